"""Which small row counts the int8 and fp8 GEMMs of this device reject, found by trying them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from quantpolicy.host import GemmLimit, Host
from quantpolicy.schemes import Scheme

MOST_ROWS = 64
OUT_FEATURES = 256
IN_FEATURES = (4096, 8192, 12288, 16384)

Gemm = Callable[[int, int, bool], None]


def measure_gemm_limits(host: Host) -> tuple[GemmLimit, ...]:
    """Return the limits of the first accelerator; it must be the host's."""
    gemms: dict[Scheme, Gemm] = {Scheme.INT8: _run_int8}
    if host.fp8_dtype:
        fp8_dtype: torch.dtype = getattr(torch, host.fp8_dtype)
        gemms[Scheme.FP8] = lambda rows, in_features, has_bias: _run_fp8(
            rows, in_features, has_bias, fp8_dtype
        )
    limits: list[GemmLimit] = []
    for scheme, gemm in gemms.items():
        table = {
            (in_features, has_bias): _fewest_rows(gemm, in_features, has_bias)
            for in_features in IN_FEATURES
            for has_bias in (False, True)
        }
        limits += limits_from_table(scheme, table)
    return tuple(limits)


def limits_from_table(scheme: Scheme, fewest: dict[tuple[int, bool], int]) -> Sequence[GemmLimit]:
    """Return the limits that say what a table of fewest rows by (in_features, has_bias) says.

    A shape that failed at every count tried has no limit: the device does not run the scheme there.
    """
    limits: list[GemmLimit] = []
    widths = sorted({in_features for in_features, _ in fewest})
    for has_bias in (False, True):
        for in_features in widths:
            rows = fewest[in_features, has_bias]
            known = [limit for limit in limits if limit.applies(scheme, in_features, has_bias)]
            if MOST_ROWS >= rows > max((limit.min_rows for limit in known), default=1):
                limits.append(
                    GemmLimit(
                        scheme=scheme,
                        min_rows=rows,
                        min_in_features=0 if in_features == widths[0] else in_features,
                        bias_only=has_bias,
                    )
                )
    return limits


def _fewest_rows(gemm: Gemm, in_features: int, has_bias: bool) -> int:
    """Return one more than the largest row count that fails, 1 when all work."""
    for rows in range(MOST_ROWS, 0, -1):
        try:
            gemm(rows, in_features, has_bias)
        except RuntimeError:
            return rows + 1
    return 1


def _run_int8(rows: int, in_features: int, has_bias: bool) -> None:
    del has_bias  # the integer product has none; a bias is added to it afterwards
    left = torch.ones(rows, in_features, dtype=torch.int8, device="cuda")
    right = torch.ones(OUT_FEATURES, in_features, dtype=torch.int8, device="cuda")
    torch._int_mm(left, right.t())
    torch.cuda.synchronize()


def _run_fp8(rows: int, in_features: int, has_bias: bool, dtype: torch.dtype) -> None:
    left = torch.ones(rows, in_features, device="cuda").to(dtype)
    right = torch.ones(OUT_FEATURES, in_features, device="cuda").to(dtype)
    bias = torch.ones(OUT_FEATURES, device="cuda", dtype=torch.bfloat16) if has_bias else None
    torch._scaled_mm(
        left,
        right.t(),
        scale_a=torch.ones(rows, 1, device="cuda"),
        scale_b=torch.ones(1, OUT_FEATURES, device="cuda"),
        bias=bias,
        out_dtype=torch.bfloat16,
    )
    torch.cuda.synchronize()
