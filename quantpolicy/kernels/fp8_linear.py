"""The fp8 Linear: rows quantised at run time, row-wise scaled GEMM, bias in its epilogue.

    out = (q(x) @ weight.T) * x_scale * weight_scale + bias

The GEMM is torch's own row-wise one, as in torchao, so results are equal where it takes the bias.
Shapes and output dtypes that it rejects, and few rows by few columns, which it is slow at, go to a
Triton GEMM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantpolicy.kernels.registry import HAS_TRITON, decline, define_op, why_no_triton
from quantpolicy.kernels.row_quantise_fp8 import fp8_rows, row_quantise_fp8_reference
from quantpolicy.kernels.rows import flat_rows
from quantpolicy.kernels.scaled_gemm import capability, scaled_gemm
from quantpolicy.kernels.scaled_mm_probe import scaled_mm

if TYPE_CHECKING:
    from collections.abc import Callable

FEW_ROWS = 128
FEW_COLUMNS = 4096
_NAME = "fp8_linear"


def fp8_linear_reference(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, floor: float
) -> Tensor:
    """Multiply in plain torch: e4m3 values as fp32, one fp32 epilogue."""
    codes, scale = row_quantise_fp8_reference(x, floor)
    acc = codes.reshape(-1, x.shape[-1]).to(torch.float32) @ weight.to(torch.float32).t()
    out = acc * scale.reshape(-1, 1) * weight_scale.reshape(1, -1)
    if bias is not None:
        out = out + bias.to(torch.float32)
    return out.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def _fake(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, floor: float
) -> Tensor:
    del weight_scale, bias, floor
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _cpu(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, floor: float
) -> Tensor:
    codes, scale = row_quantise_fp8_reference(x, floor)
    rows = flat_rows(codes)
    out = None
    if rows.numel():
        bias_x = None if bias is None else bias.to(x.dtype)
        out = scaled_mm(rows, flat_rows(scale), weight, weight_scale, bias_x, x.dtype)
    if out is None:
        return fp8_linear_reference(x, weight, weight_scale, bias, floor)
    return out.view(*x.shape[:-1], weight.shape[0])


def _cuda(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, floor: float
) -> Tensor:
    if x.numel() == 0:
        return fp8_linear_reference(x, weight, weight_scale, bias, floor)
    rows, scale = fp8_rows(x, floor)
    if bias is not None and bias.dtype is not x.dtype:
        bias = bias.to(x.dtype)
    out = None
    if not prefers_triton(rows, weight):
        out = scaled_mm(rows, scale, weight, weight_scale, bias, x.dtype)
        if out is None:
            decline(_NAME, "the vendor GEMM rejects the shape or dtype")
    if out is None and HAS_TRITON:
        out = scaled_gemm(rows, scale, weight, weight_scale, bias, x.dtype)
    if out is None:
        return fp8_linear_reference(x, weight, weight_scale, bias, floor)
    return out.view(*x.shape[:-1], weight.shape[0])


def prefers_triton(rows: Tensor, weight: Tensor) -> bool:
    """Return whether the Triton GEMM is the faster one, by bench/results/execution_tiles.json."""
    return (
        rows.shape[0] <= FEW_ROWS
        and weight.shape[0] <= FEW_COLUMNS
        and not why_no_triton(_NAME)
        and capability(rows.device) >= (9, 0)
    )


fp8_linear: Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor] = define_op(  # type: ignore[assignment]
    f"{_NAME}(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, float floor) -> Tensor",
    cpu=_cpu,
    cuda=_cuda,
    fake=_fake,
)
