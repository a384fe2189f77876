from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from baking import COMPONENT, WAN, plan_for, save_dense

from prequant import bake, validate
from prequant.header import HEADER_FILE, Header, read_baked_header
from prequant.manifest import find_baked
from quantpolicy.errors import (
    CorruptCheckpointError,
    Mismatch,
    QuantPolicyError,
    RequestError,
    StaleCheckpointError,
)

FIELDS = tuple(Header.model_fields)
NESTED = (
    "settings.granularity",
    "settings.weight_dtype",
    "settings.activation_floor",
    "host.name",
    "host.fp8_dtype",
    "source.repo",
    "source.class_name",
    "source.config_digest",
    "source.digest",
    "source.files",
    "counts.tensors",
    "counts.kept_layers",
    "counts.scale_bytes",
    "counts.source_bytes",
    "plan.request",
    "plan.components",
    "plan.weights_digest",
    "plan.plan_digest",
    "versions.torchao",
)


@pytest.fixture(scope="module")
def baked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("baked")
    save_dense(WAN, root / COMPONENT)
    bake(root / COMPONENT, root / "out", plan=plan_for(root / COMPONENT, "fp8"))
    return root / "out"


@pytest.fixture
def edit(baked: Path, tmp_path: Path) -> Callable[[Callable[[dict[str, object]], object]], Path]:
    """Return a function that edits the header of a copy and gives the copy's folder."""

    def apply(change: Callable[[dict[str, object]], object]) -> Path:
        folder = tmp_path / "copy"
        shutil.copytree(baked, folder)
        values = json.loads((folder / HEADER_FILE).read_bytes())
        changed = change(values)
        (folder / HEADER_FILE).write_text(json.dumps(values if changed is None else changed))
        return folder

    return apply


