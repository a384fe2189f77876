"""Rows of tokens: what the row-wise ops on [B, S, D] share. What an op does with a row is its own.

A program holds a row whole, so that statistics need one read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantpolicy.kernels.registry import HAS_TRITON

MAX_COLUMNS = 16384
# Samples lie along the second axis of a launch.
MAX_BATCH = 65535
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def why_not_rows(*rows: Tensor) -> str:
    """Return why tensors are not [B, S, D] of one shape and contiguous channels, or ""."""
    first = rows[0]
    if first.dim() != 3 or any(x.shape != first.shape for x in rows):
        return "activations are not [B, S, D] of one shape"
    if first.shape[-1] > MAX_COLUMNS:
        return f"rows are longer than {MAX_COLUMNS}"
    if first.shape[0] > MAX_BATCH:
        return f"there are more than {MAX_BATCH} samples"
    if any(x.stride(-1) != 1 for x in rows):
        return "channels are not contiguous"
    return ""


def why_not_vector(x: Tensor, *vectors: Tensor) -> str:
    """Return why tensors are no vectors of [B, S, D], "" when they are.

    A vector is [D], [B, D], [B, 1, D], or [B, S, D] for one a token.
    """
    (batch, tokens, columns) = x.shape
    allowed = ((columns,), (batch, columns), (batch, 1, columns), (batch, tokens, columns))
    if any(vector.shape not in allowed for vector in vectors):
        return "a vector is none of [D], [B, D], [B, 1, D] and [B, S, D]"
    if any(vector.stride(-1) != 1 for vector in vectors):
        return "a vector's channels are not contiguous"
    return ""


def why_not_table(x: Tensor, *tables: Tensor | None) -> str:
    """Return why tables cannot be added to vectors of [B, S, D], "" when they can."""
    given = [table for table in tables if table is not None]
    if any(table.shape != x.shape[-1:] or table.stride(-1) != 1 for table in given):
        return "a vector's table is not a contiguous [D]"
    if any(table.dtype not in FLOATS for table in given):
        return "a vector's table is not bfloat16, float16 or float32"
    return ""


def full_vector(vector: Tensor, table: Tensor | None) -> Tensor:
    """Return a vector in fp32 with its table added, as [B, S or 1, D] or [D]."""
    full = (vector.unsqueeze(1) if vector.dim() == 2 else vector).float()
    return full if table is None else table + full


def vector_strides(vector: Tensor | None) -> tuple[int, int]:
    """Return a vector's strides of batch and token, 0 where all share it or there is none."""
    if vector is None:
        return 0, 0
    batch = vector.stride(0) if vector.dim() > 1 else 0
    return batch, vector.stride(1) if is_by_token(vector) else 0


def is_by_token(vector: Tensor | None) -> bool:
    """Return whether every token has a vector of its own."""
    return vector is not None and vector.dim() == 3 and vector.shape[1] > 1


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def rounded(x, DTYPE: tl.constexpr):
        """Round fp32 values to a dtype and give them back as fp32."""
        return x.to(DTYPE).to(tl.float32)

    @triton.jit
    def load_fp32(row, cols, D: tl.constexpr, MASKED: tl.constexpr):
        """Load part of a row as fp32, zero past its end."""
        x = tl.load(row + cols, mask=cols < D, other=0.0) if MASKED else tl.load(row + cols)
        return x.to(tl.float32)

    @triton.jit
    def load_vector(row, table, cols, D: tl.constexpr, MASKED: tl.constexpr, TABLE: tl.constexpr):
        """Load part of a vector as fp32, with its table added in fp32."""
        x = load_fp32(row, cols, D, MASKED)
        return load_fp32(table, cols, D, MASKED) + x if TABLE else x

    @triton.jit
    def store_row(row, cols, x, D: tl.constexpr, MASKED: tl.constexpr):
        """Store part of a row in the dtype of its pointer."""
        if MASKED:
            tl.store(row + cols, x.to(row.dtype.element_ty), mask=cols < D)
        else:
            tl.store(row + cols, x.to(row.dtype.element_ty))
