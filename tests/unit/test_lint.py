from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from quantpolicy.inventory.model import Inventory, LinearFacts
from quantpolicy.inventory.shipped import load_inventory
from quantpolicy.lint import LintFinding, Severity, fewest_rows, lint
from quantpolicy.lint_meta import compare_inventories
from quantpolicy.lint_wins import rules_that_never_win
from quantpolicy.rules import RuleTable, load_rules, load_table

TABLE = """\
version: 1
min_features: 512
schemes:
  int8: {granularity: per_row, alignment: 16, min_sm: 75, dtypes: [bfloat16],
    weight_dtype: int8, kinds: [denoiser, text_encoder]}
  fp8:
    {granularity: per_row, alignment: 16, min_sm: 89, dtypes: [bfloat16], activation_floor: 1e-12,
    weight_dtype: host, kinds: [denoiser, text_encoder]}
  nvfp4: {granularity: block_16, alignment: 32, min_sm: 100, dtypes: [bfloat16],
    weight_dtype: float4_e2m1fn_x2, kinds: [denoiser, text_encoder]}
ladders:
  - {backend: cuda, host_classes: [data_center, consumer], min_sm: 89, schemes: [fp8, int8]}
  - {backend: cuda, host_classes: [data_center, consumer], min_sm: 75, schemes: [int8]}
evidence:
  e: {kind: measured, source: a run, date: 2026-11-30}
families:
  z:
    title: Z
    recognise: {class_name: ZImageTransformer2DModel}
    components:
      transformer:
        kind: denoiser
        class_name: ZImageTransformer2DModel
        inventory: z-image
        size_bytes: 12300000000
    rules:
      - id: z.fp8
        schemes: [fp8]
        effect: exclude
        because: zero_rows
        tokens: [context_refiner.0.attention.to_?, layers.0.attention.to_?]
        unless: [activation_floor]
        expect: 6
      - id: z.int8
        schemes: [int8]
        effect: exclude
        because: small_m
        tokens: [t_embedder, adaLN_modulation]
        expect: 35
      - {id: z.deny, schemes: [nvfp4], effect: deny, because: outliers, evidence: [e]}
"""


def table(folder: Path, *changes: tuple[str, str]) -> RuleTable:
    text = TABLE
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    path = folder / "families.yaml"
    path.write_text(text, encoding="utf-8")
    return load_table(path)


def found(folder: Path, *changes: tuple[str, str]) -> list[tuple[str, str, str]]:
    findings = lint(table(folder, *changes))
    return [(item.code, item.where.removeprefix(f"{folder}/"), item.message) for item in findings]


def test_a_sound_table_has_no_findings(tmp_path) -> None:
    assert found(tmp_path) == []


def test_unused_evidence_is_found(tmp_path) -> None:
    assert found(tmp_path, ("evidence: [e]}", "evidence: [e], note: n}")) == []
    changes = [(", evidence: [e]}", "}"), ("because: outliers", "because: not_validated")]
    assert found(tmp_path, *changes) == [
        ("unused_evidence", "families.yaml:15 evidence.e", "nothing cites it; cite or remove it")
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    title: Z\n", "    title: Z\n    measured: {fp8: [e]}\n"),
        ("weight_dtype: int8,", "weight_dtype: int8, evidence: [e],"),
    ],
)
def test_evidence_that_a_family_or_a_scheme_cites_is_used(tmp_path, old: str, new: str) -> None:
    changes = [(", evidence: [e]}", "}"), ("because: outliers", "because: not_validated")]
    assert found(tmp_path, *changes, (old, new)) == []


def test_a_measured_cause_needs_evidence(tmp_path) -> None:
    changes = [
        (", evidence: [e]}", "}"),
        ("    title: Z\n", "    title: Z\n    measured: {fp8: [e]}\n"),
    ]
    assert found(tmp_path, *changes) == [
        (
            "missing_evidence",
            "families.yaml:41",
            "z.deny: outliers is a measurement; cite its evidence",
        )
    ]


@pytest.mark.parametrize(
    ("new", "shown"), [("expect: 5", "5"), ("expect: 0", "0"), ("expect: {}", "no number")]
)
def test_a_count_that_differs_from_expect_is_found(tmp_path, new: str, shown: str) -> None:
    assert found(tmp_path, ("expect: 6", new)) == [
        (
            "expect",
            "families.yaml:27",
            f"z.fp8 matches 6 Linears of z transformer, expect says {shown}; "
            "correct the tokens or the number",
        )
    ]


def test_a_count_per_family_is_compared(tmp_path) -> None:
    assert found(tmp_path, ("expect: 6", "expect: {z: 6}")) == []
    assert [item[0] for item in found(tmp_path, ("expect: 6", "expect: {z: 7}"))] == ["expect"]


