from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import rfc8785
from by_hand import TABLE_TEXT, linear, plan_of, table_from, target
from hypothesis import given, settings
from hypothesis import strategies as st

from quantpolicy import Host, QuantPlan, Request, RequestError, load_rules, resolve
from quantpolicy.record import canonical_json
from quantpolicy.schemes import Scheme

PLAN = plan_of(target(linear("a"), linear("b", rows=1)), transformer="int8")


def test_json_has_the_stable_names() -> None:
    values = json.loads(PLAN.to_json())
    assert set(values) == {
        "schema_version", "family", "tier", "quality", "execution", "host", "request", "fusions",
        "rules_digest", "workload", "components", "decisions", "kernels", "compile", "memory",
        "lifted", "notes", "weights_digest", "plan_digest", "kernel_decisions",
    }  # fmt: skip
    part = values["components"]["transformer"]
    assert {"scheme", "confidence", "layers", "kept"} <= set(part)
    assert part["layers"] == [
        {"name": "a", "scheme": "int8", "shape": [4096, 4096], "dtype": "bfloat16", "pad_rows": 0}
    ]
    assert {key: part["kept"][0][key] for key in ("name", "because", "rule")} == {
        "name": "b", "because": "small_m", "rule": "derived.small_m",
    }  # fmt: skip
    assert set(values["decisions"][0]) == {
        "component", "candidate", "accepted", "because", "rule", "detail", "predicted_ms",
        "predicted",
    }  # fmt: skip
    assert set(values["memory"]) == {"items", "total_bytes", "budget_bytes", "fits"}


@pytest.mark.parametrize("family", sorted(load_rules().families))
def test_a_plan_reads_back_equal_and_is_canonical(family: str) -> None:
    plan = resolve(family, host=Host.load("h200"))
    text = plan.to_json()
    assert text.encode() == rfc8785.dumps(json.loads(text))
    again = QuantPlan.from_json(text)
    assert again == plan
    assert again.to_json() == text


def test_a_plan_file_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(json.loads(PLAN.to_json()), indent=3), encoding="utf-8")
    assert QuantPlan.from_file(path) == PLAN


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: plan.pop("tier"), r"plan\.tier: Field required"),
        (lambda plan: plan.update(extra=1), r"plan\.extra"),
        (lambda plan: plan.update(schema_version=99), r"plan\.schema_version: Input should be 1"),
        (lambda plan: plan.pop("schema_version"), r"plan\.schema_version: Input should be 1"),
        (lambda plan: plan.update(tier="fast"), r"plan\.tier"),
        (
            lambda plan: plan["request"].update(frames=0),
            r"^plan\.request\.frames: 0 where a number of at least 1 is meant; resolve the plan",
        ),
        (lambda plan: plan.update(family="other"), r"plan\.plan_digest: .* does not match"),
        (lambda plan: plan.pop("plan_digest"), r"plan\.plan_digest: None does not match"),
        (
            lambda plan: plan["components"]["transformer"]["layers"][0].update(dtype="float16"),
            r"plan\.weights_digest: .* does not match",
        ),
    ],
)
def test_an_altered_plan_is_refused_and_the_field_named(change, message: str) -> None:
    values = json.loads(PLAN.to_json())
    change(values)
    with pytest.raises(RequestError, match=message):
        QuantPlan.from_dict(values)


@pytest.mark.parametrize("text", ["", "[]", "{", "null"])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match=r"not JSON: "):
        QuantPlan.from_json(text)


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ('"pad_rows":0', '"pad_rows":9223372036854775808', "integer 9223372036854775808 is beyond"),
        ('"pad_rows":0', '"pad_rows":NaN', "NaN is no finite number"),
        ('"name":"a"', '"name":"\\ud800"', "a lone surrogate, which is no character"),
        ('"notes":[', '"notes":' + "[" * 200000, "nested deeper than 64 levels"),
        ('"pad_rows":0', '"pad_rows":0,"pad_rows":0', "the key 'pad_rows' stands twice"),
    ],
)
def test_a_plan_without_canonical_json_is_refused(old: str, new: str, found: str) -> None:
    text = PLAN.to_json()
    assert old in text
    with pytest.raises(RequestError) as caught:
        QuantPlan.from_json(text.replace(old, new, 1), where="plan.json")
    assert caught.value.where == "plan.json"
    assert caught.value.found.startswith(f"not JSON: {found}")


