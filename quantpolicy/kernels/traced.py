"""The quantised Linears as torch.compile sees them: a row quantisation, a GEMM, a bias.

At many rows the quantisation stays one op: it reads its rows once, where a compiler that fuses it
with their producer computes them twice. At few rows the host is what a forward waits for, and plain
torch fused with the producer costs it nothing; a compiler then keeps the scale in fp32 where eager
code rounds it. The GEMM is torch's own where that takes the shape. Chosen while tracing; eager code
never comes here.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from quantpolicy.kernels.fp8_linear import fp8_gemm, fp8_linear
from quantpolicy.kernels.int8_linear import int8_gemm
from quantpolicy.kernels.row_quantise_fp8 import row_quantise_fp8, row_quantise_fp8_reference
from quantpolicy.kernels.row_quantise_int8 import row_quantise_int8, row_quantise_int8_reference
from quantpolicy.kernels.scaled_mm_probe import Route, route_at_any_rows
from quantpolicy.ops import COMPILED_ROWS

_SHARED = "quantpolicy_rows"


def traced_fp8_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, floor: float
) -> Tensor:
    """Return what ``fp8_linear`` returns, in steps; shapes with no vendor route stay one op."""
    route = _vendor_route(x, weight, bias, x.dtype)
    if route is None:
        return fp8_linear(x, weight, weight_scale, bias, floor)
    codes, scale = _quantised_fp8(x, floor)
    return _vendor_gemm(route, codes, scale, weight, weight_scale, bias, x.dtype)


def _quantised_fp8(x: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    if _has_few_rows(x):
        return row_quantise_fp8_reference(x, floor)
    share_rows()
    return row_quantise_fp8(x, floor)


def _quantised_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    if _has_few_rows(x):
        return row_quantise_int8_reference(x)
    share_rows()
    return row_quantise_int8(x)


def _has_few_rows(x: Tensor) -> bool:
    """Tell the two ways apart; sizes on either side of the limit are compiled apart."""
    return x.shape[:-1].numel() < COMPILED_ROWS


def traced_fp8_gemm(
    codes: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return what ``fp8_gemm`` returns; a shape with no vendor route stays the op."""
    route = _vendor_route(codes, weight, bias, dtype)
    if route is None:
        return fp8_gemm(codes, scale, weight, weight_scale, bias, dtype)
    return _vendor_gemm(route, codes, scale, weight, weight_scale, bias, dtype)


def _vendor_route(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> str | None:
    """Return the vendor's route at any number of rows, None when there is none."""
    n, k = (int(size) for size in weight.shape)
    route = route_at_any_rows(x.device.type, x.device.index, n, k, bias is not None, dtype)
    is_vendor = route in (Route.EPILOGUE.value, Route.SEPARATE_BIAS.value)
    return route if is_vendor and x.numel() > 0 else None


def _vendor_gemm(
    route: str,
    codes: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    in_epilogue = route == Route.EPILOGUE.value
    if bias is not None:
        bias = bias.to(dtype)
    out = torch._scaled_mm(
        codes.reshape(-1, codes.shape[-1]),
        weight.t(),
        scale_a=scale.reshape(-1, 1),
        scale_b=weight_scale.reshape(1, -1),
        bias=bias if in_epilogue else None,
        out_dtype=dtype,
        use_fast_accum=True,
    )
    if bias is not None and not in_epilogue:
        out = out + bias
    return out.reshape(*codes.shape[:-1], weight.shape[0])


def traced_int8_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> Tensor:
    """Return what ``int8_linear`` returns, in two steps."""
    codes, scale = _quantised_int8(x)
    rows = codes.reshape(x.shape[:-1].numel(), x.shape[-1])
    out = int8_gemm(rows, scale.reshape(-1), weight, weight_scale, bias, x.dtype)
    return out.reshape(*x.shape[:-1], weight.shape[0])


@torch.compiler.assume_constant_result
def share_rows() -> bool:
    """Have inductor quantise an input of several Linears once; called while tracing.

    It merges equal pointwise code, but not equal calls of an op that it does not know.
    """
    _register_lowerings()
    return True


@functools.cache
def _register_lowerings() -> None:
    from torch._inductor.lowering import fallback_handler, register_lowering
    from torch._inductor.virtualized import V

    def shared(op: Any) -> Any:
        call = fallback_handler(op)

        def lower(x: Any, *rest: float) -> Any:
            # The memo holds the input, so that its id stays its own.
            known = vars(V.graph).setdefault(_SHARED, {})
            key = (op, id(x), rest)
            if key not in known:
                known[key] = (x, call(x, *rest))
            return known[key][1]

        return lower

    ops = torch.ops.quantpolicy
    for op in (ops.row_quantise_fp8.default, ops.row_quantise_int8.default):
        register_lowering(op, type_promotion_kind=None)(shared(op))
