"""Norms of HunyuanVideo written as codes: exact on a CPU, only where fp8 Linears read them."""

from __future__ import annotations

import pytest
import torch
from mounted import fuse
from torch import Tensor, nn

from quantpolicy import Host, Request, resolve
from quantpolicy.kernels.layer_norm_fp32 import layer_norm_fp32_reference
from quantpolicy.measure.tiny import build_tiny
from quantpolicy.runtime import apply_plan
from quantpolicy.runtime.joined import join_linears
from quantpolicy.runtime.mount import mount, mounted_ops, unmount
from quantpolicy.runtime.mounts import hunyuanvideo
from quantpolicy.runtime.mounts.site import former_class

FAMILIES = ("hunyuanvideo", "hunyuanvideo-1.5")
OP = "layer_norm_fp8"
ROWS = ("layer_norm_modulate",)
# A block and its attention processor; two dual blocks, and version 1.0 has two single ones.
SITES = {"hunyuanvideo": 2 * 4, "hunyuanvideo-1.5": 2 * 2}
DUAL_NORMS, SINGLE_NORMS = 4, 1


def output(model: nn.Module, inputs: dict[str, object]) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(**inputs)[0]
    return out


def single_blocks(model: nn.Module) -> list[nn.Module]:
    return list(getattr(model, "single_transformer_blocks", ()))


@pytest.fixture
def fused(settings):
    """Return a function that quantises what reads rows in the blocks of a model, and joins some."""

    def fuse_blocks(model: nn.Module, join: bool = False) -> None:
        for block in (*model.transformer_blocks, *single_blocks(model)):
            for name, module in list(block.named_modules()):
                if type(module) is nn.Linear and not name.startswith("norm"):
                    fuse(module, settings)
            attn = block.attn
            if join:
                join_linears([attn.to_q, attn.to_k, attn.to_v])
            if join and attn.add_q_proj is not None:
                join_linears([attn.add_q_proj, attn.add_k_proj, attn.add_v_proj])

    return fuse_blocks


@pytest.fixture
def rounded_once(monkeypatch):
    """Have the norms that give rows compute in fp32, as those do that give codes."""

    def modulated(norm, x, scale, shift, fused):
        assert fused
        return layer_norm_fp32_reference(x, None, None, scale, None, shift, None, norm.eps)

    monkeypatch.setattr(hunyuanvideo, "modulated", modulated)


@pytest.fixture
def calls(monkeypatch):
    """Return the floors that the op is called with, on rows that its kernel takes."""
    called: list[float] = []
    original = hunyuanvideo.layer_norm_fp8

    def call(x, *others):
        assert x.stride(-1) == 1
        called.append(others[-1])
        return original(x, *others)

    monkeypatch.setattr(hunyuanvideo, OP, call)
    return called


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("join", [False, True])
@pytest.mark.parametrize("others", [(), ("rope_qkv_pack",), ("attention_trim", "qk_rms_norm")])
def test_codes_are_those_of_norms_rounded_once(family, join, others, fused, rounded_once, calls):
    model, inputs = build_tiny(family)
    fused(model, join)
    mount(model, (*others, *ROWS))
    expected = output(model, inputs)
    assert calls == []
    report = mount(model, (OP,))
    assert report.mounted == {OP: SITES[family]}
    assert torch.equal(output(model, inputs), expected)
    norms = DUAL_NORMS * len(model.transformer_blocks) + SINGLE_NORMS * len(single_blocks(model))
    assert calls == [1e-12] * norms
    if join:
        # Every part took its share of the leader's product.
        assert model.transformer_blocks[0].attn.to_q.waiting is None


@pytest.mark.parametrize("family", FAMILIES)
def test_unmounting_gives_the_model_back(family, fused):
    model, inputs = build_tiny(family)
    fused(model)
    before = output(model, inputs)
    mount(model, (OP,))
    # The stock norms round three times.
    found = output(model, inputs)
    assert 0 < float((found - before).norm() / before.norm()) < 0.05
    assert unmount(model).restored == {OP: SITES[family]}
    assert torch.equal(output(model, inputs), before)


def test_a_norm_that_not_only_fp8_linears_read_gives_rows(settings, rounded_once, calls):
    model, inputs = build_tiny("hunyuanvideo")
    reason = "transformer_blocks.0: no norm is read by fp8 Linears in fused execution alone"
    assert mount(model, (OP,)).declined == {OP: f"{reason} (and 3 more sites)"}
    for block in model.transformer_blocks:
        for linear in (block.attn.to_q, block.attn.to_k, block.ff_context.net[0].proj):
            fuse(linear, settings)
    for block in single_blocks(model):
        for linear in (block.attn.to_q, block.attn.to_k, block.attn.to_v):
            fuse(linear, settings)
    reason = "single_transformer_blocks.0: no norm is read by fp8 Linears in fused execution alone"
    assert mount(model, (OP,)).declined == {OP: f"{reason} (and 1 more sites)"}
    for block in single_blocks(model):
        fuse(block.proj_mlp, settings)
    mount(model, ROWS)
    expected = output(model, inputs)
    assert mount(model, (OP,)).declined == {}
    assert torch.equal(output(model, inputs), expected)
    assert calls == [1e-12] * 4
    single_blocks(model)[0].proj_mlp.floor = 1e-6
    output(model, inputs)
    assert calls == [1e-12] * 7


