"""The fusions of Wan on tiny real models: exact on a CPU, reversible, never on another norm."""

from __future__ import annotations

import pytest
import torch
from mounted import classes, fuse
from torch import Tensor, nn

from quantpolicy import Host, Request, load_rules, resolve
from quantpolicy.measure.tiny import build_tiny
from quantpolicy.runtime import apply_plan
from quantpolicy.runtime.joined import JoinedLinear, join_linears
from quantpolicy.runtime.mount import mount, mounted_ops, unmount
from quantpolicy.runtime.mounts import wan
from quantpolicy.runtime.mounts.feed_forward import read_codes

PER_TOKEN, PER_SAMPLE, WITH_IMAGE = "wan2.2-ti2v-5b", "wan2.2-t2v-a14b", "wan2.1-i2v-14b"
DENSE = ("gated_residual", "layer_norm_fp32", "qk_norm_rope_across_heads", "rms_norm")
QUANTISED = ("gelu_fp8_linear", "layer_norm_fp8", "add_layer_norm_fp8")


def output(model: nn.Module, inputs: dict[str, object]) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(**inputs)[0]
    return out


@pytest.fixture
def fused(settings):
    """Return a function that quantises every Linear of the blocks of a model, and joins some."""

    def fuse_blocks(model: nn.Module, join: bool = False) -> None:
        for block in model.blocks:
            for module in list(block.modules()):
                if type(module) is nn.Linear:
                    fuse(module, settings)
            if join:
                join_linears([block.attn1.to_q, block.attn1.to_k, block.attn1.to_v])

    return fuse_blocks


@pytest.mark.parametrize("family", [PER_TOKEN, PER_SAMPLE])
def test_every_fusion_alone_and_all_together(family):
    model, inputs = build_tiny(family)
    before, names, kinds = output(model, inputs), list(model.state_dict()), classes(model)
    for ops in (*((op,) for op in DENSE), DENSE):
        report = mount(model, ops)
        assert report.declined == {}
        assert report.mounted == dict.fromkeys(ops, len(model.blocks)) == mounted_ops(model)
        assert torch.equal(output(model, inputs), before)
        assert list(model.state_dict()) == names
        assert unmount(model).restored == report.mounted
        assert classes(model) == kinds
    assert torch.equal(output(model, inputs), before)


@pytest.mark.parametrize("family", [PER_TOKEN, PER_SAMPLE])
@pytest.mark.parametrize("join", [False, True])
def test_a_fused_model_stays_exact(family, join, fused):
    model, inputs = build_tiny(family)
    fused(model, join)
    before, kinds = output(model, inputs), classes(model)
    blocks = len(model.blocks)
    for ops in (*((op,) for op in QUANTISED), (*DENSE, *QUANTISED)):
        report = mount(model, ops)
        assert report.mounted == dict.fromkeys(ops, blocks)
        assert torch.equal(output(model, inputs), before)
        if join:
            # Every part took its share of the leader's product.
            assert model.blocks[0].attn1.to_q.waiting is None
        unmount(model)
        assert classes(model) == kinds
    assert torch.equal(output(model, inputs), before)


def test_one_timestep_a_sample_in_a_batch_of_two():
    model, inputs = build_tiny(PER_SAMPLE)
    inputs = {
        name: torch.cat([value, value.flip(-1)]) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }
    inputs["timestep"] = torch.tensor([3, 700])
    before = output(model, inputs)
    mount(model, DENSE)
    assert torch.equal(output(model, inputs), before)


def test_mounted_forward_calls_the_ops(monkeypatch):
    model, inputs = build_tiny(PER_TOKEN)
    called: list[str] = []
    for op in DENSE:
        original = getattr(wan, op)

        def counting(*args, _name=op, _original=original):
            called.append(_name)
            return _original(*args)

        monkeypatch.setattr(wan, op, counting)
    mount(model, DENSE)
    output(model, inputs)
    assert {name: called.count(name) for name in DENSE} == {
        "gated_residual": 2 * 2,
        "layer_norm_fp32": 2 * 3,
        "qk_norm_rope_across_heads": 2,
        "rms_norm": 2 * 2,
    }


@pytest.mark.parametrize("family", [PER_TOKEN, PER_SAMPLE, WITH_IMAGE])
def test_a_plan_from_the_table_mounts_all_that_it_names(family):
    model, inputs = build_tiny(family)
    request = Request(transformer="fp8", execution="fused", min_features=16, quality="high")
    plan = resolve(model, host=Host.load("h200"), request=request)
    listed = load_rules().families[family].kernels
    assert [kernel.op for kernel in plan.kernels] == [kernel.op for kernel in listed]
    plain, _ = build_tiny(family)
    apply_plan(plain, plan.model_copy(update={"kernels": ()}))
    report = apply_plan(model, plan)
    assert report.declined == {}
    assert mounted_ops(model) == {kernel.op: len(model.blocks) for kernel in listed}
    assert torch.equal(output(model, inputs), output(plain, inputs))


