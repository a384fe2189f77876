from __future__ import annotations

from pathlib import Path

import pytest
from by_hand import (
    component,
    decisions_of,
    kept_of,
    linear,
    plan_of,
    target,
)

from quantpolicy import Host, Request, RequestError, load_rules, resolve
from quantpolicy.detect import host_from_facts
from quantpolicy.errors import DeniedError
from quantpolicy.host import Backend
from quantpolicy.schemes import ComponentKind, Confidence, Execution, Scheme, Tier

GIB = 1 << 30


def test_an_explicit_scheme_is_taken_even_when_slower_and_the_plan_says_so() -> None:
    plan = plan_of(target(), transformer="int8")
    assert decisions_of(plan) == {
        "fp8": (False, "requested", ""),
        "int8": (True, "requested", ""),
        "dense": (False, "requested", ""),
    }
    assert any("int8 was asked for; expect slower than dense" in note for note in plan.notes)


def test_a_denied_request_carries_trace_rule_evidence_and_remedy() -> None:
    with pytest.raises(DeniedError) as caught:
        plan_of(target(family="ruled"), transformer="fp8")
    error = caught.value
    assert (error.rule, error.evidence, error.exit_code) == ("ruled.deny.fp8", ("black",), 1)
    assert [str(d.candidate) for d in error.decisions] == ["fp8", "int8", "dense"]
    assert error.allowed == "what would run here: dense, int8"
    assert "table.yaml:" in str(error)
    assert "--lift ruled.deny.fp8" in error.remedy


def test_a_lifted_rule_is_recorded_where_it_matters() -> None:
    plan = plan_of(target(family="ruled"), lift=["ruled.deny.fp8"])
    assert plan.components["transformer"].scheme is Scheme.FP8
    assert plan.lifted == ("ruled.deny.fp8",)
    accepted = next(d for d in plan.decisions if d.accepted)
    assert "rule ruled.deny.fp8 lifted on request" in accepted.detail


def test_a_lift_without_effect_is_noted_and_not_recorded() -> None:
    plan = plan_of(target(), lift=["ruled.deny.fp8"])
    assert plan.lifted == ()
    assert "lifting ruled.deny.fp8 changed nothing here" in plan.notes


def test_an_unknown_lift_names_near_rules() -> None:
    with pytest.raises(RequestError, match=r"near: ruled\.deny\.fp8"):
        plan_of(target(), lift=["ruled.deny.fp9"])


def test_a_rule_met_by_the_floor_binds_only_schemes_without_one() -> None:
    plan = plan_of(target(family="floored"), "b200")
    assert decisions_of(plan)["fp8"][0] is True
    assert decisions_of(plan)["mxfp8"] == (False, "black_frames", "floored.deny")
    accepted = next(d for d in plan.decisions if d.accepted)
    assert "rule floored.deny lifted by the activation floor 1e-12" in accepted.detail


def test_speed_off_is_dense_and_stock_but_for_what_is_asked() -> None:
    encoder = component(linear("layer.q"), kind=ComponentKind.TEXT_ENCODER)
    plan = plan_of(target(text_encoder=encoder), speed="off", text_encoder="int8")
    assert plan.components["transformer"].scheme is Scheme.DENSE
    assert plan.components["text_encoder"].scheme is Scheme.INT8
    assert (plan.tier, plan.compile.mode, plan.kernels) == (Tier.OFF, "none", ())
    assert decisions_of(plan)["fp8"] == (False, "tier_off", "")
    assert decisions_of(plan)["dense"] == (True, "tier_off", "")


@pytest.mark.parametrize(
    ("speed", "host", "tier", "mode", "autotune"),
    [
        ("auto", "h200", Tier.COMPILE, "regional", False),
        ("auto", "mi300x", Tier.COMPILE, "regional", False),
        ("auto", "cpu", Tier.EAGER, "none", False),
        ("auto", "apple-m", Tier.EAGER, "none", False),
        ("eager", "h200", Tier.EAGER, "none", False),
        ("compile", "cpu", Tier.COMPILE, "regional", False),
        ("max", "h200", Tier.MAX, "regional", True),
    ],
)
def test_tier_and_compile(speed, host, tier, mode, autotune) -> None:
    plan = plan_of(target(), host, speed=speed)
    assert (plan.tier, plan.compile.mode, plan.compile.max_autotune) == (tier, mode, autotune)
    assert plan.compile.dynamic is (mode == "regional")
    expected = "max-autotune-no-cudagraphs" if autotune else "default"
    assert plan.compile.options == {"mode": expected, "dynamic": plan.compile.dynamic or None}


