from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baking import HOST, plan_for
from safetensors.torch import load_file, save_file

from prequant import bake, load, validate
from prequant.header import HEADER_FILE
from prequant.inspect import inspect
from prequant.manifest import Manifest
from quantpolicy.errors import CorruptCheckpointError, PlanMismatchError, RequestError
from quantpolicy.host import Host
from quantpolicy.measure.tiny import build_tiny_pipeline_folder
from quantpolicy.plan import QuantPlan

FAMILY = "wan2.2-t2v-a14b"
ONE, TWO = "transformer", "transformer_2"
SHARD = "diffusion_pytorch_model.safetensors"
TEXT = "text_encoder/model.safetensors"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense tiny pipeline with two experts of other weights, and what is baked from it."""
    folder = tmp_path_factory.mktemp("pipeline")
    source = build_tiny_pipeline_folder(folder / "dense", FAMILY)
    tensors = load_file(source / TWO / SHARD)
    tensors = {name: tensor * 0.5 for name, tensor in tensors.items()}
    save_file(tensors, source / TWO / SHARD, metadata={"format": "pt"})
    bake(source, folder / "baked", plan=plan(source))
    return folder


def plan(source: Path) -> QuantPlan:
    return plan_for(source, "int8", family=FAMILY)


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    shutil.copytree(root / "baked", tmp_path / "copy")
    return tmp_path / "copy"


def swap(folder: Path, one: str, two: str) -> None:
    (folder / one).rename(folder / "aside")
    (folder / two).rename(folder / one)
    (folder / "aside").rename(folder / two)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], set[str]]] = {
    "deleted expert": (lambda f: shutil.rmtree(f / TWO), {"component_missing"}),
    "swapped experts": (lambda f: swap(f, ONE, TWO), {"component_name", "component_header"}),
    "swapped weights": (
        lambda f: swap(f, f"{ONE}/{SHARD}", f"{TWO}/{SHARD}"),
        {"shard_component", "shard_source", "shard_header"},
    ),
    "renamed expert": (lambda f: (f / TWO).rename(f / "x"), {"component_missing", "folder_stray"}),
    "deleted header": (lambda f: (f / TWO / HEADER_FILE).unlink(), {"header_missing"}),
    "deleted manifest": (lambda f: (f / HEADER_FILE).unlink(), {"manifest_missing"}),
    "deleted text encoder": (lambda f: shutil.rmtree(f / "text_encoder"), {"file_missing"}),
    "altered text encoder": (lambda f: flip(f / TEXT), {"file_sha256"}),
    "truncated text encoder": (lambda f: os.truncate(f / TEXT, 100), {"file_bytes"}),
    "pickle": (lambda f: (f / "vae" / "x.BIN").write_bytes(b""), {"pickle_stray"}),
    "garbage index": (lambda f: (f / "model_index.json").write_text("x"), {"file_bytes"}),
    "no index": (lambda f: (f / "model_index.json").unlink(), {"file_missing"}),
    "dangling link": (lambda f: (f / "vae" / "x").symlink_to("nowhere"), {"file_stray"}),
    "loop": (lambda f: (f / "vae" / "x").symlink_to(f), {"file_stray"}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_pipeline_is_refused_by_validate_and_load(copy: Path, damage: str) -> None:
    change, codes = DAMAGES[damage]
    change(copy)
    for full in (False, True):
        with pytest.raises(CorruptCheckpointError) as caught:
            validate(copy, full=full)
        assert {item.code for item in caught.value.mismatches} >= codes
    with pytest.raises(CorruptCheckpointError):
        load(copy, component=TWO, host=Host.load(HOST))


def test_a_large_file_is_hashed_only_in_full(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prequant.tree.SMALL_BYTES", 10)
    flip(copy / TEXT)
    validate(copy)
    with pytest.raises(CorruptCheckpointError) as caught:
        validate(copy, full=True)
    assert [(item.code, item.subject) for item in caught.value.mismatches] == [
        ("file_sha256", TEXT)
    ]


def test_a_swapped_expert_alone_is_refused(copy: Path) -> None:
    swap(copy, ONE, TWO)
    with pytest.raises(CorruptCheckpointError) as caught:
        load(copy / ONE)
    assert [(item.code, item.subject) for item in caught.value.mismatches] == [
        ("component_name", ONE),
        ("component_header", ONE),
    ]


@pytest.mark.parametrize("text", ["{", "[]", '{"kind": "pipeline"}', '{"kind": 3}'])
def test_a_damaged_manifest_is_refused(copy: Path, text: str) -> None:
    (copy / HEADER_FILE).write_text(text)
    for command in (validate, inspect, load):
        with pytest.raises(CorruptCheckpointError):
            command(copy)


@pytest.mark.parametrize("field", Manifest.model_fields)
@pytest.mark.parametrize("change", ["removed", "altered"])
def test_every_field_of_the_manifest_counts(copy: Path, field: str, change: str) -> None:
    values = json.loads((copy / HEADER_FILE).read_bytes())
    value = values.pop(field)
    if change == "altered":
        kinds: dict[type, object] = {str: f"{value}0", int: 9, dict: {}}
        values[field] = kinds[type(value)]
    (copy / HEADER_FILE).write_text(json.dumps(values))
    with pytest.raises(CorruptCheckpointError):
        validate(copy)


def test_a_resealed_manifest_without_an_expert_contradicts_the_plan(copy: Path) -> None:
    values = json.loads((copy / HEADER_FILE).read_bytes())
    del values["components"][TWO], values["manifest_digest"]
    shutil.rmtree(copy / TWO)
    (copy / HEADER_FILE).write_bytes(Manifest.sealed(**values).to_bytes())
    with pytest.raises(CorruptCheckpointError) as caught:
        validate(copy)
    assert [(item.code, item.subject) for item in caught.value.mismatches] == [
        ("component_missing", TWO)
    ]


def test_a_readme_may_lie_beside(copy: Path) -> None:
    (copy / "README.md").write_text("of the uploader")
    (copy / ".gitattributes").write_text("")
    (copy / ONE / "LICENSE").write_text("")
    assert list(validate(copy, full=True).components) == [ONE, TWO]
    assert load(copy, component=TWO).report.component.name == TWO


def test_plain_diffusers_loads_the_pipeline(root: Path) -> None:
    from diffusers import WanPipeline

    parts = {"vae": None, "text_encoder": None, "tokenizer": None}
    pipe = WanPipeline.from_pretrained(root / "baked", dtype=torch.bfloat16, **parts)
    weights = dict(pipe.transformer_2.named_parameters())
    assert any(type(weight).__name__ == "Int8Tensor" for weight in weights.values())


def test_one_baked_expert_is_validated_beside_the_dense_one(root: Path, tmp_path: Path) -> None:
    source = root / "dense"
    bake(source, tmp_path / "out", plan=plan(source), component=TWO)
    assert list(validate(tmp_path / "out", full=True).components) == [TWO]
    assert load(tmp_path / "out").report.component.name == TWO


def test_a_pipeline_is_replaced_by_force_unless_it_holds_more(root: Path, copy: Path) -> None:
    source = root / "dense"
    (copy / "vae" / "notes.txt").write_text("mine")
    with pytest.raises(RequestError, match=r"holds 'vae/notes\.txt', which no bake wrote"):
        bake(source, copy, plan=plan(source), force=True)
    (copy / "vae" / "notes.txt").unlink()
    flip(copy / TEXT)
    bake(source, copy, plan=plan(source), force=True)
    validate(copy, full=True)


def test_linked_folders_are_copied_and_dead_links_refused(root: Path, tmp_path: Path) -> None:
    source = tmp_path / "dense"
    shutil.copytree(root / "dense", source)
    (source / "vae").rename(tmp_path / "elsewhere")
    (source / "vae").symlink_to(tmp_path / "elsewhere")
    bake(source, tmp_path / "out", plan=plan(source))
    assert (tmp_path / "out" / "vae").is_dir()
    assert not (tmp_path / "out" / "vae").is_symlink()
    validate(tmp_path / "out", full=True)
    (source / "tokenizer.json").symlink_to(tmp_path / "nowhere")
    with pytest.raises(RequestError, match="a link that leads nowhere"):
        bake(source, tmp_path / "two", plan=plan(source))
    (source / "tokenizer.json").unlink()
    (source / "around").symlink_to(source)
    with pytest.raises(RequestError, match="a link to a folder around it"):
        bake(source, tmp_path / "two", plan=plan(source))


def test_a_baked_pipeline_is_no_source(root: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="is a baked pipeline"):
        bake(root / "baked", tmp_path / "out", plan=plan(root / "dense"))


def test_a_weight_that_is_not_finite_names_the_expert(root: Path, tmp_path: Path) -> None:
    source = tmp_path / "dense"
    shutil.copytree(root / "dense", source)
    name = f"{plan(source).components[TWO].layers[0].name}.weight"
    tensors = load_file(source / TWO / SHARD)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, source / TWO / SHARD, metadata={"format": "pt"})
    with pytest.raises(PlanMismatchError) as caught:
        bake(source, tmp_path / "out", plan=plan(source))
    assert caught.value.where == str(source / TWO)
    assert [item.subject for item in caught.value.mismatches] == [name]
