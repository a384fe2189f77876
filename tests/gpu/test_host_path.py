"""Warm calls on a CUDA device: repeated launches follow addresses, streams, graphs and threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_kernels import torchao_linear
from torch import Tensor

from quantpolicy.kernels import replay
from quantpolicy.kernels.contract import forget_verdicts, op_counts, same_bits
from quantpolicy.kernels.gated_residual import gated_residual, gated_residual_reference
from quantpolicy.kernels.linear import FusedLinear
from quantpolicy.kernels.row_quantise_fp8 import launch_row_quantise_fp8
from quantpolicy.kernels.scaled_gemm import scaled_gemm
from quantpolicy.kernels.swiglu import swiglu, swiglu_reference
from quantpolicy.ops import COMPILED_ROWS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # torch announces its own changes while it compiles.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

D = 512


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def arguments(tokens: int = 33) -> tuple[Tensor, Tensor, Tensor]:
    return noise(1, tokens, D), noise(1, tokens, D), noise(1, D)


def assert_exact(args: tuple[Tensor, Tensor, Tensor]) -> None:
    assert same_bits(gated_residual(*args), gated_residual_reference(*args))


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return the list that every repeated launch is added to."""
    made: list[object] = []
    call = replay.Replay.__call__

    def counted(self: replay.Replay, addresses: list[int]) -> object:
        made.append(self)
        return call(self, addresses)

    monkeypatch.setattr(replay.Replay, "__call__", counted)
    return made


def test_every_kind_of_launcher_is_repeated(replays: list[object]) -> None:
    fp8 = noise(200, D).to(torch.float8_e4m3fn)
    ones = torch.ones(200, 1, device="cuda")
    x = noise(200, D)
    for name, call in {
        "op": lambda: gated_residual(*arguments()),
        "rows": lambda: launch_row_quantise_fp8(x, 1e-12),
        "gemm": lambda: scaled_gemm(fp8, ones, fp8, ones, None, torch.bfloat16),
    }.items():
        call()
        before = len(replays)
        call()
        assert len(replays) == before + 1, name


def test_repeated_gemms_follow_their_operands() -> None:
    for rows in (40, 300):
        ones = torch.ones(rows, 1, device="cuda")
        scale = torch.ones(256, 1, device="cuda")
        for _ in range(4):
            x = torch.randint(-9, 10, (rows, D), dtype=torch.int8, device="cuda")
            weight = torch.randint(-9, 10, (256, D), dtype=torch.int8, device="cuda")
            found = scaled_gemm(x, ones, weight, scale, None, torch.float32)
            assert torch.equal(found, x.float() @ weight.float().t())


def test_alignment_changes_between_warm_calls() -> None:
    storage = noise(33 * D + 1)
    _, update, gate = arguments()
    for _ in range(3):
        for start in (0, 1):
            x = storage[start : start + 33 * D].view(1, 33, D)
            assert (x.data_ptr() % 16 == 0) is (start == 0)
            assert_exact((x, update, gate))
            codes, _ = launch_row_quantise_fp8(x, 1e-12)
            expected, _ = launch_row_quantise_fp8(x.clone(), 1e-12)
            assert same_bits(codes, expected)


def test_warm_calls_run_on_the_current_stream() -> None:
    args = arguments()
    assert_exact(args)
    stream = torch.cuda.Stream()
    x, update, gate = arguments()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.zero_()
        found = gated_residual(x, update, gate)
    # On any other stream the kernel would have run before the zeros were written.
    torch.cuda.synchronize()
    assert same_bits(found, gated_residual_reference(x, update, gate))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_warm_calls_run_on_the_device_of_the_data() -> None:
    for device in ("cuda:1", "cuda:0", "cuda:1", "cuda:0"):
        args = tuple(x.to(device) for x in arguments())
        found = gated_residual(*args)
        assert found.device == args[0].device
        assert same_bits(found, gated_residual_reference(*args))


@pytest.mark.parametrize("is_warm", [True, False])
def test_capture_of_warm_and_cold_signatures(is_warm: bool, replays: list[object]) -> None:
    tokens = 41 if is_warm else 43
    x = noise(tokens, 2 * D)
    args = arguments(tokens)
    swiglu(noise(1, 2 * D))
    if is_warm:
        swiglu(x)
        gated_residual(*args)
    replays.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gated = swiglu(x)
        added = gated_residual(*args)
    assert len(replays) == 2 * is_warm
    for _ in range(2):
        x.normal_()
        args[0].normal_()
        graph.replay()
        torch.testing.assert_close(gated, swiglu_reference(x), rtol=2**-6, atol=2**-6)
        assert same_bits(added, gated_residual_reference(*args))


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("rows", [40, 300])
def test_warm_linears_in_a_graph_and_across_inputs(kind: str, rows: int) -> None:
    linear = FusedLinear.adopt(torchao_linear(kind, 256, D, torch.bfloat16))
    with torch.no_grad():
        inputs = [noise(2, rows // 2, D) for _ in range(3)]
        expected = [linear(x.clone()) for x in inputs]
        assert all(torch.equal(linear(x), y) for x, y in zip(inputs, expected, strict=True))
        held = inputs[0].clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = linear(held)
        for x, y in zip(inputs, expected, strict=True):
            held.copy_(x)
            graph.replay()
            assert torch.equal(out, y)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_compiled_linears_give_the_bytes_of_eager_ones(kind: str) -> None:
    linear = FusedLinear.adopt(torchao_linear(kind, 256, D, torch.bfloat16))
    torch._dynamo.reset()
    compiled = torch.compile(linear, fullgraph=True)
    with torch.no_grad():
        for rows in (COMPILED_ROWS, COMPILED_ROWS + 300):
            x = noise(1, rows, D)
            assert torch.equal(compiled(x), linear(x))


def test_threads_with_their_own_streams() -> None:
    forget_verdicts("gated_residual")
    before = op_counts()["gated_residual"].refused if "gated_residual" in op_counts() else 0
    start = threading.Barrier(4)

    def work(number: int) -> bool:
        start.wait()
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for step in range(100):
                args = arguments(1 + (number + step) % 7)
                found = gated_residual(*args)
                if not same_bits(found, gated_residual_reference(*args)):
                    return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    assert op_counts()["gated_residual"].refused == before
