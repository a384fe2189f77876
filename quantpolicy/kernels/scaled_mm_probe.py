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
PROBE_ROWS = (1, 2, 16, 17, 41, 64, 128, 256)


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
_COMPILED_ROUTES: dict[tuple[object, ...], Route] = {}


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
    _COMPILED_ROUTES.clear()


@torch.compiler.assume_constant_result
def route_at_any_rows(
    device_type: str, index: int | None, n: int, k: int, bias: bool, dtype: torch.dtype
) -> str:
    """Return the value of the one route that serves a weight shape at every number of rows.

    For compiled code, which serves many numbers of rows: called while tracing, it multiplies
    zeros at PROBE_ROWS. ``triton`` where no vendor route serves all. A plain string, because a
    traced constant keeps no identity.
    """
    key = (device_type, index, n, k, bias, dtype)
    if key not in _COMPILED_ROUTES:
        device = torch.device(device_type, index) if index is not None else device_type
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            _COMPILED_ROUTES[key] = _probe_rows(torch.device(device), n, k, bias, dtype)
    return _COMPILED_ROUTES[key].value


def _probe_rows(device: torch.device, n: int, k: int, bias: bool, dtype: torch.dtype) -> Route:
    weight = torch.zeros((n, k), device=device, dtype=torch.float8_e4m3fn)
    w_scale = torch.ones((n, 1), device=device)
    added = torch.zeros(n, device=device, dtype=dtype) if bias else None
    found = set()
    for rows in PROBE_ROWS:
        x = torch.zeros((rows, k), device=device, dtype=torch.float8_e4m3fn)
        x_scale = torch.ones((rows, 1), device=device)
        scaled_mm(x, x_scale, weight, w_scale, added, dtype)
        found.add(_ROUTES.get(signature_of(x, weight, added, dtype), Route.TRITON))
    if Route.TRITON in found:
        return Route.TRITON
    return Route.SEPARATE_BIAS if Route.SEPARATE_BIAS in found else Route.EPILOGUE


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
