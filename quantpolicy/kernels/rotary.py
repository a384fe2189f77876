"""What the ops that rotate queries and keys share: the packed shapes, and the interleaved rotation.

In the interleaved layout channels 2i and 2i+1 are one pair:

    out[2i]   = x[2i] * cos[2i]     - x[2i+1] * sin[2i]
    out[2i+1] = x[2i+1] * cos[2i+1] + x[2i] * sin[2i+1]
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantpolicy.kernels.registry import HAS_TRITON

HEAD_TILE = 8
HALF_DTYPES = (torch.bfloat16, torch.float16)


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [B, R, H, D] by fp32 tables [R, D]: products and sum in fp32, rounded once."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((-odd, even), dim=-1).flatten(-2)
    table = (slice(None), None)
    rotated: Tensor = (x.float() * cos[table] + turned.float() * sin[table]).to(x.dtype)
    return rotated


def rotate_rows_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first rows of [B, S, H, D], as many as the tables have; copy the others."""
    rows = cos.shape[0]
    if rows == x.shape[1]:
        return rotate_reference(x, cos, sin)
    return torch.cat([rotate_reference(x[:, :rows], cos, sin), x[:, rows:]], dim=1)


def why_not_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> str:
    """Return why the kernels cannot rotate these tensors, "" when they can."""
    if q.dtype not in HALF_DTYPES or k.dtype is not q.dtype:
        return "queries and keys are not both bfloat16 or both float16"
    if q.dim() != 4 or q.shape != k.shape:
        return "queries and keys are not [B, S, H, D] of one shape"
    if q.shape[-1] % 2 or q.shape[-1] > 256:
        return "the head size is odd or above 256"
    if cos.dtype is not torch.float32 or sin.dtype is not torch.float32:
        return "the rotary tables are not float32"
    if cos.dim() != 2 or cos.shape != sin.shape or cos.shape[1] != q.shape[-1]:
        return "the rotary tables are not [R, D]"
    if cos.shape[0] > q.shape[1]:
        return "the rotary tables have more rows than there are tokens"
    if q.stride(-1) != 1 or k.stride(-1) != 1 or cos.stride(-1) != 1 or sin.stride(-1) != 1:
        return "channels are not contiguous"
    return ""


def why_not_text(x: Tensor, text: Tensor | None) -> str:
    """Return why text tokens cannot be packed behind image tokens, "" when they can."""
    if text is None:
        return ""
    if text.dtype is not x.dtype or text.stride(-1) != 1:
        return "text and image tokens differ in dtype, or channels are not contiguous"
    if text.dim() != 4 or (text.shape[0], *text.shape[2:]) != (x.shape[0], *x.shape[2:]):
        return "text and image tokens differ in batch, heads or head size"
    return ""


def packed_like(x: Tensor, text: Tensor | None) -> Tensor:
    """Return an uninitialised contiguous [B, S + T, H, D]."""
    tokens = x.shape[1] + (text.shape[1] if text is not None else 0)
    return x.new_empty((x.shape[0], tokens, x.shape[2], x.shape[3]))


def token_strides(x: Tensor) -> tuple[int, int, int]:
    """Return the strides of batch, token and head of [B, S, H, D]."""
    return x.stride(0), x.stride(1), x.stride(2)


if HAS_TRITON:
    import triton
    import triton.language as tl

    from quantpolicy.kernels.row_math import product

    @triton.jit
    def load_pairs(row, cols, mask, BLOCK: tl.constexpr):
        """Load channels of one table row as fp32 pairs: two [1, BLOCK // 2]."""
        values = tl.load(row + cols, mask=mask, other=0.0).to(tl.float32)
        return tl.split(tl.reshape(values, (1, BLOCK // 2, 2)))

    @triton.jit
    def rotate_pairs(x, cos_even, cos_odd, sin_even, sin_odd, HEADS: tl.constexpr, D: tl.constexpr):
        """Rotate fp32 [HEADS, D] as torch does: products and their sum each rounded."""
        even, odd = tl.split(tl.reshape(x, (HEADS, D // 2, 2)))
        out_even = product(even, cos_even) + product(-odd, sin_even)
        out_odd = product(odd, cos_odd) + product(even, sin_odd)
        return tl.reshape(tl.join(out_even, out_odd), (HEADS, D))