@pytest.mark.parametrize("asked", [1, 500])
def test_the_budget_is_at_most_the_hosts_memory(asked: int) -> None:
    host = Host.load("rtx4090")
    plan = plan_of(target(), "rtx4090", memory_bytes=asked * host.memory_bytes)
    note = "the memory asked for is more than rtx4090 has: its 23.00 GiB are the budget"
    assert plan.memory.budget_bytes == host.memory_bytes
    assert (note in plan.notes) is (asked > 1)
    assert plan.memory == plan_of(target(), "rtx4090").memory


def test_compile_is_refused_below_sm70_and_auto_is_eager_there() -> None:
    host = host_from_facts(Backend.CUDA, "sm61", "GeForce GTX 1080", 8 * GIB)
    assert plan_of(target(), host).tier is Tier.EAGER
    with pytest.raises(DeniedError, match="what would run here: off, auto, eager"):
        plan_of(target(), host, speed="compile")


def test_kernels_follow_quality_and_tier() -> None:
    def ops(**request: object) -> list[str]:
        return [kernel.op for kernel in plan_of(target(), **request).kernels]

    assert ops() == ["gated_residual"]
    assert ops(quality="high") == ["gated_residual", "qk_rms_norm"]
    assert ops(quality="high", speed="off") == []
    assert ops(quality="high", host="cpu") == []


@pytest.mark.parametrize("scheme", ["fp8", "int8"])
def test_the_execution_does_not_enter_the_weights_digest(scheme: str) -> None:
    goal = target(linear("a", rows=4, has_bias=True), linear("b", 3072, 12288, rows=20))
    torchao = plan_of(goal, transformer=scheme)
    fused = plan_of(goal, transformer=scheme, execution="fused")
    assert fused.execution is Execution.FUSED
    assert fused.components == torchao.components
    assert fused.weights_digest == torchao.weights_digest
    assert fused.plan_digest != torchao.plan_digest


@pytest.mark.parametrize(
    ("scheme", "host", "found"),
    [
        ("mxfp8", "b200", "fused execution multiplies fp8 and int8 only"),
        ("nvfp4", "b200", "fused execution multiplies fp8 and int8 only"),
        ("fp8", "mi300x", "multiplies float8_e4m3fn, and mi300x float8_e4m3fnuz"),
    ],
)
def test_fused_execution_refuses_what_its_ops_do_not_multiply(scheme, host, found) -> None:
    with pytest.raises(DeniedError) as caught:
        plan_of(target(), host, transformer=scheme, execution="fused")
    assert found in caught.value.found
    assert caught.value.remedy.endswith(", or ask for --execution torchao")
    assert scheme not in caught.value.allowed.removeprefix("what would run here: ").split(", ")
    plan = plan_of(target(), host, transformer=scheme)
    assert plan.components["transformer"].scheme == scheme


@pytest.mark.parametrize(
    ("shapes", "way_out"),
    [
        ([(256, 320), (320, 384)], ", or give --min-features 320 or less"),
        ([(320, 330), (256, 320)], ", or give --min-features 256 or less"),
        ([(250, 330)], ""),
    ],
)
def test_a_scheme_that_min_features_leaves_no_linear_offers_to_lower_it(shapes, way_out) -> None:
    goal = target(*(linear(f"blocks.0.{n}", n, k) for n, k in shapes))
    with pytest.raises(DeniedError) as caught:
        plan_of(goal, transformer="fp8")
    assert caught.value.remedy == f"give --transformer one of these{way_out}"
    if way_out:
        least = int(way_out.split()[4])
        assert plan_of(goal, transformer="fp8", min_features=least).components["transformer"].layers
        with pytest.raises(DeniedError):
            plan_of(goal, transformer="fp8", min_features=least + 1)


def test_auto_leaves_a_decision_for_what_fused_execution_does_not_multiply() -> None:
    goal = target(family="ruled")
    plan = plan_of(goal, "b200", lift=["ruled.deny.mxfp8"], execution="fused")
    assert decisions_of(plan)["mxfp8"] == (False, "not_offered", "")
    assert plan_of(target(), "mi300x", execution="fused").components["transformer"].scheme == "int8"


def test_layerwise_fp8_is_the_same_under_fused_execution() -> None:
    encoder = component(linear("layer.q", rows=None), kind=ComponentKind.TEXT_ENCODER)
    goal = target(text_encoder=encoder)
    plan = plan_of(goal, text_encoder="layerwise_fp8", execution="fused")
    assert plan.components["text_encoder"].scheme is Scheme.LAYERWISE_FP8


