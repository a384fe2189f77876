"""The quantised Linears as torch.compile sees them: steps that it fuses with their neighbours.

The row quantisation is plain torch, so that a compiler computes it together with the norm or the
activation before it; only the GEMM stays a call. A compiler keeps the scale in fp32 where eager
code rounds it to the activation's dtype. Chosen while tracing; eager code never comes here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantpolicy.kernels.fp8_linear import fp8_linear
from quantpolicy.kernels.int8_linear import int8_gemm
from quantpolicy.kernels.row_quantise_fp8 import row_quantise_fp8_reference
from quantpolicy.kernels.row_quantise_int8 import row_quantise_int8_reference
from quantpolicy.kernels.scaled_mm_probe import Route, route_at_any_rows


def traced_fp8_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, floor: float
) -> Tensor:
    """Return what ``fp8_linear`` returns, in steps; shapes with no vendor route stay one op."""
    n, k = weight.shape
    route = route_at_any_rows(x.device.type, x.device.index, n, k, bias is not None, x.dtype)
    if route not in (Route.EPILOGUE.value, Route.SEPARATE_BIAS.value) or x.numel() == 0:
        return fp8_linear(x, weight, weight_scale, bias, floor)
    codes, scale = row_quantise_fp8_reference(x, floor)
    in_epilogue = route == Route.EPILOGUE.value
    if bias is not None:
        bias = bias.to(x.dtype)
    out = torch._scaled_mm(
        codes.reshape(-1, k),
        weight.t(),
        scale_a=scale.reshape(-1, 1),
        scale_b=weight_scale.reshape(1, -1),
        bias=bias if in_epilogue else None,
        out_dtype=x.dtype,
        use_fast_accum=True,
    )
    if bias is not None and not in_epilogue:
        out = out + bias
    return out.reshape(*x.shape[:-1], n)


def traced_int8_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> Tensor:
    """Return what ``int8_linear`` returns, in two steps."""
    codes, scale = row_quantise_int8_reference(x)
    rows = codes.reshape(x.shape[:-1].numel(), x.shape[-1])
    out = int8_gemm(rows, scale.reshape(-1), weight, weight_scale, bias, x.dtype)
    return out.reshape(*x.shape[:-1], weight.shape[0])
