from __future__ import annotations

import json
import shutil
from pathlib import Path

import diffusers
import pytest
import torch
from baking import (
    COMPONENT,
    HOST,
    WAN,
    assert_same_tensors,
    denying_rules,
    files_of,
    forward,
    plan_for,
    save_dense,
    without_exclusions,
)
from torch import nn

from prequant import bake, load
from prequant.baked import read_baked_files
from prequant.header import HEADER_FILE
from prequant.load import planned_name
from prequant.skeleton import build_skeleton, fill_skeleton
from quantpolicy.errors import CorruptCheckpointError, RequestError, StaleCheckpointError
from quantpolicy.host import Host
from quantpolicy.measure.tiny import build_tiny_pipeline_folder
from quantpolicy.request import Request
from quantpolicy.resolver import resolve
from quantpolicy.rules import load_rules
from quantpolicy.runtime.apply import apply_plan
from quantpolicy.runtime.execution import unmount
from quantpolicy.runtime.linear import QuantisedLinear, guard_linear
from quantpolicy.schemes import SchemeChoice

SCHEMES = ("int8", "fp8", "mxfp8", "nvfp4")
GEMM_ON_CPU = ("int8", "fp8")


def tiny_families() -> list[str]:
    """Return one family for each tiny model of the table."""
    by_model = {spec.tiny: family for family, spec in load_rules().families.items() if spec.tiny}
    return sorted(by_model.values())


@pytest.fixture(scope="module")
def dense(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Path, dict[str, object]]]:
    """Dense sharded folders and inputs by family, made when first asked for."""
    root = tmp_path_factory.mktemp("families")

    class Folders(dict[str, tuple[Path, dict[str, object]]]):
        def __missing__(self, family: str) -> tuple[Path, dict[str, object]]:
            folder = root / family / COMPONENT
            _, inputs = save_dense(family, folder, sharded=True)
            self[family] = folder, inputs
            return self[family]

    return Folders()


def from_pretrained(folder: Path) -> nn.Module:
    name = json.loads((folder / "config.json").read_bytes())["_class_name"]
    model = getattr(diffusers, name).from_pretrained(folder, torch_dtype=torch.bfloat16)
    assert isinstance(model, nn.Module)
    return model


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", tiny_families())
def test_offline_equals_run_time(
    dense: dict[str, tuple[Path, dict[str, object]]], tmp_path: Path, family: str, scheme: str
) -> None:
    """Names, every tensor and the output: bake and load against apply_plan and plain diffusers."""
    source, inputs = dense[family]
    plan = plan_for(source, scheme, family=family)
    bake(source, tmp_path / "out", plan=plan)
    applied = from_pretrained(source)
    report = apply_plan(applied, plan, component=COMPONENT)
    loaded = load(tmp_path / "out", host=plan.host, request=plan.request)
    assert loaded.report.used == "baked"
    assert loaded.report.component == report.components[COMPONENT]
    assert_same_tensors(applied, loaded.model)
    expected = forward(applied, inputs)
    assert torch.equal(forward(loaded.model, inputs), expected)
    assert expected.isfinite().all()
    plain = from_pretrained(tmp_path / "out")
    assert_same_tensors(applied, plain)
    if scheme not in GEMM_ON_CPU:
        with pytest.raises(ValueError, match="Invalid scaling configuration"):
            forward(plain, inputs)
        for layer in plan.components[COMPONENT].layers:
            guard_linear(plain.get_submodule(layer.name), layer.pad_rows)
    # Plain diffusers mounts no kernels.
    unmount(applied)
    assert torch.equal(forward(plain, inputs), forward(applied, inputs))


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense tiny Wan, an fp8 checkpoint of it, and one baked without the exclusions."""
    root = tmp_path_factory.mktemp("wan")
    save_dense(WAN, root / COMPONENT)
    plan = plan_for(root / COMPONENT, "fp8")
    bake(root / COMPONENT, root / "fp8", plan=plan)
    bake(root / COMPONENT, root / "stale", plan=without_exclusions(plan))
    return root


def test_a_loaded_model_is_ready_to_run(wan: Path) -> None:
    before = torch.get_default_dtype(), torch.random.get_rng_state()
    model = load(wan / "fp8").model
    assert not model.training
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert not any(tensor.is_meta for tensor in tensors.values())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert "scale_shift_table" in dict(model.named_parameters())
    assert {name for name, buffer in model.named_buffers()} == {"rope.freqs_cos", "rope.freqs_sin"}
    kept = "condition_embedder.time_embedder.linear_1.weight"
    assert model.get_parameter(kept).dtype is torch.float32
    assert torch.get_default_dtype() is before[0]
    assert torch.equal(torch.random.get_rng_state(), before[1])
    quantised = [module for module in model.modules() if isinstance(module, QuantisedLinear)]
    assert len(quantised) == len(plan_for(wan / COMPONENT, "fp8").components[COMPONENT].layers)


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_empty_inputs_and_pads_work_as_at_run_time(wan: Path, tmp_path: Path, scheme: str) -> None:
    plan = plan_for(wan / COMPONENT, scheme)
    bake(wan / COMPONENT, tmp_path / "out", plan=plan)
    model = load(tmp_path / "out").model
    module = next(module for module in model.modules() if isinstance(module, QuantisedLinear))
    empty = torch.empty(1, 0, module.in_features, dtype=torch.bfloat16)
    assert module(empty).shape == (1, 0, module.out_features)
    pads = {
        name: module.pad_rows
        for name, module in model.named_modules()
        if isinstance(module, QuantisedLinear)
    }
    assert pads == {layer.name: layer.pad_rows for layer in plan.components[COMPONENT].layers}


def test_weights_are_memory_mapped_and_never_written_back(wan: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(wan / "fp8", folder)
    before = files_of(folder)
    model = load(folder).model
    with torch.no_grad():
        model.get_parameter("patch_embedding.bias").add_(1)
    assert files_of(folder) == before


def test_tied_linears_stay_one_weight(wan: Path, tmp_path: Path) -> None:
    """A name that the file lacks, because it is another's alias, is filled and guarded with it."""
    files = read_baked_files(wan / "fp8", [])
    part = plan_for(wan / COMPONENT, "fp8").components[COMPONENT]
    model = build_skeleton(part.class_name, files.config, torch.bfloat16)
    model.alias = nn.Linear(1, 1, device="meta")
    twin = model.get_submodule(part.layers[0].name)
    model.alias.weight, model.alias.bias = twin.weight, twin.bias
    fill_skeleton(model, files, part, torch.device("cpu"))
    assert model.alias.weight is twin.weight
    assert type(model.alias) is type(twin) is QuantisedLinear