def test_a_projection_exchanged_later_gets_rows(fused, rounded_once):
    model, inputs = build_tiny("hunyuanvideo")
    fused(model)
    mount(model, (*ROWS, OP))
    seen = []

    class Adapted(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base_layer = base

        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.dtype)
            return self.base_layer(x)

    before = output(model, inputs)
    block, single = model.transformer_blocks[0], single_blocks(model)[0]
    block.attn.to_k = Adapted(block.attn.to_k)
    block.ff.net[0].proj = Adapted(block.ff.net[0].proj)
    single.proj_mlp = Adapted(single.proj_mlp)
    assert torch.equal(output(model, inputs), before)
    assert seen == [torch.bfloat16] * 3


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (
            lambda model: setattr(model.transformer_blocks[0].attn, "processor", print),
            "transformer_blocks.0: its attention processor is a builtin_function_or_method",
        ),
        (
            lambda model: model.transformer_blocks[1].norm1.register_forward_hook(lambda *_: None),
            "transformer_blocks.1: a AdaLayerNormZero inside it has hooks",
        ),
        (
            lambda model: setattr(model.transformer_blocks[1], "norm1_context", nn.LayerNorm(128)),
            "transformer_blocks.1: a norm is a LayerNorm",
        ),
        (
            lambda model: setattr(model.transformer_blocks[1], "norm2", nn.LayerNorm(128)),
            "transformer_blocks.1: its norm is no LayerNorm without weights",
        ),
        (
            lambda model: model.transformer_blocks[1].ff.register_forward_hook(lambda *_: None),
            "transformer_blocks.1: a FeedForward inside it has hooks",
        ),
        (
            lambda model: setattr(model.transformer_blocks[1].ff_context.net, "0", nn.Identity()),
            "transformer_blocks.1: in the place of a GELU is a Identity",
        ),
        (
            lambda model: model.single_transformer_blocks[1].proj_mlp.register_forward_pre_hook(
                lambda *_: None
            ),
            "single_transformer_blocks.1: a FusedLinear inside it has hooks",
        ),
        (
            lambda model: setattr(model.single_transformer_blocks[1].attn, "forward", print),
            "single_transformer_blocks.1: its forward is replaced on the object"
            " (an offloading or caching hook)",
        ),
    ],
)
def test_one_rejected_site_leaves_the_whole_fusion_out(spoil, reason, fused):
    model, _ = build_tiny("hunyuanvideo")
    fused(model)
    spoil(model)
    assert mount(model, (OP,)).declined == {OP: reason}
    assert mounted_ops(model) == {}


def test_a_first_frame_modulated_apart_is_a_reason_against_it(fused):
    from diffusers.models.transformers.transformer_hunyuan_video import (
        HunyuanVideoTokenReplaceTransformerBlock,
    )

    block = HunyuanVideoTokenReplaceTransformerBlock(2, 64, mlp_ratio=4.0, qk_norm="rms_norm")
    assert mount(nn.ModuleDict({"block": block}), (OP,)).declined == {
        OP: "block: its first frame is modulated apart"
    }


def test_a_plan_from_the_table_mounts_both_norms():
    model, inputs = build_tiny("hunyuanvideo")
    request = Request(transformer="fp8", execution="fused", min_features=16, quality="high")
    plan = resolve(model, host=Host.load("h200"), request=request)
    planned = {kernel.op for kernel in plan.kernels}
    assert planned >= {OP, *ROWS}
    report = apply_plan(model, plan)
    assert report.declined == {}
    assert mounted_ops(model).keys() == planned
    assert mounted_ops(model)[OP] == SITES["hunyuanvideo"]
    assert output(model, inputs).isfinite().all()


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_blocks_stay_one_graph(family, fused):
    model, inputs = build_tiny(family)
    fused(model, True)
    mount(model, ("attention_trim", "rope_qkv_pack", "gated_residual", *ROWS, OP))
    before = output(model, inputs)
    model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    try:
        torch.testing.assert_close(output(model, inputs), before, rtol=0.02, atol=0.02)
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_processor_exchanged_later_gets_rows(family, fused, rounded_once):
    model, inputs = build_tiny(family)
    fused(model)
    mount(model, (OP, *ROWS, "rope_qkv_pack"))
    before = output(model, inputs)
    for block in (*model.transformer_blocks, *single_blocks(model)):
        block.attn.processor = former_class(block.attn.processor)()
    assert torch.equal(output(model, inputs), before)
