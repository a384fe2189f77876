"""An fp8 Linear over tanh-GELU rows, beside rows taken as they are: one pass makes the codes.

    rows = cat(head, round(gelu_tanh(x)))
    out  = (q(rows) @ weight.T) * row_scale * weight_scale + bias

``fp8_linear`` over the eager chain, whose activation, concatenation and quantisation need three
passes. Contract: high; the exponential is the GPU's fast one.
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

_NAME = "gelu_fp8_linear"


def gelu_rows(x: Tensor, head: Tensor | None) -> Tensor:
    """Activate, and put the head before it, in plain torch."""
    return beside(head, F.gelu(x, approximate="tanh"))


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


if HAS_TRITON:
    import triton
    import triton.language as tl

    from quantpolicy.kernels.activated_rows import load_head, load_input, with_head
    from quantpolicy.kernels.row_math import rounded_pairs, sigmoid
    from quantpolicy.kernels.row_tiles import store_codes

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
        TILE: tl.constexpr,
        TILES: tl.constexpr,
        EXACT_DIVISION: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        x_row = x_ptr + row * x_stride
        head_row = head_ptr + row * head_stride
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        tiles: tl.tuple = ()
        for i in tl.static_range(TILES):
            if (i + 1) * TILE <= N:
                tiles += (load_head(head_row, i, TILE),)
            else:
                x = load_input(x_row, i, TILE, N, K)
                # 2 sqrt(2 / pi) x (1 + 0.044715 x^2)
                inner = x * (1.5957691216057308 + 0.07135481627260025 * x * x)
                y = rounded_pairs(x * sigmoid(inner), dtype)
                tiles += (with_head(y, head_row, i, TILE, N),)
        out, at = q_ptr + row * K, scale_ptr + row
        store_codes(out, at, tiles, floor, dtype, K, TILE, TILES, EXACT_DIVISION)


@remembered
def gelu_quantise(x: Tensor, head: Tensor | None, floor: float) -> tuple[Tensor, Tensor]:
    """Run the Triton kernel, one program a row: codes [M, K] and scales [M, 1]."""
    return launch_codes(_gelu_quantise_kernel, (x,), head, floor)


def launch_gelu_fp8_linear(
    x: Tensor,
    head: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    floor: float,
) -> Tensor:
    """Make the codes, then run the GEMM that ``fp8_linear`` runs."""
    return multiply_codes(x, gelu_quantise(x, head, floor), (weight, weight_scale, bias))


gelu_fp8_linear: Callable[..., Tensor] = define_fusion(  # type: ignore[assignment]
    f"{_NAME}(Tensor x, Tensor? head, Tensor weight, Tensor weight_scale, Tensor? bias,"
    " float floor) -> Tensor",
    kernel=launch_gelu_fp8_linear,
    reference=gelu_fp8_linear_reference,
    why_not=why_not_activated,
    fake=fake_linear,
)
