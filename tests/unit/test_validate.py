from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from baking import (
    COMPONENT,
    HOST,
    WAN,
    change_component,
    plan_for,
    reseal,
    save_dense,
    without_exclusions,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from prequant import bake, validate
from prequant.header import HEADER_FILE
from quantpolicy.errors import (
    CorruptCheckpointError,
    QuantPolicyError,
    RequestError,
    StaleCheckpointError,
)
from quantpolicy.host import Host
from quantpolicy.measure.tiny import build_tiny_pipeline_folder
from quantpolicy.plan import QuantPlan, SchemeSettings
from quantpolicy.request import Request
from quantpolicy.resolver import resolve
from quantpolicy.rules import load_rules
from quantpolicy.runtime.apply import apply_plan
from quantpolicy.schemes import SchemeChoice

SHARD = "diffusion_pytorch_model.safetensors"
FIRST_SHARD = "diffusion_pytorch_model-00001-of-"
OVERLAY = """
evidence:
  test.run: {kind: measured, source: a test, date: 2026-12-01}
families:
  wan2.2-ti2v-5b:
    rules:
      - id: wan2.2-ti2v-5b.fp8.more
        schemes: [fp8]
        effect: exclude
        because: outliers
        tokens: [TOKEN]
        expect: 1
        evidence: [test.run]
  wan2.1-t2v-1.3b:
    rules:
      - id: wan2.1-t2v-1.3b.fp8.more
        schemes: [fp8]
        effect: exclude
        because: outliers
        tokens: [TOKEN]
        expect: 1
        evidence: [test.run]
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense tiny Wan in shards and what is baked from it, never written to afterwards."""
    folder = tmp_path_factory.mktemp("validate")
    save_dense(WAN, folder / COMPONENT, sharded=True)
    for scheme in ("int8", "fp8", "mxfp8", "nvfp4"):
        bake(folder / COMPONENT, folder / scheme, plan=plan_for(folder / COMPONENT, scheme))
    return folder


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "copy"
    shutil.copytree(root / "fp8", folder)
    return folder


def findings(
    folder: Path,
    error: type[QuantPolicyError],
    *,
    full: bool = False,
    plan: QuantPlan | None = None,
) -> set[str]:
    with pytest.raises(error) as caught:
        validate(folder, full=full, plan=plan)
    assert type(caught.value) is error
    return {item.code for item in caught.value.mismatches}


@pytest.mark.parametrize("scheme", ["int8", "fp8", "mxfp8", "nvfp4"])
def test_what_was_baked_is_in_order(root: Path, scheme: str) -> None:
    plan = plan_for(root / COMPONENT, scheme)
    for against in (None, plan):
        report = validate(root / scheme, full=True, plan=against)
        part = report.components[COMPONENT]
        assert part.weights_digest == plan.components[COMPONENT].weights_digest
        assert part.scheme == scheme
        assert part.checked == ("header", "files", "weights", "forms", "rules", "hashes", "values")
    assert validate(root / scheme).full is False


def test_a_pipeline_is_checked_component_by_component(tmp_path: Path) -> None:
    family = "wan2.2-t2v-a14b"
    source = build_tiny_pipeline_folder(tmp_path / "pipeline", family)
    bake(source, tmp_path / "out", plan=plan_for(source, "int8", family=family))
    assert list(validate(tmp_path / "out", full=True).components) == [
        "transformer",
        "transformer_2",
    ]
    assert validate(tmp_path / "out" / "transformer_2").components["transformer_2"].family == family
    shard = tmp_path / "out" / "transformer_2" / SHARD
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CorruptCheckpointError) as caught:
        validate(tmp_path / "out", full=True)
    assert [item.subject for item in caught.value.mismatches] == [f"transformer_2: {SHARD}"]


@pytest.mark.parametrize("what", ["missing", "file", "dense", "empty"])
def test_a_wrong_folder_is_one_sentence(root: Path, tmp_path: Path, what: str) -> None:
    paths = {
        "missing": tmp_path / "nowhere",
        "file": root / COMPONENT / "config.json",
        "dense": root / COMPONENT,
        "empty": tmp_path,
    }
    expected = RequestError if what in ("missing", "file") else CorruptCheckpointError
    with pytest.raises(expected) as caught:
        validate(paths[what])
    assert str(caught.value).count(". ") == 0


