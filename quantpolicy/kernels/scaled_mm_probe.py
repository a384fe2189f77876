"""What the installed row-wise fp8 GEMM accepts, found by calling it once per signature.

Vendor libraries reject some shapes (few rows, large K and a bias, for one) and say so only when
called. The first call of a signature tries the routes in order; the answer is kept. Inside CUDA
graph capture nothing is tried: an unknown signature takes the Triton GEMM, which takes any shape.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

MM_ALIGNMENT = 16
MANY_ROWS = 256


class Route(StrEnum):
    """How one fp8 GEMM is computed."""

    EPILOGUE = "epilogue"
    SEPARATE_BIAS = "separate_bias"
    TRITON = "triton"


class Signature(NamedTuple):
    """What decides acceptance; more than MANY_ROWS rows count as MANY_ROWS."""

    device: int | None
    m: int
    n: int
    k: int
    bias: bool
    dtype: torch.dtype


_ROUTES: dict[Signature, Route] = {}


def signature_of(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Signature:
    """Return the signature of one GEMM, [M, K] by [N, K] in an output dtype."""
    rows = min(x.shape[0], MANY_ROWS)
    return Signature(x.device.index, rows, weight.shape[0], x.shape[1], bias is not None, dtype)


def routes() -> dict[Signature, Route]:
    """Return every signature tried so far and the route it takes."""
    return dict(_ROUTES)


def forget_routes() -> None:
    """Forget every answer, for tests and after a change of device."""
    _ROUTES.clear()


def scaled_mm(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor | None:
    """Multiply e4m3 rows by an e4m3 weight, or return None where no vendor route works.

    Shapes:
        x: [M, K], M > 0. weight: [N, K]. x_scale: [M, 1]. weight_scale: N values.
        bias: [N] of the output dtype.
    """
    key = signature_of(x, weight, bias, dtype)
    route = _ROUTES.get(key)
    if route is None:
        route = _find_route(key, x, x_scale, weight, weight_scale, bias)
    if route is Route.TRITON:
        return None
    return _call(route, x, x_scale, weight, weight_scale, bias, dtype)


def _call(
    route: Route,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    out = torch._scaled_mm(
        x,
        weight.t(),
        scale_a=x_scale,
        scale_b=weight_scale.view(1, -1),
        bias=bias if route is Route.EPILOGUE else None,
        out_dtype=dtype,
        use_fast_accum=True,
    )
    return out if bias is None or route is Route.EPILOGUE else out.add_(bias)


def _find_route(
    key: Signature,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
) -> Route:
    """Try the routes on the operands at hand and keep the first that the library accepts."""
    if key.n % MM_ALIGNMENT or key.k % MM_ALIGNMENT:
        _ROUTES[key] = Route.TRITON
        return Route.TRITON
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return Route.TRITON
    for route in (Route.EPILOGUE, Route.SEPARATE_BIAS):
        try:
            _call(route, x, x_scale, weight, weight_scale, bias, key.dtype)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError):
            continue
        _ROUTES[key] = route
        return route
    _ROUTES[key] = Route.TRITON
    return Route.TRITON
