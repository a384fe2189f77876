"""The quantised Linears in steps, as a compiler sees them, and the route chosen for all rows."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config
from torch._inductor.utils import run_and_get_code

from quantpolicy.kernels import scaled_mm_probe
from quantpolicy.kernels.fp8_linear import fp8_gemm, fp8_linear
from quantpolicy.kernels.int8_linear import int8_gemm, int8_linear, int8_matmul_reference
from quantpolicy.kernels.row_quantise_fp8 import row_quantise_fp8
from quantpolicy.kernels.scaled_mm_probe import PROBE_ROWS, forget_routes, route_at_any_rows
from quantpolicy.kernels.traced import traced_fp8_gemm, traced_fp8_linear, traced_int8_linear
from quantpolicy.ops import COMPILED_ROWS
from quantpolicy.schemes import Scheme

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
        expected = fp8_linear(x, weight, scale, added, FLOOR)
        assert torch.equal(traced_fp8_linear(x, weight, scale, added, FLOOR), expected)
        operands = (*row_quantise_fp8(x, FLOOR), weight, scale, added, x.dtype)
        assert torch.equal(traced_fp8_gemm(*operands), expected)
        assert torch.equal(fp8_gemm(*operands), expected)


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


class Projections(torch.nn.Module):
    """Three Linears of one input, and one of another."""

    def __init__(self, scheme: Scheme) -> None:
        super().__init__()
        self.scheme = scheme
        self.operands = [self._operands(scheme) for _ in range(4)]

    @staticmethod
    def _operands(scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
        weight = torch.randn(64, 48) * 10
        dtype = torch.int8 if scheme is Scheme.INT8 else torch.float8_e4m3fn
        return weight.to(dtype), torch.rand(64, 1) / 100

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> list[torch.Tensor]:
        inputs = (x, x, x, other)
        if self.scheme is Scheme.INT8:
            call = traced_int8_linear if torch.compiler.is_compiling() else int8_linear
            floor = ()
        else:
            call = traced_fp8_linear if torch.compiler.is_compiling() else fp8_linear
            floor = (FLOOR,)
        pairs = zip(inputs, self.operands, strict=True)
        return [call(given, *operands, None, *floor) for given, operands in pairs]


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("scheme", [Scheme.FP8, Scheme.INT8])
def test_an_input_of_several_linears_is_quantised_once(scheme: Scheme) -> None:
    model = Projections(scheme)
    many = COMPILED_ROWS // 2
    x, other = torch.randn(2, many, 48).bfloat16(), torch.randn(2, many, 48).bfloat16()
    torch._dynamo.reset()
    with torch.no_grad(), torch._inductor.config.patch(fx_graph_cache=False):
        compiled = torch.compile(model, fullgraph=True)
        found, codes = run_and_get_code(compiled, x, other)
        assert found_equal(found, model(x, other))
        # A second graph shares nothing with the first.
        wide = torch.randn(3, many, 48).bfloat16()
        assert found_equal(compiled(wide, wide), model(wide, wide))
        few = torch.randn(2, 5, 48).bfloat16()
        near, few_codes = run_and_get_code(compiled, few, few)
        # Scales that eager code rounds to bf16 stay fp32: codes move by a step here and there.
        limit = {Scheme.FP8: 2**-5, Scheme.INT8: 2**-7}[scheme]
        assert all(
            float((one.double() - exact.double()).norm() / exact.double().norm()) < limit
            for one, exact in zip(near, model(few, few), strict=True)
        )
    call = f"torch.ops.quantpolicy.row_quantise_{scheme.value}.default("
    assert [code.count(call) for code in (*codes, *few_codes)] == [2, 0]


def found_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_int8_gemm_opcheck() -> None:
    codes = torch.randint(-128, 128, (5, 48), dtype=torch.int8)
    weight = torch.randint(-128, 128, (64, 48), dtype=torch.int8)
    ones, bias = torch.ones(64, 1), torch.randn(64)
    torch.library.opcheck(int8_gemm, (codes, ones[:5], weight, ones, bias, torch.bfloat16))
    out = int8_gemm(codes, ones[:5], weight, ones, None, torch.float32)
    assert torch.equal(out, int8_matmul_reference(codes, weight).float())