def test_an_image_attended_to_apart_keeps_the_stock_cross_attention(fused):
    model, inputs = build_tiny(WITH_IMAGE)
    before = output(model, inputs)
    report = mount(model, DENSE)
    assert report.declined == {
        "rms_norm": "blocks.0.attn2: it attends to an image apart"
        f" (and {len(model.blocks) - 1} more sites)"
    }
    assert torch.equal(output(model, inputs), before)
    unmount(model)
    fused(model)
    before = output(model, inputs)
    report = mount(model, (*DENSE, *QUANTISED))
    assert report.mounted["layer_norm_fp8"] == len(model.blocks)
    assert torch.equal(output(model, inputs), before)


def test_projections_fused_later_take_the_stock_processor():
    model, inputs = build_tiny(PER_TOKEN)
    mount(model, DENSE)
    before = output(model, inputs)
    for block in model.blocks:
        block.attn1.fuse_projections()
    torch.testing.assert_close(output(model, inputs), before, rtol=0.05, atol=0.05)


def test_blocks_without_a_norm_before_cross_attention():
    model, inputs = build_tiny(PER_TOKEN)
    for block in model.blocks:
        block.norm2 = nn.Identity()
    before = output(model, inputs)
    assert mount(model, DENSE).declined == {}
    assert torch.equal(output(model, inputs), before)


@pytest.mark.parametrize(
    ("spoil", "op", "reason"),
    [
        (
            lambda block: setattr(block.attn1, "processor", print),
            "qk_norm_rope_across_heads",
            "blocks.1.attn1: its attention processor is a builtin_function_or_method",
        ),
        (
            lambda block: setattr(block.attn1, "norm_k", nn.RMSNorm(64, eps=1e-6)),
            "qk_norm_rope_across_heads",
            "blocks.1.attn1: a norm weight is (64,), not all heads' (128,)",
        ),
        (
            lambda block: setattr(block.attn1.norm_k, "eps", 1e-5),
            "qk_norm_rope_across_heads",
            "blocks.1.attn1: the norms of queries and keys differ in eps",
        ),
        (
            lambda block: setattr(block.attn2, "norm_q", nn.Identity()),
            "rms_norm",
            "blocks.1.attn2: queries and keys have no RMSNorm with a weight and an eps",
        ),
        (
            lambda block: block.norm3.register_forward_hook(lambda *_: None),
            "layer_norm_fp32",
            "blocks.1: a FP32LayerNorm inside it has hooks",
        ),
        (
            lambda block: block.attn1.to_v.register_forward_pre_hook(lambda *_: None),
            "layer_norm_fp8",
            "blocks.1: a FusedLinear inside it has hooks",
        ),
        (
            lambda block: block.attn2.register_forward_hook(lambda *_: None),
            "layer_norm_fp8",
            "blocks.1: a WanAttention inside it has hooks",
        ),
        (
            lambda block: setattr(block.attn1, "processor", print),
            "layer_norm_fp8",
            "blocks.1: its attention processor is a builtin_function_or_method",
        ),
        (
            lambda block: setattr(block, "ffn", nn.Sequential(block.ffn)),
            "add_layer_norm_fp8",
            "blocks.1: in the place of a FeedForward is a Sequential",
        ),
        (
            lambda block: setattr(block, "attn2", nn.Identity()),
            "add_layer_norm_fp8",
            "blocks.1: in the place of a WanAttention is a Identity",
        ),
        (
            lambda block: setattr(block, "norm1", nn.LayerNorm(128)),
            "layer_norm_fp32",
            "blocks.1: a norm is a LayerNorm",
        ),
        (
            lambda block: setattr(block, "forward", print),
            "gated_residual",
            "blocks.1: its forward is replaced on the object (an offloading or caching hook)",
        ),
    ],
)
def test_one_rejected_site_leaves_the_whole_fusion_out(spoil, op, reason, fused):
    model, _ = build_tiny(PER_TOKEN)
    if op in QUANTISED:
        fused(model)
    spoil(model.blocks[1])
    kinds = classes(model)
    report = mount(model, (op,))
    assert report.mounted == {}
    assert report.declined == {op: reason}
    assert classes(model) == kinds


def test_projections_of_another_class_keep_their_norms_and_rotation_fused():
    model, inputs = build_tiny(PER_TOKEN)
    before = output(model, inputs)
    for block in model.blocks:
        block.attn1.to_q, block.attn2.to_k = (
            nn.Sequential(linear) for linear in (block.attn1.to_q, block.attn2.to_k)
        )
    assert mount(model, DENSE).declined == {}
    assert torch.equal(output(model, inputs), before)


