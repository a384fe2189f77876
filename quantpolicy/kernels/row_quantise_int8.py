"""Row quantisation of an activation to int8: one symmetric scale per row, the input read once.

    scale[r] = max(amax |x[r, :]| / 127.5, 2^-23)      rounded to the dtype of x
    q[r, k]  = clamp(round(x[r, k] * (1 / scale[r])), -128, 127)

Codes and scales equal torchao's ``Int8Tensor`` activation quantisation (PerRow, symmetric).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantpolicy.kernels.registry import HAS_TRITON, decline, define_op, direct, why_no_triton
from quantpolicy.kernels.replay import remembered
from quantpolicy.kernels.row_launch import launch_rows, row_amax_reference
from quantpolicy.kernels.rows import flat_rows, row_scales_like

if TYPE_CHECKING:
    from collections.abc import Callable

INT8_HALF_RANGE = 127.5
INT8_EPS = torch.finfo(torch.float32).eps
_NAME = "row_quantise_int8"


def row_quantise_int8_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows in plain torch, the chain that torchao runs in eager mode."""
    scale = (row_amax_reference(x) / INT8_HALF_RANGE).clamp(min=INT8_EPS).to(torch.float32)
    codes = (x.to(torch.float32) * (1.0 / scale)).round().clamp(-128, 127)
    return codes.to(torch.int8).contiguous(), scale


def _fake(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.int8), row_scales_like(x)


def _cuda(x: Tensor) -> tuple[Tensor, Tensor]:
    codes, scale = int8_rows(x)
    return codes.view(x.shape), scale.view(*x.shape[:-1], 1)


def int8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [M, K] and scales [M, 1] of all rows of ``x``, for a CUDA tensor."""
    reason = why_no_triton(_NAME)
    if reason:
        decline(_NAME, reason)
        codes, scale = row_quantise_int8_reference(x)
        return flat_rows(codes), flat_rows(scale)
    return launch_row_quantise_int8(x)


if HAS_TRITON:
    import triton
    import triton.language as tl

    from quantpolicy.kernels.row_math import int8_codes, int8_scale, larger, row_amax

    @triton.jit(do_not_specialize=["inner"])
    def _row_quantise_int8_kernel(
        x_ptr,
        q_ptr,
        scale_ptr,
        inner,
        outer_stride,
        inner_stride,
        K: tl.constexpr,
        BLOCK_A: tl.constexpr,
        BLOCK_B: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        x_row = x_ptr + (row // inner) * outer_stride + (row % inner) * inner_stride
        q_row = q_ptr + row * K
        cols_a = tl.arange(0, BLOCK_A)[None, :]
        a = tl.load(x_row + cols_a).to(tl.float32)
        amax = row_amax(a)
        if BLOCK_B > 0:
            cols_b = BLOCK_A + tl.arange(0, BLOCK_B)[None, :]
            b = tl.load(x_row + cols_b, mask=cols_b < K, other=0.0).to(tl.float32)
            amax = larger(amax, row_amax(b))
        scale = int8_scale(amax, x_ptr.dtype.element_ty)[:, None]
        tl.store(scale_ptr + row + tl.zeros((1, 1), dtype=tl.int32), scale)
        tl.store(q_row + cols_a, int8_codes(a, scale))
        if BLOCK_B > 0:
            tl.store(q_row + cols_b, int8_codes(b, scale), mask=cols_b < K)

    @triton.jit(do_not_specialize=["inner"])
    def _row_quantise_int8_long_kernel(
        x_ptr,
        q_ptr,
        scale_ptr,
        inner,
        outer_stride,
        inner_stride,
        K,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        x_row = x_ptr + (row // inner) * outer_stride + (row % inner) * inner_stride
        q_row = q_ptr + row * K
        cols = tl.arange(0, BLOCK)[None, :]
        amax = tl.zeros((1,), dtype=tl.float32)
        for start in range(0, K, BLOCK):
            part = tl.load(x_row + start + cols, mask=start + cols < K, other=0.0)
            amax = larger(amax, row_amax(part.to(tl.float32)))
        scale = int8_scale(amax, x_ptr.dtype.element_ty)[:, None]
        tl.store(scale_ptr + row + tl.zeros((1, 1), dtype=tl.int32), scale)
        for start in range(0, K, BLOCK):
            part = tl.load(x_row + start + cols, mask=start + cols < K, other=0.0)
            tl.store(
                q_row + start + cols,
                int8_codes(part.to(tl.float32), scale),
                mask=start + cols < K,
            )


@remembered
def launch_row_quantise_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Run the Triton kernel and return codes [M, K] and scales [M, 1] of all rows of ``x``."""
    return launch_rows(
        _row_quantise_int8_kernel,
        _row_quantise_int8_long_kernel,
        x,
        torch.int8,
        empty_scale=INT8_EPS,
    )


row_quantise_int8: Callable[[Tensor], tuple[Tensor, Tensor]] = direct(
    define_op(
        f"{_NAME}(Tensor x) -> (Tensor, Tensor)",
        cpu=row_quantise_int8_reference,
        cuda=_cuda,
        fake=_fake,
    ),
    _cuda,
)
