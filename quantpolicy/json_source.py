"""Read JSON text into plain values that have a canonical form. No schema here.

Refused are NaN and infinite numbers, integers that are not kept exactly, lone surrogates, keys
that stand twice and what is nested too deep. A byte-order mark is accepted; the encoding is UTF-8.
"""

from __future__ import annotations

import json
import math
import re
from typing import NoReturn

from quantpolicy.record import MAX_SAFE_INTEGER

MAX_DEPTH = 64
_DIGITS = len(str(MAX_SAFE_INTEGER))
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_json(text: str | bytes) -> object:
    """Return the value of a JSON text.

    Raises:
        ValueError: not UTF-8, not JSON, or a value that has no canonical form.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8-sig")
    too_deep = f"nested deeper than {MAX_DEPTH} levels"
    try:
        values: object = json.loads(
            text,
            object_pairs_hook=_object_without_duplicates,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
            parse_int=_exact_int,
        )
    except RecursionError as error:
        raise ValueError(too_deep) from error
    if _is_too_deep(values):
        raise ValueError(too_deep)
    if _SURROGATE.search(json.dumps(values, ensure_ascii=False) if "\\u" in text else text):
        raise ValueError("a lone surrogate, which is no character")
    return values


def parse_json_object(text: str | bytes) -> dict[str, object]:
    """Return the object of a JSON text.

    Raises:
        ValueError: see ``parse_json``, or not an object.
    """
    values = parse_json(text)
    if not isinstance(values, dict):
        raise ValueError(f"a JSON {type(values).__name__}, not an object")
    return values


def _object_without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [key for key, _ in pairs]
        twice = next(key for key in names if names.count(key) > 1)
        raise ValueError(f"the key {twice!r} stands twice")
    return values


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no finite number")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is no finite number")
    return value


def _exact_int(text: str) -> int:
    if len(text) > _DIGITS + 1 or abs(int(text)) > MAX_SAFE_INTEGER:
        raise ValueError(f"integer {text[:40]} is beyond {MAX_SAFE_INTEGER}")
    return int(text)


def _is_too_deep(value: object) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [item for parent in level for item in _inner(parent)]
        if not level:
            return False
    return True


def _inner(value: object) -> list[object]:
    """Return the objects and arrays in a value."""
    items: list[object] = []
    if isinstance(value, dict):
        items = list(value.values())
    elif isinstance(value, list):
        items = value
    return [item for item in items if isinstance(item, dict | list)]
