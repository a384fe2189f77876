"""An fp8 Linear over SwiGLU rows, beside rows taken as they are: one pass makes the codes.

    rows = cat(head, round(value * round(silu(gate))))
    out  = (q(rows) @ weight.T) * row_scale * weight_scale + bias

``fp8_linear`` over the eager chain, whose activation, product, concatenation and quantisation need
four passes. Value and gate are read where they lie: as halves of one projection, in either order,
or as two. Contract: high; the exponential is the GPU's fast one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import functional as F

from quantpolicy.kernels.activated_rows import (
    beside,
    fake_linear,
    launch_codes,
    multiply_codes,
    why_not_activated,
)
from quantpolicy.kernels.contract import define_fusion
from quantpolicy.kernels.fp8_linear import fp8_linear
from quantpolicy.kernels.registry import HAS_TRITON
from quantpolicy.kernels.replay import remembered

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = "swiglu_fp8_linear"


def swiglu_rows(value: Tensor, gate: Tensor, head: Tensor | None) -> Tensor:
    """Gate, and put the head before it, in plain torch."""
    return beside(head, value * F.silu(gate))


def swiglu_fp8_linear_reference(
    value: Tensor,
    gate: Tensor,
    head: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    floor: float,
) -> Tensor:
    """Gate in plain torch, then quantise and multiply."""
    return fp8_linear(swiglu_rows(value, gate, head), weight, weight_scale, bias, floor)


if HAS_TRITON:
    import triton
    import triton.language as tl

    from quantpolicy.kernels.activated_rows import load_head, load_input, with_head
    from quantpolicy.kernels.row_math import rounded_pairs, sigmoid
    from quantpolicy.kernels.row_tiles import store_codes

    @triton.jit
    def _swiglu_quantise_kernel(
        value_ptr,
        gate_ptr,
        head_ptr,
        q_ptr,
        scale_ptr,
        floor,
        value_stride,
        gate_stride,
        head_stride,
        N: tl.constexpr,
        K: tl.constexpr,
        TILE: tl.constexpr,
        TILES: tl.constexpr,
        EXACT_DIVISION: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        value_row = value_ptr + row * value_stride
        gate_row = gate_ptr + row * gate_stride
        head_row = head_ptr + row * head_stride
        dtype: tl.constexpr = value_ptr.dtype.element_ty
        tiles: tl.tuple = ()
        for i in tl.static_range(TILES):
            if (i + 1) * TILE <= N:
                tiles += (load_head(head_row, i, TILE),)
            else:
                gate = load_input(gate_row, i, TILE, N, K)
                value = load_input(value_row, i, TILE, N, K)
                silu = rounded_pairs(gate * sigmoid(gate), dtype)
                y = rounded_pairs(value * silu, dtype)
                tiles += (with_head(y, head_row, i, TILE, N),)
        out, at = q_ptr + row * K, scale_ptr + row
        store_codes(out, at, tiles, floor, dtype, K, TILE, TILES, EXACT_DIVISION)


@remembered
def swiglu_quantise(
    value: Tensor, gate: Tensor, head: Tensor | None, floor: float
) -> tuple[Tensor, Tensor]:
    """Run the Triton kernel, one program a row: codes [M, K] and scales [M, 1]."""
    return launch_codes(_swiglu_quantise_kernel, (value, gate), head, floor)


def launch_swiglu_fp8_linear(
    value: Tensor,
    gate: Tensor,
    head: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    floor: float,
) -> Tensor:
    """Make the codes, then run the GEMM that ``fp8_linear`` runs."""
    codes = swiglu_quantise(value, gate, head, floor)
    return multiply_codes(value, codes, (weight, weight_scale, bias))


swiglu_fp8_linear: Callable[..., Tensor] = define_fusion(  # type: ignore[assignment]
    f"{_NAME}(Tensor value, Tensor gate, Tensor? head, Tensor weight, Tensor weight_scale,"
    " Tensor? bias, float floor) -> Tensor",
    kernel=launch_swiglu_fp8_linear,
    reference=swiglu_fp8_linear_reference,
    why_not=why_not_activated,
    fake=fake_linear,
)
