"""RMSNorm of rows, computed in fp32 and rounded once to half precision.

    out[b, s, :] = round(x[b, s, :] * rsqrt(mean(x^2) + eps) * weight)

The weight is fp32 or of the rows' dtype. Contract: high; the chain it replaces norms in fp32 and
casts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from quantpolicy.kernels.contract import define_fusion
from quantpolicy.kernels.keyed_launch import keyed_launch
from quantpolicy.kernels.registry import HAS_TRITON
from quantpolicy.kernels.rotary import HALF_DTYPES
from quantpolicy.kernels.row_launch import row_warps, split_columns
from quantpolicy.kernels.token_rows import why_not_rows

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = "rms_norm"
STREAM_DTYPES = (*HALF_DTYPES, torch.float32)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Norm in fp32 and cast, in plain torch."""
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(dtype).contiguous()


def _fake(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    del weight, eps
    return x.new_empty(x.shape, dtype=dtype)


def why_not_norm(x: Tensor, weight: Tensor, dtype: torch.dtype) -> str:
    """Return why the kernels cannot norm these rows, "" when they can."""
    if x.dtype not in STREAM_DTYPES or weight.dtype not in (torch.float32, x.dtype):
        return "the stream is of another dtype, or the norm weight neither float32 nor of its dtype"
    if dtype not in HALF_DTYPES:
        return "the result is not bfloat16 or float16"
    if weight.shape != x.shape[-1:] or not weight.is_contiguous():
        return "the norm weight is not a contiguous [D]"
    return why_not_rows(x)


def _why_not(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> str:
    del eps
    return why_not_norm(x, weight, dtype)


if HAS_TRITON:
    import triton
    import triton.language as tl

    from quantpolicy.kernels.token_rows import load_fp32, store_row

    @triton.jit(do_not_specialize=["tokens"])
    def _rms_norm_kernel(
        x_ptr,
        weight_ptr,
        out_ptr,
        tokens,
        x_b,
        x_s,
        eps,
        D: tl.constexpr,
        BLOCK_A: tl.constexpr,
        BLOCK_B: tl.constexpr,
    ):
        token = tl.program_id(0).to(tl.int64)
        batch = tl.program_id(1).to(tl.int64)
        x_row = x_ptr + batch * x_b + token * x_s
        out = out_ptr + (batch * tokens + token) * D
        masked: tl.constexpr = D < BLOCK_A + BLOCK_B
        cols_a = tl.arange(0, BLOCK_A)
        a = load_fp32(x_row, cols_a, D, False)
        squares = tl.sum(a * a, axis=0)
        if BLOCK_B > 0:
            cols_b = BLOCK_A + tl.arange(0, BLOCK_B)
            b = load_fp32(x_row, cols_b, D, masked)
            squares += tl.sum(b * b, axis=0)
        factor = tl.rsqrt(squares / D + tl.cast(eps, tl.float32))
        store_row(out, cols_a, a * factor * load_fp32(weight_ptr, cols_a, D, False), D, False)
        if BLOCK_B > 0:
            y = b * factor * load_fp32(weight_ptr, cols_b, D, masked)
            store_row(out, cols_b, y, D, masked)


def launch_rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Run the Triton kernel: one program a token and batch row."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if out.numel() == 0:
        return out
    batch, tokens, columns = x.shape
    first, rest = split_columns(columns)
    keyed_launch(
        _rms_norm_kernel,
        (tokens, batch),
        (
            x,
            weight,
            out,
            tokens,
            x.stride(0),
            x.stride(1),
            eps,
            columns,
            first,
            rest,
        ),
        free=(3,),
        num_warps=row_warps(columns),
        enable_fp_fusion=True,
    )
    return out


rms_norm: Callable[..., Tensor] = define_fusion(  # type: ignore[assignment]
    f"{_NAME}(Tensor x, Tensor weight, float eps, ScalarType dtype) -> Tensor",
    kernel=launch_rms_norm,
    reference=rms_norm_reference,
    why_not=_why_not,
    fake=_fake,
)
