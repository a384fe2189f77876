"""SwiGLU before an fp8 Linear on tiny real models: exact on a CPU, and reversible."""

from __future__ import annotations

import pytest
import torch
from fused_plans import is_equal, run
from mounted import classes, fuse
from test_planned_kernels import planned
from torch import Tensor, nn

from quantpolicy.kernels.contract import ON_CPU, op_counts
from quantpolicy.kernels.swiglu_fp8_linear import swiglu_fp8_linear
from quantpolicy.measure.tiny import build_component, build_tiny, denoiser_of, tiny_spec
from quantpolicy.ops import MOUNTABLE
from quantpolicy.rules import load_rules
from quantpolicy.runtime import apply_plan
from quantpolicy.runtime.joined import join_linears
from quantpolicy.runtime.mount import mount, mounted_ops, unmount
from quantpolicy.runtime.mounts import gated_feed_forward
from quantpolicy.runtime.mounts.gated_feed_forward import KINDS
from quantpolicy.runtime.mounts.site import former_class

OP = "swiglu_fp8_linear"
FLUX, Z_IMAGE, MINIMAX = "flux.2-dev", "z-image", "minimax-h3"
# Two dual blocks of two streams and two single ones; two blocks and two refiners of each kind.
SITES = {FLUX: 6, "flux.2-klein-4b": 6, "flux.2-klein-9b": 6, Z_IMAGE: 6, MINIMAX: 4}
ONE_OF_EACH = {FLUX: 4, Z_IMAGE: 6, MINIMAX: 4}


@pytest.fixture
def fused(settings):
    """Return a function that quantises every bf16 Linear of a model's blocks."""

    def fuse_blocks(model: nn.Module) -> None:
        for name, module in list(model.named_modules()):
            is_block = any(part.isdecimal() for part in name.split("."))
            if is_block and type(module) is nn.Linear and module.weight.dtype is torch.bfloat16:
                fuse(module, settings)

    return fuse_blocks


def feed_forwards(model: nn.Module) -> list[nn.Module]:
    """Return the modules of the classes that the op knows, in order."""
    return [module for module in model.modules() if former_class(module) in KINDS]


@pytest.fixture
def called(monkeypatch):
    """Return the shapes that the op is called with: value, gate and head."""
    calls: list[list[tuple[int, ...] | None]] = []

    def noting(*args: object) -> Tensor:
        calls.append([None if each is None else tuple(each.shape) for each in args[:3]])
        return swiglu_fp8_linear(*args)

    monkeypatch.setattr(gated_feed_forward, OP, noting)
    return calls


@pytest.mark.parametrize("family", [FLUX, Z_IMAGE, MINIMAX])
def test_a_fused_model_stays_exact(family, fused, called):
    model, inputs = build_tiny(family)
    fused(model)
    before, kinds, names = run(model, inputs), classes(model), list(model.state_dict())
    assert called == []
    report = mount(model, (OP,))
    assert (report.mounted, report.declined) == ({OP: SITES[family]}, {})
    assert mounted_ops(model) == {OP: SITES[family]}
    assert is_equal(run(model, inputs), before)
    assert len(called) == SITES[family]
    assert list(model.state_dict()) == names
    assert unmount(model).restored == {OP: SITES[family]}
    assert classes(model) == kinds
    assert is_equal(run(model, inputs), before)
    assert len(called) == SITES[family]


def test_what_the_op_is_given(fused, called):
    model, inputs = build_tiny(FLUX)
    fused(model)
    mount(model, (OP,))
    declines = op_counts()[OP].declines if OP in op_counts() else {}
    run(model, inputs)
    image, text = (1, 64, 384), (1, 32, 384)
    both, head = (1, 96, 384), (1, 96, 128)
    dual, single = [[image, image, None], [text, text, None]], [both, both, head]
    assert called == [*dual, *dual, single, single]
    assert op_counts()[OP].declines[ON_CPU] == declines.get(ON_CPU, 0) + len(called)


