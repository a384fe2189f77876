from __future__ import annotations

import pytest
from pydantic import ValidationError

from quantpolicy.request import Request
from quantpolicy.schemes import Confidence, Execution, Quality, SchemeChoice, Tier


def test_the_defaults() -> None:
    assert Request().model_dump(mode="json") == {
        "speed": "auto",
        "quality": "lossless",
        "transformer": "auto",
        "text_encoder": "auto",
        "vae": "auto",
        "execution": "torchao",
        "memory_bytes": None,
        "resolution": None,
        "frames": None,
        "min_features": None,
        "lift": [],
        "confidence": "derived",
    }


def test_words_become_enums() -> None:
    request = Request(
        speed="off",
        quality="high",
        transformer="fp8",
        text_encoder="layerwise_fp8",
        vae="dense",
        execution="fused",
        confidence="measured",
    )
    assert request.speed is Tier.OFF
    assert request.quality is Quality.HIGH
    assert request.transformer is SchemeChoice.FP8
    assert request.text_encoder is SchemeChoice.LAYERWISE_FP8
    assert request.vae is SchemeChoice.DENSE
    assert request.execution is Execution.FUSED
    assert request.confidence is Confidence.MEASURED


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("speed", "fast"),
        ("speed", False),
        ("quality", "low"),
        ("transformer", "fp9"),
        ("transformer", None),
        ("execution", "triton"),
        ("memory_bytes", 0),
        ("memory_bytes", -1),
        ("frames", 0),
        ("min_features", 0),
        ("confidence", "certain"),
        ("unknown", 1),
    ],
)
def test_values_out_of_range_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValidationError) as caught:
        Request.model_validate({field: value})
    assert [error["loc"] for error in caught.value.errors()] == [(field,)]


@pytest.mark.parametrize(
    ("text", "expected"), [("1280x720", (1280, 720)), ("16x16", (16, 16)), (None, None)]
)
def test_width_and_height(text: str | None, expected: tuple[int, int] | None) -> None:
    assert Request(resolution=text).width_height == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1280",
        "1280X720",
        "1280*720",
        "0x720",
        "1280x0",
        "1x1",
        " 1280x720",
        "1e3x720",
        "1280x720\n",
        "1280x-720",
        "100000x1000000",
    ],
)
def test_a_resolution_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="is not WIDTHxHEIGHT in pixels, such as 1280x720"):
        Request(resolution=text)


def test_lift_is_a_sorted_set() -> None:
    assert Request(lift=("b", "a", "b")).lift == ("a", "b")
    assert Request(lift=["b", "a"]) == Request(lift=["a", "b", "a"])


def test_a_request_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Request().speed = Tier.OFF
