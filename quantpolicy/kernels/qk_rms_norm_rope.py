"""RMSNorm without weights and partial NeoX rotation of Q and K heads, from strided views.

    y = round(x * rsqrt(mean(x^2) + eps))                            x: [B, S, H, D]
    out[:R/2]  = y[:R/2] * cos[:R/2]   - y[R/2:R] * sin[:R/2]        tables: [B, S, 1, R], R <= D
    out[R/2:R] = y[R/2:R] * cos[R/2:R] + y[:R/2]  * sin[R/2:R]
    out[R:]    = y[R:]

Tables, products and sums are rounded to the dtype of x, as the eager chain rounds them. The tables
may be shared by all batch rows (expanded). Contract: high; only the order of the sum differs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from quantpolicy.kernels.contract import define_fusion
from quantpolicy.kernels.keyed_launch import keyed_launch
from quantpolicy.kernels.registry import HAS_TRITON
from quantpolicy.kernels.rotary import HALF_DTYPES, packed_like, token_strides

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = "qk_rms_norm_rope"
_HEAD_TILE = 16
HEAD_SIZE = 64
ROTARY_SIZE = 48


def norm_rope_reference(x: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Norm and rotate one of the two in plain torch."""
    return rotate_reference(F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype), cos, sin)


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate what is normed in plain torch."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    size = cos.shape[-1]
    turning, rest = x[..., :size], x[..., size:]
    first, second = turning.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return torch.cat([turning * cos + turned * sin, rest], dim=-1)


