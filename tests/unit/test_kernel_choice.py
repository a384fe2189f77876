"""Kernels: from a family's list to what a plan names, and the reason for each that is left out."""

from __future__ import annotations

from pathlib import Path

import pytest
from by_hand import BLOCKS, TABLE_TEXT, component, plan_of, table_from, target

from quantpolicy import Host, resolve
from quantpolicy.detect import host_from_facts
from quantpolicy.errors import RuleTableError
from quantpolicy.host import Backend
from quantpolicy.lint import lint
from quantpolicy.ops import MOUNTABLE, OPS
from quantpolicy.plan import QuantPlan
from quantpolicy.request import Request
from quantpolicy.rules import load_rules
from quantpolicy.schemes import ComponentKind, Contract

GIB = 1 << 30
LISTED = """    kernels:
      - {op: rope_qkv_pack, evidence: [good]}
      - {op: attention_trim, evidence: [good, black]}
      - {op: qk_rms_norm}
      - {op: linear_gelu}
      - {op: gelu_fp8_linear}
      - {op: swiglu, component: vae}
      - {op: qkv_linear, component: vae}
"""
TEXT = TABLE_TEXT.replace(
    """    kernels:
      - {op: gated_residual, evidence: [good]}
      - {op: qk_rms_norm}
""",
    LISTED,
).replace(
    "components: {transformer: {kind: denoiser, size_bytes: 1}}\n    measured",
    "components: {transformer: {kind: denoiser, size_bytes: 1}, vae: {kind: vae, size_bytes: 1}}\n"
    "    measured",
)
TABLE = table_from(TEXT)
VAE = component(kind=ComponentKind.VAE, inventory=None, dense_bytes=1000)
SM75 = host_from_facts(Backend.CUDA, "sm75", "Tesla T4", 15 * GIB)
SM86 = host_from_facts(Backend.CUDA, "sm86", "NVIDIA A10", 22 * GIB)


def planned(host: str | Host = "h200", **request: object) -> QuantPlan:
    return plan_of(target(vae=VAE), host, rules=TABLE, **request)


def ops(plan: QuantPlan) -> list[str]:
    return [f"{kernel.component}.{kernel.op}" for kernel in plan.kernels]


def left_out(plan: QuantPlan) -> dict[str, str]:
    return {
        f"{each.component}.{each.op}": each.detail
        for each in plan.kernel_decisions
        if not each.accepted
    }


RELAXED = "it is numerically relaxed; --quality high mounts it"
FREE = ["transformer.rope_qkv_pack", "transformer.attention_trim"]
VAE_OPS = ["vae.swiglu", "vae.qkv_linear"]


@pytest.mark.parametrize("speed", ["auto", "eager", "compile", "max"])
def test_lossless_and_equivalent_kernels_at_every_tier_but_off(speed: str) -> None:
    plan = planned(speed=speed, transformer="dense")
    assert ops(plan) == FREE
    assert [kernel.contract for kernel in plan.kernels] == [Contract.LOSSLESS, Contract.EQUIVALENT]
    assert left_out(plan) == {
        "transformer.qk_rms_norm": RELAXED,
        "transformer.linear_gelu": RELAXED,
        "transformer.gelu_fp8_linear": "it is for fp8, and transformer is dense",
        "vae.swiglu": RELAXED,
        "vae.qkv_linear": RELAXED,
    }
    assert ops(planned(speed=speed, transformer="dense", quality="high")) == [
        *FREE,
        "transformer.qk_rms_norm",
        "transformer.linear_gelu",
        *VAE_OPS,
    ]


def test_speed_off_mounts_nothing_and_every_op_says_why() -> None:
    plan = planned(speed="off", quality="high", transformer="fp8")
    assert plan.kernels == ()
    assert len(left_out(plan)) == 7
    assert set(left_out(plan).values()) == {"speed off runs the stock model"}


