"""The int8 Linear: rows quantised at run time, int32 GEMM, scales and bias in one epilogue.

    out = (q(x) @ weight.T) * x_scale * weight_scale + bias        one rounding, to the dtype of x

torchao rounds once more, after the first scale; the two differ by at most that rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantpolicy.kernels.registry import decline, define_op, why_no_triton
from quantpolicy.kernels.row_quantise_int8 import int8_rows, row_quantise_int8_reference
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
    acc = int8_matmul_reference(codes.reshape(-1, codes.shape[-1]), weight)
    return scaled_reference(acc, scale, weight_scale, bias, x)


def int8_matmul_reference(codes: Tensor, weight: Tensor) -> Tensor:
    """Return codes @ weight.T in int32, exactly, for any number of rows."""
    if codes.shape[0] == 0 or codes.shape[1] == 0:
        return codes.new_zeros((codes.shape[0], weight.shape[0]), dtype=torch.int32)
    if codes.is_cuda:
        return torch.mm(codes.to(torch.float64), weight.to(torch.float64).t()).to(torch.int32)
    return torch._int_mm(codes, weight.t())


def scaled_reference(
    acc: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor | None, x: Tensor
) -> Tensor:
    """Apply scales and bias to an accumulator in fp32, round once to the dtype of ``x``."""
    out = acc.to(torch.float32) * x_scale.reshape(-1, 1) * weight_scale.reshape(1, -1)
    if bias is not None:
        out = out + bias.to(torch.float32)
    return out.to(x.dtype).reshape(*x.shape[:-1], acc.shape[-1])


def _fake(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    del weight_scale, bias
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _cuda(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    if x.numel() == 0:
        return int8_linear_reference(x, weight, weight_scale, bias)
    rows, scale = int8_rows(x)
    reason = why_no_triton(_NAME)
    if reason:
        decline(_NAME, reason)
        return scaled_reference(_int_mm(rows, weight), scale, weight_scale, bias, x)
    out = scaled_gemm(rows, scale, weight, weight_scale, bias, x.dtype)
    return out.view(*x.shape[:-1], weight.shape[0])


def _int_mm(codes: Tensor, weight: Tensor) -> Tensor:
    """Return codes @ weight.T through the vendor GEMM, its limits met by padding with zeros."""
    (m, k), n = codes.shape, weight.shape[0]
    pad_m, pad_k, pad_n = max(0, INT_MM_MIN_ROWS - m), -k % INT_MM_ALIGNMENT, -n % INT_MM_ALIGNMENT
    if pad_m or pad_k:
        codes = torch.nn.functional.pad(codes, (0, pad_k, 0, pad_m))
    if pad_k or pad_n:
        weight = torch.nn.functional.pad(weight, (0, pad_k, 0, pad_n))
    return torch._int_mm(codes, weight.t())[:m, :n]


int8_linear: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] = define_op(  # type: ignore[assignment]
    f"{_NAME}(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias) -> Tensor",
    cpu=int8_linear_reference,
    cuda=_cuda,
    fake=_fake,
)
