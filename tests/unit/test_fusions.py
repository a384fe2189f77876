"""Fusions: from the table to explicit groups of a plan, and what keeps projections apart."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from by_hand import TABLE_TEXT, component, linear, plan_of, table_from, target

from quantpolicy import Host, Request, load_rules, resolve
from quantpolicy.errors import RuleTableError
from quantpolicy.fusions import fusion_places
from quantpolicy.inventory.shipped import load_inventory
from quantpolicy.lint import lint
from quantpolicy.plan import QuantPlan
from quantpolicy.schemes import ComponentKind

ROOT = Path(__file__).parents[2]

FUSIONS = """
fusions:
  qkv: {within: [attn1], parts: [to_q, to_k, to_v]}
  kv: {within: ["attn*"], parts: [to_k, to_v]}
"""
USES = """
    fusions:
      qkv: {pays: measured, expect: 2, evidence: [good]}
      kv: {pays: measured, expect: 3, evidence: [good]}
    kernels:
"""
TEXT = TABLE_TEXT.replace("families:\n", f"{FUSIONS.strip()}\nfamilies:\n", 1).replace(
    "\n    kernels:\n", USES, 1
)
TABLE = table_from(TEXT)


def attention(place: str, **facts: dict[str, object]) -> tuple[object, ...]:
    return tuple(
        linear(f"{place}.{leaf}", **facts.get(leaf, {})) for leaf in ("to_q", "to_k", "to_v")
    )


def fused(*linears: object, rules: object = TABLE, **request: object) -> QuantPlan:
    return plan_of(target(*linears), rules=rules, **{"execution": "fused", **request})


def groups(plan: QuantPlan) -> list[tuple[str, str, tuple[str, ...], str]]:
    return [(f.component, f.name, f.parts, f.scheme) for f in plan.fusions]


def test_groups_are_explicit_and_in_the_order_of_the_parts() -> None:
    plan = fused(*reversed(attention("blocks.0.attn1")), *attention("blocks.0.attn2"))
    names = [f"blocks.0.attn1.{leaf}" for leaf in ("to_q", "to_k", "to_v")]
    assert groups(plan) == [
        ("transformer", "qkv", tuple(names), "fp8"),
        ("transformer", "kv", ("blocks.0.attn2.to_k", "blocks.0.attn2.to_v"), "fp8"),
    ]
    assert QuantPlan.from_json(plan.to_json()) == plan
    assert "fusions: qkv at 1 places of transformer, kv at 1 places" in plan.explain()


def test_a_projection_has_one_fusion() -> None:
    plan = fused(*attention("blocks.0.attn1"))
    assert [name for _, name, _, _ in groups(plan)] == ["qkv"]
    note = "fusion kv leaves blocks.0.attn1 apart: to_k is dense or in another fusion"
    assert f"transformer: {note}" in plan.notes


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"to_k": {"k": 2048}}, "to_k has 2048 input features, to_q 4096"),
        ({"to_v": {"has_bias": False}}, "to_v and to_q differ in having a bias"),
        ({"to_v": {"dtype": "float32"}}, "to_v is dense or in another fusion"),
        ({"to_q": {"n": 256}}, "to_q is dense or in another fusion"),
    ],
)
def test_what_does_not_fit_is_left_apart_with_a_reason(facts, reason) -> None:
    places = [f"blocks.{index}.attn1" for index in range(3)]
    plan = fused(*(part for place in places for part in attention(place, **facts)))
    assert "qkv" not in [name for _, name, _, _ in groups(plan)]
    note = f"transformer: fusion qkv leaves blocks.0.attn1 and 2 more apart: {reason}"
    assert note in plan.notes


def test_places_hold_every_part() -> None:
    spec = TABLE.file.fusions["qkv"]
    names = ["a.attn1.to_q", "a.attn1.to_k", "a.attn1.to_v", "b.attn1.to_q", "attn1x.to_q"]
    names += ["b.attn1.to_v", "c.attn2.to_q", "c.attn2.to_k", "c.attn2.to_v"]
    assert fusion_places(spec, names) == {
        "a.attn1": ("a.attn1.to_q", "a.attn1.to_k", "a.attn1.to_v")
    }


@pytest.mark.parametrize("request_", [{"execution": "torchao"}, {"speed": "off"}])
def test_only_fused_execution_above_tier_off_has_them(request_) -> None:
    plan = fused(*attention("blocks.0.attn1"), transformer="fp8", **request_)
    assert plan.components["transformer"].layers
    assert plan.fusions == ()
    assert not any("fusion" in note for note in plan.notes)


def test_dense_components_and_other_kinds_have_none() -> None:
    assert fused(*attention("blocks.0.attn1"), transformer="dense").fusions == ()
    encoder = component(*attention("attn1"), kind=ComponentKind.TEXT_ENCODER)
    goal = target(linear("blocks.0.ff"), text_encoder=encoder)
    plan = plan_of(goal, rules=TABLE, execution="fused", text_encoder="fp8")
    assert plan.components["text_encoder"].layers
    assert plan.fusions == ()


@pytest.mark.parametrize("pays", ["unknown, expect: 2", "refuted, expect: 2, evidence: [good]"])
def test_only_what_is_measured_to_pay_enters_a_plan(pays: str) -> None:
    text = TEXT.replace("qkv: {pays: measured, expect: 2, evidence: [good]", "qkv: {pays: " + pays)
    plan = fused(*attention("blocks.0.attn1"), rules=table_from(text))
    assert [name for _, name, _, _ in groups(plan)] == ["kv"]


def test_fusions_enter_the_plan_digest_only() -> None:
    linears = attention("blocks.0.attn1")
    without = table_from(TEXT.replace("measured, expect: 2", "refuted, expect: 2"))
    one, other = fused(*linears), fused(*linears, rules=without)
    assert one.fusions != other.fusions
    assert one.weights_digest == other.weights_digest
    assert one.plan_digest != other.plan_digest


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("qkv: {pays", "qkw: {pays", "unknown fusion 'qkw'"),
        (", evidence: [good]}\n      kv", "}\n      kv", "measured with 0 evidence records"),
        ("{pays: measured", "{pays: unknown", "unknown with 1 evidence records"),
        ("evidence: [good]}\n      kv", "evidence: [bad]}\n      kv", "unknown evidence 'bad'"),
        ("expect: 2", "expect: -2", "a negative number"),
        ("parts: [to_q, to_k", "parts: [to_q, to_q", "part 'to_q' is given twice"),
        ("parts: [to_q, to_k", "parts: [to_q, 'to_*'", r"part 'to_\*' is no name in a module"),
        ("within: [attn1]", "within: ['attn 1']", "token 'attn 1' is no name of modules"),
    ],
)
def test_a_malformed_fusion_is_refused(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(RuleTableError, match=message):
        table_from(TEXT.replace(old, new, 1))


def test_lint_counts_the_places_of_the_shipped_fusions(tmp_path: Path) -> None:
    rules = load_rules()
    uses = {name: use for spec in rules.families.values() for name, use in spec.fusions.items()}
    assert uses.keys() == rules.file.fusions.keys()
    assert [finding for finding in lint(rules) if finding.code == "fusion_expect"] == []
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text(
        "families: {flux.1: {override: [fusions], "
        "fusions: {added.qkv: {pays: unknown, expect: 20}}}}\n"
    )
    rules = load_rules(overlay)
    (finding,) = [finding for finding in lint(rules) if finding.code == "fusion_expect"]
    assert finding.where == f"{overlay}:1 families.flux.1.fusions.added.qkv"
    assert "stand in 19 modules of transformer, expect says 20" in finding.message


# Groups that fused execution joins where every part is quantised, by family.
JOINED = {
    "wan2.1-t2v-1.3b": {"self-attention.qkv": 30, "cross-attention.kv": 30},
    "wan2.1-t2v-14b": {"cross-attention.kv": 40},
    "wan2.1-i2v-14b": {"cross-attention.kv": 40, "added.kv": 40},
    "wan2.2-ti2v-5b": {"self-attention.qkv": 30, "cross-attention.kv": 30},
    "wan2.2-t2v-a14b": {"cross-attention.kv": 40},
    "wan2.2-i2v-a14b": {"cross-attention.kv": 40},
    "hunyuanvideo": {"self-attention.qkv": 62, "added.qkv": 20},
    "hunyuanvideo-1.5": {"self-attention.qkv": 56, "added.qkv": 54},
    "hunyuanvideo-1.5-720p": {"self-attention.qkv": 56, "added.qkv": 54},
    "ltx-2": {"self-attention.qkv": 96, "cross-attention.kv": 192},
    "ltx-2.3": {"self-attention.qk": 96, "cross-attention.vk": 192},
    "qwen-image": {"self-attention.qkv": 60, "added.qkv": 60},
    "qwen-image-edit": {"self-attention.qkv": 60, "added.qkv": 60},
    "flux.1": {"self-attention.qkv": 57, "added.qkv": 19},
    "flux.2-dev": {"self-attention.qkv": 8, "added.qkv": 8},
    "flux.2-klein-4b": {"self-attention.qkv": 5, "added.qkv": 5},
    "flux.2-klein-9b": {"self-attention.qkv": 8, "added.qkv": 8},
    "z-image": {"self-attention.qkv": 34},
    "minimax-h3": {},
}


@pytest.mark.parametrize("family", load_rules().families)
def test_plans_join_what_was_measured_to_pay(family: str) -> None:
    scheme = "int8" if family.startswith("hunyuanvideo-1.5") else "fp8"
    request = Request(execution="fused", transformer=scheme)
    plan = resolve(family, host=Host.load("h200"), request=request)
    found = Counter(group.name for group in plan.fusions if group.component == "transformer")
    assert found == JOINED[family]


RATIOS = {
    (row["family"], row["fusion"], row["scheme"]): row["joined_of_apart"]
    for row in json.loads((ROOT / "bench/results/joined.json").read_text())["joined"]
}


@pytest.mark.parametrize("family", load_rules().families)
def test_the_table_says_of_each_fusion_what_the_measurement_says(family: str) -> None:
    schemes = ["int8"] if family.startswith("hunyuanvideo-1.5") else ["fp8", "int8"]
    for name, use in load_rules().families[family].fusions.items():
        pays = all(RATIOS[family, name, scheme] <= 0.97 for scheme in schemes)
        assert use.pays == ("measured" if pays else "refuted"), name
        assert use.evidence


@pytest.mark.parametrize("family", load_rules().families)
def test_shipped_parts_read_one_input_width(family: str) -> None:
    rules = load_rules()
    spec = rules.families[family]
    inventory = load_inventory(spec.components["transformer"].inventory)
    linears = {item.name: item for item in inventory.linears}
    for name in spec.fusions:
        for parts in fusion_places(rules.file.fusions[name], linears).values():
            assert len({linears[part].in_features for part in parts}) == 1
            assert len({linears[part].has_bias for part in parts}) == 1