def test_an_accepted_kernel_says_its_promise_and_its_evidence() -> None:
    plan = planned(transformer="dense", quality="high")
    accepted = {each.op: each.detail for each in plan.kernel_decisions if each.accepted}
    assert accepted["rope_qkv_pack"] == (
        "bit-exact, verified at the first use of every signature; evidence good"
    )
    assert accepted["attention_trim"] == (
        "equal but for rounding, at every tier but off; evidence good, black"
    )
    assert accepted["qk_rms_norm"] == "numerically relaxed, as quality high allows; not measured"


@pytest.mark.parametrize(
    ("scheme", "execution", "expected"),
    [
        ("dense", "torchao", ["linear_gelu"]),
        ("dense", "fused", ["linear_gelu"]),
        ("fp8", "torchao", []),
        ("fp8", "fused", ["gelu_fp8_linear"]),
        ("int8", "fused", []),
    ],
)
def test_ops_that_need_a_scheme_or_an_execution(scheme, execution, expected) -> None:
    plan = planned(transformer=scheme, execution=execution, quality="high")
    found = [op for op in ("linear_gelu", "gelu_fp8_linear") if f"transformer.{op}" in ops(plan)]
    assert found == expected
    if (scheme, execution) == ("fp8", "torchao"):
        assert left_out(plan) == {
            "transformer.linear_gelu": "it is for dense, and transformer is fp8",
            "transformer.gelu_fp8_linear": "it is for execution fused, not torchao",
        }
    # The autoencoder is dense whatever the denoiser is.
    assert ops(plan)[-2:] == VAE_OPS


def test_compiled_code_of_few_rows_calls_no_op() -> None:
    def shipped(**request: object) -> QuantPlan:
        values = {"transformer": "fp8", "execution": "fused", "quality": "high", **request}
        return resolve(
            "wan2.2-ti2v-5b", host=Host.load("h200"), request=Request.model_validate(values)
        )

    few = {"resolution": "512x320", "frames": 25}
    plan = shipped(**few, speed="compile")
    assert (plan.workload.image_tokens, plan.kernels) == (1120, ())
    assert left_out(plan)["transformer.gelu_fp8_linear"] == (
        "compiled code calls it from Python, which shows below 4096 image tokens;"
        " speed eager mounts it"
    )
    assert "transformer.gelu_fp8_linear" in ops(shipped(**few, speed="eager"))
    assert "transformer.gelu_fp8_linear" in ops(shipped(speed="compile"))


def test_an_op_that_replaces_another_stands_alone_where_it_is_planned() -> None:
    listed = "      - {op: swiglu, component: vae}\n"
    both = table_from(TEXT.replace(listed, listed + listed.replace("swiglu", "swiglu_linear")))
    plan = plan_of(target(vae=VAE), rules=both, quality="high")
    assert ops(plan)[-2:] == ["vae.swiglu_linear", "vae.qkv_linear"]
    assert left_out(plan)["vae.swiglu"] == "swiglu_linear takes its sites"
    plan = plan_of(target(vae=VAE), SM86, rules=both, quality="high")
    assert ops(plan)[-2:] == VAE_OPS
    assert "vae.swiglu_linear" in left_out(plan)


def test_a_quantised_autoencoder_keeps_what_needs_no_dense_weights() -> None:
    vae = component(*BLOCKS, kind=ComponentKind.VAE)
    plan = plan_of(target(vae=vae), rules=TABLE, vae="layerwise_fp8", quality="high")
    assert plan.components["vae"].scheme == "layerwise_fp8"
    assert [name for name in ops(plan) if name.startswith("vae")] == ["vae.swiglu"]
    assert left_out(plan)["vae.qkv_linear"] == "it is for dense, and vae is layerwise_fp8"


def test_old_gpus_and_rocm_have_what_is_plain_torch() -> None:
    for host, arch in ((SM75, "sm75"), (Host.load("mi300x"), "gfx942")):
        plan = planned(host, quality="high", transformer="dense", speed="eager")
        assert ops(plan) == [
            "transformer.attention_trim",
            "transformer.linear_gelu",
            "vae.qkv_linear",
        ]
        assert left_out(plan)["transformer.rope_qkv_pack"] == (
            f"its kernel needs CUDA sm80, and {host.name} is {arch}"
        )
        assert left_out(plan)["transformer.gelu_fp8_linear"].startswith(
            "its kernel needs CUDA sm89"
        )