def other(value: object) -> object:
    """Return another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return {"fp8": "int8", "bfloat16": "float16"}.get(value, f"{value}0")
    if isinstance(value, list):
        return [*value, "more"]
    assert isinstance(value, dict)
    first = next(iter(value), None)
    return {**value, first: other(value[first])} if first is not None else {"more": "x"}


def parent_of(values: dict[str, object], path: str) -> tuple[dict[str, object], str]:
    *parents, leaf = path.split(".")
    for name in parents:
        inner = values[name]
        assert isinstance(inner, dict)
        values = inner
    return values, leaf


Edit = Callable[[Callable[[dict[str, object]], object]], Path]


@pytest.mark.parametrize("field", [*FIELDS, *NESTED])
def test_a_removed_field_is_refused(edit: Edit, field: str) -> None:
    def remove(values: dict[str, object]) -> None:
        parent, leaf = parent_of(values, field)
        del parent[leaf]

    with pytest.raises(CorruptCheckpointError) as caught:
        validate(edit(remove))
    assert caught.value.exit_code == 3
    if "." not in field:
        assert ("header_field_missing", field) in [
            (item.code, item.subject) for item in caught.value.mismatches
        ]


@pytest.mark.parametrize("field", [*FIELDS, *NESTED])
def test_an_altered_field_is_refused(edit: Edit, field: str) -> None:
    def alter(values: dict[str, object]) -> None:
        parent, leaf = parent_of(values, field)
        parent[leaf] = other(parent[leaf])

    with pytest.raises(CorruptCheckpointError) as caught:
        validate(edit(alter))
    codes = {item.code for item in caught.value.mismatches}
    assert codes & {"header_digest", "header_field", "header_field_unknown"}


def reordered(value: object) -> object:
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in sorted(value, reverse=True)}
    return [reordered(item) for item in value] if isinstance(value, list) else value


def test_a_header_in_another_order_is_accepted(edit: Edit, baked: Path) -> None:
    folder = edit(reordered)
    assert (folder / HEADER_FILE).read_bytes() != (baked / HEADER_FILE).read_bytes()
    assert validate(folder).components[COMPONENT].weights_digest


def test_an_unknown_field_is_refused(edit: Edit) -> None:
    with pytest.raises(CorruptCheckpointError) as caught:
        validate(edit(lambda values: {**values, "comment": "hello"}))
    assert [(item.code, item.subject) for item in caught.value.mismatches] == [
        ("header_field_unknown", "comment")
    ]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 1, "format": 2}', "\xff"])
def test_a_header_that_is_no_object_is_corrupt(edit: Edit, text: str) -> None:
    folder = edit(lambda values: values)
    (folder / HEADER_FILE).write_text(text, encoding="latin-1")
    with pytest.raises(CorruptCheckpointError) as caught:
        validate(folder)
    assert [item.code for item in caught.value.mismatches] == ["header_json"]


def test_a_header_holds_no_path_and_no_clock(baked: Path) -> None:
    text = (baked / HEADER_FILE).read_text()
    assert str(baked.parent) not in text
    header = read_baked_header(baked)
    assert header.source.repo == ""
    assert header.content_digest == header.header_digest
    assert header.versions.keys() == {"quantpolicy", "torch", "torchao", "diffusers"}


def test_a_newer_format_is_stale_not_damaged(baked: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(baked, folder)
    values = json.loads((folder / HEADER_FILE).read_bytes())
    values.pop("header_digest")
    header = Header.sealed(**{**values, "format_version": 2})
    (folder / HEADER_FILE).write_bytes(header.to_bytes())
    with pytest.raises(StaleCheckpointError) as caught:
        validate(folder)
    assert [item.code for item in caught.value.mismatches] == ["format_version"]


def test_a_component_is_told_from_a_folder_that_holds_one(baked: Path, tmp_path: Path) -> None:
    faults: list[Mismatch] = []
    alone = find_baked(baked, faults)
    assert alone is not None
    assert (alone.components, alone.manifest, faults) == ({"": baked}, None, [])
    shutil.copytree(baked, tmp_path / COMPONENT)
    assert find_baked(tmp_path, faults) is None
    assert [item.code for item in faults] == ["manifest_missing"]


def test_reading_a_folder_without_a_header_is_corrupt(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpointError, match="header_missing"):
        read_baked_header(tmp_path)


def test_header_and_validation_never_import_torch(baked: Path) -> None:
    code = (
        "import sys, prequant, prequant.header, prequant.inspect\n"
        "prequant.validate(sys.argv[1], full=True)\n"
        "prequant.inspect.inspect(sys.argv[1])\n"
        "assert not {'torch', 'numpy', 'safetensors'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(baked)], check=True)


def test_the_package_s_functions_survive_importing_their_modules() -> None:
    import prequant
    import prequant.bake
    import prequant.load
    import prequant.validate

    assert [callable(getattr(prequant, name)) for name in prequant.__all__] == [True] * 3
    assert not hasattr(prequant, "nonsense")
    assert issubclass(CorruptCheckpointError, QuantPolicyError)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("NaN", "NaN is no finite number"),
        ("-Infinity", "-Infinity is no finite number"),
        ("1e999", "1e999 is no finite number"),
        (str(2**60), "integer 1152921504606846976 is beyond 9007199254740991"),
        ('"\\ud800"', "a lone surrogate, which is no character"),
        ("[" * 200_000, "nested deeper than 64 levels"),
    ],
)
@pytest.mark.parametrize("field", ["format_version", "plan"])
def test_a_header_without_canonical_json_is_corrupt(
    baked: Path, tmp_path: Path, field: str, value: str, found: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(baked, folder)
    values = json.loads((folder / HEADER_FILE).read_bytes())
    text = json.dumps({**values, field: "HERE"}).replace('"HERE"', value)
    (folder / HEADER_FILE).write_text(text)
    with pytest.raises(CorruptCheckpointError) as caught:
        validate(folder)
    assert [str(item) for item in caught.value.mismatches] == [
        f"[header_json] {HEADER_FILE}: expected a JSON object, found {found}"
    ]
    assert caught.value.exit_code == 3


def test_a_float_that_becomes_an_inexact_integer_is_corrupt(edit: Callable[..., Path]) -> None:
    folder = edit(lambda values: values.update(format_version=float(2**60)))
    with pytest.raises(CorruptCheckpointError) as caught:
        read_baked_header(folder)
    (fault,) = caught.value.mismatches
    assert (fault.code, fault.subject, fault.expected) == (
        "header_field",
        HEADER_FILE,
        "exact numbers",
    )


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("NaN", "not JSON: NaN is no finite number"),
        (str(2**60), "not JSON: integer 1152921504606846976 is beyond 9007199254740991"),
        ('"\\ud800"', "not JSON: a lone surrogate, which is no character"),
    ],
)
def test_a_config_without_canonical_json_is_refused_and_corrupt(
    baked: Path, tmp_path: Path, value: str, found: str
) -> None:
    dense = tmp_path / COMPONENT
    save_dense(WAN, dense)
    plan = plan_for(dense, "fp8")
    shutil.copytree(baked, tmp_path / "copy")
    for folder in (dense, tmp_path / "copy"):
        values = json.loads((folder / "config.json").read_bytes())
        text = json.dumps({**values, "eps": "HERE"}).replace('"HERE"', value)
        (folder / "config.json").write_text(text)
    with pytest.raises(RequestError) as refused:
        bake(dense, tmp_path / "out", plan=plan)
    assert (refused.value.where, refused.value.found) == (str(dense / "config.json"), found)
    with pytest.raises(CorruptCheckpointError) as caught:
        validate(tmp_path / "copy")
    (fault,) = caught.value.mismatches
    assert (fault.code, fault.found) == ("config_json", found)
