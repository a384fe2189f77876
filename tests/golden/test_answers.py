"""The answers that the rule table and the resolver exist to give, one by one."""

from __future__ import annotations

import pytest

from quantpolicy import DeniedError, Host, QuantPlan, Request, load_rules, resolve
from quantpolicy.schemes import Cause, ComponentKind, Scheme, SchemeChoice, Tier

FAMILIES = tuple(load_rules().families)
DENOISERS = {
    family: [
        name
        for name, spec in load_rules().families[family].components.items()
        if spec.kind is ComponentKind.DENOISER
    ]
    for family in FAMILIES
}
GIB = 1 << 30


def plan_for(family: str, host: str, **request: object) -> QuantPlan:
    return resolve(family, host=Host.load(host), request=Request(**request))


def scheme_of(plan: QuantPlan, name: str = "transformer") -> Scheme:
    return plan.components[name].scheme


@pytest.mark.parametrize("host", ["b200", "h200"])
def test_wan_5b_is_fp8_and_keeps_its_condition_embedder_for_zero_rows(host: str) -> None:
    transformer = plan_for("wan2.2-ti2v-5b", host).components["transformer"]
    assert transformer.scheme is Scheme.FP8
    assert (len(transformer.layers), len(transformer.kept)) == (300, 6)
    assert {
        layer.name: layer.because
        for layer in transformer.kept
        if layer.name.startswith("condition_embedder.")
    } == {
        f"condition_embedder.{name}": Cause.ZERO_ROWS
        for name in (
            "time_embedder.linear_1", "time_embedder.linear_2", "time_proj",
            "text_embedder.linear_1", "text_embedder.linear_2",
        )
    }  # fmt: skip
    assert not any("condition_embedder" in layer.name for layer in transformer.layers)


@pytest.mark.parametrize("family", ["ltx-2", "ltx-2.3"])
def test_ltx_is_fp8_and_keeps_nothing_for_zero_rows(family: str) -> None:
    transformer = plan_for(family, "b200").components["transformer"]
    assert transformer.scheme is Scheme.FP8
    assert Cause.ZERO_ROWS not in {layer.because for layer in transformer.kept}


@pytest.mark.parametrize("family", ["hunyuanvideo-1.5", "hunyuanvideo-1.5-720p"])
@pytest.mark.parametrize("host", ["b200", "h200", "l40s"])
def test_hunyuanvideo_15_stays_dense_and_compiled_where_it_fits(family: str, host: str) -> None:
    plan = plan_for(family, host)
    assert scheme_of(plan) is Scheme.DENSE
    assert (plan.tier, plan.compile.mode) == (Tier.COMPILE, "regional")
    int8 = next(decision for decision in plan.decisions if decision.candidate is Scheme.INT8)
    assert (int8.accepted, int8.because, int8.rule) == (
        False, Cause.SLOWER, "int8.memory-fallback",
    )  # fmt: skip


def test_hunyuanvideo_15_is_int8_with_too_little_memory() -> None:
    plan = plan_for("hunyuanvideo-1.5", "b200", memory_bytes=30 * GIB)
    assert scheme_of(plan) is Scheme.INT8
    assert plan.memory.fits
    assert any("for memory; expect slower" in note for note in plan.notes)


def test_hunyuanvideo_15_is_int8_when_asked_for() -> None:
    assert scheme_of(plan_for("hunyuanvideo-1.5", "b200", transformer="int8")) is Scheme.INT8


def test_hunyuanvideo_15_refuses_fp8_with_rule_and_evidence() -> None:
    with pytest.raises(DeniedError) as caught:
        plan_for("hunyuanvideo-1.5", "b200", transformer="fp8")
    error = caught.value
    assert error.rule == "hunyuanvideo-1.5.deny.fp8"
    assert "d.hunyuanvideo-1.5" in error.evidence
    for part in (error.rule, "d.hunyuanvideo-1.5", "dense, int8", f"--lift {error.rule}"):
        assert part in str(error)
    assert [(d.candidate, d.accepted) for d in error.decisions] == [
        (Scheme.FP8, False), (Scheme.MXFP8, False), (Scheme.INT8, False), (Scheme.DENSE, False),
    ]  # fmt: skip


