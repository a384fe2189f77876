"""Every family on every preset is planned as the golden files say; see ``regenerate``."""

from __future__ import annotations

import pytest
from regenerate import PLANS, render, summarise_family

from quantpolicy import load_rules

FAMILIES = tuple(load_rules().families)


def test_there_is_a_golden_file_for_every_family() -> None:
    assert {path.stem for path in PLANS.glob("*.json")} == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_plans_are_the_golden_ones(family: str) -> None:
    golden = (PLANS / f"{family}.json").read_text(encoding="utf-8")
    assert render(summarise_family(family)).splitlines() == golden.splitlines(), (
        "run `python -m tests.golden.regenerate` and review the difference"
    )