def test_norms_of_a_head_and_across_heads_have_no_site_in_each_other_s_models():
    across, _ = build_tiny(PER_TOKEN)
    assert mount(across, ("qk_rms_norm",)).mounted == {}
    by_head, _ = build_tiny("hunyuanvideo")
    assert mount(by_head, ("qk_norm_rope_across_heads", "rms_norm")).mounted == {}


def test_blocks_of_the_same_name_in_another_model_are_no_site():
    from diffusers.models.transformers.transformer_chronoedit import WanTransformerBlock

    block = WanTransformerBlock(128, 256, 2, cross_attn_norm=True)
    assert mount(nn.ModuleList([block]), DENSE).mounted == {}


def test_a_dense_feed_forward_is_no_site_for_the_fp8_epilogue(settings):
    model, _ = build_tiny(PER_TOKEN)
    reason = {"gelu_fp8_linear": "the model has no site for it"}
    assert mount(model, ("gelu_fp8_linear",)).declined == reason
    fuse(model.blocks[1].ffn.net[2], settings)
    assert mount(model, ("gelu_fp8_linear",)).mounted == {"gelu_fp8_linear": 1}
    unmount(model)
    model.blocks[1].ffn.net[0].approximate = "none"
    assert mount(model, ("gelu_fp8_linear",)).declined == reason


def test_hooks_in_a_feed_forward_are_a_reason_against_it(settings):
    model, _ = build_tiny(PER_TOKEN)
    fuse(model.blocks[1].ffn.net[2], settings)
    model.blocks[1].ffn.net[2].register_forward_hook(lambda *_: None)
    assert mount(model, ("gelu_fp8_linear",)).declined == {
        "gelu_fp8_linear": "blocks.1.ffn: a FusedLinear inside it has hooks"
    }


def test_dropout_in_a_feed_forward_is_not_left_out(fused):
    model, inputs = build_tiny(PER_TOKEN)
    fused(model)
    for block in model.blocks:
        block.ffn.net[1].p = 0.5
    mount(model, ("gelu_fp8_linear",))
    before = output(model, inputs)
    model.train()
    with torch.random.fork_rng(devices=[]):
        assert not torch.equal(output(model, inputs), before)


def test_a_norm_that_not_only_fp8_linears_read_is_not_quantised(settings, monkeypatch):
    model, inputs = build_tiny(PER_TOKEN)
    reason = "blocks.0: no norm is read by fp8 Linears in fused execution alone"
    assert mount(model, ("layer_norm_fp8",)).declined == {
        "layer_norm_fp8": f"{reason} (and 1 more sites)"
    }
    for block in model.blocks:
        for linear in (block.attn1.to_q, block.attn1.to_k, block.ffn.net[0].proj):
            fuse(linear, settings)
    before = output(model, inputs)
    assert mount(model, (*DENSE, "layer_norm_fp8")).declined == {}
    called = []
    original = wan.layer_norm_fp8
    monkeypatch.setattr(
        wan, "layer_norm_fp8", lambda *args: called.append(args[-1]) or original(*args)
    )
    assert torch.equal(output(model, inputs), before)
    assert called == [1e-12] * len(model.blocks)
    model.blocks[0].ffn.net[0].proj.floor = 1e-6
    model.blocks[1].ffn.net[0].proj.__class__ = JoinedLinear
    assert read_codes([model.blocks[0].ffn.net[0].proj, model.blocks[0].attn1.to_q]) is False
    assert read_codes([model.blocks[1].ffn.net[0].proj, model.blocks[0].attn1.to_q]) is True


def test_a_projection_exchanged_later_gets_rows(fused):
    model, inputs = build_tiny(PER_TOKEN)
    fused(model)
    mount(model, (*DENSE, *QUANTISED))
    seen = []

    class Adapted(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base_layer = base

        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.dtype)
            return self.base_layer(x)

    before = output(model, inputs)
    block = model.blocks[0]
    block.attn1.to_k = Adapted(block.attn1.to_k)
    block.attn1.to_out[0] = Adapted(block.attn1.to_out[0])
    block.ffn.net[0].proj = Adapted(block.ffn.net[0].proj)
    assert torch.equal(output(model, inputs), before)
    assert seen == [torch.bfloat16] * 3


@pytest.mark.parametrize("family", [PER_TOKEN, PER_SAMPLE])
@pytest.mark.parametrize("quantised", ["dense", "fused", "joined"])
def test_compiled_blocks_stay_one_graph(family, quantised, fused):
    model, inputs = build_tiny(family)
    if quantised != "dense":
        fused(model, quantised == "joined")
    mount(model, (*DENSE, *QUANTISED))
    before = output(model, inputs)
    model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    try:
        torch.testing.assert_close(output(model, inputs), before, rtol=0.02, atol=0.02)
    finally:
        torch._dynamo.reset()
