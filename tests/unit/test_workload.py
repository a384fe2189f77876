from __future__ import annotations

import pytest
from by_hand import (
    linear,
    plan_of,
    target,
)

from quantpolicy import RequestError

GIB = 1 << 30


def test_rows_of_the_image_stream_follow_the_request() -> None:
    goal = target(linear("image"), linear("joint", rows=4096 + 40), linear("text", rows=40))
    plan = plan_of(goal, resolution="1280x720", frames=81)
    assert (plan.workload.image_tokens, plan.workload.declared) == (80 * 45 * 21, False)
    declared = plan_of(goal)
    assert (declared.workload.image_tokens, declared.workload.declared) == (4096, True)
    ours, theirs = (next(d for d in p.decisions if d.accepted) for p in (plan, declared))
    assert ours.predicted_ms > 10 * theirs.predicted_ms


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"frames": 81}, "give --resolution"),
        ({"resolution": "1280x720"}, "give --frames too"),
        ({"resolution": "10x10", "frames": 1}, "at least 16 pixels"),
    ],
)
def test_an_incomplete_workload_is_an_error(request_, message) -> None:
    with pytest.raises(RequestError, match=message):
        plan_of(target(), **request_)


def test_notes_tell_domain_confidence_and_the_generic_family() -> None:
    inside = plan_of(target())
    assert not any("measured at" in note for note in inside.notes)
    outside = plan_of(target(), resolution="1280x720", frames=81)
    note = "transformer: fp8 is measured at 1000 to 5000 image tokens; this workload has 75600"
    assert note in outside.notes
    generic = plan_of(target(family="generic"), resolution="64x64")
    assert any("in no family of the table" in note for note in generic.notes)
    assert any("resolution and frames are not used" in note for note in generic.notes)
    assert "transformer: fp8 is derived, not measured on generic" in generic.notes
    assert generic.workload is None