# damage


def test_a_flipped_bit_shows_in_the_hash_only(copy: Path) -> None:
    shard = sorted(copy.glob("*.safetensors"))[0]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    validate(copy)
    assert findings(copy, CorruptCheckpointError, full=True) == {"shard_sha256"}


@pytest.mark.parametrize(
    ("scheme", "part", "value", "code"),
    [
        ("fp8", "scale", float("nan"), "scale_not_finite"),
        ("fp8", "scale", float("inf"), "scale_not_finite"),
        ("fp8", "scale", 0.0, "scale_not_positive"),
        ("int8", "scale", -1.0, "scale_not_positive"),
        ("fp8", "qdata", float("nan"), "data_nan"),
        ("mxfp8", "qdata", float("nan"), "data_nan"),
        ("mxfp8", "scale", float("nan"), "scale_not_finite"),
        ("nvfp4", "scale", float("nan"), "scale_not_finite"),
        ("nvfp4", "per_tensor_scale", float("nan"), "scale_not_finite"),
    ],
)
def test_full_scans_the_values(
    root: Path, tmp_path: Path, scheme: str, part: str, value: float, code: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(root / scheme, folder)
    for shard in sorted(folder.glob("*.safetensors")):
        tensors = load_file(shard)
        names = [name for name in tensors if name.endswith(f"._weight_{part}")]
        if names:
            break
    with safe_open(shard, framework="pt") as file:
        metadata = file.metadata()
    replaced = tensors[names[0]].float()
    replaced.view(-1)[0] = value
    tensors[names[0]] = replaced.to(tensors[names[0]].dtype)
    save_file(tensors, shard, metadata=metadata)
    assert code in findings(folder, CorruptCheckpointError, full=True)


def test_a_cut_shard_is_corrupt(copy: Path) -> None:
    shard = sorted(copy.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-10])
    assert findings(copy, CorruptCheckpointError) >= {"truncated"}


def test_a_missing_and_a_stray_shard_are_both_told(copy: Path) -> None:
    first, second = sorted(copy.glob("*.safetensors"))[:2]
    first.rename(copy / "model.safetensors.bak")
    shutil.copy(second, copy / "extra.safetensors")
    assert findings(copy, CorruptCheckpointError) >= {"shard_missing", "shard_stray"}


def test_a_stray_pickle_is_corrupt(copy: Path) -> None:
    (copy / "diffusion_pytorch_model.bin").write_bytes(b"")
    assert findings(copy, CorruptCheckpointError) == {"pickle_stray"}


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("x.BIN", "pickle_stray"),
        ("x.GGUF", "file_stray"),
        ("x.msgpack", "file_stray"),
        ("x.py", "file_stray"),
        ("x.SafeTensors", "shard_stray"),
        ("sub/x.txt", "folder_stray"),
    ],
)
def test_what_the_header_does_not_list_is_corrupt(copy: Path, name: str, code: str) -> None:
    (copy / name).parent.mkdir(exist_ok=True)
    (copy / name).write_bytes(b"")
    assert findings(copy, CorruptCheckpointError) == {code}


def test_what_was_copied_beside_the_weights_is_checked(root: Path, tmp_path: Path) -> None:
    source = tmp_path / COMPONENT
    shutil.copytree(root / COMPONENT, source)
    (source / "LICENSE.txt").write_text("open")
    bake(source, tmp_path / "out", plan=plan_for(source, "int8"))
    validate(tmp_path / "out", full=True)
    (tmp_path / "out" / "LICENSE.txt").write_text("shut")
    assert findings(tmp_path / "out", CorruptCheckpointError) == {"file_sha256"}
    (tmp_path / "out" / "LICENSE.txt").unlink()
    assert findings(tmp_path / "out", CorruptCheckpointError) == {"file_missing"}