def test_a_tensor_too_few_or_too_many_is_told(wan: Path) -> None:
    files = read_baked_files(wan / "fp8", [])
    part = plan_for(wan / COMPONENT, "fp8").components[COMPONENT]
    model = build_skeleton(part.class_name, files.config, torch.bfloat16)
    model.extra = nn.Linear(2, 2, device="meta")
    del model.scale_shift_table
    with pytest.raises(CorruptCheckpointError) as caught:
        fill_skeleton(model, files, part, torch.device("cpu"))
    assert [(item.code, item.subject) for item in caught.value.mismatches] == [
        ("tensor_unexpected", "scale_shift_table"),
        ("tensor_missing", "extra.bias"),
        ("tensor_missing", "extra.weight"),
    ]


def test_a_stale_checkpoint_is_refused_by_default(wan: Path) -> None:
    with pytest.raises(StaleCheckpointError) as caught:
        load(wan / "stale")
    assert {item.code for item in caught.value.mismatches} == {
        "weights_digest",
        "module_quantised",
    }


@pytest.mark.parametrize("given", [COMPONENT, "."])
def test_a_stale_checkpoint_is_requantised_from_the_dense_source(wan: Path, given: str) -> None:
    loaded = load(wan / "stale", on_stale="requantise", source=wan / given)
    assert loaded.report.used == "requantised"
    assert loaded.report.source == str(wan / COMPONENT)
    assert loaded.report.stale[0].startswith("[weights_digest]")
    assert_same_tensors(loaded.model, load(wan / "fp8").model)
    lines = loaded.report.explain().splitlines()
    assert lines[0] == f"requantised weights from {wan / COMPONENT}"
    stale = [f"  stale: {mismatch}" for mismatch in loaded.report.stale]
    assert lines[1 : 1 + len(stale)] == stale
    assert lines[1 + len(stale)].startswith(f"  {COMPONENT} (WanTransformer3DModel): ")


def test_a_loaded_checkpoint_is_explained(wan: Path) -> None:
    lines = load(wan / "fp8").report.explain().splitlines()
    assert lines[0] == f"baked weights from {wan / 'fp8'}"
    assert lines[2].startswith("    fp8: 21 layers, data ")


