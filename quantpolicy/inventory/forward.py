"""What a forward does beside its Linears: attention calls and pointwise work. Torch-free.

Work is told by block, that is by the part of a module's name up to its first number, with a star
for the number ("" for what is in no block): so it can be fitted to a model with other blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from quantpolicy.match import block_pattern
from quantpolicy.record import Record


class AttentionCalls(Record):
    """Attention calls alike.

    Args:
        name: pattern of the module that makes them.
        calls: of one forward.
        heads: of all samples of the batch together.
        query_rows: of one sample.
        key_rows: of one sample.
        masked: whether a mask is given.
    """

    name: str
    calls: int
    heads: int
    query_rows: int
    key_rows: int
    head_size: int
    masked: bool


class PointwiseWork(Record):
    """Everything else of an eager forward: arithmetic by value, norms, copies, concatenations.

    Args:
        name: pattern of the block.
        launches: kernels of one forward.
        image_bytes: read and written by those that see the rows of the image, which they follow.
        other_bytes: read and written by the others.
    """

    name: str
    launches: int
    image_bytes: int
    other_bytes: int


class ForwardWork(Record):
    """One forward at the family's declared inputs, Linears left out."""

    attention: tuple[AttentionCalls, ...] = ()
    pointwise: tuple[PointwiseWork, ...] = ()

    def fitted(self, own: Mapping[str, Extent], other: Mapping[str, Extent]) -> ForwardWork:
        """Return the work of a model whose blocks are more, fewer, wider or narrower.

        Calls and launches follow the number of blocks, heads and bytes the width of their Linears.

        Args:
            own: blocks of the model that was measured, see ``extents``.
            other: blocks of the model at hand; work of blocks that it lacks is left out.
        """
        attention = []
        for call in self.attention:
            blocks, width = _ratios(block_of(call.name), own, other)
            if blocks:
                values = {
                    "calls": round(call.calls * blocks),
                    "heads": max(1, round(call.heads * width)),
                }
                attention.append(call.model_copy(update=values))
        pointwise = []
        for work in self.pointwise:
            blocks, width = _ratios(work.name, own, other)
            if blocks:
                values = {
                    "launches": round(work.launches * blocks),
                    "image_bytes": round(work.image_bytes * blocks * width),
                    "other_bytes": round(work.other_bytes * blocks * width),
                }
                pointwise.append(work.model_copy(update=values))
        return ForwardWork(attention=tuple(attention), pointwise=tuple(pointwise))


class Extent(Record):
    """The blocks of one pattern: how many, and the inputs and outputs of all their Linears."""

    blocks: int
    features: int


def block_of(name: str) -> str:
    """Return the block pattern of a module: its name up to the first number, "" without one."""
    parts = block_pattern(name).split(".")
    return ".".join(parts[: parts.index("*") + 1]) if "*" in parts else ""


def extents(linears: Iterable[tuple[str, int]]) -> dict[str, Extent]:
    """Return the extent of each block pattern.

    Args:
        linears: name of each Linear, and its input and output features together.
    """
    blocks: dict[str, set[str]] = {}
    features: dict[str, int] = {}
    for name, count in linears:
        pattern = block_of(name)
        depth = pattern.count(".") + 1
        blocks.setdefault(pattern, set()).add(".".join(name.split(".")[:depth]) if pattern else "")
        features[pattern] = features.get(pattern, 0) + count
    return {
        pattern: Extent(blocks=len(found), features=features[pattern])
        for pattern, found in blocks.items()
    }


def _ratios(
    pattern: str, own: Mapping[str, Extent], other: Mapping[str, Extent]
) -> tuple[float, float]:
    """Return how many blocks the other model has to one, and how wide each is to one."""
    before, after = own.get(pattern), other.get(pattern)
    if before is None:  # blocks without Linears, and what is in no block
        return 1.0, 1.0
    if after is None:
        return 0.0, 1.0
    blocks = after.blocks / before.blocks
    return blocks, after.features / before.features / blocks