def qk_rms_norm_rope_reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Norm and rotate queries and keys in plain torch."""
    return norm_rope_reference(q, cos, sin, eps), norm_rope_reference(k, cos, sin, eps)


def _fake(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    del cos, sin, eps
    return packed_like(q, None), packed_like(k, None)


def why_not_qk_rms_norm_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> str:
    """Return why the kernel cannot take these tensors, "" when it can."""
    if q.dtype not in HALF_DTYPES or k.dtype is not q.dtype:
        return "queries and keys are not both bfloat16 or both float16"
    if q.dim() != 4 or q.shape != k.shape or q.shape[-1] != HEAD_SIZE:
        return f"queries and keys are not [B, S, H, {HEAD_SIZE}] of one shape"
    if cos.dim() != 4 or cos.shape != sin.shape or cos.shape[2:] != (1, ROTARY_SIZE):
        return f"the rotary tables are not [B, S, 1, {ROTARY_SIZE}]"
    if cos.shape[0] not in (1, q.shape[0]) or cos.shape[1] != q.shape[1]:
        return "the rotary tables and the queries differ in batch or tokens"
    if any(x.stride(-1) != 1 for x in (q, k, cos, sin)):
        return "channels are not contiguous"
    return ""


def _why_not(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, eps: float) -> str:
    del eps
    return why_not_qk_rms_norm_rope(q, k, cos, sin)


if HAS_TRITON:
    import triton
    import triton.language as tl

    from quantpolicy.kernels.token_rows import rounded

    @triton.jit
    def _load_table(row, cols, mask, DTYPE: tl.constexpr):
        return rounded(tl.load(row + cols, mask=mask, other=0.0).to(tl.float32), DTYPE)

    @triton.jit
    def _norm_rotate_token(
        source,
        target,
        stride_h,
        cos_row,
        sin_row,
        eps,
        H: tl.constexpr,
        HEADS: tl.constexpr,
        D: tl.constexpr,
        R: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Norm and rotate the heads of one token: two rotated halves, padded, and the rest."""
        dtype: tl.constexpr = target.dtype.element_ty
        half: tl.constexpr = R // 2
        cols = tl.arange(0, BLOCK)[None, :]
        turning = cols < half
        cos_1 = _load_table(cos_row, cols, turning, dtype)
        cos_2 = _load_table(cos_row + half, cols, turning, dtype)
        sin_1 = _load_table(sin_row, cols, turning, dtype)
        sin_2 = _load_table(sin_row + half, cols, turning, dtype)
        rest = tl.arange(0, D - R)[None, :]
        for start in tl.static_range(0, H, HEADS):
            head = start + tl.arange(0, HEADS)[:, None]
            row = source + head.to(tl.int64) * stride_h
            out = target + head * D
            mask = (head < H) & turning
            x_1 = tl.load(row + cols, mask=mask, other=0.0).to(tl.float32)
            x_2 = tl.load(row + half + cols, mask=mask, other=0.0).to(tl.float32)
            x_3 = tl.load(row + R + rest, mask=head < H, other=0.0).to(tl.float32)
            squares = tl.sum(x_1 * x_1 + x_2 * x_2, axis=1) + tl.sum(x_3 * x_3, axis=1)
            factor = tl.rsqrt(squares / D + eps)[:, None]
            y_1 = rounded(x_1 * factor, dtype)
            y_2 = rounded(x_2 * factor, dtype)
            o_1 = rounded(y_1 * cos_1, dtype) + rounded(-y_2 * sin_1, dtype)
            o_2 = rounded(y_2 * cos_2, dtype) + rounded(y_1 * sin_2, dtype)
            tl.store(out + cols, o_1.to(dtype), mask=mask)
            tl.store(out + half + cols, o_2.to(dtype), mask=mask)
            tl.store(out + R + rest, (x_3 * factor).to(dtype), mask=head < H)

    @triton.jit(do_not_specialize=["tokens"])
    def _qk_rms_norm_rope_kernel(
        q_ptr,
        k_ptr,
        cos_ptr,
        sin_ptr,
        q_out_ptr,
        k_out_ptr,
        tokens,
        q_b,
        q_s,
        q_h,
        k_b,
        k_s,
        k_h,
        cos_b,
        cos_s,
        sin_b,
        sin_s,
        eps,
        H: tl.constexpr,
        D: tl.constexpr,
        R: tl.constexpr,
        BLOCK: tl.constexpr,
        HEADS: tl.constexpr,
    ):
        token = tl.program_id(0).to(tl.int64)
        batch = tl.program_id(1).to(tl.int64)
        cos_row = cos_ptr + batch * cos_b + token * cos_s
        sin_row = sin_ptr + batch * sin_b + token * sin_s
        out = (batch * tokens + token) * (H * D)
        q_row = q_ptr + batch * q_b + token * q_s
        k_row = k_ptr + batch * k_b + token * k_s
        _norm_rotate_token(
            q_row, q_out_ptr + out, q_h, cos_row, sin_row, eps, H, HEADS, D, R, BLOCK
        )
        _norm_rotate_token(
            k_row, k_out_ptr + out, k_h, cos_row, sin_row, eps, H, HEADS, D, R, BLOCK
        )


def launch_qk_rms_norm_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Run the Triton kernel: one program a token and batch row, all heads of Q and K."""
    q_out, k_out = packed_like(q, None), packed_like(k, None)
    if q_out.numel() == 0:
        return q_out, k_out
    batch, tokens, heads, size = q.shape
    shared = cos.shape[0] == 1
    keyed_launch(
        _qk_rms_norm_rope_kernel,
        (tokens, batch),
        (
            q,
            k,
            cos,
            sin,
            q_out,
            k_out,
            tokens,
            *token_strides(q),
            *token_strides(k),
            0 if shared else cos.stride(0),
            cos.stride(1),
            0 if shared else sin.stride(0),
            sin.stride(1),
            eps,
            heads,
            size,
            cos.shape[-1],
            triton.next_power_of_2(cos.shape[-1] // 2),
            _HEAD_TILE,
        ),
        free=(6,),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return q_out, k_out


qk_rms_norm_rope: Callable[..., tuple[Tensor, Tensor]] = define_fusion(  # type: ignore[assignment]
    f"{_NAME}(Tensor q, Tensor k, Tensor cos, Tensor sin, float eps) -> (Tensor, Tensor)",
    kernel=launch_qk_rms_norm_rope,
    reference=qk_rms_norm_rope_reference,
    why_not=_why_not,
    fake=_fake,
)