def test_hunyuanvideo_15_takes_fp8_when_the_rule_is_lifted() -> None:
    rule = "hunyuanvideo-1.5.deny.fp8"
    plan = plan_for("hunyuanvideo-1.5", "b200", lift=[rule])
    assert scheme_of(plan) is Scheme.FP8
    assert plan.lifted == (rule,)
    accepted = next(d for d in plan.decisions if d.accepted and d.component == "transformer")
    assert f"rule {rule} lifted on request" in accepted.detail


@pytest.mark.parametrize("host", ["rtx4090", "rtx5090"])
@pytest.mark.parametrize("family", FAMILIES)
def test_consumer_boards_try_int8_first(family: str, host: str) -> None:
    plan = plan_for(family, host)
    first = next(d for d in plan.decisions if d.component == "transformer")
    assert first.candidate is Scheme.INT8
    assert first.accepted or first.because is Cause.MEMORY


@pytest.mark.parametrize("host", ["a100", "rtx3090"])
@pytest.mark.parametrize("family", FAMILIES)
def test_ampere_is_int8(family: str, host: str) -> None:
    plan = plan_for(family, host)
    assert {scheme_of(plan, name) for name in DENOISERS[family]} == {Scheme.INT8}


@pytest.mark.parametrize("host", ["cpu", "apple-m"])
@pytest.mark.parametrize("family", FAMILIES)
def test_cpu_and_apple_are_dense_and_not_compiled(family: str, host: str) -> None:
    plan = plan_for(family, host)
    assert {part.scheme for part in plan.components.values()} == {Scheme.DENSE}
    assert (plan.tier, plan.compile.mode) == (Tier.EAGER, "none")


