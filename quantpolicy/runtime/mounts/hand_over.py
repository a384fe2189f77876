"""Normed rows that one block computes for the next, beside the residual stream that it returns.

The rows hang on the stream's tensor object: they are gone with it, they are taken once, and only by
the very norm that they were made for, while the stream has not been written to. Every other call
norms its own rows. Nothing is handed over while a compiler traces, or in ``torch.inference_mode``,
whose tensors do not tell of writes.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from quantpolicy.kernels.contract import count_call
from quantpolicy.runtime.mounts.site import Part

_NAME = "chained_norms"
_LINK = "_quantpolicy_next"
_ROWS = "_quantpolicy_normed"


class Normed(NamedTuple):
    """Rows, the norm that they were made for, and the version of the stream that they belong to."""

    rows: Tensor
    norm: Part
    version: int


def link_norms(blocks: Iterable[Part]) -> None:
    """Tell every block the first norm of the one behind it."""
    for block, following in pairwise(blocks):
        # Not through setattr, which would register the norm as a child of both blocks.
        vars(block)[_LINK] = following.norm1


def unlink_norms(blocks: Iterable[Part]) -> None:
    """Undo ``link_norms``."""
    for block in blocks:
        block.__dict__.pop(_LINK, None)


def next_norm(block: Part, stream: Tensor) -> Part | None:
    """Return the norm for which a block can leave rows on its stream, None when it leaves none."""
    if torch.compiler.is_compiling() or stream.is_inference():
        return None
    norm = vars(block).get(_LINK)
    return norm if norm is not None and norm.weight.device == stream.device else None


def leave_normed(stream: Tensor, norm: Part, rows: Tensor) -> None:
    """Leave the normed rows of a stream for the block behind."""
    setattr(stream, _ROWS, Normed(rows, norm, stream._version))


def take_normed(stream: Tensor, norm: Part, dtype: torch.dtype) -> Tensor | None:
    """Return the rows that were left on a stream for a norm, None when it has to norm itself."""
    if torch.compiler.is_compiling():
        return None
    left: Normed | None = getattr(stream, _ROWS, None)
    if left is None:
        return None
    delattr(stream, _ROWS)
    if left.norm is not norm or left.rows.dtype is not dtype or left.version != stream._version:
        return None
    count_call(_NAME)
    return left.rows
