"""Turn what pydantic found in a rule table into sentences with file, line and near names."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from enum import StrEnum
from types import UnionType
from typing import TypeAlias, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from quantpolicy.errors import RuleTableError
from quantpolicy.record import Record
from quantpolicy.schemes import RULE_CAUSES, Cause
from quantpolicy.yaml_source import Plain, YamlPath, YamlSource, describe_place

_Model = TypeVar("_Model", bound=Record)
_Annotation: TypeAlias = object

_MEANT = {
    "string_type": "text",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "date_type": "a date such as 2026-11-30",
    "date_parsing": "a date such as 2026-11-30",
    "date_from_datetime_parsing": "a date such as 2026-11-30",
}
_LIMITS = {
    "greater_than": "more than",
    "greater_than_equal": "at least",
    "less_than": "less than",
    "less_than_equal": "at most",
}


def validate_source(model: type[_Model], source: YamlSource) -> _Model:
    """Return the record that the file holds; types are strict, nothing is converted.

    Raises:
        RuleTableError: with every error of the file.
    """
    try:
        return model.model_validate_json(json.dumps(source.values), strict=True)
    except ValidationError as error:
        raise_all(_explain(model, source, error.errors(include_url=False)))
        raise AssertionError("a validation error without an error") from error


def raise_all(errors: Iterable[RuleTableError]) -> None:
    """Raise the first of the errors with the others attached; return when there are none."""
    found = list(errors)
    if not found:
        return
    first, *others = found
    raise RuleTableError(
        first.where, first.found, allowed=first.allowed, remedy=first.remedy, others=others
    )


def suggest(name: str, known: Iterable[str]) -> tuple[str, str]:
    """Return what is known, and a remedy that names the nearest of it."""
    names = sorted(str(item) for item in known)
    near = difflib.get_close_matches(name, names, n=1)
    remedy = f"did you mean {near[0]!r}" if near else "use one of them"
    return "known: " + ", ".join(names), remedy


def _explain(
    model: type[Record], source: YamlSource, details: Sequence[ErrorDetails]
) -> list[RuleTableError]:
    """Return one error a path, the deepest ones of a union or list only, missing keys last."""
    located = [(_yaml_path(source.values, detail["loc"]), detail) for detail in details]
    parents = {path[:depth] for path, _ in located for depth in range(len(path))}
    errors: dict[tuple[object, ...], tuple[bool, int, RuleTableError]] = {}
    for path, detail in located:
        is_missing = detail["type"] == "missing"
        if path in parents and not is_missing:
            continue
        found, allowed, remedy = _sentence(model, path, detail)
        is_key = detail["type"] == "extra_forbidden"
        place = path[:-1] if is_key or _is_list_item(path, detail["input"]) else path
        line = source.line(path)
        error = RuleTableError(
            describe_place(source.name, line, place), found, allowed=allowed, remedy=remedy
        )
        key = (path, detail["loc"]) if is_missing else path
        errors.setdefault(key, (is_missing, line, error))
    ordered = sorted(errors.values(), key=lambda item: item[:2])
    return [error for _, _, error in ordered]


def describe_fault(model: type[Record], detail: ErrorDetails) -> tuple[str, str, str]:
    """Return (found, allowed, remedy) for a fault of a record that was not read from a file."""
    return _sentence(model, detail["loc"], detail)


def _is_list_item(path: YamlPath, value: object) -> bool:
    return bool(path) and isinstance(path[-1], int) and not isinstance(value, dict | list)


def _yaml_path(values: Plain, loc: tuple[str | int, ...]) -> YamlPath:
    """Return the location without the parts that pydantic adds for keys and unions."""
    path: list[str | int] = []
    for part in loc:
        if isinstance(values, dict) and part in values:
            values = values[str(part)]
        elif isinstance(values, list) and isinstance(part, int):
            values = values[part]
        else:
            continue
        path.append(part)
    return tuple(path)


def _sentence(model: type[Record], path: YamlPath, detail: ErrorDetails) -> tuple[str, str, str]:
    """Return (found, allowed, remedy)."""
    kind, value = detail["type"], detail["input"]
    last = detail["loc"][-1] if detail["loc"] else ""
    if kind == "extra_forbidden":
        owner = annotation_at(model, path[:-1])
        assert isinstance(owner, type)
        assert issubclass(owner, BaseModel)
        return f"unknown key {last!r}", *suggest(str(last), owner.model_fields)
    if kind == "missing":
        return f"required key {last!r} is missing", "", f"add {last}"
    if kind == "enum":
        enum = annotation_at(model, path, key=last == "[key]")
        assert isinstance(enum, type)
        assert issubclass(enum, StrEnum)
        known = RULE_CAUSES if enum is Cause else enum
        return f"unknown {_noun(enum)} {value!r}", *suggest(str(value), known)
    shown = "nothing" if value is None else json.dumps(value, default=str)[:60]
    if kind == "string_type" and isinstance(value, bool | int | float):
        return f"{shown} where text is meant", "", "quote it"
    if kind in _MEANT:
        return f"{shown} where {_MEANT[kind]} is meant", "", f"write {_MEANT[kind]}"
    message = str(detail["msg"])
    if kind == "value_error":
        return message.removeprefix("Value error, "), "", "correct the value"
    if kind in _LIMITS:
        (limit,) = detail["ctx"].values()
        meant = f"a number of {_LIMITS[kind]} {limit}"
        return f"{shown} where {meant} is meant", "", "write such a number"
    return f"{shown}: {message}", "", "correct the value"


def _noun(enum: type[StrEnum]) -> str:
    letters = (f" {letter.lower()}" if letter.isupper() else letter for letter in enum.__name__)
    return "".join(letters).strip()


def annotation_at(model: type[Record], path: YamlPath, *, key: bool = False) -> _Annotation:
    """Return the type that the schema declares at a path, or for the key itself."""
    annotation: _Annotation = model
    for depth, part in enumerate(path):
        annotation = _inside(annotation, part, key=key and depth == len(path) - 1)
    return _without_none(annotation)


def _inside(annotation: _Annotation, part: str | int, *, key: bool) -> _Annotation:
    annotation = _without_none(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is dict:
        return arguments[0] if key else arguments[1]
    if origin in (tuple, list):
        return arguments[0]
    assert isinstance(annotation, type)
    assert issubclass(annotation, BaseModel)
    return annotation.model_fields[str(part)].annotation


def _without_none(annotation: _Annotation) -> _Annotation:
    if get_origin(annotation) in (Union, UnionType):
        choices = [item for item in get_args(annotation) if item is not type(None)]
        mappings = [item for item in choices if get_origin(item) is dict]
        return (mappings or choices)[0]
    return annotation
