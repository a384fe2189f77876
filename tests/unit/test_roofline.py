"""The predictions against the committed measurements; nothing is timed here.

``bench.roofline.REFERENCE`` names the files. Whoever replaces them fits the tables of
``quantpolicy/step_time.py`` and the preset h200 again until this passes.
"""

from __future__ import annotations

import json

import pytest

from bench import roofline
from quantpolicy import Host, Request, load_rules, resolve
from quantpolicy.rule_schema import KernelSpec
from quantpolicy.rules import RuleTable
from quantpolicy.schemes import Scheme


@pytest.fixture(scope="module")
def comparisons() -> list[roofline.Comparison]:
    return roofline.compare_files(roofline.REFERENCE, Host.load("h200"))


def test_the_reference_covers_both_models_modes_and_executions(comparisons) -> None:
    assert {entry.model for entry in comparisons} == {"wan", "hunyuan"}
    assert {entry.mode for entry in comparisons} == {"eager", "compile"}
    assert {entry.tokens for entry in comparisons} == {1120, 27280, 27286}
    assert {entry.variant for entry in comparisons} == {
        "dense", "fused_fp8", "fused_int8", "torchao_fp8", "torchao_int8",
    }  # fmt: skip


def test_predictions_are_within_a_fifth_of_the_measured_steps(comparisons) -> None:
    assert roofline.MOST_ERROR == 0.20
    assert roofline.inaccurate(comparisons) == []


def test_no_slower_candidate_is_ranked_first(comparisons) -> None:
    assert roofline.misranked(comparisons) == []


@pytest.mark.parametrize(("variant", "ops"), [("stock", ()), ("trim", ("attention_trim",))])
def test_the_released_depth_is_predicted_from_the_shipped_inventory(variant, ops) -> None:
    # 60 blocks, at fewer tokens than the inventory was taken at
    path = roofline.RESULTS / "models_hunyuanvideo.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["variants"]
    measured = next(row["ms"] for row in rows if row["variant"] == variant)
    request = Request(
        speed="eager", resolution="848x480", frames=65, transformer="dense", text_encoder="dense"
    )
    plan = resolve("hunyuanvideo", host=Host.load("h200"), request=request, rules=listing(ops))
    assert {kernel.op for kernel in plan.kernels} == set(ops)
    dense = next(d for d in plan.decisions if d.accepted and d.component == "transformer")
    assert dense.candidate is Scheme.DENSE
    assert dense.predicted_ms == pytest.approx(measured, rel=roofline.MOST_ERROR)


def listing(ops: tuple[str, ...]) -> RuleTable:
    """The shipped table as if HunyuanVideo listed these ops and no others."""
    rules = load_rules()
    kernels = tuple(KernelSpec(op=op) for op in ops)
    family = rules.families["hunyuanvideo"].model_copy(update={"kernels": kernels})
    families = {**rules.families, "hunyuanvideo": family}
    return RuleTable(rules.file.model_copy(update={"families": families}), {}, rules.sources)


def entry(variant: str, measured_ms: float, predicted_ms: float) -> roofline.Comparison:
    return roofline.Comparison("wan", 1120, "eager", variant, measured_ms, predicted_ms, {})


def test_a_prediction_that_is_off_is_told() -> None:
    found = roofline.inaccurate([entry("dense", 100, 119), entry("fused_fp8", 100, 121)])
    assert found == ["wan, 1120 tokens, eager: fused_fp8 is predicted at 1.21 of its time"]


def test_a_step_of_two_files_counts_by_its_least_time() -> None:
    quiet, slow = (
        entry("dense", ms, 100)._replace(results=name) for ms, name in ((95, "a"), (150, "b"))
    )
    assert roofline.inaccurate([quiet, slow]) == roofline.inaccurate([slow, quiet]) == []
    assert len(roofline.inaccurate([slow])) == 1
    other = slow._replace(mode="compile")
    assert roofline.undisturbed([slow, quiet, other]) == [quiet, other]


def test_a_slower_candidate_first_is_told_for_all_and_for_its_execution() -> None:
    entries = [entry("dense", 10, 10), entry("fused_fp8", 12, 9), entry("torchao_fp8", 20, 19)]
    where = "wan, 1120 tokens, eager"
    assert roofline.misranked(entries) == [
        f"{where}: fused_fp8 is ranked first, and dense is faster",
        f"{where}, fused: fused_fp8 is ranked first, and dense is faster",
    ]
    assert roofline.misranked([entry("dense", 10, 10), entry("fused_fp8", 10.1, 9)]) == []


def test_rows_that_failed_or_are_beyond_the_plan_are_left_out() -> None:
    row = {"variant": "dense", "tokens": 27286, "mode": "eager", "ms": 480.0}
    others = [
        {**row, "failed": "out of memory"},
        {**row, "variant": "fused_fp8_kernels"},
    ]
    found = roofline.compare({"hunyuan": [*others, row]}, Host.load("h200"))
    assert [(entry.variant, entry.measured_ms) for entry in found] == [("dense", 480.0)]


