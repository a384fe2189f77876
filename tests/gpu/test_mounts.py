"""Mounted tiny models on a CUDA device: exact where lossless, compiled, captured, verified once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from quantpolicy.kernels.contract import forget_verdicts, op_counts
from quantpolicy.measure.tiny import build_tiny
from quantpolicy.runtime.mount import mount, unmount

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # torch announces its own changes while it compiles.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

FAMILIES = ("hunyuanvideo", "hunyuanvideo-1.5")
LOSSLESS = ("rope_qkv_pack", "gated_residual")
HIGH = (*LOSSLESS, "qk_rms_norm", "layer_norm_modulate", "linear_gelu")


def tiny(family: str, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, dict[str, object]]:
    model, inputs = build_tiny(family)
    moved = {
        name: (value.to("cuda", dtype) if value.is_floating_point() else value.cuda())
        if isinstance(value, Tensor)
        else value
        for name, value in inputs.items()
    }
    return model.to("cuda", dtype), moved


def output(model: nn.Module, inputs: dict[str, object]) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(**inputs)[0]
    return out


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_lossless_fusions_are_exact_and_verified(family: str, dtype: torch.dtype) -> None:
    forget_verdicts()
    model, inputs = tiny(family, dtype)
    expected = output(model, inputs)
    assert mount(model, LOSSLESS).declined == {}
    for _ in range(2):
        assert torch.equal(output(model, inputs), expected)
    for op in LOSSLESS:
        assert op_counts()[op].refused == 0
        assert op_counts()[op].calls > 0
    unmount(model)
    assert torch.equal(output(model, inputs), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_high_fusions_with_the_trim_are_close(family: str) -> None:
    model, inputs = tiny(family)
    expected = output(model, inputs)
    assert mount(model, ("attention_trim", *HIGH)).declined == {}
    assert error(output(model, inputs), expected) < 0.02


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_blocks_stay_one_graph(family: str) -> None:
    model, inputs = tiny(family)
    mount(model, ("attention_trim", *HIGH))
    expected = output(model, inputs)
    model.compile_repeated_blocks(fullgraph=True)  # type: ignore[operator]
    try:
        assert error(output(model, inputs), expected) < 0.02
    finally:
        torch._dynamo.reset()


def test_captured_forward_replays() -> None:
    model, inputs = tiny("hunyuanvideo")
    mount(model, HIGH)
    expected = output(model, inputs)
    output(model, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = output(model, inputs)
    graph.replay()
    assert torch.equal(held, expected)
