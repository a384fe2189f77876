"""Recognition: names, folders, configurations, repositories and live models, and every mistake."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quantpolicy.errors import CorruptCheckpointError, RequestError
from quantpolicy.family_match import Clues, effective_config, find_family
from quantpolicy.host import Host
from quantpolicy.inventory.shipped import load_inventory
from quantpolicy.recognise import target_from
from quantpolicy.resolver import resolve
from quantpolicy.rules import RuleTable, load_rules
from quantpolicy.schemes import ComponentKind
from quantpolicy.target import Target


@pytest.fixture(scope="module")
def rules() -> RuleTable:
    return load_rules()


@pytest.fixture
def copy_of(pipelines: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that gives a pipeline folder to damage."""

    def copy(family: str) -> Path:
        return Path(shutil.copytree(pipelines(family), tmp_path / family))

    return copy


def released_config(rules: RuleTable, family: str) -> dict[str, object]:
    spec = rules.families[family].components["transformer"]
    return {"_class_name": spec.class_name, **spec.config}


def test_every_family_by_name(rules: RuleTable) -> None:
    for family, spec in rules.families.items():
        target = target_from(family, rules)
        assert (target.family, target.source, target.recognised_by) == (
            family,
            family,
            "family name",
        )
        assert set(target.components) == set(spec.components)
        for name, part in target.components.items():
            shipped = spec.components[name].inventory
            assert part.kind is spec.components[name].kind
            if shipped:
                assert part.inventory == load_inventory(shipped)
                assert part.dense_bytes == load_inventory(shipped).dense_bytes
            else:
                assert part.inventory is None
                assert part.dense_bytes == spec.components[name].size_bytes


def test_components_stand_in_order(rules: RuleTable, pipelines: Callable[[str], Path]) -> None:
    expected = ["transformer", "transformer_2", "text_encoder", "vae"]
    assert list(target_from("wan2.2-t2v-a14b", rules).components) == expected
    assert list(target_from(pipelines("wan2.2-t2v-a14b"), rules).components) == expected


# A tiny model lacks the facts that tell a family's sizes apart; the first of equal rules counts.
FOLDER_FAMILY = {
    "wan2.1-t2v-14b": "wan2.1-t2v-1.3b",
    "hunyuanvideo-1.5-720p": "hunyuanvideo-1.5",
    "flux.2-klein-9b": "flux.2-klein-4b",
}


@pytest.mark.parametrize("family", load_rules().families)
def test_every_family_by_pipeline_folder(
    family: str, rules: RuleTable, pipelines: Callable[[str], Path]
) -> None:
    target = target_from(str(pipelines(family)), rules)
    assert target.family == FOLDER_FAMILY.get(family, family)
    spec = rules.families[family]
    assert set(target.components) == set(spec.components)
    for name, part in target.components.items():
        assert part.class_name == spec.components[name].class_name
        assert part.dtype == spec.components[name].dtype
        assert part.inventory is not None
        assert part.dense_bytes == part.inventory.dense_bytes > 0
    denoiser = target.components["transformer"].inventory
    assert denoiser is not None
    assert all(linear.rows is not None for linear in denoiser.linears)


def test_every_released_config_is_its_family(rules: RuleTable) -> None:
    # Equal released configurations: A14B is Wan 2.1 twice, editing is Qwen-Image.
    same = {"wan2.2-t2v-a14b": "wan2.1-t2v-14b", "qwen-image-edit": "qwen-image"}
    for family, spec in rules.families.items():
        target = target_from(released_config(rules, family), rules)
        assert target.family == same.get(family, family)
        assert list(target.components) == ["transformer"]
        assert target.components["transformer"].inventory == load_inventory(
            rules.families[target.family].components["transformer"].inventory
        )
        if family in same:
            assert f"told from {family} by nothing" in target.recognised_by
        assert spec.recognise.class_name in target.recognised_by


