"""Weights of one shape that lie one behind the other, so that one GEMM can read them as one.

The parameters stay the module's own: same names, same values, views of one storage.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantpolicy.runtime.mounts.site import Part


def share_storage(tensors: list[Tensor]) -> None:
    """Move parameters of one shape and dtype one behind the other; they stay what they are."""
    whole = torch.cat([tensor.data for tensor in tensors])
    for tensor, part in zip(tensors, whole.chunk(len(tensors)), strict=True):
        tensor.data = part


def adjacent(tensors: list[Tensor]) -> Tensor | None:
    """Return all as one tensor when each lies behind the one before it, None otherwise."""
    first = tensors[0]
    size = first.numel() * first.element_size()
    start = first.data_ptr()
    if any(
        tensor.data_ptr() != start + number * size or tensor.dtype is not first.dtype
        for number, tensor in enumerate(tensors)
    ):
        return None
    if first.untyped_storage().nbytes() < len(tensors) * size or not first.is_contiguous():
        return None
    return first.detach().as_strided(
        (first.shape[0] * len(tensors), *first.shape[1:]), first.stride()
    )


def qkv_of(attn: Part) -> tuple[Part, Part, Part]:
    """Return the query, key and value projections of an attention."""
    return attn.to_q, attn.to_k, attn.to_v
