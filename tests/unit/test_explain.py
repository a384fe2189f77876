from __future__ import annotations

import pytest
from by_hand import BLOCKS, component, linear, plan_of, target

from quantpolicy import Host, load_rules, resolve
from quantpolicy.schemes import ComponentKind
from quantpolicy.text import align, format_bytes


def test_a_small_plan_is_explained_in_full() -> None:
    goal = target(
        *BLOCKS,
        linear("blocks.0.mod", rows=1),
        linear("blocks.1.mod", rows=1),
        vae=component(kind=ComponentKind.VAE, inventory=None, dense_bytes=1000),
    )
    text = plan_of(goal, transformer="int8", quality="high").explain()
    plan = plan_of(goal, transformer="int8", quality="high")
    assert (
        text
        == f"""\
plain on h200 (cuda, sm90, data_center, 139 GiB)
  tier compile (regional compile), quality high, execution torchao
  4096 image tokens, batch 1, declared inputs
  weights {plan.weights_digest[:16]}, plan {plan.plan_digest[:16]}

Components
  transformer  int8   derived   3 Linears quantised, 2 kept  96.00 MiB -> 48.06 MiB  per_row, int8
  vae          dense  measured

Decisions
  transformer  fp8    rejected  requested        int8 was asked for
  transformer  int8   accepted  requested        {plan.decisions[1].detail}
  transformer  dense  rejected  requested        int8 was asked for
  vae          dense  accepted  dense_component  {plan.decisions[3].detail}

Predicted ms of a step, without what fusions save
                      Linears  attention  pointwise  launches  total
  transformer  fp8      0.352      0.000      0.000     0.041  0.393
  transformer  int8     0.758      0.000      0.000     0.035  0.793
  transformer  dense    0.547      0.000      0.000     0.010  0.557

Kernels
  transformer  gated_residual  lossless  planned  {plan.kernel_decisions[0].detail}
  transformer  qk_rms_norm     high      planned  {plan.kernel_decisions[1].detail}

Kept dense
  transformer  blocks.*.mod  2  small_m  derived.small_m

Memory
  transformer  int8 Linears                      50,393,088
  transformer  dense Linears                     67,108,864
  transformer  other parameters and buffers             100
  vae          dense weights, not itemised            1,000
  runtime      activations                      134,217,728
  runtime      device context and workspaces  1,073,741,824
  total        fits 149,250,113,536           1,325,462,604

Notes
  - recognised by a test
  - {plan.notes[1]}
  - transformer: int8 is derived, not measured on plain
"""
    )


def test_detail_of_an_accepted_decision_carries_the_numbers() -> None:
    plan = plan_of(target())
    fp8, _, dense = plan.decisions
    assert fp8.detail == (
        f"48.05 MiB of weights instead of 96.00 MiB; predicted {fp8.predicted_ms:.1f} ms a "
        f"step against {dense.predicted_ms:.1f} ms dense; the plan needs 1.17 GiB, within "
        "139.00 GiB"
    )


def test_lifted_rules_and_padding_are_shown() -> None:
    plan = plan_of(target(linear("mod", rows=1), family="ruled"), lift=["ruled.pad.mod"])
    assert "lifted" not in plan.explain()
    plan = plan_of(target(family="ruled"), lift=["ruled.deny.fp8"])
    assert "  lifted rules: ruled.deny.fp8\n" in plan.explain()
    plan = plan_of(target(linear("mod", rows=1), family="ruled"), transformer="int8")
    assert "per_row, int8, 1 padded" in plan.explain()


@pytest.mark.parametrize("family", sorted(load_rules().families))
def test_every_decision_and_kept_pattern_of_a_family_is_told(family: str) -> None:
    plan = resolve(family, host=Host.load("rtx4090"))
    text = plan.explain()
    assert "\x1b" not in text
    for decision in plan.decisions:
        assert decision.detail in text
    for component_plan in plan.components.values():
        for layer in component_plan.kept:
            assert layer.rule in text
    assert f"{plan.memory.total_bytes:,}" in text


def test_columns_are_aligned() -> None:
    rows = [["a", "1"], ["bcd", "10"]]
    assert align(rows, right=frozenset({1}), indent="  ") == ["  a     1", "  bcd  10"]
    assert align(rows) == ["a    1", "bcd  10"]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1 << 20, "1.00 MiB"),
        (483 * 2**20 + 2**19, "483.50 MiB"),
        (1 << 30, "1.00 GiB"),
        (3 << 29, "1.50 GiB"),
    ],
)
def test_sizes_are_shown_in_the_unit_that_they_fill(count: int, text: str) -> None:
    assert format_bytes(count) == text