def test_a_float_that_becomes_an_inexact_integer_is_refused() -> None:
    text = PLAN.to_json().replace('"pad_rows":0', '"pad_rows":1152921504606846976.0', 1)
    with pytest.raises(RequestError) as caught:
        QuantPlan.from_json(text)
    assert caught.value.where == "plan"
    assert caught.value.found.startswith("has no canonical JSON: 1152921504606846976 ")


@pytest.mark.parametrize(
    ("scheme", "found"),
    [
        ("dense", "layer a is dense; a dense Linear is a kept one"),
        ("fp8", "layer a has scheme fp8, the component int8"),
    ],
)
def test_a_layer_of_another_scheme_is_refused(scheme: str, found: str) -> None:
    values = json.loads(PLAN.to_json())
    values["components"]["transformer"]["layers"][0]["scheme"] = scheme
    with pytest.raises(RequestError) as caught:
        QuantPlan.from_dict(values)
    assert caught.value.where == "plan.components.transformer"
    assert caught.value.found == found


def test_a_missing_plan_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        QuantPlan.from_file(tmp_path / "none.json")


def test_host_only_choices_leave_the_weights_digest() -> None:
    goal = target(linear("a"), linear("b"))
    base = plan_of(goal, "b200")
    for other in (
        plan_of(goal, "h200"),
        plan_of(goal, "l40s"),
        plan_of(goal, "b200", speed="max", quality="high"),
        plan_of(goal, "b200", transformer="fp8", memory_bytes=1 << 40),
    ):
        assert other.weights_digest == base.weights_digest
        assert other.plan_digest != base.plan_digest


def test_pad_rows_leave_the_weights_digest() -> None:
    goal = target(linear("mod"), family="ruled")
    wider = table_from(TABLE_TEXT.replace("rows: 20", "rows: 32"))
    one, two = plan_of(goal, "a100"), plan_of(goal, "a100", rules=wider)
    assert one.components["transformer"].layers != two.components["transformer"].layers
    assert one.weights_digest == two.weights_digest


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": "float16"},
        {"keep_in_fp32": ("norm",)},
        {"layers": ()},
        {"kept": ()},
        {"scheme": Scheme.FP8},
        {"settings": PLAN.components["transformer"].settings.model_copy(
            update={"activation_floor": 1e-6})},
    ],
)  # fmt: skip
def test_what_decides_bytes_enters_the_weights_digest(changed: dict[str, object]) -> None:
    part = PLAN.components["transformer"]
    other = part.model_copy(update=changed)
    assert other.weights_digest != part.weights_digest


def test_an_excluded_layer_changes_the_weights_digest() -> None:
    goal = target(linear("embed"), linear("a"), family="ruled")
    other = table_from(TABLE_TEXT.replace("tokens: [embed]", "tokens: [other]"))
    one, two = plan_of(goal, "a100"), plan_of(goal, "a100", rules=other)
    assert one.weights_digest != two.weights_digest
    assert one.rules_digest != two.rules_digest


JSON = st.recursive(
    st.none() | st.booleans() | st.text() | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=500, deadline=None)
@given(JSON)
def test_canonical_json_equals_the_reference(value: object) -> None:
    try:
        expected = rfc8785.dumps(value)
    except rfc8785.CanonicalizationError:
        with pytest.raises(ValueError, match=r".+"):
            canonical_json(value)
        return
    assert canonical_json(value) == expected


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0, "0"), (-0.0, "0"), (5.0, "5"), (1e-12, "1e-12"), (1e-7, "1e-7"), (1e-6, "0.000001"),
        (-1.5e-5, "-0.000015"), (1e-4, "0.0001"), (1e15, "1000000000000000"),
        (9039990416699520.0, "9039990416699520"), (1e21, "1e+21"),
        (0.1 + 0.2, "0.30000000000000004"),
    ],
)  # fmt: skip
def test_numbers_print_as_in_ecmascript(number: float, text: str) -> None:
    assert canonical_json([number, "\0" + text]).decode() == f'[{text},"\\u0000{text}"]'


@pytest.mark.parametrize("value", [math.nan, math.inf, 2**53, "\ud800"])
def test_values_without_a_canonical_form_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r".+"):
        canonical_json([value])


def test_requests_are_checked_when_formed() -> None:
    assert Request(lift=["b", "a", "b"]).lift == ("a", "b")
    with pytest.raises(RequestError, match="1280x720"):
        Request(resolution="720p")