@pytest.mark.parametrize("family", SITES)
def test_a_plan_from_the_table_mounts_it(family, called):
    spec = load_rules().families[family]
    tiny = tiny_spec(spec.tiny, load_rules())
    if family == Z_IMAGE:
        # Hidden channels that are a multiple of 16.
        sizes = {"dim": 192, "n_heads": 3, "n_kv_heads": 3}
        tiny = tiny.model_copy(update={"config": {**tiny.config, **sizes}})
    _, inputs = build_tiny(family)
    model, plain, full = (build_component(denoiser_of(spec), tiny, 0) for _ in range(3))
    fp8 = {"transformer": "fp8", "execution": "fused", "min_features": 16}
    plan = planned(model, **fp8, quality="high")
    assert OP not in {kernel.op for kernel in planned(model, **fp8).kernels}
    ops = [kernel.op for kernel in spec.kernels if kernel.component == "denoiser"]
    assert [kernel.op for kernel in plan.kernels] == ops
    assert apply_plan(full, plan).declined == {}
    assert set(mounted_ops(full)) >= set(ops)
    # The others are not exact on a CPU, nor need they be.
    alone = tuple(kernel for kernel in plan.kernels if kernel.op == OP)
    apply_plan(plain, plan.model_copy(update={"kernels": ()}))
    apply_plan(model, plan.model_copy(update={"kernels": alone}))
    assert mounted_ops(model)[OP] == mounted_ops(full)[OP] == SITES[family]
    expected = run(plain, inputs)
    assert is_equal(run(model, inputs), expected)
    assert len(called) == SITES[family]
    run(full, inputs)
    assert len(called) == 2 * SITES[family]


def test_joined_projections_of_z_image(fused, called):
    model, inputs = build_tiny(Z_IMAGE)
    fused(model)
    for ff in feed_forwards(model):
        join_linears([ff.w1, ff.w3])
    before = run(model, inputs)
    assert mount(model, (OP,)).mounted == {OP: SITES[Z_IMAGE]}
    assert is_equal(run(model, inputs), before)
    assert len(called) == SITES[Z_IMAGE]
    # Each part took its share of the leader's product.
    assert all(ff.w1.waiting is None for ff in feed_forwards(model))


@pytest.mark.parametrize("family", [FLUX, Z_IMAGE, MINIMAX])
def test_a_dense_entry_runs_as_it_is(family, settings, called):
    model, inputs = build_tiny(family)
    assert mount(model, (OP,)).declined == {OP: "the model has no site for it"}
    ends = [KINDS[former_class(ff)][1](ff)[1] for ff in feed_forwards(model)]
    for last in ends[1:]:
        fuse(last, settings)
    before, seen = run(model, inputs), []
    entries = {FLUX: "linear_in", Z_IMAGE: "w3", MINIMAX: "proj"}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == entries[family]:
            assert type(module) is nn.Linear
            module.register_forward_hook(lambda *_: seen.append(1))
    assert mount(model, (OP,)).mounted == {OP: SITES[family] - 1}
    assert is_equal(run(model, inputs), before)
    assert len(seen) == ONE_OF_EACH[family]
    assert len(called) == SITES[family] - 1


def test_a_last_linear_exchanged_later_gets_rows(fused, called):
    model, inputs = build_tiny(FLUX)
    fused(model)
    before = run(model, inputs)
    mount(model, (OP,))
    seen = []
    for owner, name in (
        (model.transformer_blocks[0].ff, "linear_out"),
        (model.single_transformer_blocks[1].attn, "to_out"),
    ):
        wrapped = nn.Sequential(getattr(owner, name))
        wrapped.register_forward_hook(lambda _, given, __: seen.append(tuple(given[0].shape)))
        setattr(owner, name, wrapped)
    assert is_equal(run(model, inputs), before)
    assert seen == [(1, 64, 384), (1, 96, 512)]
    assert len(called) == SITES[FLUX] - 2


def test_dropout_is_not_left_out(fused, called):
    model, inputs = build_tiny(MINIMAX)
    fused(model)
    for ff in feed_forwards(model):
        ff.net[1].p = 0.5
    before = run(model, inputs)
    mount(model, (OP,))
    assert is_equal(run(model, inputs), before)
    assert len(called) == SITES[MINIMAX]
    model.train()
    with torch.random.fork_rng(devices=[]):
        dropped = run(model, inputs)
    assert not is_equal(dropped, before)
    assert len(called) == SITES[MINIMAX]


