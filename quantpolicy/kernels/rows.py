"""The row-wise view that every row kernel shares: any [..., K] tensor as outer x inner rows.

A view covers contiguous, sliced, expanded and batched inputs without a copy; what a kernel does
with a row does not belong here.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """Rows of contiguous values, in two levels of strides.

    Row r starts at (r // inner) * outer_stride + (r % inner) * inner_stride.

    Args:
        data: the tensor that holds the values; a copy only when no such view exists.
    """

    data: Tensor
    total: int
    inner: int
    outer_stride: int
    inner_stride: int
    columns: int


def as_rows(x: Tensor) -> Rows:
    """View ``x`` as rows, copying only a tensor whose rows are not contiguous or not regular.

    Shapes:
        x: [..., K], at least one dimension.
    """
    columns = x.shape[-1]
    count = math.prod(x.shape[:-1])
    if x.is_contiguous():
        return Rows(x, count, max(count, 1), 0, columns, columns)
    levels = _merged_levels(x)
    if len(levels) > 2 or (columns > 1 and x.stride(-1) != 1):
        return Rows(x.contiguous(), count, max(count, 1), 0, columns, columns)
    (_, outer_stride), (inner, inner_stride) = [(1, 0)] * (2 - len(levels)) + levels
    return Rows(x, count, max(inner, 1), outer_stride, inner_stride, columns)


def _merged_levels(x: Tensor) -> list[tuple[int, int]]:
    """Return (size, stride) of the leading dimensions, neighbours merged where they are regular."""
    levels: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if levels and levels[-1][1] == stride * size:
            levels[-1] = (levels[-1][0] * size, stride)
        else:
            levels.append((size, stride))
    return levels


def flat_rows(codes: Tensor) -> Tensor:
    """View contiguous [..., K] codes as [M, K], M = 0 included."""
    return codes.view(codes.shape[:-1].numel(), codes.shape[-1])


def row_scales_like(x: Tensor) -> Tensor:
    """Return an uninitialised fp32 tensor with one scale per row of ``x``: [..., 1]."""
    return x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
