"""Mounting on tiny real models: exact, whole or not at all, composable, reversible, independent."""

from __future__ import annotations

import copy
from contextlib import ExitStack

import pytest
import torch
from mounted import classes, fuse
from torch import nn

from quantpolicy.errors import KernelMountError
from quantpolicy.kernels.registry import DISABLE_VARIABLE, is_disabled
from quantpolicy.measure.tiny import build_tiny
from quantpolicy.ops import MOUNTABLE, OPS
from quantpolicy.plan import PlannedKernel
from quantpolicy.runtime.joined import join_linears
from quantpolicy.runtime.mount import mount, mount_planned, mounted_ops, unmount
from quantpolicy.runtime.mounts import site
from quantpolicy.schemes import Contract

FAMILIES = ("hunyuanvideo", "hunyuanvideo-1.5")
# On a CPU every op runs its reference, which is the eager chain itself.
EXACT = (
    "rope_qkv_pack",
    "gated_residual",
    "qk_rms_norm",
    "layer_norm_modulate",
    "linear_gelu",
)
SITES = {
    "hunyuanvideo": {
        "rope_qkv_pack": 6,
        "gated_residual": 4,
        "qk_rms_norm": 4,
        "layer_norm_modulate": 9,
        "linear_gelu": 6,
    },
    "hunyuanvideo-1.5": {
        "rope_qkv_pack": 2,
        "gated_residual": 2,
        "qk_rms_norm": 2,
        "layer_norm_modulate": 7,
        "linear_gelu": 4,
    },
}


def output(model: nn.Module, inputs: dict[str, object]) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(**inputs)[0]
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_every_fusion_alone_and_all_together(family):
    model, inputs = build_tiny(family)
    before, names, kinds = output(model, inputs), list(model.state_dict()), classes(model)
    for ops in (*((op,) for op in EXACT), EXACT, ("rope_qkv_pack", "qk_rms_norm")):
        report = mount(model, ops)
        assert report.declined == {}
        assert report.mounted == {op: SITES[family][op] for op in ops} == mounted_ops(model)
        assert torch.equal(output(model, inputs), before)
        assert list(model.state_dict()) == names
        assert unmount(model).restored == report.mounted
        assert classes(model) == kinds
        assert mounted_ops(model) == {}
    assert torch.equal(output(model, inputs), before)


def test_mounted_forward_calls_the_ops(monkeypatch):
    model, inputs = build_tiny("hunyuanvideo")
    called: list[str] = []
    for op in EXACT[1:]:
        path = f"quantpolicy.runtime.mounts.hunyuanvideo.{op}"
        if op == "qk_rms_norm":
            path = "quantpolicy.runtime.mounts.hunyuanvideo_attention.qk_norm_rope_pack"
        module, _, name = path.rpartition(".")
        original = getattr(__import__(module, fromlist=[name]), name)

        def counting(*args, _name=name, _original=original):
            called.append(_name)
            return _original(*args)

        monkeypatch.setattr(path, counting)
    mount(model, EXACT)
    output(model, inputs)
    assert {name: called.count(name) for name in called} == {
        "qk_norm_rope_pack": 4,
        "layer_norm_modulate": 2 * 2 + 2 * 2 + 2 + 1,
        "gated_residual": 2 * 4 + 2,
        "linear_gelu": 2 * 2 + 2,
    }


def test_mounting_twice_and_one_after_another():
    model, inputs = build_tiny("hunyuanvideo")
    before = output(model, inputs)
    first = mount(model, ("rope_qkv_pack",))
    kinds = classes(model)
    assert mount(model, ("rope_qkv_pack",)) == first
    assert classes(model) == kinds
    mount(model, ("gated_residual",))
    assert mounted_ops(model) == {"rope_qkv_pack": 6, "gated_residual": 4}
    assert torch.equal(output(model, inputs), before)


def test_two_models_in_one_process():
    one, inputs = build_tiny("hunyuanvideo")
    other, _ = build_tiny("hunyuanvideo")
    before = output(other, inputs)
    mount(one, EXACT)
    assert mounted_ops(other) == {}
    mount(other, ("gated_residual",))
    unmount(one)
    assert mounted_ops(other) == {"gated_residual": 4}
    assert torch.equal(output(other, inputs), before)


