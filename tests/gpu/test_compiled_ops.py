"""Ops in compiled code, on a CUDA device: the results of eager at any size and alignment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from quantpolicy.kernels import registry
from quantpolicy.kernels.contract import op_counts, same_bits
from quantpolicy.kernels.gelu_fp8_linear import gelu_fp8_linear
from quantpolicy.kernels.layer_norm_fp8 import layer_norm_fp8
from quantpolicy.kernels.layer_norm_fp32 import layer_norm_fp32
from quantpolicy.kernels.linear import FusedLinear
from quantpolicy.kernels.qk_norm_rope_across_heads import qk_norm_rope_across_heads
from quantpolicy.kernels.qk_norm_rope_pack import qk_norm_rope_pack
from quantpolicy.kernels.qk_rms_norm import qk_rms_norm
from quantpolicy.kernels.rms_norm import rms_norm
from quantpolicy.kernels.rms_norm_fp8 import rms_norm_fp8
from quantpolicy.kernels.row_quantise_fp8 import row_quantise_fp8
from quantpolicy.kernels.row_quantise_int8 import row_quantise_int8
from quantpolicy.kernels.scale_add_rms_norm import scale_add_rms_norm
from quantpolicy.kernels.swiglu import swiglu
from quantpolicy.kernels.swiglu_fp8_linear import swiglu_fp8_linear
from quantpolicy.ops import COMPILED_ROWS
from quantpolicy.runtime.weights import quantise_weight
from quantpolicy.schemes import Scheme

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # torch and torchao announce their own changes while they compile.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

TOKENS = (17, 1120, 75_600)
WIDTH, HEADS, HEAD = 3072, 24, 128
EPS, FLOOR = 1e-6, 1e-12
BF16, FP32 = torch.bfloat16, torch.float32


def noise(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def heads(batch: int, tokens: int) -> Tensor:
    return noise(batch, tokens, HEADS, HEAD)


def vectors(batch: int) -> tuple[Tensor, ...]:
    pairs = [(noise(batch, 1, WIDTH, dtype=FP32), noise(WIDTH, dtype=FP32)) for _ in range(2)]
    return tuple(vector for pair in pairs for vector in pair)


def fp8_weight(n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    return noise(n, k).to(torch.float8_e4m3fn), noise(n, 1, dtype=FP32).abs() / 100, noise(n)


class Case(NamedTuple):
    """An op, and its arguments at a batch size and number of tokens."""

    op: Callable[..., Any]
    arguments: Callable[[int, int], tuple[Any, ...]]


CASES = {
    "row_quantise_fp8": Case(row_quantise_fp8, lambda b, s: (noise(b, s, WIDTH), FLOOR)),
    "row_quantise_int8": Case(row_quantise_int8, lambda b, s: (noise(b, s, WIDTH),)),
    "rms_norm": Case(
        rms_norm,
        lambda b, s: (noise(b, s, WIDTH, dtype=FP32), noise(WIDTH, dtype=FP32), EPS, BF16),
    ),
    "qk_rms_norm": Case(
        qk_rms_norm,
        lambda b, s: (heads(b, s), heads(b, s), noise(HEAD), noise(HEAD), EPS),
    ),
    "qk_norm_rope_pack": Case(
        qk_norm_rope_pack,
        lambda b, s: (
            *(heads(b, s) for _ in range(3)),
            *(heads(b, 21) for _ in range(3)),
            *(noise(HEAD) for _ in range(4)),
            *(noise(s, HEAD, dtype=FP32) for _ in range(2)),
            EPS,
        ),
    ),
    "qk_norm_rope_across_heads": Case(
        qk_norm_rope_across_heads,
        lambda b, s: (
            *(noise(b, s, WIDTH) for _ in range(2)),
            *(noise(WIDTH) for _ in range(2)),
            *(noise(1, s, 1, HEAD, dtype=FP32) for _ in range(2)),
            EPS,
        ),
    ),
    "scale_add_rms_norm": Case(
        scale_add_rms_norm,
        lambda b, s: (
            *(noise(b, s, WIDTH, dtype=FP32), noise(b, s, WIDTH)),
            *(noise(WIDTH, dtype=FP32) for _ in range(2)),
            EPS,
        ),
    ),
    "swiglu": Case(swiglu, lambda b, s: (noise(b, s, 2 * WIDTH),)),
    "layer_norm_fp32": Case(
        layer_norm_fp32,
        lambda b, s: (noise(b, s, WIDTH), None, None, *vectors(b), EPS),
    ),
    "layer_norm_fp8": Case(
        layer_norm_fp8,
        lambda b, s: (noise(b, s, WIDTH), None, None, *vectors(b), EPS, FLOOR),
    ),
    "rms_norm_fp8": Case(
        rms_norm_fp8,
        lambda b, s: (
            *(noise(b, s, WIDTH), noise(WIDTH), *noise(6, 2 * WIDTH).chunk(2, dim=1)),
            *(torch.arange(s, device="cuda") % 6, EPS, FLOOR),
        ),
    ),
}
# Exact whatever the order of sums, hence at any alignment.
ORDERLESS = ("row_quantise_fp8", "row_quantise_int8", "swiglu")


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def tensors(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def assert_same(found: Any, expected: Any) -> None:
    for one, other in zip(tensors(found), tensors(expected), strict=True):
        assert one.stride() == other.stride()
        assert same_bits(one, other)


@pytest.mark.parametrize("batch", [1, 2])
def test_equals_eager_at_any_number_of_tokens(case: Case, batch: int) -> None:
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(case.op, backend=counter, fullgraph=True)
    for tokens in (*TOKENS, 18, 1000, 4096):
        arguments = case.arguments(batch, tokens)
        assert_same(compiled(*arguments), case.op(*arguments))
    assert counter.frame_count <= 2


def test_sizes_that_are_open_from_the_start(case: Case) -> None:
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(case.op, backend=counter, fullgraph=True, dynamic=True)
    for tokens in TOKENS:
        arguments = case.arguments(2, tokens)
        assert_same(compiled(*arguments), case.op(*arguments))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("name", ORDERLESS)
@pytest.mark.parametrize("aligned_first", [False, True])
def test_inputs_of_any_alignment(name: str, aligned_first: bool) -> None:
    op, arguments = CASES[name]
    compiled = torch.compile(op, fullgraph=True)
    x, *others = arguments(2, 40)
    storage = torch.empty(x.numel() + 8, device="cuda", dtype=x.dtype)
    for offset in (0, 3, 8) if aligned_first else (3, 0, 8):
        moved = storage[offset : offset + x.numel()].view(x.shape).copy_(x)
        assert_same(compiled(moved, *others), op(x, *others))


@pytest.mark.parametrize("name", ORDERLESS[:2])
def test_a_view_is_read_where_it_lies(name: str) -> None:
    op, arguments = CASES[name]

    def of_a_part(x: Tensor, *others: Any) -> Any:
        return op(x[:, 5:, :2048], *others)

    compiled = torch.compile(of_a_part, fullgraph=True)
    for tokens in (17, 1120):
        given = arguments(2, tokens)
        assert_same(compiled(*given), of_a_part(*given))


def test_in_a_cuda_graph(case: Case) -> None:
    compiled = torch.compile(case.op, fullgraph=True)
    arguments, new = case.arguments(2, 40), case.arguments(2, 40)
    expected = case.op(*new)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        compiled(*arguments)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = compiled(*arguments)
    for one, other in zip(arguments, new, strict=True):
        if isinstance(one, Tensor):
            one.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    assert_same(found, expected)


@pytest.mark.parametrize("tokens", [17, 1120])
def test_gelu_fp8_linear(tokens: int) -> None:
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(gelu_fp8_linear, backend=counter, fullgraph=True)
    operands = fp8_weight(1024, WIDTH)
    for batch in (2, 1):
        x = noise(batch, tokens, WIDTH)
        found = compiled(x, None, *operands, FLOOR).double()
        expected = gelu_fp8_linear(x, None, *operands, FLOOR).double()
        # The GEMM of few rows is another one in eager code.
        assert (found - expected).norm() / expected.norm() < 2**-8


@pytest.mark.parametrize("tokens", [17, 1120])
@pytest.mark.parametrize("gate_first", [False, True])
def test_swiglu_fp8_linear(gate_first: bool, tokens: int) -> None:
    def gated(projected: Tensor, head: Tensor) -> Tensor:
        first, second = projected[..., HEAD:].chunk(2, dim=-1)
        value, gate = (second, first) if gate_first else (first, second)
        return swiglu_fp8_linear(value, gate, head, *operands, FLOOR)  # type: ignore[no-any-return]

    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(gated, backend=counter, fullgraph=True)
    operands = fp8_weight(1024, WIDTH + HEAD)
    for batch in (2, 1):
        arguments = noise(batch, tokens, HEAD + 2 * WIDTH), noise(batch, tokens, HEAD)
        found, expected = compiled(*arguments).double(), gated(*arguments).double()
        # The GEMM of few rows is another one in eager code.
        assert (found - expected).norm() / expected.norm() < 2**-8


@pytest.mark.parametrize("tokens", [17, 1120])
def test_an_op_reads_halves_of_a_projection_where_they_lie(tokens: int) -> None:
    weight, scale, _ = fp8_weight(1024, WIDTH)

    def gated(projected: Tensor) -> Tensor:
        gate, value = projected.chunk(2, dim=-1)
        return swiglu_fp8_linear(value, gate, None, weight, scale, None, FLOOR)  # type: ignore[no-any-return]

    compiled = torch.compile(gated, fullgraph=True)
    projected = noise(2, tokens, 2 * WIDTH)
    compiled(projected)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        compiled(projected)
        torch.cuda.synchronize()
    events = profile.events()
    on_device = [e.name for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    assert sum("_swiglu_quantise_kernel" in name for name in on_device) == 1
    # Neither half is copied.
    assert not any("triton_poi" in name or "copy" in name.lower() for name in on_device)


@pytest.mark.parametrize("scheme", [Scheme.FP8, Scheme.INT8])
def test_three_linears_quantise_their_input_once(scheme: Scheme, settings: Any) -> None:
    linears = []
    for _ in range(3):
        linear = nn.Linear(WIDTH, WIDTH, device="cuda", dtype=BF16)
        weight = quantise_weight(linear.weight.detach(), scheme, settings[scheme])
        linear.weight = nn.Parameter(weight, requires_grad=False)
        linears.append(FusedLinear.adopt(linear))
    model = nn.ModuleList(linears)

    def project(x: Tensor) -> list[Tensor]:
        return [linear(x) for linear in model]

    compiled = torch.compile(project, fullgraph=True)
    x = noise(2, COMPILED_ROWS // 2, WIDTH)
    compiled(x)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        found = compiled(x)
        torch.cuda.synchronize()
    kernel = f"_row_quantise_{scheme.value}_kernel"
    events = profile.events()
    on_device = [e.name for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    assert sum(kernel in name for name in on_device) == 1
    for one, other in zip(found, project(x), strict=True):
        assert (one.double() - other.double()).norm() / other.double().norm() < 2**-8


def test_a_disabled_op_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registry.DISABLE_VARIABLE, "swiglu")
    registry.is_disabled.cache_clear()
    x = noise(2, 41, 2 * WIDTH)
    torch.compile(swiglu, fullgraph=True)(x)
    registry.is_disabled.cache_clear()
    assert op_counts()["swiglu"].declines[f"switched off by {registry.DISABLE_VARIABLE}"] > 0


def test_memory_is_not_copied(case: Case) -> None:
    compiled = torch.compile(case.op, fullgraph=True)
    arguments = case.arguments(1, 1120)
    compiled(*arguments)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = tensors(compiled(*arguments))
    results = sum(each.numel() * each.element_size() for each in found)
    # The allocator may hand out a block that is a MiB too large; a copied input is larger.
    assert torch.cuda.max_memory_allocated() - before <= results + len(found) * 2**20
