"""Mounted tiny models on a CUDA device: exact where lossless, compiled, captured, verified once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from quantpolicy.kernels.contract import forget_verdicts, op_counts, same_bits
from quantpolicy.kernels.linear import FusedLinear
from quantpolicy.measure.tiny import build_tiny
from quantpolicy.runtime.joined import join_linears
from quantpolicy.runtime.mount import mount, unmount
from quantpolicy.runtime.weights import quantise_weight
from quantpolicy.schemes import Scheme
from tests.gpu.closeness import SAME_ERROR, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # torch announces its own changes while it compiles.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

FAMILIES = ("hunyuanvideo", "hunyuanvideo-1.5")
LOSSLESS = ("rope_qkv_pack", "gated_residual")
HIGH = (*LOSSLESS, "qk_rms_norm", "layer_norm_modulate", "linear_gelu")
HIGH_FP8 = (*HIGH[:-1], "gelu_fp8_linear", "layer_norm_fp8")


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
    assert relative_error(output(model, inputs), expected) < 0.02


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_blocks_stay_one_graph(family: str) -> None:
    model, inputs = tiny(family)
    mount(model, ("attention_trim", *HIGH))
    expected = output(model, inputs)
    model.compile_repeated_blocks(fullgraph=True)  # type: ignore[operator]
    try:
        assert relative_error(output(model, inputs), expected) < 0.02
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


def fuse(model: nn.Module, settings, join: bool) -> None:  # type: ignore[no-untyped-def]
    """Quantise the Linears of a model's blocks that read rows, and join some."""
    for block in (*model.transformer_blocks, *getattr(model, "single_transformer_blocks", ())):
        for name, module in list(block.named_modules()):
            if type(module) is nn.Linear and not name.startswith("norm"):
                weight = quantise_weight(module.weight, Scheme.FP8, settings[Scheme.FP8])
                module.weight = nn.Parameter(weight, requires_grad=False)
                FusedLinear.adopt(module)
        attn = block.attn
        for parts in ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj"):
            linears = [getattr(attn, part) for part in parts]
            if join and linears[0] is not None:
                join_linears(linears)


@pytest.mark.parametrize("others", [(), ("rope_qkv_pack",), ("attention_trim", *HIGH_FP8)])
@pytest.mark.parametrize("join", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_norms_written_as_codes_are_close(  # type: ignore[no-untyped-def]
    family: str, join: bool, others: tuple[str, ...], settings
) -> None:
    model, inputs = tiny(family)
    exact = output(model, inputs)
    fuse(model, settings, join)
    expected = output(model, inputs)
    allowed = SAME_ERROR * relative_error(expected, exact)
    assert mount(model, (*others, "layer_norm_fp8")).declined == {}
    before = op_counts().get("layer_norm_fp8")
    calls, declines = (before.calls, before.declines) if before else (0, {})
    found = output(model, inputs)
    blocks = len(model.transformer_blocks)
    singles = len(getattr(model, "single_transformer_blocks", ()))
    after = op_counts()["layer_norm_fp8"]
    assert (after.calls - calls, after.declines) == (4 * blocks + singles, declines)
    # The stock norms round three times.
    assert not torch.equal(found, expected)
    assert relative_error(found, exact) < allowed
    model.compile_repeated_blocks(fullgraph=True)  # type: ignore[operator]
    try:
        assert relative_error(output(model, inputs), exact) < allowed
    finally:
        torch._dynamo.reset()


def test_a_captured_forward_with_codes_replays(settings) -> None:  # type: ignore[no-untyped-def]
    model, inputs = tiny("hunyuanvideo")
    fuse(model, settings, True)
    mount(model, HIGH_FP8)
    for _ in range(3):
        expected = output(model, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = output(model, inputs)
    graph.replay()
    assert same_bits(held, expected)
