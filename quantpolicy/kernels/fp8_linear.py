"""The fp8 Linear: rows quantised at run time, row-wise scaled GEMM, bias in its epilogue.

    out = (q(x) @ weight.T) * x_scale * weight_scale + bias

The GEMM is torch's own row-wise one, as in torchao, so results are equal where it takes the bias.
Shapes and output dtypes that it rejects go to a Triton GEMM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantpolicy.kernels.registry import HAS_TRITON, decline, define_op
from quantpolicy.kernels.row_quantise_fp8 import row_quantise_fp8_cuda, row_quantise_fp8_reference
from quantpolicy.kernels.rows import flat_rows
from quantpolicy.kernels.scaled_gemm import scaled_gemm
from quantpolicy.kernels.scaled_mm_probe import scaled_mm

if TYPE_CHECKING:
    from collections.abc import Callable

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


def _linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, floor: float
) -> Tensor:
    shape = (*x.shape[:-1], weight.shape[0])
    quantise = row_quantise_fp8_cuda if x.is_cuda else row_quantise_fp8_reference
    codes, scale = quantise(x, floor)
    rows = flat_rows(codes)
    if rows.shape[0] == 0 or rows.shape[1] == 0:
        return x.new_zeros(shape) if bias is None else bias.to(x.dtype).expand(shape).clone()
    if bias is not None and bias.dtype is not x.dtype:
        bias = bias.to(x.dtype)
    out = scaled_mm(rows, scale, weight, weight_scale, bias, x.dtype)
    if out is not None:
        return out.view(shape)
    decline(_NAME, "the vendor GEMM rejects the shape or dtype")
    if x.is_cuda and HAS_TRITON:
        return scaled_gemm(rows, scale, weight, weight_scale, bias, x.dtype).view(shape)
    return fp8_linear_reference(x, weight, weight_scale, bias, floor)


fp8_linear: Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor] = define_op(  # type: ignore[assignment]
    f"{_NAME}(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, float floor) -> Tensor",
    cpu=_linear,
    cuda=_linear,
    fake=_fake,
)