def test_a_copy_of_a_mounted_model_is_mounted_and_independent():
    model, inputs = build_tiny("hunyuanvideo")
    before = output(model, inputs)
    mount(model, EXACT)
    copied = copy.deepcopy(model)
    unmount(model)
    assert mounted_ops(copied) == SITES["hunyuanvideo"]
    assert torch.equal(output(copied, inputs), before)


def test_model_keeps_its_class_names_and_types():
    model, _ = build_tiny("hunyuanvideo")
    block_class = type(model.transformer_blocks[0])
    mount(model, EXACT)
    block = model.transformer_blocks[0]
    assert type(block) is not block_class
    assert isinstance(block, block_class)
    assert type(block).__name__ == block_class.__name__


@pytest.mark.parametrize(
    ("spoil", "op", "reason"),
    [
        (
            lambda model: setattr(model.transformer_blocks[1].ff.net[0], "approximate", "none"),
            "linear_gelu",
            "transformer_blocks.1.ff.net.0: its GELU is not the tanh approximation",
        ),
        (
            lambda model: (
                model.transformer_blocks[1].ff.net[0].proj.register_forward_hook(lambda *_: None)
            ),
            "linear_gelu",
            "transformer_blocks.1.ff.net.0: a Linear inside it has hooks",
        ),
        (
            lambda model: setattr(model.single_transformer_blocks[0].proj_mlp, "bias", None),
            "linear_gelu",
            "single_transformer_blocks.0: its Linear has no bias",
        ),
        (
            lambda model: setattr(
                model.single_transformer_blocks[0].attn.norm_q,
                "weight",
                nn.Parameter(torch.ones(128)),
            ),
            "qk_rms_norm",
            "single_transformer_blocks.0.attn: a norm weight is (128,), not one head's (64,)",
        ),
        (
            lambda model: setattr(model.transformer_blocks[0], "forward", print),
            "gated_residual",
            "transformer_blocks.0: its forward is replaced on the object"
            " (an offloading or caching hook)",
        ),
        (
            lambda model: setattr(model.transformer_blocks[0].attn, "processor", print),
            "rope_qkv_pack",
            "transformer_blocks.0.attn: its attention processor is a builtin_function_or_method",
        ),
    ],
)
def test_one_rejected_site_leaves_the_whole_fusion_out(spoil, op, reason):
    model, _ = build_tiny("hunyuanvideo")
    spoil(model)
    kinds = classes(model)
    report = mount(model, (op,))
    assert report.mounted == {}
    assert report.declined == {op: reason}
    assert classes(model) == kinds


def test_exact_gelu_of_other_modules_is_no_site():
    model, _ = build_tiny("hunyuanvideo-1.5")
    mount(model, ("linear_gelu",))
    for name in ("image_embedder", "context_embedder_2"):
        assert all(not site.mounted_slots(module) for module in getattr(model, name).modules())


def test_quantised_linears_decline_the_dense_epilogues_and_take_the_fp8_one(settings):
    model, inputs = build_tiny("hunyuanvideo")
    for block in model.transformer_blocks:
        for linear in (block.ff.net[2], block.ff_context.net[2], block.ff.net[0].proj):
            fuse(linear, settings)
    for block in model.single_transformer_blocks:
        fuse(block.proj_out, settings)
    before = output(model, inputs)
    report = mount(model, ("linear_gelu", "split_linear", "gelu_fp8_linear"))
    assert report.mounted == {"gelu_fp8_linear": 6}
    assert report.declined == {
        "linear_gelu": "transformer_blocks.0.ff.net.0: its Linear is a FusedLinear"
        " (and 1 more sites)",
        "split_linear": "single_transformer_blocks.0: its Linear is a FusedLinear"
        " (and 1 more sites)",
    }
    assert torch.equal(output(model, inputs), before)
    unmount(model)
    assert torch.equal(output(model, inputs), before)


def test_joined_projections_stay_joined(settings):
    model, inputs = build_tiny("hunyuanvideo")
    for block in (*model.transformer_blocks, *model.single_transformer_blocks):
        parts = [block.attn.to_q, block.attn.to_k, block.attn.to_v]
        for linear in parts:
            fuse(linear, settings)
        join_linears(parts)
    before = output(model, inputs)
    assert mount(model, EXACT).declined == {}
    assert torch.equal(output(model, inputs), before)
    # Every part took its share of the leader's product.
    assert model.transformer_blocks[0].attn.to_q.waiting is None