def test_a_wrong_index_total_is_corrupt(copy: Path) -> None:
    index = copy / f"{SHARD}.index.json"
    values = json.loads(index.read_bytes())
    values["metadata"]["total_size"] += 1
    index.write_text(json.dumps(values))
    assert findings(copy, CorruptCheckpointError) == {"index_total"}


def test_an_index_that_names_a_tensor_elsewhere_is_corrupt(copy: Path) -> None:
    index = copy / f"{SHARD}.index.json"
    values = json.loads(index.read_bytes())
    shards = sorted(set(values["weight_map"].values()))
    name = next(key for key, shard in values["weight_map"].items() if shard == shards[0])
    values["weight_map"][name] = shards[1]
    index.write_text(json.dumps(values))
    assert findings(copy, CorruptCheckpointError) >= {"tensor_misplaced"}


@pytest.mark.parametrize("change", ["class", "quantization_config", "kept", "empty", "unreadable"])
def test_a_changed_config_is_corrupt(copy: Path, change: str) -> None:
    config = copy / "config.json"
    values = json.loads(config.read_bytes())
    expected = {"config_digest"}
    if change == "class":
        values["_class_name"] = "FluxTransformer2DModel"
        expected.add("class_name")
    elif change == "quantization_config":
        del values["quantization_config"]
        expected.add("quantization_config")
    elif change == "kept":
        values["quantization_config"]["modules_to_not_convert"].pop()
        expected.add("quantization_config")
    elif change == "empty":
        values = {}
        expected |= {"class_name", "quantization_config"}
    else:
        expected = {"config_json"}
    config.write_text("{" if change == "unreadable" else json.dumps(values))
    assert findings(copy, CorruptCheckpointError) == expected


def test_a_config_in_another_order_is_accepted(copy: Path) -> None:
    config = copy / "config.json"
    values = json.loads(config.read_bytes())
    config.write_text(json.dumps(dict(reversed(values.items()))))
    validate(copy, full=True)


def rewrite_shards(folder: Path, change: object) -> None:
    """Apply ``change(tensors, metadata)`` to every shard, and make the index agree."""
    weight_map: dict[str, str] = {}
    total = 0
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            metadata = dict(file.metadata())
        tensors = load_file(shard)
        change(tensors, metadata)
        save_file(tensors, shard, metadata=metadata)
        weight_map.update(dict.fromkeys(tensors, shard.name))
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / f"{SHARD}.index.json").write_text(json.dumps(index))


