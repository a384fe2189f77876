"""Every op of quantpolicy.kernels on a CUDA device, against plain torch and against torchao."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from quantpolicy.kernels.fp8_linear import fp8_linear, fp8_linear_reference
from quantpolicy.kernels.gemm_tiles import Tiles
from quantpolicy.kernels.int8_linear import (
    int8_linear,
    int8_linear_reference,
    int8_matmul_reference,
    scaled_reference,
)
from quantpolicy.kernels.linear import FusedLinear
from quantpolicy.kernels.row_quantise_fp8 import row_quantise_fp8, row_quantise_fp8_reference
from quantpolicy.kernels.row_quantise_int8 import row_quantise_int8, row_quantise_int8_reference
from quantpolicy.kernels.scaled_gemm import scaled_gemm
from quantpolicy.kernels.scaled_mm_probe import forget_routes, routes, scaled_mm
from tests.gpu.closeness import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # torch announces its own changes while it compiles.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

FLOOR = 1e-12
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = (
    (1, 3072),
    (1000, 3072),
    (513, 14336),
    (64, 12288),
    (33, 40000),
    (300, 17),
    (5, 1),
    (2, 3),
)


def values(shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> torch.Tensor:
    """Return rows that stress one property of a quantiser."""
    x = torch.randn(shape, device="cuda")
    if kind == "wide":
        x *= torch.exp2(torch.randint(-20, 10, (shape[0], 1), device="cuda").float())
        x *= torch.exp2(torch.randint(-9, 1, shape, device="cuda").float())
    elif kind == "ties":
        x = torch.randint(-255, 256, shape, device="cuda").float()
    elif kind == "zero rows":
        x[::2] = 0.0
        x[::4] = -0.0
    return x.to(dtype)


def assert_same_bytes(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype is expected.dtype
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["normal", "wide", "ties", "zero rows"])
def test_row_quantise_gives_the_bytes_of_the_eager_chain(kind: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        x = values(shape, kind, dtype)
        for found, expected in (
            (row_quantise_fp8(x, FLOOR), row_quantise_fp8_reference(x, FLOOR)),
            (row_quantise_int8(x), row_quantise_int8_reference(x)),
        ):
            assert_same_bytes(found[0], expected[0])
            if dtype is torch.float16:
                torch.testing.assert_close(found[1], expected[1], rtol=2e-7, atol=0)
            else:
                assert torch.equal(found[1], expected[1])


def test_row_quantise_without_a_floor_divides_exactly() -> None:
    x = values((700, 3072), "wide", torch.bfloat16)
    found, expected = row_quantise_fp8(x, 0.0), row_quantise_fp8_reference(x, 0.0)
    assert_same_bytes(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_row_quantise_reads_any_strides() -> None:
    v = values((300, 3072), "normal", torch.bfloat16).view(6, 50, 3072)
    four = v.view(2, 3, 50, 3072)
    for x in (
        v[:, 3:40],
        v[..., 64:1088],
        v[..., 3:1000],
        v[:1].expand(6, 50, 3072),
        v.transpose(0, 1),
        v.transpose(1, 2),
        four[:, :, 5:45],
        four.transpose(1, 2),
        v[::2, ::3],
    ):
        found, expected = row_quantise_fp8(x, FLOOR), row_quantise_fp8_reference(x, FLOOR)
        assert_same_bytes(found[0], expected[0])
        found, expected = row_quantise_int8(x), row_quantise_int8_reference(x)
        assert_same_bytes(found[0], expected[0])


def test_row_quantise_spreads_nan_over_its_row_only() -> None:
    x = values((4, 3072), "normal", torch.bfloat16)
    x[1, 5] = float("nan")
    x[2, 7] = float("inf")
    codes, scale = row_quantise_fp8(x, FLOOR)
    expected, expected_scale = row_quantise_fp8_reference(x, FLOOR)
    assert torch.equal(scale.isnan(), expected_scale.isnan())
    assert torch.equal(codes.float().isnan(), expected.float().isnan())
    assert_same_bytes(codes[3], expected[3])


def test_row_quantise_past_two_to_the_31_elements() -> None:
    x = torch.empty(750_000, 3072, device="cuda", dtype=torch.bfloat16).normal_()
    codes, scale = row_quantise_fp8(x, FLOOR)
    expected, expected_scale = row_quantise_fp8_reference(x[-1000:], FLOOR)
    assert_same_bytes(codes[-1000:], expected)
    assert torch.equal(scale[-1000:], expected_scale)
    del codes
    codes, _ = row_quantise_int8(x)
    assert_same_bytes(codes[-1000:], row_quantise_int8_reference(x[-1000:])[0])


def int8_operands(m: int, n: int, k: int) -> tuple[torch.Tensor, ...]:
    return (
        torch.randint(-128, 128, (m, k), dtype=torch.int8, device="cuda"),
        torch.rand(m, 1, device="cuda") / 1000,
        torch.randint(-128, 128, (n, k), dtype=torch.int8, device="cuda"),
        torch.rand(n, 1, device="cuda") / 1000,
        torch.randn(n, device="cuda", dtype=torch.bfloat16),
    )


@pytest.mark.parametrize("m", [1, 2, 17, 40, 64, 65, 256, 1120, 3001])
@pytest.mark.parametrize(
    ("n", "k"), [(3072, 3072), (9216, 3072), (3072, 14336), (48, 80), (50, 70)]
)
def test_int8_gemm_is_exact_before_the_epilogue(m: int, n: int, k: int) -> None:
    x, x_scale, weight, w_scale, bias = int8_operands(m, n, k)
    ones = torch.ones_like
    acc = int8_matmul_reference(x, weight)
    found = scaled_gemm(x, ones(x_scale), weight, ones(w_scale), None, torch.float32)
    assert torch.equal(found, acc.to(torch.float32))
    found = scaled_gemm(x, x_scale, weight, w_scale, bias, torch.bfloat16)
    expected = scaled_reference(acc, x_scale, w_scale, bias, found.dtype)
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-6)
    assert not torch.equal(found, expected + 0.02 * expected.abs())


def test_gemm_writes_every_element_of_partial_tiles() -> None:
    x, x_scale, weight, w_scale, _ = int8_operands(300, 272, 208)
    acc = int8_matmul_reference(x, weight).to(torch.float32)
    for tiles in (
        Tiles(128, 256, 128, 8, 4, halves=2, flatten=True),
        Tiles(256, 128, 128, 8, 4, halves=2, flatten=True),
        Tiles(64, 64, 128, 4, 3),
    ):
        poison = torch.full((300, 272), float("nan"), device="cuda")
        del poison
        found = scaled_gemm(
            x,
            torch.ones_like(x_scale),
            weight,
            torch.ones_like(w_scale),
            None,
            torch.float16,
            tiles,
        )
        assert torch.equal(found, acc.to(torch.float16))


def torchao_linear(kind: str, n: int, k: int, dtype: torch.dtype) -> nn.Linear:
    """Return a CUDA Linear whose weight torchao has quantised."""
    from torchao.float8.inference import Float8MMConfig
    from torchao.quantization import Float8Tensor, Int8Tensor, PerRow
    from torchao.quantization.quantize_.workflows.float8.float8_tensor import (
        QuantizeTensorToFloat8Kwargs,
    )
    from torchao.quantization.quantize_.workflows.int8.int8_tensor import (
        QuantizeTensorToInt8Kwargs,
    )

    linear = nn.Linear(k, n, device="cuda", dtype=dtype).eval().requires_grad_(False)
    weight = linear.weight.detach()
    if kind == "int8":
        quantised = Int8Tensor.from_hp(
            weight, PerRow(), act_quant_kwargs=QuantizeTensorToInt8Kwargs(PerRow())
        )
    else:
        quantised = Float8Tensor.from_hp(
            weight,
            torch.float8_e4m3fn,
            PerRow(),
            mm_config=Float8MMConfig(use_fast_accum=True),
            act_quant_kwargs=QuantizeTensorToFloat8Kwargs(
                torch.float8_e4m3fn, PerRow(), hp_value_lb=FLOOR
            ),
        )
    linear.weight = nn.Parameter(quantised, requires_grad=False)
    return linear


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [129, 300, 1120])
def test_fp8_linear_equals_torchao_where_the_same_gemm_runs(m: int, dtype: torch.dtype) -> None:
    linear = torchao_linear("fp8", 3072, 3072, dtype)
    x = values((m, 3072), "normal", dtype)
    weight = linear.weight
    out = fp8_linear(x, weight.qdata, weight.scale, linear.bias, FLOOR)
    assert torch.equal(out, linear(x))


@pytest.mark.parametrize("m", [1, 2, 16, 17, 40, 41, 42, 64, 128])
@pytest.mark.parametrize("k", [3072, 12288, 14336])
@pytest.mark.parametrize("n", [3072, 6144])
def test_fp8_linear_at_few_rows_and_large_k(m: int, n: int, k: int) -> None:
    linear = torchao_linear("fp8", n, k, torch.bfloat16)
    x = values((m, k), "normal", torch.bfloat16)
    weight = linear.weight
    out = fp8_linear(x, weight.qdata, weight.scale, linear.bias, FLOOR)
    expected = fp8_linear_reference(x, weight.qdata, weight.scale, linear.bias, FLOOR)
    assert relative_error(out, expected) < 5e-3


@pytest.mark.parametrize(("n", "k"), [(50, 64), (64, 50), (33, 17), (48, 3072)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_linear_of_unaligned_sizes(n: int, k: int, dtype: torch.dtype) -> None:
    linear = torchao_linear("fp8", n, k, dtype)
    weight = linear.weight
    x = values((37, k), "normal", dtype)
    out = fp8_linear(x, weight.qdata, weight.scale, linear.bias, FLOOR)
    expected = fp8_linear_reference(x, weight.qdata, weight.scale, linear.bias, FLOOR)
    assert out.dtype is dtype
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def test_unknown_signature_inside_a_capture_needs_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = FusedLinear.adopt(torchao_linear("fp8", 6144, 12288, torch.bfloat16))
    x = values((40, 12288), "normal", torch.bfloat16)
    expected = linear(x)
    with monkeypatch.context() as patch:
        patch.setattr("quantpolicy.kernels.fp8_linear.scaled_mm", lambda *_: None)
        linear(x)
    forget_routes()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linear(x)
    graph.replay()
    torch.cuda.synchronize()
    assert routes() == {}
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_linear_of_no_rows_and_of_many_dimensions(kind: str) -> None:
    linear = torchao_linear(kind, 64, 96, torch.bfloat16)
    weight, bias = linear.weight, linear.bias
    fused = FusedLinear.adopt(linear)
    for shape in ((0, 96), (2, 0, 96), (1, 96), (96,), (2, 3, 5, 96)):
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        out = fused(x)
        assert out.shape == (*shape[:-1], 64)
        reference = fp8_linear_reference if kind == "fp8" else int8_linear_reference
        floor = (FLOOR,) if kind == "fp8" else ()
        expected = reference(x, weight.qdata, weight.scale, bias, *floor)
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 17, 256, 1120])
def test_int8_linear_is_within_one_rounding_of_torchao(m: int, dtype: torch.dtype) -> None:
    linear = torchao_linear("int8", 3072, 3072, dtype)
    weight = linear.weight
    x = values((m, 3072), "normal", dtype)
    out = int8_linear(x, weight.qdata, weight.scale, linear.bias)
    stock = linear(x)
    step = torch.finfo(dtype).eps * stock.abs().amax().clamp(min=1)
    assert (out - stock).abs().max() <= 2 * step


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_fused_linear_in_a_cuda_graph_and_under_compile(kind: str) -> None:
    first = FusedLinear.adopt(torchao_linear(kind, 256, 128, torch.bfloat16))
    second = FusedLinear.adopt(torchao_linear(kind, 128, 256, torch.bfloat16))
    model = nn.Sequential(first, nn.GELU(approximate="tanh"), second).eval()
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        for rows in (40, 64, 100, 256, 300, 1120):
            x = values((rows, 128), "normal", torch.bfloat16)
            assert relative_error(compiled(x), model(x)) < 0.03
        assert counters["stats"]["unique_graphs"] <= 2
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = compiled(x)
        x.copy_(values((1120, 128), "normal", torch.bfloat16))
        graph.replay()
        assert torch.equal(out, compiled(x))


def test_scaled_mm_refuses_what_it_cannot_take() -> None:
    x = torch.zeros(20, 24, device="cuda").to(torch.float8_e4m3fn)
    weight = torch.zeros(32, 24, device="cuda").to(torch.float8_e4m3fn)
    ones = torch.ones(32, device="cuda")
    assert scaled_mm(x, ones[:20], weight, ones, None, torch.bfloat16) is None


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_opcheck(kind: str) -> None:
    linear = torchao_linear(kind, 64, 96, torch.bfloat16)
    x = torch.randn(33, 96, device="cuda", dtype=torch.bfloat16)
    weight = linear.weight
    if kind == "fp8":
        torch.library.opcheck(torch.ops.quantpolicy.row_quantise_fp8.default, (x, FLOOR))
        arguments = (x, weight.qdata, weight.scale, linear.bias, FLOOR)
        # torch cannot look for mutation of e4m3 arguments.
        checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(
            torch.ops.quantpolicy.fp8_linear.default, arguments, test_utils=checks
        )
    else:
        torch.library.opcheck(torch.ops.quantpolicy.row_quantise_int8.default, (x,))
        torch.library.opcheck(
            torch.ops.quantpolicy.int8_linear.default, (x, weight.qdata, weight.scale, linear.bias)
        )
