from __future__ import annotations

import re

import pytest

from quantpolicy.json_source import MAX_DEPTH, parse_json, parse_json_object


def test_plain_values_are_read_as_they_are() -> None:
    text = (
        '{"a": [1, -2.5, 1e20, null, true], "b": {"c": "\\ud83d\\ude00"}, "d": -9007199254740991}'
    )
    assert parse_json_object(text.encode()) == {
        "a": [1, -2.5, 1e20, None, True],
        "b": {"c": "\U0001f600"},
        "d": -9007199254740991,
    }


def test_a_byte_order_mark_is_accepted() -> None:
    assert parse_json_object(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": NaN}', "NaN is no finite number"),
        ('{"a": [-Infinity]}', "-Infinity is no finite number"),
        ('{"a": 1e400}', "1e400 is no finite number"),
        ('{"a": 9007199254740992}', "integer 9007199254740992 is beyond 9007199254740991"),
        ('{"a": ' + "-1" + "0" * 5000 + "}", "integer -1" + "0" * 38 + " is beyond"),
        ('{"a": "\\udc00"}', "a lone surrogate, which is no character"),
        ('{"\\ud800": 1}', "a lone surrogate, which is no character"),
        ('{"a": "\ud800"}', "a lone surrogate, which is no character"),
        ('{"a": {"b": 1, "b": 2}}', "the key 'b' stands twice"),
        ('{"a": ' + "[" * 200_000, "nested deeper than 64 levels"),
        ("[1]", "a JSON list, not an object"),
        (b"\xff{}", "'utf-8' codec can't decode"),
    ],
)
def test_what_has_no_canonical_form_is_refused(text: str | bytes, found: str) -> None:
    with pytest.raises(ValueError, match=re.escape(found)):
        parse_json_object(text)


def test_depth_is_limited_at_64_levels() -> None:
    deepest = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert MAX_DEPTH == 64
    assert parse_json("[[]]") == [[]]
    assert isinstance(parse_json(deepest), list)
    with pytest.raises(ValueError, match="nested deeper than 64 levels"):
        parse_json(f"[{deepest}]")