def test_config_with_every_default_written_out_is_released(rules: RuleTable) -> None:
    config = {
        **effective_config("LTX2VideoTransformer3DModel", {}),
        "_class_name": "LTX2VideoTransformer3DModel",
        "_diffusers_version": "0.42.1",
        "field_of_another_release": 3,
    }
    inventory = target_from(config, rules).components["transformer"].inventory
    assert inventory == load_inventory("ltx-2")


def test_changed_config_is_built_on_the_meta_device(rules: RuleTable) -> None:
    config = released_config(rules, "z-image") | {"n_layers": 3}
    target = target_from(config, rules)
    inventory = target.components["transformer"].inventory
    assert target.family == "z-image"
    assert inventory is not None
    assert inventory.source == "config"
    layers = {linear.name.split(".")[1] for linear in inventory.linears if "layers." in linear.name}
    assert layers == {"0", "1", "2"}
    shipped = {linear.name: linear for linear in load_inventory("z-image").linears}
    assert all(linear == shipped[linear.name] for linear in inventory.linears)


def test_component_folder_and_config_file_and_live_model_agree(
    rules: RuleTable, pipelines: Callable[[str], Path]
) -> None:
    from quantpolicy.measure.tiny import build_tiny

    folder = pipelines("ltx-2") / "transformer"
    from_folder = target_from(folder, rules)
    from_file = target_from(folder / "config.json", rules)
    from_model = target_from(build_tiny("ltx-2")[0], rules)
    parts = [target.components["transformer"] for target in (from_folder, from_file, from_model)]
    assert {target.family for target in (from_folder, from_file, from_model)} == {"ltx-2"}
    assert [part.inventory.source for part in parts if part.inventory] == [
        "headers",
        "config",
        "live",
    ]
    first, second, third = (part.inventory.linears for part in parts if part.inventory)
    assert first == second == third
    assert parts[0].keep_in_fp32 == parts[1].keep_in_fp32 == parts[2].keep_in_fp32
    assert {part.dtype for part in parts} == {"bfloat16"}