def test_requantising_needs_the_source_that_was_baked(wan: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no dense source was given"):
        load(wan / "stale", on_stale="requantise")
    other = tmp_path / COMPONENT
    save_dense("flux.1", other)
    with pytest.raises(RequestError, match="FluxTransformer2DModel"):
        load(wan / "stale", on_stale="requantise", source=other)
    i2v = tmp_path / "i2v"
    save_dense("wan2.1-i2v-14b", i2v)
    with pytest.raises(RequestError, match=r"config\.json is not the one that was baked"):
        load(wan / "stale", on_stale="requantise", source=i2v)


def test_a_source_is_requantised_as_its_own_component_or_the_only_denoiser(tmp_path: Path) -> None:
    host = Host.load(HOST)
    alone, both = (resolve(family, host=host) for family in (WAN, "wan2.2-t2v-a14b"))
    assert planned_name(alone, "transformer_2", tmp_path) == "transformer"
    assert planned_name(both, "transformer_2", tmp_path) == "transformer_2"
    with pytest.raises(RequestError, match="its plan has no transformer_3; planned are: transf"):
        planned_name(both, "transformer_3", tmp_path)


def test_requantising_refuses_other_weights_of_the_same_config(wan: Path, tmp_path: Path) -> None:
    other = tmp_path / COMPONENT
    shutil.copytree(wan / COMPONENT, other)
    shard = other / "diffusion_pytorch_model.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(RequestError, match=f"{shard.name} holds other bytes than were baked"):
        load(wan / "stale", on_stale="requantise", source=other)
    shard.write_bytes(content[:-2])
    with pytest.raises(RequestError, match=f"{shard.name} has {len(content) - 2} bytes"):
        load(wan / "stale", on_stale="requantise", source=other)
    shard.rename(other / "diffusion_pytorch_model.fp16.safetensors")
    with pytest.raises(RequestError, match=f"its weight files are not {shard.name}"):
        load(wan / "stale", on_stale="requantise", source=other)


def test_a_device_that_is_not_there_is_one_sentence(wan: Path) -> None:
    for device in ("banana", "cuda:99"):
        with pytest.raises(RequestError, match=f"'{device}' cannot be used"):
            load(wan / "fp8", device=device)


def test_another_component_than_the_folder_s_is_refused(wan: Path) -> None:
    assert load(wan / "fp8", component=COMPONENT).report.used == "baked"
    with pytest.raises(RequestError, match="is the component 'transformer', not 'foo'"):
        load(wan / "fp8", component="foo")
    with pytest.raises(RequestError, match="an empty name was given"):
        load("")


def test_a_sound_checkpoint_is_not_requantised(wan: Path) -> None:
    assert load(wan / "fp8", on_stale="requantise").report.used == "baked"


def test_a_damaged_checkpoint_is_never_requantised(wan: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(wan / "fp8", folder)
    (folder / HEADER_FILE).write_text("{}")
    with pytest.raises(CorruptCheckpointError):
        load(folder, on_stale="requantise", source=wan / COMPONENT)


def test_one_checkpoint_serves_hosts_that_store_the_same_bytes(wan: Path) -> None:
    request = Request(transformer=SchemeChoice.FP8, min_features=16)
    for host in ("h100", "l40s", HOST):
        assert load(wan / "fp8", host=Host.load(host), request=request).report.used == "baked"
    with pytest.raises(StaleCheckpointError) as caught:
        load(wan / "fp8", host=Host.load("mi300x"), request=request)
    assert "weight_dtype" in {item.code for item in caught.value.mismatches}
    with pytest.raises(StaleCheckpointError) as caught:
        load(wan / "fp8", host=Host.load("a100"), request=request)
    assert [item.code for item in caught.value.mismatches] == ["denied"]


def test_another_request_is_stale(wan: Path) -> None:
    request = Request(transformer=SchemeChoice.INT8, min_features=16)
    with pytest.raises(StaleCheckpointError) as caught:
        load(wan / "fp8", request=request)
    assert {"scheme", "weights_digest"} <= {item.code for item in caught.value.mismatches}


def test_wrong_arguments_are_one_sentence(wan: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="known: raise, requantise"):
        load(wan / "fp8", on_stale="ignore")
    with pytest.raises(RequestError, match="no such folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(CorruptCheckpointError, match="header_missing"):
        load(wan / COMPONENT)


def test_a_component_of_a_pipeline_is_named(tmp_path: Path) -> None:
    family = "wan2.2-t2v-a14b"
    source = build_tiny_pipeline_folder(tmp_path / "pipeline", family)
    plan = plan_for(source, "int8", family=family)
    assert denying_rules(family)
    bake(source, tmp_path / "out", plan=plan)
    with pytest.raises(RequestError, match="transformer, transformer_2"):
        load(tmp_path / "out")
    first = load(tmp_path / "out", component="transformer").model
    second = load(tmp_path / "out", component="transformer_2").model
    name = "patch_embedding.weight"
    expected = from_pretrained(source / "transformer_2").get_parameter(name)
    assert torch.equal(second.get_parameter(name), expected)
    assert type(first) is type(second)
