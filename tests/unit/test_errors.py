from __future__ import annotations

import pytest

from quantpolicy import errors
from quantpolicy.errors import (
    CorruptCheckpointError,
    DeniedError,
    KernelMountError,
    Mismatch,
    PlanMismatchError,
    QuantPolicyError,
    RequestError,
    RuleTableError,
    StaleCheckpointError,
)
from quantpolicy.plan import Decision
from quantpolicy.schemes import Cause, Scheme

TREE = [
    (QuantPolicyError, Exception, 1),
    (RuleTableError, QuantPolicyError, 2),
    (RequestError, QuantPolicyError, 2),
    (DeniedError, RequestError, 1),
    (PlanMismatchError, QuantPolicyError, 1),
    (StaleCheckpointError, QuantPolicyError, 1),
    (CorruptCheckpointError, QuantPolicyError, 3),
    (KernelMountError, QuantPolicyError, 1),
]


@pytest.mark.parametrize(("error", "parent", "exit_code"), TREE)
def test_the_tree_and_its_exit_codes(error, parent, exit_code) -> None:
    assert issubclass(error, parent)
    assert error.exit_code == exit_code


def test_the_tree_is_complete() -> None:
    public = {
        value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception) and not name.startswith("_")
    }
    assert public == {error for error, _, _ in TREE}
    assert all(error.__name__ in (errors.__doc__ or "") for error in public)


@pytest.mark.parametrize(
    ("allowed", "remedy", "sentence"),
    [
        ("known: a, b", "choose one", "f.yaml:3 x: found y; known: a, b; choose one."),
        ("", "choose one.", "f.yaml:3 x: found y; choose one."),
        ("known: a, b", "", "f.yaml:3 x: found y; known: a, b."),
        ("", "", "f.yaml:3 x: found y."),
    ],
)
def test_a_message_is_one_sentence(allowed: str, remedy: str, sentence: str) -> None:
    error = QuantPolicyError("f.yaml:3 x", "found y", allowed=allowed, remedy=remedy)
    assert str(error) == sentence
    assert error.to_dict() == {
        "error": "QuantPolicyError",
        "where": "f.yaml:3 x",
        "found": "found y",
        "allowed": allowed,
        "remedy": remedy,
        "exit_code": 1,
    }


def test_a_rule_table_error_names_the_places_of_the_others() -> None:
    others = [RuleTableError(f"f:{line}", "bad") for line in range(2, 12)]
    assert str(RuleTableError("f:1", "bad", remedy="fix it", others=others[:2])) == (
        "f:1: bad; fix it (also wrong: f:2, f:3)."
    )
    error = RuleTableError("f:1", "bad", remedy="fix it", others=others)
    assert str(error).endswith("f:8, f:9, and 2 more).")
    assert error.others == tuple(others)
    assert error.to_dict()["others"] == [other.to_dict() for other in others]


def test_a_denial_carries_its_trace() -> None:
    decision = Decision(
        component="transformer",
        candidate=Scheme.FP8,
        accepted=False,
        because=Cause.BLACK_FRAMES,
        rule="x.deny.fp8",
        detail="denied",
    )
    error = DeniedError(
        "x transformer", "fp8", decisions=[decision], rule="x.deny.fp8", evidence=["d.x"]
    )
    values = error.to_dict()
    assert (error.decisions, error.rule, error.evidence) == ((decision,), "x.deny.fp8", ("d.x",))
    assert (values["rule"], values["evidence"], values["exit_code"]) == ("x.deny.fp8", ["d.x"], 1)
    assert values["decisions"] == [
        {
            "component": "transformer",
            "candidate": "fp8",
            "accepted": False,
            "because": "black_frames",
            "rule": "x.deny.fp8",
            "detail": "denied",
            "predicted_ms": None,
            "predicted": [],
        }
    ]


@pytest.mark.parametrize("error", [PlanMismatchError, StaleCheckpointError, CorruptCheckpointError])
def test_all_mismatches_are_kept_and_eight_are_shown(error) -> None:
    items = [Mismatch("shape", f"layer{i}", "[2, 2]", "[3, 2]") for i in range(10)]
    raised = error("model", items, remedy="resolve again")
    first = "[shape] layer0: expected [2, 2], found [3, 2]"
    assert str(raised).startswith(f"model: {first}; [shape] layer1: ")
    assert str(raised).endswith("layer7: expected [2, 2], found [3, 2]; and 2 more; resolve again.")
    assert raised.mismatches == tuple(items)
    assert len(raised.to_dict()["mismatches"]) == 10
    assert raised.to_dict()["mismatches"][9] == {
        "code": "shape",
        "subject": "layer9",
        "expected": "[2, 2]",
        "found": "[3, 2]",
    }
    assert repr(items[0]) == "Mismatch('shape', 'layer0', '[2, 2]', '[3, 2]')"
    assert str(error("model", items, remedy="r", found="given")) == "model: given; r."