def test_second_expert_alone_keeps_its_name(
    rules: RuleTable, pipelines: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = pipelines("wan2.2-i2v-a14b")
    assert list(target_from(folder / "transformer_2", rules).components) == ["transformer_2"]
    renamed = Path(shutil.copytree(folder / "transformer", tmp_path / "expert"))
    assert list(target_from(renamed, rules).components) == ["transformer"]


def _with_config(folder: Path, change: dict[str, object]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    return path


def test_a_component_of_another_class_than_the_index_says(
    rules: RuleTable, copy_of: Callable[[str], Path]
) -> None:
    folder = copy_of("flux.1")
    for name, own, listed in (
        ("vae", "AutoencoderKLWan", "AutoencoderKL"),
        ("transformer", "WanTransformer3DModel", "FluxTransformer2DModel"),
    ):
        path = _with_config(folder / name, {"_class_name": own})
        with pytest.raises(RequestError) as caught:
            target_from(folder, rules)
        assert caught.value.where == str(path)
        assert caught.value.found == (
            f"names class {own}, but model_index.json says that the {name} is a {listed}"
        )


def test_a_quantised_config_is_refused_as_a_file_and_in_a_folder(
    rules: RuleTable, copy_of: Callable[[str], Path]
) -> None:
    folder = copy_of("flux.1") / "transformer"
    path = _with_config(folder, {"quantization_config": {"quant_method": "torchao"}})
    for model in (path, folder, json.loads(path.read_text())):
        with pytest.raises(RequestError) as caught:
            target_from(model, rules)
        assert caught.value.found == (
            "already quantised: config.json carries a quantization_config"
        )
    _with_config(folder, {"quantization_config": None})
    assert target_from(path, rules).family == "flux.1"
    assert target_from(folder, rules).family == "flux.1"


def test_a_byte_order_mark_in_a_config_is_accepted(
    rules: RuleTable, copy_of: Callable[[str], Path]
) -> None:
    path = copy_of("flux.1") / "transformer" / "config.json"
    path.write_text(path.read_text(), encoding="utf-8-sig")
    assert target_from(path.parent, rules).family == "flux.1"


def test_a_component_without_a_denoiser_has_no_workload(
    rules: RuleTable, pipelines: Callable[[str], Path]
) -> None:
    host = Host.load("h200")
    note = (
        "no denoiser is here: flux.1 is the family whose rules apply, not a claim about the model"
        " that this component belongs to"
    )
    folder = pipelines("flux.1")
    alone = resolve(folder / "vae", host=host)
    whole = resolve(folder, host=host)
    assert (alone.workload, whole.workload is None) == (None, False)
    assert (note in alone.notes, note in whole.notes) == (True, False)


def test_vae_folder_alone(rules: RuleTable, pipelines: Callable[[str], Path]) -> None:
    target = target_from(pipelines("qwen-image") / "vae", rules)
    assert target.family == "qwen-image"
    assert {name: part.kind for name, part in target.components.items()} == {
        "vae": ComponentKind.VAE
    }


class Pipeline:
    """What recognition needs of a diffusers pipeline: its class, components and config."""

    def __init__(self, config: dict[str, object], **components: object) -> None:
        self.components = components
        self.config = config


class WanPipeline(Pipeline):
    pass


def test_live_pipeline_with_both_experts(rules: RuleTable) -> None:
    from quantpolicy.measure.tiny import build_tiny, build_tiny_part

    model = build_tiny("wan2.2-t2v-a14b")[0]
    other = build_tiny("wan2.2-t2v-a14b", seed=1)[0]
    parts = {
        "tokenizer": object(),
        "vae": build_tiny_part("AutoencoderKLWan", dtype="float32"),
        "text_encoder": build_tiny_part("UMT5EncoderModel"),
        "transformer": model,
        "transformer_2": other,
        "scheduler": None,
    }
    target = target_from(WanPipeline({"boundary_ratio": 0.875}, **parts), rules)
    assert target.family == "wan2.2-t2v-a14b"
    assert list(target.components) == ["transformer", "transformer_2", "text_encoder", "vae"]
    assert target.components["vae"].dtype == "float32"
    alone = target_from(WanPipeline({"boundary_ratio": None}, transformer=model), rules)
    assert alone.family == "wan2.1-t2v-1.3b"
    assert list(alone.components) == ["transformer"]


def test_real_pipeline_object(rules: RuleTable, pipelines: Callable[[str], Path]) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline

    from quantpolicy.measure.tiny import build_tiny

    pipeline = ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=None,
        text_encoder=None,
        tokenizer=None,
        transformer=build_tiny("z-image")[0],
    )
    target = target_from(pipeline, rules)
    assert (target.family, target.source) == ("z-image", "ZImagePipeline")
    folder = target_from(pipelines("z-image"), rules)
    live, stored = (item.components["transformer"].inventory for item in (target, folder))
    assert live is not None
    assert stored is not None
    assert live.linears == stored.linears


def test_boundary_ratio_tells_an_a14b_whose_second_expert_is_absent(
    rules: RuleTable, copy_of: Callable[[str], Path]
) -> None:
    folder = copy_of("wan2.2-t2v-a14b")
    index = json.loads((folder / "model_index.json").read_text())
    index |= {"transformer_2": [None, None], "boundary_ratio": 0.9, "expand_timesteps": False}
    (folder / "model_index.json").write_text(json.dumps(index))
    target = target_from(folder, rules)
    assert target.family == "wan2.2-t2v-a14b"
    assert list(target.components) == ["transformer", "text_encoder", "vae"]


def test_ti2v_5b_has_no_second_expert(rules: RuleTable, copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("wan2.2-ti2v-5b")
    index = json.loads((folder / "model_index.json").read_text())
    index |= {"transformer_2": [None, None], "boundary_ratio": None, "expand_timesteps": True}
    (folder / "model_index.json").write_text(json.dumps(index))
    target = target_from(folder, rules)
    assert target.family == "wan2.2-ti2v-5b"
    assert list(target.components) == ["transformer", "text_encoder", "vae"]


def test_modular_pipeline_folder(rules: RuleTable, copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("minimax-h3")
    (folder / "model_index.json").unlink()
    shutil.rmtree(folder / "text_encoder")
    where = {"pretrained_model_name_or_path": "x", "subfolder": "transformer"}
    index = {
        "_class_name": "ModularPipeline",
        "transformer": ["diffusers", "MiniMaxH3Transformer3DModel", where],
        "text_encoder": [None, None, {"type_hint": ["transformers", "Qwen3VLModel"]}],
        "vae": [None, None, {"type_hint": ["diffusers", "AutoencoderKLMiniMaxH3"]}],
        "guider": [None, None, {"type_hint": [None, None]}],
    }
    (folder / "modular_model_index.json").write_text(json.dumps(index))
    target = target_from(folder, rules)
    assert target.family == "minimax-h3"
    assert list(target.components) == ["transformer", "vae"]


def test_known_repository_is_taken_as_released(rules: RuleTable) -> None:
    for family, spec in rules.families.items():
        for repo in spec.recognise.repos:
            target = target_from(repo, rules)
            assert (target.family, target.source) == (family, repo)
            assert "taken as released" in target.recognised_by


@pytest.mark.parametrize(
    ("family", "changed", "how"),
    [
        (
            "wan2.2-ti2v-5b",
            {"in_channels": 160},
            "class WanTransformer3DModel; nearest to the configuration of wan2.2-ti2v-5b "
            "(the same: num_attention_heads 24)",
        ),
        (
            "hunyuanvideo-1.5",
            {"target_size": 1000},
            "class HunyuanVideo15Transformer3DModel; nearest to the configuration of "
            "hunyuanvideo-1.5 and hunyuanvideo-1.5-720p; told from hunyuanvideo-1.5-720p by "
            "nothing, and their rules are the same",
        ),
    ],
)
def test_a_config_like_no_family_is_told_from_the_nearest(
    rules: RuleTable, family: str, changed: dict[str, object], how: str
) -> None:
    target = target_from({**released_config(rules, family), **changed}, rules)
    assert (target.family, target.recognised_by) == (family, how)


def test_repository_in_a_config_decides_between_equal_ones(rules: RuleTable) -> None:
    config = released_config(rules, "wan2.2-t2v-a14b")
    repo = rules.families["wan2.2-t2v-a14b"].recognise.repos[0]
    target = target_from({**config, "_name_or_path": repo}, rules)
    assert target.family == "wan2.2-t2v-a14b"
    assert f"repository {repo}" in target.recognised_by


def _cache_snapshot(root: Path, repo: str, folder: Path) -> None:
    cached = root / f"models--{repo.replace('/', '--')}"
    shutil.copytree(folder, cached / "snapshots" / ("0" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)


def test_cached_repository_is_read_from_its_snapshot(
    rules: RuleTable,
    pipelines: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    _cache_snapshot(tmp_path, "someone/my-model", pipelines("flux.1") / "transformer")
    target = target_from("someone/my-model", rules)
    assert target.family == "flux.1"
    assert target.source.startswith(str(tmp_path))
    with pytest.raises(RequestError, match=r"hf download someone/other"):
        target_from("someone/other", rules)


def test_unknown_class_is_generic(rules: RuleTable, pipelines: Callable[[str], Path]) -> None:
    import diffusers

    folder = pipelines("flux.1").parent / "generic"
    if not folder.exists():
        diffusers.PixArtTransformer2DModel(
            num_attention_heads=2, attention_head_dim=32, num_layers=1, sample_size=8,
            cross_attention_dim=64, caption_channels=32,
        ).save_pretrained(folder)  # fmt: skip
    target = target_from(folder, rules)
    assert target.family == "generic"
    assert target.recognised_by == "no family of the table has class PixArtTransformer2DModel"
    inventory = target.components["transformer"].inventory
    assert inventory is not None
    assert {linear.rows for linear in inventory.linears} == {None}
    live = target_from(diffusers.PixArtTransformer2DModel.from_pretrained(folder), rules)
    assert live.family == "generic"
    assert live.components["transformer"].inventory is not None
    assert {item.name for item in live.components["transformer"].inventory.linears} == {
        item.name for item in inventory.linears
    }


EDIT_OVERLAY = """
version: 1
families:
  qwen-image-edit:
    rules:
      - {id: edit.deny.fp8, schemes: [fp8], effect: deny, because: not_validated}
"""


def test_families_with_different_rules_and_no_telling_fact_are_refused(
    rules: RuleTable, tmp_path: Path
) -> None:
    overlay = tmp_path / "edit.yaml"
    overlay.write_text(EDIT_OVERLAY)
    changed = load_rules(overlay)
    with pytest.raises(RequestError, match=r"qwen-image, qwen-image-edit.*whole pipeline"):
        target_from(released_config(rules, "qwen-image"), changed)
    clues = Clues("x", "QwenImageTransformer2DModel", pipeline="QwenImageEditPipeline")
    assert find_family(clues, changed).family == "qwen-image-edit"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ltx2", "near: ltx-2"),
        ("LTX-2", "near: ltx-2"),
        ("wan2.2-ti2v", "near: wan2.2-ti2v-5b"),
        ("gibberish", "families: wan2.1-t2v-1.3b"),
        ("", "neither a family nor a path"),
        ("./missing", "cannot be read: No such file or directory"),
        ("/missing/folder/of/mine", "cannot be read: No such file or directory"),
        ("missing.json", "cannot be read: No such file or directory"),
        ("a\0b/c/d", "null byte"),
        ("x" * 5000 + "/", "File name too long"),
    ],
)
def test_names_that_lead_nowhere(name: str, message: str, rules: RuleTable) -> None:
    with pytest.raises(RequestError, match=message):
        target_from(name, rules)


@pytest.mark.parametrize("model", [None, 3, ["ltx-2"], b"ltx-2"])
def test_things_that_are_no_model(model: object, rules: RuleTable) -> None:
    with pytest.raises(RequestError, match="is no model"):
        target_from(model, rules)


def test_family_name_comes_before_a_folder_of_that_name(
    rules: RuleTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ltx-2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert target_from("ltx-2", rules).recognised_by == "family name"
    with pytest.raises(RequestError, match="holds neither"):
        target_from("./ltx-2", rules)


FILES = {
    "model_index.json": ("{}", "give its folder"),
    "weights.safetensors": ("", r"not a config\.json"),
    "weights.gguf": ("", "already quantised"),
    "weights.ckpt": ("", "a pickle file can run code"),
    "settings.yaml": ("", r"not a config\.json"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_config(name: str, rules: RuleTable, tmp_path: Path) -> None:
    content, message = FILES[name]
    (tmp_path / name).write_text(content)
    with pytest.raises(RequestError, match=message):
        target_from(tmp_path / name, rules)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not JSON"),
        ("not json", "not JSON"),
        ("[1]", "a JSON list, not an object"),
        ("{}", "names no class"),
        ('{"_class_name": 3}', "names no class"),
        ('{"_class_name": ""}', "names no class"),
        ('{"architectures": ["A", "B"]}', "names no class"),
        ('{"_class_name": "A", "_class_name": "B"}', "'_class_name' stands twice"),
        ('{"_class_name": "NoSuchModel"}', "no model class of diffusers"),
    ],
)
def test_configs_that_say_nothing(
    content: str, message: str, rules: RuleTable, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(RequestError, match=message):
        target_from(path, rules)


def test_config_that_is_not_text(rules: RuleTable, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RequestError, match="not JSON"):
        target_from(tmp_path / "config.json", rules)


def test_folders_without_a_model(rules: RuleTable, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"neither model_index\.json nor config\.json"):
        target_from(tmp_path, rules)
    (tmp_path / "model-Q8_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(RequestError, match="GGUF weights are already quantised"):
        target_from(tmp_path, rules)


def test_config_without_weights_beside_it(rules: RuleTable, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"_class_name": "FluxTransformer2DModel"}')
    with pytest.raises(RequestError, match=r"holds no weights.*config\.json"):
        target_from(tmp_path, rules)
    assert target_from(tmp_path / "config.json", rules).family == "flux.1"


def test_symbolic_links(rules: RuleTable, pipelines: Callable[[str], Path], tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(RequestError, match="Too many levels of symbolic links"):
        target_from(loop, rules)
    nowhere = tmp_path / "nowhere"
    nowhere.symlink_to(tmp_path / "missing")
    with pytest.raises(RequestError, match="No such file"):
        target_from("nowhere" if Path.cwd() == tmp_path else str(nowhere), rules)
    good = tmp_path / "good"
    good.symlink_to(pipelines("flux.1"))
    assert target_from(good, rules).family == "flux.1"


def _without_folder(folder: Path, index: dict[str, object]) -> None:
    shutil.rmtree(folder / "vae")


def _malformed_entry(folder: Path, index: dict[str, object]) -> None:
    index["vae"] = ["diffusers"]


def _number_entry(folder: Path, index: dict[str, object]) -> None:
    index["vae"] = ["diffusers", 3]


def _name_outside(folder: Path, index: dict[str, object]) -> None:
    index["../vae"] = index.pop("vae")


def _no_class(folder: Path, index: dict[str, object]) -> None:
    del index["_class_name"]


def _no_denoiser(folder: Path, index: dict[str, object]) -> None:
    index["transformer"] = [None, None]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without_folder, r"model_index\.json names 'vae', but there is no such folder"),
        (_malformed_entry, r"malformed entry \['diffusers'\]"),
        (_number_entry, r"malformed entry \['diffusers', 3\]"),
        (_name_outside, r"'\.\./vae': no name for a component"),
        (_no_class, "names no class"),
        (_no_denoiser, "ZImagePipeline has no denoiser"),
    ],
)
def test_damaged_pipeline_folders(
    damage: Callable[[Path, dict[str, object]], None],
    message: str,
    rules: RuleTable,
    copy_of: Callable[[str], Path],
) -> None:
    folder = copy_of("z-image")
    index = json.loads((folder / "model_index.json").read_text())
    damage(folder, index)
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(RequestError, match=message):
        target_from(folder, rules)


def test_damaged_weights_are_a_corrupt_checkpoint(
    rules: RuleTable, copy_of: Callable[[str], Path]
) -> None:
    folder = copy_of("z-image")
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    with pytest.raises(CorruptCheckpointError, match="truncated"):
        target_from(folder, rules)


TORCH_FREE = """
import sys
from quantpolicy.recognise import target_from
from quantpolicy.rules import load_rules
rules = load_rules()
for model in sys.argv[1:]:
    assert target_from(model, rules).components
config = {"_class_name": "ZImageTransformer2DModel"}
assert target_from(config, rules).family == "z-image"
found = {"torch", "diffusers", "transformers", "numpy", "safetensors"} & set(sys.modules)
assert not found, found
"""


def test_names_folders_and_released_configs_need_no_torch(
    pipelines: Callable[[str], Path],
) -> None:
    models = ["ltx-2", str(pipelines("flux.1")), str(pipelines("flux.1") / "transformer")]
    subprocess.run([sys.executable, "-c", TORCH_FREE, *models], check=True, timeout=120)


def test_target_is_frozen_and_comparable(rules: RuleTable) -> None:
    first, second = target_from("flux.1", rules), target_from("flux.1", rules)
    assert isinstance(first, Target)
    assert first == second
