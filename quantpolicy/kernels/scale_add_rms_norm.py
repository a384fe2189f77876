"""Residual plus scaled update as fp32, and the RMSNorm of the sum, in one launch.

    stream[b, s, :] = residual[b, s, :] + update[b, s, :] * scale
    normed[b, s, :] = round(stream * rsqrt(mean(stream^2) + eps) * weight)

The normed value has the dtype of the update. Contract: high; the stream itself is rounded as in the
eager chain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantpolicy.kernels.contract import define_fusion
from quantpolicy.kernels.keyed_launch import keyed_launch
from quantpolicy.kernels.registry import HAS_TRITON
from quantpolicy.kernels.rms_norm import rms_norm_reference, why_not_norm
from quantpolicy.kernels.row_launch import row_warps, split_columns
from quantpolicy.kernels.token_rows import why_not_rows

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = "scale_add_rms_norm"


def scale_add_rms_norm_reference(
    residual: Tensor, update: Tensor, scale: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add in fp32, norm in fp32 and cast, in plain torch."""
    stream = (residual + update * scale).contiguous()
    return stream, rms_norm_reference(stream, weight, eps, update.dtype)


def _fake(
    residual: Tensor, update: Tensor, scale: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    del weight, eps
    dtype = torch.promote_types(torch.promote_types(residual.dtype, update.dtype), scale.dtype)
    return residual.new_empty(residual.shape, dtype=dtype), update.new_empty(update.shape)


def _why_not(residual: Tensor, update: Tensor, scale: Tensor, weight: Tensor, eps: float) -> str:
    del eps
    if scale.dtype is not torch.float32 or scale.shape != residual.shape[-1:]:
        return "the scale is not a float32 [D]"
    if not scale.is_contiguous():
        return "the scale is not contiguous"
    return why_not_norm(residual, weight, update.dtype) or why_not_rows(residual, update)


if HAS_TRITON:
    import triton
    import triton.language as tl

    from quantpolicy.kernels.row_math import product
    from quantpolicy.kernels.token_rows import load_fp32, store_row

    @triton.jit
    def _added(residual, update, scale_ptr, stream, cols, D: tl.constexpr, M: tl.constexpr):
        x = load_fp32(residual, cols, D, M)
        x += product(load_fp32(update, cols, D, M), load_fp32(scale_ptr, cols, D, M))
        store_row(stream, cols, x, D, M)
        return x

    @triton.jit(do_not_specialize=["tokens"])
    def _scale_add_rms_norm_kernel(
        residual_ptr,
        update_ptr,
        scale_ptr,
        weight_ptr,
        stream_ptr,
        normed_ptr,
        tokens,
        residual_b,
        residual_s,
        update_b,
        update_s,
        eps,
        D: tl.constexpr,
        BLOCK_A: tl.constexpr,
        BLOCK_B: tl.constexpr,
    ):
        token = tl.program_id(0).to(tl.int64)
        batch = tl.program_id(1).to(tl.int64)
        residual = residual_ptr + batch * residual_b + token * residual_s
        update = update_ptr + batch * update_b + token * update_s
        stream = stream_ptr + (batch * tokens + token) * D
        normed = normed_ptr + (batch * tokens + token) * D
        masked: tl.constexpr = D < BLOCK_A + BLOCK_B
        cols_a = tl.arange(0, BLOCK_A)
        a = _added(residual, update, scale_ptr, stream, cols_a, D, False)
        squares = tl.sum(product(a, a), axis=0)
        if BLOCK_B > 0:
            cols_b = BLOCK_A + tl.arange(0, BLOCK_B)
            b = _added(residual, update, scale_ptr, stream, cols_b, D, masked)
            squares += tl.sum(product(b, b), axis=0)
        factor = tl.rsqrt(squares / D + tl.cast(eps, tl.float32))
        y = a * factor * load_fp32(weight_ptr, cols_a, D, False)
        store_row(normed, cols_a, y, D, False)
        if BLOCK_B > 0:
            y = b * factor * load_fp32(weight_ptr, cols_b, D, masked)
            store_row(normed, cols_b, y, D, masked)


def launch_scale_add_rms_norm(
    residual: Tensor, update: Tensor, scale: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Run the Triton kernel: one program a token and batch row."""
    stream = torch.empty(residual.shape, dtype=torch.float32, device=residual.device)
    normed = torch.empty(update.shape, dtype=update.dtype, device=update.device)
    if stream.numel() == 0:
        return stream, normed
    batch, tokens, columns = residual.shape
    first, rest = split_columns(columns)
    keyed_launch(
        _scale_add_rms_norm_kernel,
        (tokens, batch),
        (
            residual,
            update,
            scale,
            weight,
            stream,
            normed,
            tokens,
            residual.stride(0),
            residual.stride(1),
            update.stride(0),
            update.stride(1),
            eps,
            columns,
            first,
            rest,
        ),
        free=(6,),
        num_warps=row_warps(columns),
        enable_fp_fusion=True,
    )
    return stream, normed


scale_add_rms_norm: Callable[..., tuple[Tensor, Tensor]] = define_fusion(  # type: ignore[assignment]
    f"{_NAME}(Tensor residual, Tensor update, Tensor scale, Tensor weight, float eps)"
    " -> (Tensor, Tensor)",
    kernel=launch_scale_add_rms_norm,
    reference=scale_add_rms_norm_reference,
    why_not=_why_not,
    fake=_fake,
)