def test_a_token_that_matches_nothing_is_found(tmp_path) -> None:
    assert found(tmp_path, ("[t_embedder, adaLN", "[t_embedder, time_embed, adaLN")) == [
        (
            "dead_token",
            "families.yaml:34",
            "z.int8: token 'time_embed' matches no Linear; remove it",
        )
    ]


def test_a_small_m_layer_without_a_rule_is_found(tmp_path) -> None:
    assert found(tmp_path, ("[t_embedder, adaLN", "[adaLN"), ("expect: 35", "expect: 33")) == [
        (
            "uncovered_small_m",
            "families.yaml:21 families.z.components.transformer",
            "the probe finds small_m in t_embedder.mlp.0, t_embedder.mlp.2, and no int8 rule "
            "covers them; add an exclude or pad_rows rule",
        )
    ]


def test_a_pad_rows_rule_covers_a_layer_too(tmp_path) -> None:
    text = TABLE.partition("      - id: z.int8\n")[2]
    exclude = text[: text.index("        because: small_m")]
    pad = exclude.replace("effect: exclude", "effect: pad_rows\n        rows: 17")
    assert found(tmp_path, (exclude, pad), ("min_features: 512", "min_features: 64")) == []
    assert [item[:2] for item in found(tmp_path, (exclude, pad))] == [
        ("dead_rule", "families.yaml:34")
    ]


def test_a_zero_row_layer_without_a_rule_is_found(tmp_path) -> None:
    changes = [(", layers.0.attention.to_?]", "]"), ("expect: 6", "expect: 3")]
    assert found(tmp_path, *changes) == [
        (
            "uncovered_zero_rows",
            "families.yaml:21 families.z.components.transformer",
            "the probe finds zero_rows in layers.0.attention.to_q, layers.0.attention.to_k, "
            "layers.0.attention.to_v, and no fp8 rule covers them; add an exclude or pad_rows rule",
        )
    ]
    denied = [*changes, ("schemes: [nvfp4], effect", "schemes: [nvfp4, fp8], effect")]
    codes = [(code, message.split(" ")[0]) for code, _, message in found(tmp_path, *denied)]
    assert codes == [("dead_rule", "z.fp8")]


def test_a_rule_that_the_probe_does_not_justify_needs_a_note(tmp_path) -> None:
    wider = [("layers.0.attention.to_?]", "layers.0.attention]"), ("expect: 6", "expect: 7")]
    assert found(tmp_path, *wider) == [
        (
            "unjustified",
            "families.yaml:27",
            "z.fp8 covers z:layers.0.attention.to_out.0, where the probe finds no zero_rows; "
            "narrow the tokens, or say why in its note",
        )
    ]
    noted = (wider[0], ("expect: 6", "expect: 7\n        note: one projection more does no harm"))
    assert found(tmp_path, *noted) == []


def test_short_streams_count_as_few_rows(tmp_path) -> None:
    changes = [("    title: Z\n", "    title: Z\n    short_streams: {cap_embedder: 0}\n")]
    spec = table(tmp_path, *changes).families["z"]
    linears = {linear.name: linear for linear in load_inventory("z-image").linears}
    assert fewest_rows(linears["cap_embedder.1"], spec) == 0
    assert fewest_rows(linears["t_embedder.mlp.0"], spec) == 1
    assert [item[:1] for item in found(tmp_path, *changes)] == [("uncovered_small_m",)]
    unknown = LinearFacts(name="x", out_features=1, in_features=1, dtype="bfloat16", has_bias=False)
    assert fewest_rows(unknown, spec) is None


def test_an_inventory_that_does_not_ship_is_found(tmp_path) -> None:
    findings = found(tmp_path, ("inventory: z-image", "inventory: z-imag"))
    assert [item[:2] for item in findings] == [
        ("inventory", "families.yaml:24 families.z.components.transformer.inventory")
    ]
    assert "no such inventory ships" in findings[0][2]


def test_a_rule_that_never_wins_is_found(tmp_path) -> None:
    shadowed = (
        "      - id: z.late\n"
        "        schemes: [int8]\n"
        "        effect: exclude\n"
        "        because: small_m\n"
        "        tokens: [t_embedder.mlp.0]\n"
        "        expect: 1\n"
    )
    changed = table(tmp_path, ("      - {id: z.deny", f"{shadowed}      - {{id: z.deny"))
    assert rules_that_never_win(changed) == ("z.late",)
    assert lint(changed) == [
        LintFinding(
            severity=Severity.ERROR,
            code="dead_rule",
            where=f"{tmp_path}/families.yaml:40",
            message="z.late decides nothing on any host preset; remove it, or move it forward",
        )
    ]