def test_rows_of_two_files_are_not_ranked_among_each_other() -> None:
    dense, fused = entry("dense", 10, 10), entry("fused_fp8", 12, 9)
    one = [dense._replace(results="a"), fused._replace(results="a")]
    where = "wan, 1120 tokens, eager (a)"
    assert [str(ranking) for ranking in roofline.rankings(one)] == [
        f"{where}: dense < fused_fp8, predicted fused_fp8 < dense"
    ]
    two = [dense._replace(results="a"), fused._replace(results="b")]
    assert list(roofline.rankings(two)) == []


def test_few_tokens_are_predicted_slower_fused_than_dense_where_nothing_is_compiled(
    comparisons,
) -> None:
    eager = {
        found.variant: found.predicted_ms
        for found in comparisons
        if (found.tokens, found.mode) == (1120, "eager")
    }
    assert eager["dense"] < eager["fused_fp8"] < eager["fused_int8"] < eager["torchao_fp8"]


def test_the_command_prints_all_and_fails_where_a_prediction_does(tmp_path, capsys) -> None:
    row = {"variant": "dense", "tokens": 27286, "mode": "eager", "ms": 1e6}
    path, out = tmp_path / "results.json", tmp_path / "out.json"
    path.write_text(json.dumps({"hunyuan": [row, {**row, "variant": "fused_fp8_joined"}]}))
    assert roofline.main([str(path), "--json", str(out)]) == 1
    assert "dense is predicted at 0.00 of its time" in capsys.readouterr().out
    written = json.loads(out.read_text())
    assert [found["variant"] for found in written["comparisons"]] == ["dense"]
    assert len(written["faults"]) == 1


@pytest.mark.parametrize(
    ("text", "found"),
    [(None, "cannot be read"), ("", "cannot be read"), ("{}", "holds no measured step to compare")],
)
def test_a_file_that_proves_nothing_is_refused(tmp_path, capsys, text, found) -> None:
    path = tmp_path / "results.json"
    if text is not None:
        path.write_text(text)
    assert roofline.main([str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}: {found}")
    assert "bench.execution" in error


FEW = json.loads((roofline.RESULTS / "execution_few_tokens.json").read_text(encoding="utf-8"))
ROW = next(row for row in FEW["wan"] if row["variant"] == "dense")


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (None, "wan is no list of rows"),
        ("dense", "wan is no list of rows"),
        ([ROW, 1], "wan[1] is no object"),
        ([ROW | {"variant": "own"}], "wan[0] is of no known variant: 'own'"),
        ([ROW | {"variant": []}], "wan[0] is of no known variant: []"),
        ([ROW | {"mode": "graph"}], "wan[0] is of no known mode: 'graph'"),
        ([ROW | {"tokens": 7}], "wan[0] is at no tokens that the model is measured at: 7"),
        ([ROW | {"ms": 0}], "wan[0] has no time: 0"),
        ([{name: ROW[name] for name in ROW if name != "ms"}], "wan[0] has no time: None"),
    ],
)
def test_rows_that_the_benchmark_does_not_write_are_refused(tmp_path, capsys, rows, found) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"wan": rows}))
    assert roofline.main([str(path)]) == 2
    assert f"{path}: cannot be read: {found}; " in capsys.readouterr().err


def test_a_host_without_a_rate_is_refused(tmp_path, capsys) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"wan": [ROW | {"variant": "fused_fp8"}]}))
    assert roofline.main([str(path), "--host", "a100"]) == 2
    assert "host a100: has no rate for fused_fp8; " in capsys.readouterr().err


def test_files_of_one_name_are_told_apart_and_one_named_twice_counts_once(tmp_path) -> None:
    paths = [tmp_path / folder / "run.json" for folder in ("a", "b")]
    for path, ms in zip(paths, (30.0, 60.0), strict=True):
        path.parent.mkdir()
        path.write_text(json.dumps({"wan": [ROW | {"ms": ms}]}))
    found = roofline.compare_files([*paths, paths[0]], Host.load("h200"))
    assert [(entry.results, entry.measured_ms) for entry in found] == [
        (str(paths[0]), 30.0),
        (str(paths[1]), 60.0),
    ]
    assert list(roofline.rankings(found)) == []


def test_a_step_that_a_file_holds_twice_is_ranked_once() -> None:
    entries = [entry("dense", 12, 10), entry("dense", 10, 10), entry("fused_fp8", 11, 11)]
    (ranking,) = roofline.rankings(entries)
    assert [each.measured_ms for each in ranking.measured] == [10, 11]
    assert roofline.misranked(entries) == []


def test_a_folder_that_is_missing_is_told_before_anything_is_predicted(tmp_path, capsys) -> None:
    out = tmp_path / "missing" / "out.json"
    with pytest.raises(SystemExit) as refusal:
        roofline.main(["--json", str(out)])
    assert refusal.value.code == 2
    assert f"--json: {out.parent} is no folder; make it first" in capsys.readouterr().err
