"""From the shipped table to mounted kernels: resolve, apply, run, count and unmount tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from baking import save_dense
from fused_plans import assert_same_state, is_equal, run
from mounted import classes
from test_mount_minimax_h3 import build as build_decoder
from test_mount_minimax_h3 import decoded
from torch import nn

from prequant import bake, load
from quantpolicy import Host, QuantPlan, Request, load_rules, resolve
from quantpolicy.kernels.contract import ON_CPU
from quantpolicy.kernels.registry import DISABLE_VARIABLE, is_disabled
from quantpolicy.measure.tiny import build_tiny
from quantpolicy.ops import OPS
from quantpolicy.runtime import ApplyReport, OpCounts, apply_plan, op_counts, unmount
from quantpolicy.runtime.mount import mount, mounted_ops
from quantpolicy.runtime.mounts.site import mounted_slots
from quantpolicy.schemes import Scheme

FREE = {"rope_qkv_pack", "gated_residual", "attention_trim"}
SITES = {
    "hunyuanvideo": {
        "rope_qkv_pack": 6,
        "gated_residual": 4,
        "attention_trim": 9,
        "qk_rms_norm": 4,
        "layer_norm_modulate": 9,
        "linear_gelu": 6,
        "split_linear": 2,
    },
    "hunyuanvideo-1.5": {
        "rope_qkv_pack": 2,
        "gated_residual": 2,
        "attention_trim": 5,
        "qk_rms_norm": 2,
        "layer_norm_modulate": 7,
        "linear_gelu": 4,
    },
}
DECODER_SITES = {
    "rms_norm": 2,
    "scale_add_rms_norm": 2,
    "qk_rms_norm_rope": 2,
    "swiglu_linear": 2,
    "qkv_linear": 4,
    "batched_tiles": 1,
}


def planned(model: object, **request: object) -> QuantPlan:
    return resolve(model, host=Host.load("h200"), request=Request(**request))


def ops_of(report: ApplyReport) -> set[str]:
    return {name.partition(".")[2] for name in report.mounted}


@pytest.mark.parametrize("family", SITES)
def test_every_listed_op_mounts_and_comes_off_again(family: str) -> None:
    model, inputs = build_tiny(family)
    untouched, _ = build_tiny(family)
    before, kinds = run(model, inputs), classes(model)
    report = apply_plan(model, planned(model, quality="high"))
    assert report.declined == {}
    assert mounted_ops(model) == SITES[family]
    assert ops_of(report) == set(SITES[family])
    assert_same_state(model, untouched)
    # The trim changes the order of the attention's sums, on a CPU as on a GPU.
    for one, other in zip(run(model, inputs), before, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)
    assert unmount(model).restored == SITES[family]
    assert classes(model) == kinds
    assert is_equal(run(model, inputs), before)
    assert_same_state(model, untouched)


def listed_families() -> list[str]:
    kernels = {name: spec.kernels for name, spec in load_rules().families.items()}
    return [name for name, ops in kernels.items() if any(op.component == "denoiser" for op in ops)]


@pytest.mark.parametrize("family", listed_families())
def test_every_op_that_the_table_lists_has_sites_on_the_family(family: str) -> None:
    model, _ = build_tiny(family)
    listed = [
        kernel.op
        for kernel in load_rules().families[family].kernels
        if kernel.component == "denoiser" and OPS[kernel.op].scheme in (None, Scheme.DENSE)
    ]
    report = mount(model, listed)
    assert report.declined == {}
    assert list(report.mounted) == listed


@pytest.mark.parametrize("family", SITES)
def test_by_default_what_is_free_is_mounted_and_off_mounts_nothing(family: str) -> None:
    model, inputs = build_tiny(family)
    before = run(model, inputs)
    assert ops_of(apply_plan(model, planned(model))) == FREE
    unmount(model)
    report = apply_plan(model, planned(model, speed="off", quality="high"))
    assert (report.mounted, report.declined, mounted_ops(model)) == ((), {}, {})
    assert is_equal(run(model, inputs), before)


def test_exact_gelus_and_the_refiner_are_never_touched() -> None:
    model, _ = build_tiny("hunyuanvideo-1.5")
    apply_plan(model, planned(model, quality="high"))
    for name in ("image_embedder", "context_embedder", "context_embedder_2", "time_embed"):
        part = getattr(model, name)
        linears = [module for module in part.modules() if isinstance(module, nn.Linear)]
        assert linears
        assert all(not mounted_slots(module) for module in part.modules())


def test_fp8_in_fused_execution_takes_the_fp8_ops_instead_of_the_dense_ones() -> None:
    model, inputs = build_tiny("hunyuanvideo")
    fp8 = {"transformer": "fp8", "execution": "fused", "min_features": 16}
    plain, _ = build_tiny("hunyuanvideo")
    apply_plan(plain, planned(plain, **fp8))
    unmount(plain)
    expected = run(plain, inputs)
    report = apply_plan(model, planned(model, **fp8, quality="high"))
    assert report.declined == {}
    dense_only = {"linear_gelu", "split_linear"}
    fp8_only = {"gelu_fp8_linear": 6, "layer_norm_fp8": 8}
    assert ops_of(report) == set(SITES["hunyuanvideo"]) - dense_only | set(fp8_only)
    assert mounted_ops(model).items() >= fp8_only.items()
    assert "fused_execution" in unmount(model).restored
    assert is_equal(run(model, inputs), expected)
    assert_same_state(model, plain)


@pytest.fixture
def decoder() -> nn.Module:
    return build_decoder(heads=2, size=64)


@pytest.mark.parametrize("shape", ["module", "mapping", "pipeline"])
def test_the_kernels_of_an_autoencoder(decoder: nn.Module, shape: str) -> None:
    before, names = decoded(decoder), list(decoder.state_dict())
    whole = planned("minimax-h3", quality="high", transformer="dense")
    alone = planned(decoder, quality="high")
    assert whole.kernels == alone.kernels
    assert list(alone.components) == ["vae"]
    parts = {"scheduler": object(), "vae": decoder, "transformer": None}
    model = {"module": decoder, "mapping": parts, "pipeline": SimpleNamespace(components=parts)}[
        shape
    ]
    report = apply_plan(model, alone if shape == "module" else whole)
    assert report.declined == {}
    assert report.mounted == tuple(f"vae.{op}" for op in DECODER_SITES)
    assert mounted_ops(model) == DECODER_SITES
    assert torch.equal(decoded(decoder), before)
    assert unmount(model).restored == DECODER_SITES
    assert list(decoder.state_dict()) == names
    assert torch.equal(decoded(decoder), before)


def test_lossless_mounts_nothing_on_an_autoencoder_and_says_why(decoder: nn.Module) -> None:
    plan = planned(decoder)
    assert apply_plan(decoder, plan).mounted == ()
    left_out = {each.op for each in plan.kernel_decisions if not each.accepted}
    assert left_out == {*DECODER_SITES, "swiglu"}


def test_a_quantised_autoencoder_mounts_what_its_plan_names(decoder: nn.Module) -> None:
    plan = planned(decoder, vae="layerwise_fp8", min_features=32, quality="high")
    report = apply_plan(decoder, plan)
    assert report.quantised_layers > 0
    # Two of them are for dense weights; one has another in its place.
    expected = {*DECODER_SITES, "swiglu"} - {"qkv_linear", "swiglu_linear"}
    assert (ops_of(report), report.declined) == (expected, {})
    found = decoded(decoder)
    unmount(decoder)
    assert torch.equal(decoded(decoder), found)


def test_two_models_of_one_plan_are_independent() -> None:
    one, inputs = build_tiny("hunyuanvideo")
    other, _ = build_tiny("hunyuanvideo")
    before = run(one, inputs)
    plan = planned(one, quality="high")
    apply_plan(one, plan)
    assert mounted_ops(other) == {}
    assert is_equal(run(other, inputs), before)
    apply_plan(other, plan)
    mounted = run(other, inputs)
    unmount(one)
    assert is_equal(run(one, inputs), before)
    assert mounted_ops(other) == SITES["hunyuanvideo"]
    assert is_equal(run(other, inputs), mounted)


@pytest.fixture
def without_two_ops(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(DISABLE_VARIABLE, "rope_qkv_pack,attention_trim")
    is_disabled.cache_clear()
    yield
    is_disabled.cache_clear()


@pytest.mark.usefixtures("without_two_ops")
def test_a_disabled_op_is_planned_and_reported_as_declined() -> None:
    model, inputs = build_tiny("hunyuanvideo")
    before = run(model, inputs)
    report = apply_plan(model, planned(model))
    assert report.mounted == ("transformer.gated_residual",)
    reason = f"switched off by {DISABLE_VARIABLE}"
    assert report.declined == {
        "transformer.rope_qkv_pack": reason,
        "transformer.attention_trim": reason,
    }
    assert f"  not mounted: transformer.attention_trim: {reason}" in report.explain()
    assert is_equal(run(model, inputs), before)


def test_the_report_counts_calls_declines_and_verifications() -> None:
    model, inputs = build_tiny("hunyuanvideo")
    report = apply_plan(model, planned(model))
    assert list(report.op_counts())[:3] == ["rope_qkv_pack", "gated_residual", "attention_trim"]
    none = OpCounts(0, 0, 0, {})
    before = {op: op_counts().get(op, none) for op in FREE}
    run(model, inputs)
    after = report.op_counts()

    def on_cpu(op: str) -> int:
        return after[op].declines[ON_CPU] - before[op].declines.get(ON_CPU, 0)

    # Two dual blocks with two adds for each stream, and two single blocks with one.
    assert {op: on_cpu(op) for op in ("rope_qkv_pack", "gated_residual")} == {
        "rope_qkv_pack": 4,
        "gated_residual": 2 * 4 + 2,
    }
    assert after["attention_trim"].calls - before["attention_trim"].calls == 1
    assert op_counts()["gated_residual"] == after["gated_residual"]
    text = report.explain_ops().splitlines()
    gated = after["gated_residual"]
    place = text.index(
        f"gated_residual: {gated.calls} calls, {gated.verifications} signatures verified"
    )
    assert f"  {gated.declines[ON_CPU]} declined: {ON_CPU}" in text[place + 1 :]


def test_an_op_that_was_never_called_counts_zero() -> None:
    report = ApplyReport(
        family="f", weights_digest="", plan_digest="", components={}, mounted=("vae.never",)
    )
    assert report.op_counts()["never"] == OpCounts(0, 0, 0, {})
    assert report.explain_ops().startswith("never: 0 calls, 0 signatures verified\n")


def test_a_loaded_checkpoint_carries_its_plans_kernels(tmp_path: Path) -> None:
    folder = tmp_path / "dense" / "transformer"
    dense, inputs = save_dense("hunyuanvideo", folder)
    request = {"transformer": "fp8", "min_features": 16, "execution": "fused"}
    plan = planned(folder, **request, quality="high")
    bake(folder, tmp_path / "baked", plan=plan)
    loaded = load(tmp_path / "baked")
    assert loaded.report.declined == {}
    assert loaded.report.mounted == tuple(f"transformer.{k.op}" for k in plan.kernels)
    assert "  mounted: transformer.gelu_fp8_linear" in loaded.report.explain()
    report = apply_plan(dense, plan)
    assert report.mounted == loaded.report.mounted
    assert mounted_ops(dense) == mounted_ops(loaded.model)
    assert is_equal(run(loaded.model, inputs), run(dense, inputs))
    assert "attention_trim" in loaded.report.op_counts()
    off = load(tmp_path / "baked", request=Request(**request, speed="off"))
    assert (off.report.mounted, mounted_ops(off.model)) == ((), {})


def test_requantising_mounts_the_kernels_too(tmp_path: Path) -> None:
    folder = tmp_path / "dense" / "transformer"
    save_dense("hunyuanvideo", folder)
    request = {"min_features": 16, "quality": "high"}
    bake(folder, tmp_path / "baked", plan=planned(folder, transformer="fp8", **request))
    loaded = load(
        tmp_path / "baked",
        request=Request(transformer="int8", **request),
        on_stale="requantise",
        source=folder,
    )
    assert loaded.report.used == "requantised"
    assert set(mounted_ops(loaded.model)) == FREE | {"qk_rms_norm", "layer_norm_modulate"}
