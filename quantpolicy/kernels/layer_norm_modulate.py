"""LayerNorm without weights, then scale and shift from the conditioning, in one pass.

    out[b, s, :] = round(norm(x[b, s, :])) * (1 + scale[b, :]) + shift[b, :]

Every step of the eager chain is rounded as there; only the order of the sums in the statistics
differs. Contract: high.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import functional as F

from quantpolicy.kernels.contract import define_fusion
from quantpolicy.kernels.keyed_launch import keyed_launch
from quantpolicy.kernels.registry import HAS_TRITON
from quantpolicy.kernels.rotary import HALF_DTYPES
from quantpolicy.kernels.row_launch import row_warps, split_columns
from quantpolicy.kernels.token_rows import (
    vector_strides,
    why_not_rows,
    why_not_vector,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = "layer_norm_modulate"


def layer_norm_modulate_reference(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """Norm, scale and shift in plain torch; scale and shift are [B, D]."""
    normed = F.layer_norm(x, x.shape[-1:], eps=eps)
    return (normed * (1 + scale[:, None]) + shift[:, None]).contiguous()


def _fake(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    del scale, shift, eps
    return x.new_empty(x.shape)


def _why_not(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> str:
    del eps
    if x.dtype not in HALF_DTYPES or scale.dtype is not x.dtype or shift.dtype is not x.dtype:
        return "activations, scale and shift are not all bfloat16 or all float16"
    if scale.dim() != 2 or shift.dim() != 2:
        return "scale and shift are not [B, D]"
    return why_not_rows(x) or why_not_vector(x, scale, shift)


if HAS_TRITON:
    import triton
    import triton.language as tl

    from quantpolicy.kernels.token_rows import load_fp32, rounded, store_row

    @triton.jit
    def _modulated(x, scale, shift, cols, mean, rstd, D: tl.constexpr, M: tl.constexpr):
        dtype: tl.constexpr = scale.dtype.element_ty
        normed = rounded((x - mean) * rstd, dtype)
        factor = rounded(1.0 + load_fp32(scale, cols, D, M), dtype)
        return rounded(normed * factor, dtype) + load_fp32(shift, cols, D, M)

    @triton.jit(do_not_specialize=["tokens"])
    def _layer_norm_modulate_kernel(
        x_ptr,
        scale_ptr,
        shift_ptr,
        out_ptr,
        tokens,
        x_b,
        x_s,
        scale_b,
        shift_b,
        eps,
        D: tl.constexpr,
        BLOCK_A: tl.constexpr,
        BLOCK_B: tl.constexpr,
    ):
        token = tl.program_id(0).to(tl.int64)
        batch = tl.program_id(1).to(tl.int64)
        x_row = x_ptr + batch * x_b + token * x_s
        scale = scale_ptr + batch * scale_b
        shift = shift_ptr + batch * shift_b
        out = out_ptr + (batch * tokens + token) * D
        masked: tl.constexpr = D < BLOCK_A + BLOCK_B
        cols_a = tl.arange(0, BLOCK_A)
        a = load_fp32(x_row, cols_a, D, False)
        total = tl.sum(a, axis=0)
        if BLOCK_B > 0:
            cols_b = BLOCK_A + tl.arange(0, BLOCK_B)
            b = load_fp32(x_row, cols_b, D, masked)
            total += tl.sum(b, axis=0)
        mean = total / D
        squares = tl.sum((a - mean) * (a - mean), axis=0)
        if BLOCK_B > 0:
            centred = tl.where(cols_b < D, b - mean, 0.0)
            squares += tl.sum(centred * centred, axis=0)
        rstd = tl.rsqrt(squares / D + eps)
        store_row(out, cols_a, _modulated(a, scale, shift, cols_a, mean, rstd, D, False), D, False)
        if BLOCK_B > 0:
            y = _modulated(b, scale, shift, cols_b, mean, rstd, D, masked)
            store_row(out, cols_b, y, D, masked)


def launch_layer_norm_modulate(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """Run the Triton kernel: one program a token and batch row."""
    out = x.new_empty(x.shape)
    if out.numel() == 0:
        return out
    batch, tokens, columns = x.shape
    first, rest = split_columns(columns)
    keyed_launch(
        _layer_norm_modulate_kernel,
        (tokens, batch),
        (
            x,
            scale,
            shift,
            out,
            tokens,
            x.stride(0),
            x.stride(1),
            vector_strides(scale)[0],
            vector_strides(shift)[0],
            eps,
            columns,
            first,
            rest,
        ),
        free=(4,),
        num_warps=row_warps(columns),
        enable_fp_fusion=False,
    )
    return out


layer_norm_modulate: Callable[..., Tensor] = define_fusion(  # type: ignore[assignment]
    f"{_NAME}(Tensor x, Tensor scale, Tensor shift, float eps) -> Tensor",
    kernel=launch_layer_norm_modulate,
    reference=layer_norm_modulate_reference,
    why_not=_why_not,
    fake=_fake,
)
