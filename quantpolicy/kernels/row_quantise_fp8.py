"""Row quantisation of an activation to fp8 (e4m3fn): one scale per row, the input read once.

    scale[r] = max(amax |x[r, :]|, floor) / 448        rounded to the dtype of x
    q[r, k]  = e4m3(x[r, k] / scale[r])

Bytes and scales equal torchao's ``Float8Tensor`` activation quantisation (PerRow, the floor as
hp_value_lb). One stated difference: an fp16 row whose scale fp16 cannot hold keeps it in fp32,
where torchao divides by zero or by a subnormal.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantpolicy.kernels.registry import HAS_TRITON, decline, define_op, direct, why_no_triton
from quantpolicy.kernels.replay import remembered
from quantpolicy.kernels.row_launch import launch_rows, row_amax_reference
from quantpolicy.kernels.rows import flat_rows, row_scales_like

if TYPE_CHECKING:
    from collections.abc import Callable

E4M3_MAX = 448.0
FP16_TINY = 2.0**-14
_FAST_DIVISION_FLOOR = 1e-30
_NAME = "row_quantise_fp8"


def row_quantise_fp8_reference(x: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Quantise rows in plain torch, the chain that torchao runs in eager mode."""
    amax = row_amax_reference(x)
    scale = (amax.clamp(min=floor) / E4M3_MAX).to(torch.float32)
    if x.dtype is torch.float16:
        unrounded = amax.to(torch.float32).clamp(min=floor) / E4M3_MAX
        scale = torch.where(unrounded < FP16_TINY, unrounded, scale)
    quotient = (x.to(torch.float32) / scale).clamp(-E4M3_MAX, E4M3_MAX)
    return quotient.to(torch.float8_e4m3fn).contiguous(), scale


def _fake(x: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    del floor
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), row_scales_like(x)


def _cuda(x: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    codes, scale = fp8_rows(x, floor)
    return codes.view(x.shape), scale.view(*x.shape[:-1], 1)


def fp8_rows(x: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Return codes [M, K] and scales [M, 1] of all rows of ``x``, for a CUDA tensor."""
    reason = why_no_triton(_NAME) or why_no_e4m3(x.device)
    if reason:
        decline(_NAME, reason)
        codes, scale = row_quantise_fp8_reference(x, floor)
        return flat_rows(codes), flat_rows(scale)
    return launch_row_quantise_fp8(x, floor)


@functools.cache
def why_no_e4m3(device: torch.device) -> str:
    """Return why a CUDA device cannot make e4m3 codes, "" when it can."""
    has_e4m3 = torch.cuda.get_device_capability(device) >= (8, 9)
    return "" if has_e4m3 else "the GPU has no e4m3 conversion"


def needs_exact_division(floor: float) -> bool:
    """Return whether scales can come so near to underflow that codes need a true division."""
    return floor < _FAST_DIVISION_FLOOR


@functools.cache
def rounded_floor(floor: float, dtype: torch.dtype) -> float:
    """Return the floor as the activation dtype holds it; fp16, which underflows, keeps it.

    Hidden from modes that watch or fake what runs: no part of the data's computation.
    """
    if dtype is torch.float16:
        return floor
    with torch._C._DisableTorchDispatch():
        return float(torch.tensor(floor, dtype=dtype))


if HAS_TRITON:
    import triton
    import triton.language as tl

    from quantpolicy.kernels.row_math import fp8_codes, fp8_scale, larger, row_amax

    @triton.jit(do_not_specialize=["inner"])
    def _row_quantise_fp8_kernel(
        x_ptr,
        q_ptr,
        scale_ptr,
        inner,
        outer_stride,
        inner_stride,
        floor,
        K: tl.constexpr,
        BLOCK_A: tl.constexpr,
        BLOCK_B: tl.constexpr,
        EXACT_DIVISION: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        x_row = x_ptr + (row // inner) * outer_stride + (row % inner) * inner_stride
        q_row = q_ptr + row * K
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        cols_a = tl.arange(0, BLOCK_A)[None, :]
        a = tl.load(x_row + cols_a).to(tl.float32)
        amax = row_amax(a)
        if BLOCK_B > 0:
            cols_b = BLOCK_A + tl.arange(0, BLOCK_B)[None, :]
            b = tl.load(x_row + cols_b, mask=cols_b < K, other=0.0).to(tl.float32)
            amax = larger(amax, row_amax(b))
        scale = fp8_scale(amax, floor, dtype)[:, None]
        tl.store(scale_ptr + row + tl.zeros((1, 1), dtype=tl.int32), scale)
        tl.store(q_row + cols_a, fp8_codes(a, scale, EXACT_DIVISION))
        if BLOCK_B > 0:
            tl.store(q_row + cols_b, fp8_codes(b, scale, EXACT_DIVISION), mask=cols_b < K)

    @triton.jit(do_not_specialize=["inner"])
    def _row_quantise_fp8_long_kernel(
        x_ptr,
        q_ptr,
        scale_ptr,
        inner,
        outer_stride,
        inner_stride,
        floor,
        K,
        BLOCK: tl.constexpr,
        EXACT_DIVISION: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        x_row = x_ptr + (row // inner) * outer_stride + (row % inner) * inner_stride
        q_row = q_ptr + row * K
        cols = tl.arange(0, BLOCK)[None, :]
        amax = tl.zeros((1,), dtype=tl.float32)
        for start in range(0, K, BLOCK):
            part = tl.load(x_row + start + cols, mask=start + cols < K, other=0.0)
            amax = larger(amax, row_amax(part.to(tl.float32)))
        scale = fp8_scale(amax, floor, x_ptr.dtype.element_ty)[:, None]
        tl.store(scale_ptr + row + tl.zeros((1, 1), dtype=tl.int32), scale)
        for start in range(0, K, BLOCK):
            part = tl.load(x_row + start + cols, mask=start + cols < K, other=0.0)
            codes = fp8_codes(part.to(tl.float32), scale, EXACT_DIVISION)
            tl.store(q_row + start + cols, codes, mask=start + cols < K)


@remembered
def launch_row_quantise_fp8(x: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Run the Triton kernel and return codes [M, K] and scales [M, 1] of all rows of ``x``."""
    return launch_rows(
        _row_quantise_fp8_kernel,
        _row_quantise_fp8_long_kernel,
        x,
        torch.float8_e4m3fn,
        scalars=(rounded_floor(floor, x.dtype),),
        flags=(x.dtype is torch.float32 or needs_exact_division(floor),),
        empty_scale=floor / E4M3_MAX,
    )


row_quantise_fp8: Callable[[Tensor, float], tuple[Tensor, Tensor]] = direct(
    define_op(
        f"{_NAME}(Tensor x, float floor) -> (Tensor, Tensor)",
        cpu=row_quantise_fp8_reference,
        cuda=_cuda,
        fake=_fake,
    ),
    _cuda,
)