def test_a_plain_tensor_under_a_quantised_name_is_corrupt(copy: Path) -> None:
    name = plan_layer(copy)

    def change(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
        if tensors.pop(f"{name}._weight_scale", None) is not None:
            tensors[f"{name}.weight"] = tensors.pop(f"{name}._weight_qdata").bfloat16()

    rewrite_shards(copy, change)
    assert findings(copy, CorruptCheckpointError) >= {"layer_missing", "shard_header", "counts"}


def plan_layer(folder: Path) -> str:
    values = json.loads((folder / HEADER_FILE).read_bytes())
    name = values["plan"]["components"][COMPONENT]["layers"][0]["name"]
    assert isinstance(name, str)
    return name


def test_changed_metadata_is_corrupt_and_named(copy: Path) -> None:
    name = f"{plan_layer(copy)}.weight"

    def change(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
        values = json.loads(metadata[name])
        values["_data"]["act_quant_kwargs"]["_data"]["hp_value_lb"] = None
        metadata[name] = json.dumps(values)
        names = json.loads(metadata["tensor_names"])
        metadata["tensor_names"] = json.dumps(names[1:])

    rewrite_shards(copy, change)
    codes = findings(copy, CorruptCheckpointError)
    assert codes >= {"shard_header", "tensor_version", "tensor_names"}


def test_metadata_nested_too_deep_is_corrupt_and_named(copy: Path) -> None:
    name = f"{plan_layer(copy)}.weight"

    def change(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
        metadata[name] = "[" * 200_000
        metadata["tensor_names"] = "[" * 200_000

    rewrite_shards(copy, change)
    codes = findings(copy, CorruptCheckpointError)
    assert codes >= {"shard_header", "tensor_metadata", "tensor_names"}


def test_a_checkpoint_of_a_per_tensor_builder_is_refused(copy: Path) -> None:
    def change(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
        for key in [key for key in tensors if key.endswith("_scale")]:
            tensors[key] = tensors[key].amax().reshape(1, 1)

    rewrite_shards(copy, change)
    assert findings(copy, CorruptCheckpointError) >= {"part_form"}


# staleness


def test_a_bake_without_the_exclusions_is_stale(root: Path, tmp_path: Path) -> None:
    careless = without_exclusions(plan_for(root / COMPONENT, "fp8"))
    bake(root / COMPONENT, tmp_path / "out", plan=careless)
    with pytest.raises(StaleCheckpointError) as caught:
        validate(tmp_path / "out")
    assert caught.value.exit_code == 1
    quantised = [item for item in caught.value.mismatches if item.code == "module_quantised"]
    assert len(quantised) == 3
    assert all(item.subject.startswith("condition_embedder.") for item in quantised)
    assert all("wan.fp8.condition-embedder" in item.expected for item in quantised)
    validate(tmp_path / "out", plan=careless)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("activation_floor", 0.0),
        ("weight_dtype", "float8_e4m3fnuz"),
        ("granularity", "per_tensor"),
    ],
)
def test_other_settings_are_stale(root: Path, tmp_path: Path, field: str, value: object) -> None:
    plan = plan_for(root / COMPONENT, "fp8")
    settings = plan.components[COMPONENT].settings.model_copy(update={field: value})
    assert isinstance(settings, SchemeSettings)
    bake(root / COMPONENT, tmp_path / "out", plan=change_component(plan, settings=settings))
    assert findings(tmp_path / "out", StaleCheckpointError) == {"weights_digest", field}


def test_a_module_left_dense_is_stale(root: Path, tmp_path: Path) -> None:
    plan = plan_for(root / COMPONENT, "fp8")
    part = plan.components[COMPONENT]
    dropped, *layers = part.layers
    kept = part.kept[0].model_copy(
        update={"name": dropped.name, "shape": dropped.shape, "dtype": dropped.dtype}
    )
    fewer = change_component(plan, layers=tuple(layers), kept=(*part.kept, kept))
    bake(root / COMPONENT, tmp_path / "out", plan=fewer)
    assert findings(tmp_path / "out", StaleCheckpointError) == {"weights_digest", "module_dense"}


def test_a_forged_list_of_modules_is_caught_by_the_shards(copy: Path, root: Path) -> None:
    """A header that claims the careless plan over careful shards contradicts them."""
    careless = without_exclusions(plan_for(root / COMPONENT, "fp8"))
    part = careless.components[COMPONENT]
    reseal(
        copy,
        plan=careless.to_dict(),
        plan_digest=careless.plan_digest,
        weights_digest=part.weights_digest,
    )
    assert findings(copy, CorruptCheckpointError) >= {"layer_missing", "module_quantised"}


def test_mismatches_come_in_natural_order(root: Path, tmp_path: Path) -> None:
    """Not in that of a set, which differs from run to run."""
    plan = plan_for(root / COMPONENT, "fp8")
    part = plan.components[COMPONENT]
    names = [f"blocks.{block}.attn1.to_{which}" for block in (0, 1) for which in "kqv"]
    dropped = [layer for layer in part.layers if layer.name in names]
    fewer = change_component(
        plan,
        layers=tuple(layer for layer in part.layers if layer not in dropped),
        kept=(
            *part.kept,
            *(
                part.kept[0].model_copy(
                    update={"name": one.name, "shape": one.shape, "dtype": one.dtype}
                )
                for one in dropped
            ),
        ),
    )
    bake(root / COMPONENT, tmp_path / "out", plan=fewer)
    with pytest.raises(StaleCheckpointError) as caught:
        validate(tmp_path / "out")
    dense = [item.subject for item in caught.value.mismatches if item.code == "module_dense"]
    assert dense == names
    whole = tmp_path / "whole"
    bake(root / COMPONENT, whole, plan=plan)
    reseal(whole, plan=fewer.to_dict(), weights_digest=fewer.components[COMPONENT].weights_digest)
    with pytest.raises(CorruptCheckpointError) as damaged:
        validate(whole)
    extra = [item.subject for item in damaged.value.mismatches if item.code == "layer_extra"]
    assert extra == names


def test_a_scheme_that_is_denied_today_is_stale(root: Path, tmp_path: Path) -> None:
    request = Request(transformer=SchemeChoice.FP8, min_features=16)
    plan = plan_for(root / COMPONENT, "mxfp8")
    request = request.model_copy(update={"transformer": SchemeChoice.MXFP8})
    bake(root / COMPONENT, tmp_path / "out", plan=plan.model_copy(update={"request": request}))
    with pytest.raises(StaleCheckpointError) as caught:
        validate(tmp_path / "out")
    assert [item.code for item in caught.value.mismatches] == ["denied"]
    assert caught.value.remedy == (
        "bake it again, or load it with on_stale='requantise' and source=, the dense component"
    )
    assert "wan.deny.mxfp8" in caught.value.mismatches[0].found


def test_one_token_in_an_overlay_changes_apply_and_bake_alike(root: Path, tmp_path: Path) -> None:
    """The same names at run time and offline, and what was baked before is stale."""
    from diffusers import WanTransformer3DModel

    names = {}
    for token in ("ffn", "attn2"):
        overlay = tmp_path / f"{token}.yaml"
        overlay.write_text(OVERLAY.replace("TOKEN", token))
        rules = load_rules(overlay)
        request = Request(transformer=SchemeChoice.FP8, min_features=16)
        plan = resolve(root / COMPONENT, host=Host.load(HOST), request=request, rules=rules)
        bake(root / COMPONENT, tmp_path / token, plan=plan)
        validate(tmp_path / token, rules=rules)
        stored = {
            name.removesuffix("._weight_qdata")
            for shard in (tmp_path / token).glob("*.safetensors")
            for name in load_file(shard)
            if name.endswith("._weight_qdata")
        }
        model = WanTransformer3DModel.from_pretrained(root / COMPONENT, torch_dtype=torch.bfloat16)
        apply_plan(model, plan, component=COMPONENT)
        applied = {
            name
            for name, module in model.named_modules()
            if type(getattr(module, "weight", None)).__name__ == "Float8Tensor"
        }
        assert stored == applied
        names[token] = stored
    assert not any(".ffn." in name for name in names["ffn"])
    assert any(".ffn." in name for name in names["attn2"])
    with pytest.raises(StaleCheckpointError) as caught:
        validate(tmp_path / "ffn", rules=rules)
    codes = {item.code for item in caught.value.mismatches}
    assert codes == {"weights_digest", "module_dense", "module_quantised"}


def test_another_plan_is_told_apart(root: Path) -> None:
    codes = findings(root / "fp8", StaleCheckpointError, plan=plan_for(root / COMPONENT, "int8"))
    assert codes >= {"weights_digest", "scheme", "weight_dtype", "activation_floor"}


def test_damage_wins_over_staleness_and_both_are_told(root: Path, tmp_path: Path) -> None:
    careless = without_exclusions(plan_for(root / COMPONENT, "fp8"))
    bake(root / COMPONENT, tmp_path / "out", plan=careless)
    (tmp_path / "out" / "extra.safetensors").write_bytes(b"")
    codes = findings(tmp_path / "out", CorruptCheckpointError)
    assert codes == {"shard_stray", "weights_digest", "module_quantised"}


def test_a_validation_of_headers_reads_no_values(root: Path, tmp_path: Path) -> None:
    """Shards that are all holes behind their headers validate; their hashes do not."""
    folder = tmp_path / "holes"
    shutil.copytree(root / "int8", folder)
    for shard in folder.glob("*.safetensors"):
        content = shard.read_bytes()
        length = 8 + int.from_bytes(content[:8], "little")
        with shard.open("wb") as file:
            file.write(content[:length])
            file.truncate(len(content))
    validate(folder)
    assert "shard_sha256" in findings(folder, CorruptCheckpointError, full=True)


def test_validation_runs_without_torch(root: Path) -> None:
    code = "import sys, prequant\nprequant.validate(sys.argv[1])\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(root / "nvfp4")], check=True)