@pytest.mark.parametrize("scheme", ["int8", "fp8", "nvfp4", "layerwise_fp8"])
def test_a_text_encoder_takes_what_is_offered(scheme: str) -> None:
    encoder = component(linear("layer.q", rows=None), kind=ComponentKind.TEXT_ENCODER)
    plan = plan_of(target(text_encoder=encoder), "b200", text_encoder=scheme)
    layer = plan.components["text_encoder"].layers[0]
    assert (layer.scheme, layer.pad_rows) == (scheme, 17 if scheme == "int8" else 0)
    assert plan.components["text_encoder"].confidence is Confidence.DERIVED


def test_auto_leaves_text_encoder_and_vae_dense() -> None:
    parts = {
        "text_encoder": component(linear("q"), kind=ComponentKind.TEXT_ENCODER),
        "vae": component(linear("q"), kind=ComponentKind.VAE),
    }
    plan = plan_of(target(**parts))
    for name in parts:
        assert plan.components[name].scheme is Scheme.DENSE
        assert decisions_of(plan, name) == {"dense": (True, "dense_component", "")}


@pytest.mark.parametrize(
    ("kind", "flag", "scheme", "allowed"),
    [
        (ComponentKind.VAE, "vae", "int8", "dense, layerwise_fp8"),
        (ComponentKind.TEXT_ENCODER, "text_encoder", "mxfp8", "dense, int8, fp8, layerwise_fp8"),
        (ComponentKind.DENOISER, "transformer", "layerwise_fp8", "dense, int8, fp8"),
    ],
)
def test_a_scheme_that_a_kind_does_not_take_is_refused(kind, flag, scheme, allowed) -> None:
    goal = target(other=component(linear("q"), kind=kind))
    with pytest.raises(DeniedError, match="is not offered for") as caught:
        plan_of(goal, **{flag: scheme})
    assert caught.value.allowed == f"what would run here: {allowed}"


def test_layerwise_fp8_takes_every_linear_but_those_kept_in_fp32() -> None:
    vae = component(
        linear("odd", 15, 7), linear("norm.proj", dtype="float32"), kind=ComponentKind.VAE
    )
    plan = plan_of(target(vae=vae), vae="layerwise_fp8")
    assert [layer.name for layer in plan.components["vae"].layers] == ["odd"]
    assert kept_of(plan, "vae") == {"norm.proj": ("fp32_kept", "derived.fp32_kept")}
    assert plan.components["vae"].settings.weight_dtype == "float8_e4m3fn"


def test_a_dense_denoiser_lists_its_linears_and_other_dense_components_do_not() -> None:
    goal = target(text_encoder=component(linear("q"), kind=ComponentKind.TEXT_ENCODER))
    plan = plan_of(goal, transformer="dense")
    assert set(kept_of(plan).values()) == {("dense_component", "derived.dense_component")}
    assert len(kept_of(plan)) == 3
    assert kept_of(plan, "text_encoder") == {}
    assert "  transformer  every Linear  3  dense_component" in plan.explain()


def test_a_component_of_known_size_only_cannot_be_quantised() -> None:
    encoder = component(kind=ComponentKind.TEXT_ENCODER, inventory=None, dense_bytes=7 * GIB)
    goal = target(text_encoder=encoder)
    with pytest.raises(RequestError, match="only the size of text_encoder is known") as caught:
        plan_of(goal, text_encoder="int8")
    assert "folder" in str(caught.value)
    assert (
        sum(i.bytes for i in plan_of(goal).memory.items if i.component == "text_encoder") == 7 * GIB
    )


def test_a_scheme_for_a_component_that_is_not_there_is_an_error() -> None:
    with pytest.raises(RequestError, match="there is none; components: transformer"):
        plan_of(target(), vae="layerwise_fp8")


def test_resolve_does_not_depend_on_where_a_rule_stands(tmp_path: Path) -> None:
    overlay = """
families:
  ltx-2:
    rules:
      - {id: mine.deny.fp8, schemes: [fp8], effect: deny, because: not_validated}
"""
    (tmp_path / "a.yaml").write_text(overlay)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.yaml").write_text("# one line more\n" + overlay)
    plans = [
        resolve(
            "ltx-2", host=Host.load("h200"), request=Request(), rules=load_rules(tmp_path / name)
        ).to_json()
        for name in ("a.yaml", "elsewhere/b.yaml")
    ]
    assert "mine.deny.fp8" in plans[0]
    assert plans[0] == plans[1]