def test_split_linear_on_a_dense_model():
    model, inputs = build_tiny("hunyuanvideo")
    before = output(model, inputs)
    assert mount(model, ("split_linear",)).mounted == {"split_linear": 2}
    assert torch.equal(output(model, inputs), before)


def test_another_class_has_no_site():
    model, _ = build_tiny("qwen-image")
    report = mount(model, MOUNTABLE)
    assert report.mounted == {}
    assert set(report.declined.values()) == {"the model has no site for it"}


def test_unknown_op():
    model, _ = build_tiny("hunyuanvideo")
    with pytest.raises(KernelMountError, match="rope_pack: no such kernel; known kernels: att"):
        mount(model, ("gated_residual", "rope_pack"))
    assert mounted_ops(model) == {}


def test_conflicting_claims_leave_the_second_out(monkeypatch):
    model, _ = build_tiny("hunyuanvideo")
    from quantpolicy.runtime import mount as module

    finders = module._finders()
    monkeypatch.setattr(
        module, "_finders", lambda: {**finders, "swiglu": finders["gated_residual"]}
    )
    report = mount(model, ("gated_residual", "swiglu"))
    assert report.mounted == {"gated_residual": 4}
    reason = "transformer_blocks.0: gated_residual has this part of the forward"
    assert report.declined == {"swiglu": reason}
    assert mount(model, ("swiglu",)).declined == {"swiglu": reason}


def test_switched_off_op_is_not_mounted(monkeypatch):
    model, _ = build_tiny("hunyuanvideo")
    monkeypatch.setenv(DISABLE_VARIABLE, "rope_qkv_pack,swiglu")
    is_disabled.cache_clear()
    report = mount(model, ("rope_qkv_pack", "gated_residual"))
    monkeypatch.undo()
    is_disabled.cache_clear()
    assert report.mounted == {"gated_residual": 4}
    assert report.declined == {"rope_qkv_pack": f"switched off by {DISABLE_VARIABLE}"}


def test_a_failure_half_way_leaves_every_class(monkeypatch):
    model, inputs = build_tiny("hunyuanvideo")
    before = output(model, inputs)
    mount(model, ("gated_residual",))
    kinds = classes(model)
    from quantpolicy.runtime import mount as module

    real, calls = module.set_slots, []

    def failing(target, slots):
        calls.append(target)
        if len(calls) == 4:
            raise RuntimeError("out of memory")
        real(target, slots)

    monkeypatch.setattr(module, "set_slots", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        mount(model, ("rope_qkv_pack", "layer_norm_modulate"))
    assert classes(model) == kinds
    assert torch.equal(output(model, inputs), before)


def test_planned_kernels_are_mounted_by_component_and_undone():
    model, inputs = build_tiny("hunyuanvideo")
    kernels = [
        PlannedKernel(component="transformer", op=op, contract=OPS[op].contract)
        for op in ("rope_qkv_pack", "swiglu")
    ] + [PlannedKernel(component="vae", op="rms_norm", contract=Contract.HIGH)]
    undo = ExitStack()
    mounted, declined = mount_planned({"transformer": model}, kernels, undo)
    assert mounted == ("transformer.rope_qkv_pack",)
    assert declined == {"transformer.swiglu": "the model has no site for it"}
    assert mounted_ops({"transformer": model}) == {"rope_qkv_pack": 6}
    undo.close()
    assert mounted_ops(model) == {}
    assert output(model, inputs).isfinite().all()


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_blocks_stay_one_graph(family):
    model, inputs = build_tiny(family)
    mount(model, ("attention_trim", *EXACT))
    before = output(model, inputs)
    model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    try:
        torch.testing.assert_close(output(model, inputs), before, rtol=0.02, atol=0.02)
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_mounted_class_has_code_of_its_own(family):
    """A compiler keeps a limited number of graphs of one code object."""
    model, _ = build_tiny(family)
    mount(model, ("attention_trim", *EXACT))
    mounted = {type(module) for module in model.modules() if site.mounted_slots(module)}
    assert len({kind.forward.__code__ for kind in mounted}) == len(mounted) > 0
    assert {kind.forward.__code__.co_name for kind in mounted} == {k.__name__ for k in mounted}
