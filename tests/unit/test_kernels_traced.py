"""The quantised Linears in steps, as a compiler sees them, and the route chosen for all rows."""

from __future__ import annotations

import pytest
import torch

from quantpolicy.kernels import scaled_mm_probe
from quantpolicy.kernels.fp8_linear import fp8_linear
from quantpolicy.kernels.int8_linear import int8_gemm, int8_linear, int8_matmul_reference
from quantpolicy.kernels.scaled_mm_probe import PROBE_ROWS, forget_routes, route_at_any_rows
from quantpolicy.kernels.traced import traced_fp8_linear, traced_int8_linear

FLOOR = 1e-12


@pytest.fixture(autouse=True)
def _fresh() -> None:
    forget_routes()
    yield
    forget_routes()


def fp8_operands(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weight = torch.randn(n, k).to(torch.float8_e4m3fn)
    return weight, torch.rand(n, 1) / 100, torch.randn(n).bfloat16()


@pytest.mark.parametrize("shape", [(5, 48), (1, 48), (2, 3, 48), (0, 48)])
@pytest.mark.parametrize(("n", "k"), [(64, 48), (50, 48)])
def test_fp8_steps_equal_the_op(shape: tuple[int, ...], n: int, k: int) -> None:
    weight, scale, bias = fp8_operands(n, k)
    x = torch.randn(shape).bfloat16()
    for added in (None, bias):
        out = traced_fp8_linear(x, weight, scale, added, FLOOR)
        assert torch.equal(out, fp8_linear(x, weight, scale, added, FLOOR))


@pytest.mark.parametrize("shape", [(5, 48), (1, 48), (2, 3, 48), (0, 48), (2, 0, 48)])
def test_int8_steps_equal_the_op(shape: tuple[int, ...]) -> None:
    weight = torch.randint(-128, 128, (64, 48), dtype=torch.int8)
    scale, bias = torch.rand(64, 1) / 100, torch.randn(64).bfloat16()
    x = torch.randn(shape).bfloat16()
    for added in (None, bias):
        out = traced_int8_linear(x, weight, scale, added)
        assert torch.equal(out, int8_linear(x, weight, scale, added))


def test_a_bias_rejected_at_few_rows_is_added_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch._scaled_mm

    def picky(x: torch.Tensor, *args: torch.Tensor, **kwargs: object) -> torch.Tensor:
        if kwargs["bias"] is not None and x.shape[0] <= 41:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        return real(x, *args, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", picky)
    assert route_at_any_rows("cpu", None, 64, 48, True, torch.bfloat16) == "separate_bias"
    assert route_at_any_rows("cpu", None, 64, 48, False, torch.bfloat16) == "epilogue"
    weight, scale, bias = fp8_operands(64, 48)
    x = torch.randn(100, 48).bfloat16()
    expected = fp8_linear(x, weight, scale, None, FLOOR) + bias
    assert torch.equal(traced_fp8_linear(x, weight, scale, bias, FLOOR), expected)


def test_the_route_is_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = scaled_mm_probe.scaled_mm

    def counted(x: torch.Tensor, *rest: object) -> torch.Tensor | None:
        seen.append(x.shape[0])
        return real(x, *rest)

    monkeypatch.setattr(scaled_mm_probe, "scaled_mm", counted)
    for _ in range(2):
        assert route_at_any_rows("cpu", None, 64, 48, True, torch.bfloat16) == "epilogue"
        assert route_at_any_rows("cpu", None, 50, 48, True, torch.bfloat16) == "triton"
    assert seen == [*PROBE_ROWS, *PROBE_ROWS]


def test_int8_gemm_opcheck() -> None:
    codes = torch.randint(-128, 128, (5, 48), dtype=torch.int8)
    weight = torch.randint(-128, 128, (64, 48), dtype=torch.int8)
    ones, bias = torch.ones(64, 1), torch.randn(64)
    torch.library.opcheck(int8_gemm, (codes, ones[:5], weight, ones, bias, torch.bfloat16))
    out = int8_gemm(codes, ones[:5], weight, ones, None, torch.float32)
    assert torch.equal(out, int8_matmul_reference(codes, weight).float())
