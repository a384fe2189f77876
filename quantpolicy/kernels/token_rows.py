"""Rows of tokens: what the row-wise ops on [B, S, D] share. What an op does with a row is its own.

A program takes one row whole, in one or two power-of-two tiles, so that statistics need one read.
"""

from __future__ import annotations

from torch import Tensor

from quantpolicy.kernels.registry import HAS_TRITON
from quantpolicy.kernels.row_quantise_fp8 import row_warps, split_columns

MAX_COLUMNS = 16384

__all__ = ["MAX_COLUMNS", "row_warps", "split_columns", "why_not_rows", "why_not_vector"]


def why_not_rows(*rows: Tensor) -> str:
    """Return why tensors are not [B, S, D] of one shape and contiguous channels, or ""."""
    first = rows[0]
    if first.dim() != 3 or any(x.shape != first.shape for x in rows):
        return "activations are not [B, S, D] of one shape"
    if first.shape[-1] > MAX_COLUMNS:
        return f"rows are longer than {MAX_COLUMNS}"
    if any(x.stride(-1) != 1 for x in rows):
        return "channels are not contiguous"
    return ""


def why_not_vector(x: Tensor, *vectors: Tensor) -> str:
    """Return why tensors are not [D] or [B, D] beside [B, S, D], "" when they are."""
    allowed = (x.shape[-1:], (x.shape[0], x.shape[-1]))
    if any(vector.shape not in allowed for vector in vectors):
        return "a vector is neither [D] nor [B, D]"
    if any(vector.stride(-1) != 1 for vector in vectors):
        return "a vector's channels are not contiguous"
    return ""


def batch_stride(vector: Tensor) -> int:
    """Return the stride from one batch row of a vector to the next, 0 when all share it."""
    return vector.stride(0) if vector.dim() == 2 else 0


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
    def store_row(row, cols, x, D: tl.constexpr, MASKED: tl.constexpr):
        """Store part of a row in the dtype of its pointer."""
        if MASKED:
            tl.store(row + cols, x.to(row.dtype.element_ty), mask=cols < D)
        else:
            tl.store(row + cols, x.to(row.dtype.element_ty))