def hooked(part: nn.Module) -> None:
    part.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("family", "spoil", "reason"),
    [
        (
            FLUX,
            lambda model: hooked(model.transformer_blocks[1].ff.linear_out),
            "transformer_blocks.1.ff: a FusedLinear inside it has hooks",
        ),
        (
            FLUX,
            lambda model: hooked(model.transformer_blocks[1].ff_context.act_fn),
            "transformer_blocks.1.ff_context: a Flux2SwiGLU inside it has hooks",
        ),
        (
            FLUX,
            lambda model: hooked(model.single_transformer_blocks[0].attn.mlp_act_fn.gate_fn),
            "single_transformer_blocks.0.attn: a SiLU inside it has hooks",
        ),
        (
            FLUX,
            lambda model: hooked(model.single_transformer_blocks[0].attn.to_out),
            "single_transformer_blocks.0.attn: a FusedLinear inside it has hooks",
        ),
        (
            FLUX,
            lambda model: setattr(model.single_transformer_blocks[0].attn, "forward", print),
            "single_transformer_blocks.0.attn: its forward is replaced on the object"
            " (an offloading or caching hook)",
        ),
        (
            FLUX,
            lambda model: setattr(model.single_transformer_blocks[0].attn, "processor", print),
            "single_transformer_blocks.0.attn: its attention processor is a"
            " builtin_function_or_method",
        ),
        (
            Z_IMAGE,
            lambda model: setattr(model.layers[1].feed_forward, "forward", print),
            "layers.1.feed_forward: its forward is replaced on the object"
            " (an offloading or caching hook)",
        ),
        (
            Z_IMAGE,
            lambda model: hooked(model.context_refiner[0].feed_forward.w2),
            "context_refiner.0.feed_forward: a FusedLinear inside it has hooks",
        ),
        (
            MINIMAX,
            lambda model: hooked(model.transformer_blocks[1].ff.net[0]),
            "transformer_blocks.1.ff: a SwiGLU inside it has hooks",
        ),
        (
            MINIMAX,
            lambda model: setattr(model.transformer_blocks[1].ff.net[2], "forward", print),
            "transformer_blocks.1.ff: the forward of a FusedLinear inside it is replaced",
        ),
    ],
)
def test_one_rejected_site_leaves_the_whole_fusion_out(family, spoil, reason, fused):
    model, _ = build_tiny(family)
    fused(model)
    spoil(model)
    kinds = classes(model)
    report = mount(model, (OP,))
    assert (report.mounted, report.declined) == ({}, {OP: reason})
    assert classes(model) == kinds


def test_the_processor_that_keeps_keys_and_values_is_declined(fused):
    from diffusers.models.transformers.transformer_flux2 import Flux2KVParallelSelfAttnProcessor

    model, _ = build_tiny(FLUX)
    fused(model)
    for block in model.single_transformer_blocks:
        block.attn.set_processor(Flux2KVParallelSelfAttnProcessor())
    assert mount(model, (OP,)).declined == {
        OP: "single_transformer_blocks.0.attn: its attention processor is a"
        " Flux2KVParallelSelfAttnProcessor (and 1 more sites)"
    }


def test_other_activations_are_no_site(fused):
    model, _ = build_tiny(MINIMAX)
    fused(model)
    for block in model.transformer_blocks:
        block.ff.net[0].activation = nn.GELU()
    assert mount(model, (OP,)).mounted == {OP: SITES[MINIMAX] - len(model.transformer_blocks)}
    wan, _ = build_tiny("wan2.2-ti2v-5b")
    fused(wan)
    assert mount(wan, (OP,)).declined == {OP: "the model has no site for it"}
    flux, _ = build_tiny(FLUX)
    fused(flux)
    report = mount(flux, MOUNTABLE)
    assert report.mounted == {OP: SITES[FLUX]}


@pytest.mark.parametrize("family", [FLUX, Z_IMAGE, MINIMAX])
def test_compiled_blocks_stay_one_graph(family, fused):
    model, inputs = build_tiny(family)
    fused(model)
    mount(model, (OP,))
    before = run(model, inputs)
    model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    try:
        for found, expected in zip(run(model, inputs), before, strict=True):
            torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    finally:
        torch._dynamo.reset()