def test_ampere_has_all_but_the_fp8_kernel() -> None:
    plan = planned(SM86, quality="high", transformer="dense")
    assert ops(plan) == [*FREE, "transformer.qk_rms_norm", "transformer.linear_gelu", *VAE_OPS]


@pytest.mark.parametrize("host", ["cpu", "apple-m"])
def test_hosts_without_a_gpu_have_none(host: str) -> None:
    plan = planned(host, quality="high", transformer="dense")
    assert plan.kernels == ()
    assert set(left_out(plan).values()) == {f"it runs on GPUs, and {host} is none"}


def test_a_family_without_a_list_has_neither_kernels_nor_decisions() -> None:
    for family in ("ruled", "generic"):
        plan = plan_of(target(family=family), rules=TABLE, quality="high")
        assert (plan.kernels, plan.kernel_decisions) == ((), ())


def test_kernels_are_of_the_plan_and_not_of_the_weights() -> None:
    lossless, high = planned(), planned(quality="high")
    assert lossless.kernels != high.kernels
    assert lossless.weights_digest == high.weights_digest
    assert QuantPlan.from_json(high.to_json()) == high
    assert "attention_trim   equivalent  planned   equal but for rounding" in high.explain()
    assert "gelu_fp8_linear  high        left out  it is for execution fused" in high.explain()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("op: swiglu", "op: swiglo", "unknown op 'swiglo'.*did you mean 'swiglu'"),
        ("op: swiglu", "op: qk_norm_rope_pack", "unknown op 'qk_norm_rope_pack'"),
        ("swiglu, component: vae", "swiglu, component: text_encoder", "has no text_encoder"),
        ("op: linear_gelu", "op: qk_rms_norm", "op 'qk_rms_norm' is listed twice"),
        ("[good, black]", "[good, blank]", "unknown evidence 'blank'"),
        ("{op: linear_gelu}", "{op: linear_gelu, contract: high}", "contract"),
    ],
)
def test_a_malformed_list_is_refused(old: str, new: str, message: str) -> None:
    assert TEXT.count(old) == 1
    with pytest.raises(RuleTableError, match=message):
        table_from(TEXT.replace(old, new))


def test_lint_names_the_line_of_an_unknown_op(tmp_path: Path) -> None:
    path = tmp_path / "table.yaml"
    path.write_text(TEXT.replace("op: swiglu", "op: swiglo"))
    line = 1 + TEXT[: TEXT.index("op: swiglu")].count("\n")
    (finding,) = lint(load_rules(), path)
    assert finding.code == "schema"
    assert finding.where.startswith(f"{path}:{line} families.plain.kernels")
    assert finding.message.startswith(
        "unknown op 'swiglo'; known: add_layer_norm_fp8, attention_trim, "
    )


def test_ops_and_finders_are_the_same_ones() -> None:
    from quantpolicy.runtime.mount import _finders

    assert set(_finders()) == set(MOUNTABLE)
    parts = {part for facts in OPS.values() for part in facts.part_of}
    assert parts <= set(MOUNTABLE)


def test_an_overlay_replaces_a_familys_list(tmp_path: Path) -> None:
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text(
        "families: {hunyuanvideo: {override: [kernels], kernels: [{op: gated_residual}]}}\n"
    )
    rules = load_rules(overlay)
    plan = resolve("hunyuanvideo", host=Host.load("h200"), rules=rules)
    assert ops(plan) == ["transformer.gated_residual"]
    overlay.write_text("families: {hunyuanvideo: {override: [kernels], kernels: [{op: gated}]}}\n")
    (finding,) = lint(load_rules(), overlay)
    assert finding.where.startswith(f"{overlay}:1 families.hunyuanvideo.kernels")
