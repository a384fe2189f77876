"""One small quantised GEMM per scheme, to learn whether this device runs it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from quantpolicy.errors import KernelMountError
from quantpolicy.kernels.linear import FusedLinear
from quantpolicy.plan import SchemeSettings
from quantpolicy.runtime.linear import guard_linear
from quantpolicy.runtime.weights import GEMM_SCHEMES, quantise_weight
from quantpolicy.schemes import ROW_SCALED, Execution, Scheme

FEATURES = 256
ROWS = 32
LARGEST_ERROR = 0.25

_FAILURES = (
    RuntimeError,
    ValueError,
    TypeError,
    AssertionError,
    AttributeError,
    ImportError,
    KernelMountError,
)


def failed_gemms(
    gemms: Iterable[tuple[Scheme, torch.device, torch.dtype]],
    settings: SchemeSettings,
    execution: Execution,
) -> list[tuple[Scheme, torch.device, str]]:
    """Try each different GEMM once; return those that fail, with what went wrong."""
    results = (
        (scheme, device, smoke_test(scheme, settings, device, dtype, execution))
        for scheme, device, dtype in dict.fromkeys(gemms)
        if scheme in GEMM_SCHEMES
    )
    return [result for result in results if result[2]]


@torch.no_grad()
def smoke_test(
    scheme: Scheme,
    settings: SchemeSettings,
    device: torch.device,
    dtype: torch.dtype,
    execution: Execution = Execution.TORCHAO,
) -> str:
    """Run one small Linear in the scheme on the device; return "" or what went wrong.

    Wrapping a weight can succeed where the first multiplication fails, so both are done. Draws no
    random numbers. ``NotImplementedError`` and CUDA's errors are runtime errors.
    """
    values = torch.arange(FEATURES * FEATURES, device=device, dtype=torch.float32)
    weight = torch.sin(values).reshape(FEATURES, FEATURES).to(dtype)
    rows = torch.cos(values[: ROWS * FEATURES]).reshape(ROWS, FEATURES).to(dtype)
    dense = rows.float() @ weight.float().T + 1.0
    try:
        linear = nn.Linear(FEATURES, FEATURES, device="meta", dtype=dtype)
        linear.weight = nn.Parameter(quantise_weight(weight, scheme, settings), requires_grad=False)
        linear.bias = nn.Parameter(torch.ones(FEATURES, device=device, dtype=dtype))
        guarded: nn.Linear = guard_linear(linear)
        if execution is Execution.FUSED and scheme in ROW_SCALED:
            guarded = FusedLinear.adopt(guarded)
        output = guarded(rows).float()
        error = float((output - dense).norm() / dense.norm())
    except _FAILURES as failure:
        return f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"
    if not error <= LARGEST_ERROR:
        return f"its result is wrong (relative error {error:.3g})"
    return ""
