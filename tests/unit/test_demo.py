from __future__ import annotations

import json

import pytest

from prequant import demo
from prequant.cli import main
from prequant.demo import Step, run_demo


@pytest.fixture(scope="module")
def steps() -> list[Step]:
    return run_demo()


def test_every_step_is_as_it_should_be(steps: list[Step]) -> None:
    assert [step.what for step in steps if not step.ok] == []


def test_every_promise_is_shown_for_both_schemes(steps: list[Step]) -> None:
    whats = [step.what for step in steps]
    for scheme in ("int8", "fp8"):
        shown = [what.removeprefix(f"{scheme}: ") for what in whats if what.startswith(scheme)]
        assert shown[:4] == ["bake", "validate --full", "edit the header", "flip a bit of a weight"]
        assert shown[-3:] == [
            "load with prequant",
            "load with plain diffusers",
            "load for another host",
        ]
    assert "fp8: bake without the 3 exclusions" in whats
    assert "resolve the released model for h200" in whats


def test_tampering_is_told_by_its_codes(steps: list[Step]) -> None:
    results = {step.what: step.result for step in steps}
    assert results["fp8: edit the header"].startswith("refused as corrupt (exit 3): header_digest")
    assert results["int8: flip a bit of a weight"] == "refused as corrupt (exit 3): shard_sha256"
    assert results["fp8: bake without the 3 exclusions"].startswith("refused as stale (exit 1)")


@pytest.mark.parametrize("ok", [True, False])
def test_a_step_that_is_wrong_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ok: bool
) -> None:
    monkeypatch.setattr(demo, "run_demo", lambda: [Step(what="bake", result="24 layers", ok=ok)])
    assert main(["demo", "--json"]) == (0 if ok else 1)
    assert json.loads(capsys.readouterr().out) == [
        {"what": "bake", "result": "24 layers", "ok": ok}
    ]
    assert main(["demo"]) == (0 if ok else 1)
    table = capsys.readouterr().out.splitlines()
    assert table[1].split() == ["bake", "24", "layers", "yes" if ok else "NO"]
