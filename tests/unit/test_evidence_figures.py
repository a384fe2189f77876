"""Measured evidence says what the result files say."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest

from quantpolicy import load_rules
from quantpolicy.rule_schema import EvidenceKind, EvidenceRecord

ROOT = Path(__file__).parents[2]
RULES = load_rules()
RESULTS = sorted((ROOT / "bench/results").glob("*.json"))
# A command, the revision it ran at, and the file that it wrote.
SOURCE = re.compile(r"(python -m bench\.[^,;:]+) at revision (\w+), (bench/results/\w+\.json)")
RECORDS = {
    name: record
    for name, record in RULES.evidence.items()
    if record.kind is EvidenceKind.MEASURED and "bench" in record.source
}


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


@functools.cache
def read(path: Path) -> dict[str, object]:
    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def results_of(record: EvidenceRecord) -> list[dict[str, object]]:
    return [read(ROOT / name) for _, _, name in SOURCE.findall(record.source)]


def numbers(value: object, key: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number below a value with the key that it stands under."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from numbers(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from numbers(item, key)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key, value


def stands_in(metric: str, value: float, results: list[dict[str, object]]) -> bool:
    """Tell whether a number, rounded as the metric is, stands under a key of the metric's words."""
    step = Decimal(repr(value).removesuffix(".0"))
    words = set(re.split(r"[_ ]", metric))
    return any(
        Decimal(repr(number)).quantize(step) == step
        for key, number in numbers(results)
        if set(re.split(r"[_ ]", key)) <= words
    )


def test_there_are_measured_records() -> None:
    assert len(RECORDS) > 20


@pytest.mark.parametrize("name", RECORDS)
def test_source_of_evidence_is_that_of_the_result_file(name: str) -> None:
    record = RECORDS[name]
    sources = SOURCE.findall(record.source)
    assert len(sources) == record.source.count("bench/results/") > 0
    for (command, revision, _), results in zip(sources, results_of(record), strict=True):
        assert results["revision"] == revision
        assert f"{results['command']} ".startswith(f"{command} ")
        assert results["versions"] == record.versions
        assert results["gpu"] == f"NVIDIA {record.gpu}"
    assert record.date.isoformat() == max(results["date"] for results in results_of(record))


@pytest.mark.parametrize("name", RECORDS)
def test_metrics_of_evidence_stand_in_the_result_file(name: str) -> None:
    record = RECORDS[name]
    results = results_of(record)
    wrong = {
        metric: value
        for metric, value in record.metrics.items()
        if not stands_in(metric, value, results)
    }
    assert wrong == {}


def test_a_figure_that_no_result_file_holds_is_found() -> None:
    results: list[dict[str, object]] = [{"rows": [{"op": "a", "ms": 1.249, "eager_ms": 3.0}]}]
    assert stands_in("a_ms", 1.25, results)
    assert stands_in("a_eager_ms", 3, results)
    assert not stands_in("a_ms", 1.24, results)
    assert not stands_in("a_ms", 3, results)
    assert not stands_in("a_error", 1.25, results)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_result_file_says_where_it_comes_from(path: Path) -> None:
    results = read(path)
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", str(results["date"]))
    assert re.fullmatch(r"[0-9a-f]{7,}", str(results["revision"]))
    assert re.fullmatch(r"python -m bench\.\w+( [^/~ ][^ ]*)*", str(results["command"]))
    assert results.keys() & {"gpu", "cpu", "machine"}
    assert results.keys() & {"versions", "torch"}