def test_files_are_checked_alone_or_as_overlays(tmp_path) -> None:
    base = table(tmp_path)
    whole = tmp_path / "families.yaml"
    good = tmp_path / "good.yaml"
    good.write_text("evidence:\n  f: {kind: measured, source: s, date: 2026-11-30}\n")
    bad = tmp_path / "bad.yaml"
    bad.write_text(
        "rules:\n  - {id: z.deny, schemes: [fp9], effect: deny, because: slower}\nx: 1\n"
    )
    missing = tmp_path / "none.yaml"
    assert lint(base, whole) == []
    assert [(item.code, item.where) for item in lint(base, whole, good)] == [
        ("unused_evidence", f"{good}:2 evidence.f")
    ]
    findings = lint(base, bad, missing)
    assert [(item.severity, item.code, item.where) for item in findings] == [
        (Severity.ERROR, "schema", str(missing)),
        (Severity.ERROR, "schema", f"{bad}:2 rules[0].schemes"),
        (Severity.ERROR, "schema", f"{bad}:3"),
    ]
    assert findings[1].message.startswith("unknown scheme 'fp9'; known: dense, ")
    assert findings[2].message.startswith("unknown key 'x'; known: ")


def test_a_broken_whole_table_is_a_finding(tmp_path) -> None:
    base = table(tmp_path)
    whole = tmp_path / "families.yaml"
    whole.write_text(TABLE.replace("version: 1", "version: 2"))
    assert [(item.code, item.where) for item in lint(base, whole)] == [
        ("schema", f"{whole}:1 version")
    ]


def test_the_shipped_table_is_sound() -> None:
    assert lint(load_rules()) == []


def test_lint_imports_no_torch(tmp_path) -> None:
    table(tmp_path)
    code = (
        "import sys; from quantpolicy.lint import lint; from quantpolicy.rules import load_table; "
        f"lint(load_table({str(tmp_path / 'families.yaml')!r})); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


CODE = """
from quantpolicy.lint import lint
from quantpolicy.rules import load_table
for item in lint(load_table({path!r}), meta=True):
    print(item.code, item.where, item.message, sep="|")
"""


def meta_findings(path: Path) -> list[list[str]]:
    """Run in a process of its own: diffusers warns at import on machines without a GPU."""
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(path=str(path))],
        capture_output=True,
        text=True,
        check=True,
    )
    return [line.split("|") for line in done.stdout.splitlines()]


def test_meta_compares_the_released_class_with_the_inventory(tmp_path) -> None:
    table(tmp_path)
    assert meta_findings(tmp_path / "families.yaml") == []
    table(
        tmp_path,
        (
            "        inventory: z-image\n",
            "        inventory: z-image\n"
            "        keep_in_fp32: [t_embedder]\n"
            "        config: {n_layers: 29}\n",
        ),
    )
    findings = meta_findings(tmp_path / "families.yaml")
    where = f"{tmp_path}/families.yaml:21 families.z.components.transformer"
    assert [item[:2] for item in findings] == [["released_class", where]] * 4
    again = "run `python -m quantpolicy.measure.generate`"
    assert findings[0][2] == (
        "8 Linears are only in the shipped inventory, first layers.29.attention.to_q; " + again
    )
    assert findings[1][2] == "2 Linears are different, first t_embedder.mlp.0; " + again
    assert findings[2][2].startswith("2091136 bytes outside Linears, the class has ")
    assert findings[3][2] == (
        "keep_in_fp32 is ['t_embedder'], the class declares []; take over the class's list"
    )


@pytest.mark.parametrize(
    "change",
    [{"out_features": 3}, {"in_features": 3}, {"dtype": "float32"}, {"has_bias": False}],
    ids=str,
)
def test_inventories_are_compared_by_shape_dtype_and_bias(change: dict[str, object]) -> None:
    fact = LinearFacts(name="a", out_features=2, in_features=2, dtype="bfloat16", has_bias=True)
    shipped = Inventory(class_name="X", linears=(fact,), other_bytes=1, source="shipped")
    built = shipped.model_copy(update={"linears": (fact.model_copy(update=change),)})
    again = "run `python -m quantpolicy.measure.generate`"
    assert list(compare_inventories(shipped, built)) == [
        f"1 Linears are different, first a; {again}"
    ]


def test_inventories_are_compared_by_name_and_other_bytes() -> None:
    fact = LinearFacts(name="a", out_features=2, in_features=2, dtype="bfloat16", has_bias=True)
    probed = fact.model_copy(update={"rows": 1, "zero_rows": True})
    shipped = Inventory(class_name="X", linears=(probed,), other_bytes=1, source="shipped")
    built = shipped.model_copy(update={"linears": (fact,)})
    assert list(compare_inventories(shipped, built)) == []
    renamed = fact.model_copy(update={"name": "b"})
    built = shipped.model_copy(update={"linears": (renamed,), "other_bytes": 2})
    again = "run `python -m quantpolicy.measure.generate`"
    assert list(compare_inventories(shipped, built)) == [
        f"1 Linears are only in the shipped inventory, first a; {again}",
        f"1 Linears are missing from the shipped inventory, first b; {again}",
        f"1 bytes outside Linears, the class has 2; {again}",
    ]
