"""An fp8 Linear over tanh-GELU rows, beside rows taken as they are: one pass makes the codes.

    rows = cat(head, round(gelu_tanh(x)))
    out  = (q(rows) @ weight.T) * row_scale * weight_scale + bias

``fp8_linear`` over the eager chain, whose activation, concatenation and quantisation need three
passes. Contract: high; the exponential is the GPU's fast one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from quantpolicy.kernels.contract import define_fusion
from quantpolicy.kernels.fp8_linear import fp8_linear, multiply_rows
from quantpolicy.kernels.keyed_launch import keyed_launch
from quantpolicy.kernels.registry import HAS_TRITON
from quantpolicy.kernels.replay import remembered
from quantpolicy.kernels.rotary import HALF_DTYPES
from quantpolicy.kernels.row_launch import REGISTER_COLUMNS, row_warps, split_columns
from quantpolicy.kernels.row_quantise_fp8 import (
    needs_exact_division,
    rounded_floor,
    why_no_e4m3,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = "gelu_fp8_linear"


def gelu_rows(x: Tensor, head: Tensor | None) -> Tensor:
    """Activate, and put the head before it, in plain torch."""
    rows = F.gelu(x, approximate="tanh")
    return rows if head is None else torch.cat([head, rows], dim=-1)


def gelu_fp8_linear_reference(
    x: Tensor,
    head: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    floor: float,
) -> Tensor:
    """Activate in plain torch, then quantise and multiply."""
    return fp8_linear(gelu_rows(x, head), weight, weight_scale, bias, floor)


def _fake(
    x: Tensor,
    head: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    floor: float,
) -> Tensor:
    del head, weight_scale, bias, floor
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _why_not(
    x: Tensor,
    head: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    floor: float,
) -> str:
    del weight_scale, bias, floor
    if x.dtype not in HALF_DTYPES or (head is not None and head.dtype is not x.dtype):
        return "activations are not all bfloat16 or all float16"
    if row_stride(x) is None or (head is not None and row_stride(head) is None):
        return "rows are not regular, or their channels not contiguous"
    if weight.shape[1] > REGISTER_COLUMNS:
        return f"rows are longer than {REGISTER_COLUMNS}"
    if x.numel() == 0:
        return "there are no rows"
    return why_no_e4m3(x.device)


def row_stride(x: Tensor) -> int | None:
    """Return the stride from each row of [B, S, K] to the next, None when there is no such one."""
    if x.dim() != 3 or x.stride(-1) != 1:
        return None
    regular = x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    return x.stride(1) if regular else None


if HAS_TRITON:
    import triton
    import triton.language as tl

    from quantpolicy.kernels.row_math import (
        fp8_codes,
        fp8_scale,
        larger,
        rounded_pairs,
        row_amax,
        sigmoid,
    )

    @triton.jit
    def _activated(x_row, head_row, cols, N: tl.constexpr, K: tl.constexpr):
        """Load part of a row, [1, BLOCK], as fp32: the head as it is, the rest activated."""
        dtype: tl.constexpr = x_row.dtype.element_ty
        x = tl.load(x_row + cols - N, mask=(cols >= N) & (cols < K), other=0.0).to(tl.float32)
        # 2 sqrt(2 / pi) x (1 + 0.044715 x^2)
        inner = x * (1.5957691216057308 + 0.07135481627260025 * x * x)
        y = rounded_pairs(x * sigmoid(inner), dtype)
        if N > 0:
            head = tl.load(head_row + cols, mask=cols < N, other=0.0).to(tl.float32)
            y = tl.where(cols < N, head, y)
        return y

    @triton.jit
    def _gelu_quantise_kernel(
        x_ptr,
        head_ptr,
        q_ptr,
        scale_ptr,
        floor,
        x_stride,
        head_stride,
        N: tl.constexpr,
        K: tl.constexpr,
        BLOCK_A: tl.constexpr,
        BLOCK_B: tl.constexpr,
        EXACT_DIVISION: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        x_row = x_ptr + row * x_stride
        head_row = head_ptr + row * head_stride
        q_row = q_ptr + row * K
        cols_a = tl.arange(0, BLOCK_A)[None, :]
        a = _activated(x_row, head_row, cols_a, N, K)
        amax = row_amax(a)
        if BLOCK_B > 0:
            cols_b = BLOCK_A + tl.arange(0, BLOCK_B)[None, :]
            b = _activated(x_row, head_row, cols_b, N, K)
            amax = larger(amax, row_amax(b))
        scale = fp8_scale(amax, floor, x_ptr.dtype.element_ty)[:, None]
        tl.store(scale_ptr + row + tl.zeros((1, 1), dtype=tl.int32), scale)
        tl.store(q_row + cols_a, fp8_codes(a, scale, EXACT_DIVISION))
        if BLOCK_B > 0:
            tl.store(q_row + cols_b, fp8_codes(b, scale, EXACT_DIVISION), mask=cols_b < K)


@remembered
def gelu_quantise(x: Tensor, head: Tensor | None, floor: float) -> tuple[Tensor, Tensor]:
    """Run the Triton kernel, one program a row: codes [M, K] and scales [M, 1]."""
    width = 0 if head is None else head.shape[-1]
    columns = width + x.shape[-1]
    rows = x.numel() // x.shape[-1]
    codes = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    keyed_launch(
        _gelu_quantise_kernel,
        (rows, 1),
        (
            x,
            x if head is None else head,
            codes,
            scale,
            rounded_floor(floor, x.dtype),
            x.stride(1),
            0 if head is None else head.stride(1),
            width,
            columns,
            *split_columns(columns),
            needs_exact_division(floor),
        ),
        num_warps=row_warps(columns),
        enable_fp_fusion=True,
    )
    return codes, scale


def launch_gelu_fp8_linear(
    x: Tensor,
    head: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    floor: float,
) -> Tensor:
    """Make the codes, then run the GEMM that ``fp8_linear`` runs."""
    codes, scale = gelu_quantise(x, head, floor)
    out = multiply_rows(codes, scale, weight, weight_scale, bias, x.dtype)
    return out.view(*x.shape[:-1], weight.shape[0])


gelu_fp8_linear: Callable[..., Tensor] = define_fusion(  # type: ignore[assignment]
    f"{_NAME}(Tensor x, Tensor? head, Tensor weight, Tensor weight_scale, Tensor? bias,"
    " float floor) -> Tensor",
    kernel=launch_gelu_fp8_linear,
    reference=gelu_fp8_linear_reference,
    why_not=_why_not,
    fake=_fake,
)
