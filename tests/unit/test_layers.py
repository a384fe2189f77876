from __future__ import annotations

import pytest
from by_hand import (
    BLOCKS,
    TABLE_TEXT,
    component,
    decisions_of,
    kept_of,
    linear,
    plan_of,
    table_from,
    target,
)

from quantpolicy.errors import DeniedError
from quantpolicy.schemes import Scheme

GIB = 1 << 30


def test_reasons_come_in_a_fixed_order() -> None:
    goal = target(
        linear("embed", 15, 15, dtype="float32"),
        linear("scale", 15, 15, dtype="float32"),
        linear("half", 15, 15, dtype="float16"),
        linear("odd", 341, 100, rows=1),
        linear("small", 4096, 256, rows=1),
        linear("mod", rows=1),
        linear("short", rows=16),
        linear("enough", rows=17),
        family="ruled",
    )  # fmt: skip
    plan = plan_of(goal, transformer="int8")
    assert kept_of(plan) == {
        "embed": ("zero_rows", "ruled.keep.embed"),
        "scale": ("fp32_kept", "derived.fp32_kept"),
        "half": ("alignment", "derived.alignment"),
        "odd": ("alignment", "derived.alignment"),
        "small": ("min_features", "derived.min_features"),
        "short": ("small_m", "derived.small_m"),
    }
    assert [(layer.name, layer.pad_rows) for layer in plan.components["transformer"].layers] == [
        ("mod", 20), ("enough", 0),
    ]  # fmt: skip


def test_a_dtype_that_the_scheme_is_not_made_from_is_kept() -> None:
    plan = plan_of(target(linear("half", dtype="float16"), *BLOCKS), transformer="fp8")
    assert kept_of(plan) == {"half": ("weight_dtype", "derived.weight_dtype")}


def test_a_component_of_another_dtype_is_refused() -> None:
    goal = target()
    half = component(*BLOCKS, dtype="float16")
    goal = goal.model_copy(update={"components": {"transformer": half}})
    with pytest.raises(DeniedError, match="made from bfloat16; transformer is loaded in float16"):
        plan_of(goal, transformer="fp8")


def test_modules_named_by_keep_in_fp32_stay() -> None:
    part = component(*BLOCKS, linear("time_embedder.linear_1"), keep_in_fp32=("time_embedder",))
    goal = target().model_copy(update={"components": {"transformer": part}})
    plan = plan_of(goal)
    assert kept_of(plan) == {"time_embedder.linear_1": ("fp32_kept", "derived.fp32_kept")}


def test_fp8_keeps_layers_below_the_row_floor_of_the_host() -> None:
    goal = target(*BLOCKS, linear("ff.out", 3072, 12288, rows=41), linear("ff.ok", 3072, 12288))
    assert kept_of(plan_of(goal, "h200")) == {"ff.out": ("small_m", "derived.small_m")}
    assert kept_of(plan_of(goal, "b200")) == {}


def test_unknown_rows_are_padded_to_the_floor_and_noted() -> None:
    plan = plan_of(target(linear("a", rows=None)), transformer="int8")
    assert plan.components["transformer"].layers[0].pad_rows == 17
    assert any("rows of 1 Linears are not known" in note for note in plan.notes)


def test_a_stream_that_can_be_short_counts_with_its_fewest_rows() -> None:
    plan = plan_of(target(*BLOCKS, linear("side.proj", rows=256)), transformer="int8")
    assert kept_of(plan) == {"side.proj": ("small_m", "derived.small_m")}


def test_a_token_with_a_number_tells_blocks_apart() -> None:
    plan = plan_of(target(family="floored"))
    assert kept_of(plan) == {"blocks.0.to_q": ("outliers", "floored.first.block")}
    assert [layer.name for layer in plan.components["transformer"].layers] == [
        "blocks.1.to_q", "blocks.2.to_q",
    ]  # fmt: skip


def test_min_features_of_the_request_replaces_the_tables() -> None:
    goal = target(*BLOCKS, linear("narrow", 4096, 256))
    assert kept_of(plan_of(goal)) == {"narrow": ("min_features", "derived.min_features")}
    assert kept_of(plan_of(goal, min_features=256)) == {}


def test_a_scheme_that_takes_no_layer_is_refused_with_the_reasons() -> None:
    goal = target(linear("a", 15, 15))
    assert decisions_of(plan_of(goal))["fp8"] == (False, "no_layers", "")
    with pytest.raises(DeniedError, match=r"takes no Linear .* alignment by derived\.alignment"):
        plan_of(goal, transformer="fp8")


def test_zero_rows_need_the_floor() -> None:
    no_floor = table_from(TABLE_TEXT.replace(", activation_floor: 1.0e-12", ""))
    goal = target(*BLOCKS, linear("pad", zero_rows=True))
    assert kept_of(plan_of(goal)) == {}
    assert kept_of(plan_of(goal, rules=no_floor)) == {"pad": ("zero_rows", "derived.zero_rows")}


def test_experts_choose_together() -> None:
    goal = target(transformer_2=component(linear("a", 15, 15)))
    plan = plan_of(goal)
    assert {part.scheme for part in plan.components.values()} == {Scheme.DENSE}
    assert decisions_of(plan, "transformer")["fp8"] == (False, "no_layers", "")
