"""A norm that only fp8 Linears read, in whichever block: it ends in their row quantisation."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from itertools import chain

from torch import Tensor, nn

from quantpolicy.kernels.quantised_rows import QuantisedRows
from quantpolicy.kernels.rms_norm_fp8 import rms_norm_fp8
from quantpolicy.runtime.mounts.feed_forward import read_codes
from quantpolicy.runtime.mounts.site import (
    Part,
    Site,
    Sites,
    find_in_each,
    former_class,
    why_not_bypassed,
)

Readers = tuple[Part, ...]


def quantised_rows(
    norm: Part,
    x: Tensor,
    readers: Readers,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    index: Tensor | None = None,
) -> QuantisedRows:
    """Return the codes of ``norm(x) * scale + shift`` for an RMSNorm; see ``rms_norm_fp8``.

    Args:
        readers: Linears that read codes.
    """
    args = (x, norm.weight, scale, shift, index, norm.eps)
    return QuantisedRows(*rms_norm_fp8(*args, readers[0].floor), x.dtype)


def is_read_as_codes(readers: Iterable[Readers]) -> bool:
    """Return whether the result of one norm at least is read by fp8 Linears alone."""
    return any(read_codes(linears) for linears in readers)


def find_read_as_codes(
    model: nn.Module,
    kinds: Container[type],
    why_not_passed: Callable[[Part, int], str],
    readers_of: Callable[[Part, int], Readers],
    make: Callable[[str, Part], tuple[Site, str]],
) -> Sites:
    """Return the blocks of some classes in which fp8 Linears read one of two norms.

    Args:
        why_not_passed: why the codes of one of a block's norms reach no Linear, "" when they do.
        readers_of: the Linears that read one of them.
        make: see ``find_in_each``.
    """

    def concerns(block: Part) -> bool:
        if any(why_not_passed(block, which) for which in (0, 1)):
            return True
        return is_read_as_codes(readers_of(block, which) for which in (0, 1))

    named = model.named_modules()
    blocks = [each for each in named if former_class(each[1]) in kinds and concerns(each[1])]
    return find_in_each(blocks, make)


def why_not_read_as_codes(readers: Sequence[Readers]) -> str:
    """Return why no norm can give its readers codes, "" when one can."""
    for linear in chain.from_iterable(readers):
        if reason := why_not_bypassed(linear):
            return reason
    if not is_read_as_codes(readers):
        return "no norm is read by fp8 Linears in fused execution alone"
    return ""


def why_not_quantised(norms: Sequence[Part], kind: type, readers: Sequence[Readers]) -> str:
    """Return why codes cannot go from RMSNorms to Linears, "" when they can.

    Args:
        kind: class of each norm.
        readers: the Linears behind each norm.
    """
    for norm in norms:
        if former_class(norm) is not kind or norm.weight is None or norm.eps is None:
            return f"a norm is no {kind.__name__} with a weight and an eps"
        if getattr(norm, "bias", None) is not None:
            return "a norm has a bias"
    for norm in norms:
        if reason := why_not_bypassed(norm):
            return reason
    return why_not_read_as_codes(readers)