@pytest.mark.parametrize("host", ["b200", "rtx5090"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("gib", [4, 24, 64])
def test_nvfp4_is_never_chosen_by_auto(family: str, host: str, gib: int) -> None:
    plan = plan_for(family, host, memory_bytes=gib * GIB)
    assert Scheme.NVFP4 not in {decision.candidate for decision in plan.decisions}


def test_both_experts_of_a14b_are_planned_alike() -> None:
    plan = plan_for("wan2.2-t2v-a14b", "h200")
    first, second = plan.components["transformer"], plan.components["transformer_2"]
    assert (first.scheme, second.scheme) == (Scheme.FP8, Scheme.FP8)
    assert first.layers == second.layers
    assert len(first.layers) == 40 * 10


def test_ti2v_5b_has_one_denoiser() -> None:
    assert "transformer_2" not in plan_for("wan2.2-ti2v-5b", "h200").components


@pytest.mark.parametrize("family", FAMILIES)
def test_speed_off_is_dense_and_stock(family: str) -> None:
    plan = plan_for(family, "h200", speed="off")
    assert {part.scheme for part in plan.components.values()} == {Scheme.DENSE}
    assert (plan.tier, plan.compile.mode, plan.kernels) == (Tier.OFF, "none", ())


def test_speed_off_quantises_the_text_encoder_that_is_asked_for() -> None:
    plan = plan_for("wan2.2-ti2v-5b", "h200", speed="off", text_encoder="int8")
    assert {name: str(part.scheme) for name, part in plan.components.items()} == {
        "transformer": "dense", "text_encoder": "int8", "vae": "dense",
    }  # fmt: skip
    encoder = plan.components["text_encoder"]
    assert encoder.layers
    assert {layer.pad_rows for layer in encoder.layers} == {17}


def test_fp8_storage_type_of_mi300x() -> None:
    ours, theirs = (plan_for("wan2.2-ti2v-5b", host) for host in ("b200", "mi300x"))
    assert ours.components["transformer"].settings.weight_dtype == "float8_e4m3fn"
    assert theirs.components["transformer"].settings.weight_dtype == "float8_e4m3fnuz"
    assert ours.components["transformer"].layers == theirs.components["transformer"].layers
    assert ours.weights_digest != theirs.weights_digest


@pytest.mark.parametrize(
    ("family", "host", "scheme"),
    [
        ("flux.1", "mi300x", "mxfp8"),
        ("flux.1", "a100", "fp8"),
        ("flux.1", "apple-m", "int8"),
        ("flux.1", "h200", "nvfp4"),
        ("flux.1", "cpu", "fp8"),
    ],
)
def test_what_a_host_cannot_run_is_refused_with_what_would(
    family: str, host: str, scheme: str
) -> None:
    with pytest.raises(DeniedError, match="what would run here: dense") as caught:
        plan_for(family, host, transformer=scheme)
    allowed = caught.value.allowed.removeprefix("what would run here: ").split(", ")
    for name in allowed:
        assert scheme_of(plan_for(family, host, transformer=name)) == name


@pytest.mark.parametrize("host", ["b200", "h200", "a100", "rtx4090", "cpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_int8_layer_sees_16_rows_unpadded(family: str, host: str) -> None:
    from quantpolicy.inventory.shipped import load_inventory

    plan = plan_for(family, host, transformer="int8")
    for name in DENOISERS[family]:
        inventory = load_inventory(load_rules().families[family].components[name].inventory)
        rows = {linear.name: linear.rows for linear in inventory.linears}
        for layer in plan.components[name].layers:
            seen = rows[layer.name]
            assert layer.pad_rows >= 17 or (seen is not None and seen > 16), layer.name


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if not family.startswith("hunyuanvideo-1.5")]
)
def test_no_fp8_layer_is_below_the_floor_of_its_host(family: str) -> None:
    from quantpolicy.inventory.shipped import load_inventory

    h200 = Host.load("h200")
    plan = plan_for(family, "h200", transformer="fp8")
    for name in DENOISERS[family]:
        inventory = load_inventory(load_rules().families[family].components[name].inventory)
        facts = {linear.name: linear for linear in inventory.linears}
        assert plan.components[name].settings.activation_floor == 1e-12
        for layer in plan.components[name].layers:
            fact = facts[layer.name]
            least = h200.min_rows(Scheme.FP8, fact.in_features, fact.has_bias)
            assert max(layer.pad_rows, fact.rows or 0) >= least, layer.name


@pytest.mark.parametrize("host", ["b200", "h200", "a100", "rtx4090", "mi300x", "cpu"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", list(SchemeChoice))
def test_every_linear_is_either_planned_or_kept(
    family: str, host: str, scheme: SchemeChoice
) -> None:
    from quantpolicy.inventory.shipped import load_inventory

    try:
        plan = plan_for(family, host, transformer=scheme)
    except DeniedError as denied:
        refused = [d for d in denied.decisions if d.candidate == scheme]
        plan = plan_for(family, host, transformer="dense")
        assert [d.accepted for d in refused] == [False]
    for name in DENOISERS[family]:
        component = plan.components[name]
        names = [layer.name for layer in (*component.layers, *component.kept)]
        inventory = load_inventory(load_rules().families[family].components[name].inventory)
        assert sorted(names) == sorted(linear.name for linear in inventory.linears)
        assert bool(component.layers) == (component.scheme is not Scheme.DENSE)


def test_a_refusal_offers_no_lift_that_the_host_would_refuse_again() -> None:
    with pytest.raises(DeniedError) as caught:
        plan_for("wan2.2-ti2v-5b", "h200", transformer="mxfp8")
    assert caught.value.rule == "wan.deny.mxfp8"
    assert caught.value.remedy == "give --transformer one of these"
    with pytest.raises(DeniedError) as caught:
        plan_for("wan2.2-ti2v-5b", "b200", transformer="mxfp8")
    assert caught.value.remedy == (
        "give --transformer one of these, or lift the rule with --lift wan.deny.mxfp8"
    )
