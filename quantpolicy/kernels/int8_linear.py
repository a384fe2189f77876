"""The int8 Linear: rows quantised at run time, int32 GEMM, scales and bias in one epilogue.

    out = (q(x) @ weight.T) * x_scale * weight_scale + bias        one rounding, to the dtype of x

torchao rounds once more, after the first scale; the two differ by at most that rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantpolicy.kernels.registry import decline, define_op, direct, why_no_triton
from quantpolicy.kernels.row_quantise_int8 import int8_rows, row_quantise_int8_reference
from quantpolicy.kernels.rows import flat_rows
from quantpolicy.kernels.scaled_gemm import scaled_gemm

if TYPE_CHECKING:
    from collections.abc import Callable

INT_MM_MIN_ROWS = 17
INT_MM_ALIGNMENT = 8
_NAME = "int8_linear"


def int8_linear_reference(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> Tensor:
    """Multiply in plain torch: exact integers, then one fp32 epilogue."""
    codes, scale = row_quantise_int8_reference(x)
    acc = int8_matmul_reference(flat_rows(codes), weight)
    out = scaled_reference(acc, scale, weight_scale, bias, x.dtype)
    return out.view(*x.shape[:-1], weight.shape[0])


def int8_matmul_reference(codes: Tensor, weight: Tensor) -> Tensor:
    """Return codes @ weight.T in int32, exactly, for any number of rows."""
    if codes.shape[0] == 0 or codes.shape[1] == 0:
        return codes.new_zeros((codes.shape[0], weight.shape[0]), dtype=torch.int32)
    if codes.is_cuda:
        return torch.mm(codes.to(torch.float64), weight.to(torch.float64).t()).to(torch.int32)
    return torch._int_mm(codes, weight.t())


def scaled_reference(
    acc: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Apply scales and bias to an accumulator [M, N] in fp32, round once."""
    out = acc.to(torch.float32) * x_scale.reshape(-1, 1) * weight_scale.reshape(1, -1)
    if bias is not None:
        out = out + bias.to(torch.float32)
    return out.to(dtype)


def _fake(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    del weight_scale, bias
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _cuda(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    if x.numel() == 0:
        return int8_linear_reference(x, weight, weight_scale, bias)
    rows, scale = int8_rows(x)
    out = _gemm_cuda(rows, scale, weight, weight_scale, bias, x.dtype)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], weight.shape[0])


def _gemm_cpu(
    codes: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    acc = int8_matmul_reference(codes, weight)
    return scaled_reference(acc, scale, weight_scale, bias, dtype)


def _gemm_cuda(
    codes: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    if codes.numel() == 0:
        return _gemm_cpu(codes, scale, weight, weight_scale, bias, dtype)
    reason = why_no_triton(_NAME)
    if not reason:
        return scaled_gemm(codes, scale, weight, weight_scale, bias, dtype)
    decline(_NAME, reason)
    return scaled_reference(_int_mm(codes, weight), scale, weight_scale, bias, dtype)


def _gemm_fake(
    codes: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    del scale, weight_scale, bias
    return codes.new_empty((codes.shape[0], weight.shape[0]), dtype=dtype)


def _int_mm(codes: Tensor, weight: Tensor) -> Tensor:
    """Return codes @ weight.T through the vendor GEMM, its limits met by padding with zeros."""
    (m, k), n = codes.shape, weight.shape[0]
    pad_m, pad_k, pad_n = max(0, INT_MM_MIN_ROWS - m), -k % INT_MM_ALIGNMENT, -n % INT_MM_ALIGNMENT
    if pad_m or pad_k:
        codes = torch.nn.functional.pad(codes, (0, pad_k, 0, pad_m))
    if pad_k or pad_n:
        weight = torch.nn.functional.pad(weight, (0, pad_k, 0, pad_n))
    return torch._int_mm(codes, weight.t())[:m, :n]


int8_linear: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] = direct(
    define_op(
        f"{_NAME}(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias) -> Tensor",
        cpu=int8_linear_reference,
        cuda=_cuda,
        fake=_fake,
    ),
    _cuda,
)

int8_gemm: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, torch.dtype], Tensor] = (
    define_op(  # type: ignore[assignment]
        "int8_gemm(Tensor codes, Tensor scale, Tensor weight, Tensor weight_scale, Tensor? bias,"
        " ScalarType dtype) -> Tensor",
        cpu=_gemm_cpu,
        cuda=_gemm_cuda,
        fake=_gemm_fake,
    )
)
