"""The fp8 Linear: rows quantised at run time, row-wise scaled GEMM, bias in its epilogue.

    out = (q(x) @ weight.T) * x_scale * weight_scale + bias

The GEMM is torch's own row-wise one, as in torchao, so results are equal where it takes the bias.
Shapes and output dtypes that it rejects, and few rows by few columns, which it is slow at, go to a
Triton GEMM. ``fp8_gemm`` is the second half alone, for rows that come quantised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantpolicy.kernels.registry import HAS_TRITON, decline, define_op, direct, why_no_triton
from quantpolicy.kernels.row_quantise_fp8 import fp8_rows, row_quantise_fp8_reference
from quantpolicy.kernels.rows import flat_rows
from quantpolicy.kernels.scaled_gemm import capability, scaled_gemm
from quantpolicy.kernels.scaled_mm_probe import scaled_mm

if TYPE_CHECKING:
    from collections.abc import Callable

FEW_ROWS = 128
FEW_COLUMNS = 4096
_NAME = "fp8_linear"


def fp8_gemm_reference(
    codes: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Multiply in plain torch: e4m3 values as fp32, one fp32 epilogue."""
    acc = codes.reshape(-1, codes.shape[-1]).to(torch.float32) @ weight.to(torch.float32).t()
    out = acc * scale.reshape(-1, 1) * weight_scale.reshape(1, -1)
    if bias is not None:
        out = out + bias.to(torch.float32)
    return out.to(dtype).reshape(*codes.shape[:-1], weight.shape[0])


def fp8_linear_reference(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, floor: float
) -> Tensor:
    """Quantise and multiply in plain torch."""
    codes, scale = row_quantise_fp8_reference(x, floor)
    return fp8_gemm_reference(codes, scale, weight, weight_scale, bias, x.dtype)


def _fake(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, floor: float
) -> Tensor:
    del weight_scale, bias, floor
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _fake_gemm(
    codes: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    del scale, weight_scale, bias
    return codes.new_empty((*codes.shape[:-1], weight.shape[0]), dtype=dtype)


def _cpu(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, floor: float
) -> Tensor:
    codes, scale = row_quantise_fp8_reference(x, floor)
    return _gemm_cpu(codes, scale, weight, weight_scale, bias, x.dtype)


def _gemm_cpu(
    codes: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    rows = flat_rows(codes)
    out = None
    if rows.numel():
        bias_x = None if bias is None else bias.to(dtype)
        out = scaled_mm(rows, flat_rows(scale), weight, weight_scale, bias_x, dtype)
    if out is None:
        return fp8_gemm_reference(codes, scale, weight, weight_scale, bias, dtype)
    return out.view(*codes.shape[:-1], weight.shape[0])


def _cuda(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, floor: float
) -> Tensor:
    if x.numel() == 0:
        return fp8_linear_reference(x, weight, weight_scale, bias, floor)
    rows, scale = fp8_rows(x, floor)
    out = multiply_rows(rows, scale, weight, weight_scale, bias, x.dtype)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], weight.shape[0])


def _gemm_cuda(
    codes: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    if codes.numel() == 0:
        return fp8_gemm_reference(codes, scale, weight, weight_scale, bias, dtype)
    rows = codes.reshape(-1, codes.shape[-1])
    out = multiply_rows(rows, scale.reshape(-1, 1), weight, weight_scale, bias, dtype)
    return out.view(*codes.shape[:-1], weight.shape[0])


def multiply_rows(
    rows: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Multiply CUDA codes [M, K], M > 0, with scales [M, 1] by a weight, [M, N] in a dtype."""
    if bias is not None and bias.dtype is not dtype:
        bias = bias.to(dtype)
    out = None
    if not prefers_triton(rows, weight):
        out = scaled_mm(rows, scale, weight, weight_scale, bias, dtype)
        if out is None:
            decline(_NAME, "the vendor GEMM rejects the shape or dtype")
    if out is None and HAS_TRITON:
        out = scaled_gemm(rows, scale, weight, weight_scale, bias, dtype)
    if out is None:
        out = fp8_gemm_reference(rows, scale, weight, weight_scale, bias, dtype)
    return out


def prefers_triton(rows: Tensor, weight: Tensor) -> bool:
    """Return whether the Triton GEMM is the faster one, by bench/results/execution_tiles.json."""
    return (
        rows.shape[0] <= FEW_ROWS
        and weight.shape[0] <= FEW_COLUMNS
        and not why_no_triton(_NAME)
        and capability(rows.device) >= (9, 0)
    )


fp8_linear: Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor] = direct(
    define_op(
        f"{_NAME}(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, float floor)"
        " -> Tensor",
        cpu=_cpu,
        cuda=_cuda,
        fake=_fake,
    ),
    _cuda,
)

fp8_gemm: Callable[..., Tensor] = direct(
    define_op(
        "fp8_gemm(Tensor codes, Tensor scale, Tensor weight, Tensor weight_scale, Tensor? bias,"
        " ScalarType dtype) -> Tensor",
        cpu=_gemm_cpu,
        cuda=_gemm_cuda,
        fake=_fake_gemm,
    ),
    _gemm_cuda,
)
