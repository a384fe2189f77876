"""The pydantic base of every record (frozen, unknown keys forbidden) and canonical JSON."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from decimal import Decimal

from pydantic import BaseModel, ConfigDict

MAX_SAFE_INTEGER = 2**53 - 1

# How the standard encoder writes the strings that stand for floats between 1e-6 and 1e-4.
_MARKED = re.compile(r'"\\u0000(-?0\.0000[0-9]+)"')


class Record(BaseModel):
    """A frozen record that refuses unknown keys and numbers that are not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


def canonical_json(value: object) -> bytes:
    """Return the RFC 8785 canonical JSON of plain JSON values, as UTF-8 bytes.

    The standard encoder is far faster, and equal where keys are ASCII and numbers print alike;
    anything else goes to the reference implementation.

    Raises:
        ValueError: a number or a string has no canonical form.
    """
    decimals: list[str] = []
    try:
        plain = _plain(value, decimals)
    except _UnlikeError:
        return _reference_json(value)
    text = json.dumps(plain, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    if decimals:
        text, count = _MARKED.subn(r"\1", text)
        if count != len(decimals):
            return _reference_json(value)
    return text.encode()


def sha256_of(value: object) -> str:
    """Return the hexadecimal SHA-256 of the canonical JSON of plain JSON values."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


class _UnlikeError(Exception):
    """The standard encoder would not write this value as RFC 8785 does."""


def _reference_json(value: object) -> bytes:
    import rfc8785

    return rfc8785.dumps(value)  # type: ignore[arg-type]


def _plain(value: object, decimals: list[str]) -> object:
    """Return the value with every float as the standard encoder must have it.

    Args:
        decimals: takes the text of the floats that the value holds as marked strings.
    """
    kind = type(value)
    if kind is str or kind is bool or value is None:
        return value
    if kind is dict:
        values = {}
        for key, item in value.items():  # type: ignore[attr-defined]
            if type(key) is not str or not key.isascii():
                raise _UnlikeError
            values[key] = item if type(item) is str else _plain(item, decimals)
        return values
    if kind is list or kind is tuple:
        items: Iterable[object] = value  # type: ignore[assignment]
        return [item if type(item) is str else _plain(item, decimals) for item in items]
    if kind is int and abs(value) <= MAX_SAFE_INTEGER:  # type: ignore[arg-type]
        return value
    if kind is float:
        return _plain_float(value, decimals)  # type: ignore[arg-type]
    raise _UnlikeError


def _plain_float(value: float, decimals: list[str]) -> float | int | str:
    # Both print the shortest digits that read back: without an exponent from 1e-4 on, and with the
    # same one where it has two negative digits.
    size = abs(value)
    if size <= MAX_SAFE_INTEGER:
        if value.is_integer():
            return int(value)
        if size >= 1e-4 or 1e-99 < size < 1e-9:
            return value
        if size >= 1e-6:
            decimals.append(f"{Decimal(repr(value)):f}")
            return f"\0{decimals[-1]}"
    raise _UnlikeError
