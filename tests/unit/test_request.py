from __future__ import annotations

import pytest
from pydantic import ValidationError

from quantpolicy.errors import RequestError
from quantpolicy.record import sha256_of
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
        ("frames", 2**53),
        ("memory_bytes", 2**53),
        ("min_features", 10**20),
    ],
)
def test_values_out_of_range_are_refused(field: str, value: object) -> None:
    for build in (
        lambda: Request.model_validate({field: value}),
        lambda: Request(**{field: value}),
    ):
        with pytest.raises(RequestError) as caught:
            build()
        assert caught.value.where == field
        assert caught.value.remedy


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
    with pytest.raises(RequestError, match="is not WIDTHxHEIGHT in pixels, such as 1280x720"):
        Request(resolution=text)


def test_lift_is_a_sorted_set() -> None:
    assert Request(lift=("b", "a", "b")).lift == ("a", "b")
    assert Request(lift=["b", "a"]) == Request(lift=["a", "b", "a"])


def test_a_request_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Request().speed = Tier.OFF


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"transformer": "fp9"},
            "transformer: unknown scheme choice 'fp9'; known: auto, dense, fp8, int8, "
            "layerwise_fp8, mxfp8, nvfp4; did you mean 'fp8'.",
        ),
        (
            {"min_features": 0},
            "min_features: 0 where a number of at least 1 is meant; write such a number.",
        ),
        (
            {"frames": 2**53},
            "frames: 9007199254740992 where a number of at most 9007199254740991 is meant; "
            "write such a number.",
        ),
        (
            {"resolution": "12"},
            "resolution: '12' is not WIDTHxHEIGHT in pixels, such as 1280x720; correct the value.",
        ),
        ({"frames": "x"}, 'frames: "x" where a whole number is meant; write a whole number.'),
        ({"lift": [3]}, "lift: 3 where text is meant; quote it."),
        (3, "request: 3 where a mapping is meant; write a mapping."),
    ],
)
def test_a_fault_is_one_sentence(values: object, sentence: str) -> None:
    with pytest.raises(RequestError) as caught:
        Request.model_validate(values)
    assert str(caught.value) == sentence


def test_the_largest_numbers_have_canonical_json() -> None:
    most = 2**53 - 1
    request = Request(memory_bytes=most, frames=most, min_features=most)
    assert len(sha256_of(request.model_dump(mode="json"))) == 64


def test_a_copy_and_its_json_read_back() -> None:
    request = Request().model_copy(update={"frames": 3})
    assert Request.model_validate_json(request.model_dump_json()) == request
