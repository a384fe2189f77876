"""From what a caller names to a Target: a family name, folder, config, repository id or live model.

Torch-free for names, folders and released configurations; other configurations and live models are
read by ``inventory.live``. A family name comes before a folder of the same name (write ``./NAME``).
Nothing is downloaded.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from quantpolicy.errors import RequestError
from quantpolicy.family_match import GENERIC, Clues, FamilyMatch, effective_config, find_family
from quantpolicy.inventory.headers import inventory_from_folder
from quantpolicy.inventory.model import Inventory
from quantpolicy.inventory.shipped import load_inventory
from quantpolicy.inventory.weight_files import CONFIG_FILE, read_json_file
from quantpolicy.model_folder import (
    INDEX_FILE,
    KIND_ORDER,
    MODULAR_INDEX_FILE,
    PipelineIndex,
    check_path,
    class_name_of,
    component_folders,
    index_file,
    is_component,
    kind_of_name,
    read_pipeline_index,
    repo_of,
)
from quantpolicy.rule_schema import ComponentSpec
from quantpolicy.schemes import ComponentKind
from quantpolicy.target import Target, TargetComponent

if TYPE_CHECKING:
    from quantpolicy.rules import RuleTable

DEFAULT_DENOISER = "transformer"
SECOND_DENOISER = "transformer_2"


def target_from(model: object, rules: RuleTable) -> Target:
    """Return what a plan is resolved for.

    Args:
        model: a family name, a repository id, the folder of a pipeline or of a component, a
            config.json, a configuration as a mapping, an ``nn.Module`` or a pipeline.

    Raises:
        RequestError: the model cannot be found, read or recognised, or is quantised already.
        CorruptCheckpointError: a weight file is damaged.
    """
    if isinstance(model, str):
        return _from_text(model, rules)
    if isinstance(model, os.PathLike):
        return _from_path(Path(model), rules)
    if isinstance(model, Mapping):
        return _from_config(dict(model), rules, where="config")
    if hasattr(model, "named_modules") or hasattr(model, "components"):
        from quantpolicy.recognise_live import target_from_live

        return target_from_live(model, rules)
    raise RequestError(
        "model",
        f"a {type(model).__name__} is no model",
        allowed="a family name, a folder, a config.json, a config dict, a module or a pipeline",
        remedy="give one of these",
    )


def _from_text(model: str, rules: RuleTable) -> Target:
    if model in rules.families:
        return _from_family(model, rules, source=model, how="family name")
    if _looks_like_path(model) or os.path.lexists(model):
        return _from_path(Path(model).expanduser(), rules)
    if model.count("/") == 1:
        return _from_repo(model, rules)
    raise _unknown_name(model, rules)


def _looks_like_path(model: str) -> bool:
    starts = ("./", "../", "/", "~")
    suffixes = (".json", ".safetensors", ".gguf", ".bin", ".ckpt", ".pt", ".pth", "/")
    return (
        model.startswith(starts)
        or model.endswith(suffixes)
        or model in (".", "..")
        or model.count("/") > 1
    )


def _unknown_name(model: str, rules: RuleTable) -> RequestError:
    known = {name.lower(): name for name in rules.families}
    near = [known[name] for name in difflib.get_close_matches(model.lower(), known, n=3)]
    return RequestError(
        f"model {model!r}",
        "neither a family nor a path",
        allowed="near: " + ", ".join(near) if near else "families: " + ", ".join(known.values()),
        remedy="choose a family (`quantpolicy families`) or give an existing folder",
    )


def _from_repo(repo: str, rules: RuleTable) -> Target:
    for family, spec in rules.families.items():
        if repo in spec.recognise.repos:
            how = f"repository {repo}, taken as released"
            return _from_family(family, rules, source=repo, how=how)
    folder = _cached_snapshot(repo)
    if folder is not None:
        return _from_path(folder, rules)
    raise RequestError(
        f"model {repo!r}",
        "neither an existing path, nor a repository of the rule table, nor in the local cache",
        remedy=f"download it with `hf download {repo}`, or give a family name",
    )


def _cached_snapshot(repo: str) -> Path | None:
    """Return the snapshot of a repository in the local Hugging Face cache, None without one."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        return None
    try:
        return Path(snapshot_download(repo, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def _from_family(family: str, rules: RuleTable, *, source: str, how: str) -> Target:
    components = {}
    for name, spec in rules.families[family].components.items():
        inventory = load_inventory(spec.inventory) if spec.inventory else None
        components[name] = _component(spec, inventory)
    return Target(family=family, source=source, recognised_by=how, components=in_order(components))


def _component(spec: ComponentSpec, inventory: Inventory | None) -> TargetComponent:
    return TargetComponent(
        kind=spec.kind,
        class_name=spec.class_name,
        dtype=spec.dtype,
        keep_in_fp32=spec.keep_in_fp32,
        inventory=inventory,
        dense_bytes=inventory.dense_bytes if inventory else spec.size_bytes,
    )


def in_order(components: Mapping[str, TargetComponent]) -> dict[str, TargetComponent]:
    """Return the components as denoisers, text encoders, VAE; each kind in its given order."""
    return dict(sorted(components.items(), key=lambda item: KIND_ORDER.index(item[1].kind)))


def _from_path(path: Path, rules: RuleTable) -> Target:
    check_path(path)
    if path.is_dir():
        return _from_folder(path, rules)
    if path.name == CONFIG_FILE:
        return _from_config(read_json_file(path), rules, where=str(path))
    if path.name in (INDEX_FILE, MODULAR_INDEX_FILE):
        raise _wrong_file(path, "the file of a whole pipeline", f"give its folder {path.parent}")
    if path.suffix == ".gguf":
        raise _wrong_file(path, "GGUF weights are already quantised", "give the dense model")
    if path.suffix in (".bin", ".ckpt", ".pt", ".pth"):
        remedy = "give a folder with safetensors weights"
        raise _wrong_file(path, "a pickle file can run code, so none is read", remedy)
    raise _wrong_file(path, f"not a {CONFIG_FILE}", f"give a folder or a {CONFIG_FILE}")


def _wrong_file(path: Path, found: str, remedy: str) -> RequestError:
    return RequestError(str(path), found, remedy=remedy)


def _from_folder(folder: Path, rules: RuleTable) -> Target:
    index = index_file(folder)
    if index is not None:
        return _from_pipeline_folder(index, rules)
    if is_component(folder):
        return _from_component_folder(folder, rules)
    gguf = next(folder.glob("*.gguf"), None)
    if gguf is not None:
        raise _wrong_file(gguf, "GGUF weights are already quantised", "give the dense model")
    raise RequestError(
        str(folder),
        f"holds neither {INDEX_FILE} nor {CONFIG_FILE}",
        allowed="the folder of a pipeline or of one component",
        remedy="give the folder that `save_pretrained` wrote",
    )


def pipeline_clues(index: PipelineIndex, where: str) -> Clues:
    """Return the clues of a pipeline without its configuration; its first denoiser stands for it.

    Raises:
        RequestError: it has no denoiser.
    """
    denoisers = [name for name in index.classes if kind_of_name(name) is ComponentKind.DENOISER]
    if not denoisers:
        raise RequestError(
            where,
            f"{index.pipeline} has no denoiser",
            allowed="a pipeline with a transformer or a unet",
            remedy="give a diffusion pipeline with its weights",
        )
    class_name = index.classes[denoisers[0]]
    if index.settings.get("boundary_ratio") is not None:
        denoisers.append(SECOND_DENOISER)
    names = tuple(dict.fromkeys(denoisers))
    return Clues(where, class_name, {}, index.pipeline, index.repo, names)


def is_planned(name: str, match: FamilyMatch, rules: RuleTable) -> bool:
    """Tell whether plans speak of a pipeline's component: not of a tokenizer or a scheduler."""
    if match.family != GENERIC and name in rules.families[match.family].components:
        return True
    return kind_of_name(name) is not None


def _from_pipeline_folder(path: Path, rules: RuleTable) -> Target:
    index = read_pipeline_index(path)
    folders = component_folders(path, index.classes)
    index = replace(index, classes={name: index.classes[name] for name in folders})
    clues = pipeline_clues(index, str(path.parent))
    config = read_json_file(folders[clues.denoisers[0]] / CONFIG_FILE)
    match = find_family(replace(clues, config=config), rules)
    components = {
        name: _folder_component(folder, name, index.classes[name], match, rules)
        for name, folder in folders.items()
        if is_planned(name, match, rules)
    }
    return Target(
        family=match.family,
        source=str(path.parent),
        recognised_by=match.how,
        components=in_order(components),
    )


def _from_component_folder(folder: Path, rules: RuleTable) -> Target:
    config = read_json_file(folder / CONFIG_FILE)
    class_name = class_name_of(config, folder / CONFIG_FILE)
    match = find_family(Clues(str(folder), class_name, config, repo=repo_of(config)), rules)
    name = component_name(match, folder.resolve().name, class_name, rules)
    component = _folder_component(folder, name, class_name, match, rules)
    return Target(
        family=match.family,
        source=str(folder),
        recognised_by=match.how,
        components={name: component},
    )


def component_name(match: FamilyMatch, given: str, class_name: str, rules: RuleTable) -> str:
    """Return the name of a component that comes alone: its folder's name when that fits."""
    if match.family == GENERIC:
        return given if kind_of_name(given) is not None else DEFAULT_DENOISER
    spec = rules.families[match.family].components.get(given)
    return given if spec is not None and spec.class_name == class_name else match.component


def spec_for(match: FamilyMatch, name: str, class_name: str, rules: RuleTable) -> ComponentSpec:
    """Return the family's specification of a component, or a plain one for a class it lacks."""
    if match.family != GENERIC:
        spec = rules.families[match.family].components.get(name)
        if spec is not None and spec.class_name in ("", class_name):
            return spec
    kind = kind_of_name(name) or ComponentKind.DENOISER
    return ComponentSpec(kind=kind, class_name=class_name, size_bytes=0)


def shipped_for(match: FamilyMatch, spec: ComponentSpec, rules: RuleTable) -> list[Inventory]:
    """Return the shipped inventories of the component's class, the family's own first."""
    own = [spec.inventory] if spec.inventory else []
    others = [
        part.inventory
        for family in rules.families.values()
        for part in family.components.values()
        if part.inventory and part.class_name == spec.class_name and match.family != GENERIC
    ]
    return [load_inventory(name) for name in dict.fromkeys(own + others)]


def _folder_component(
    folder: Path, name: str, class_name: str, match: FamilyMatch, rules: RuleTable
) -> TargetComponent:
    spec = spec_for(match, name, class_name, rules)
    inventory = inventory_from_folder(
        folder,
        class_name=class_name,
        dtype=spec.dtype,
        keep_in_fp32=spec.keep_in_fp32,
        shipped=shipped_for(match, spec, rules),
    )
    return _component(spec.model_copy(update={"class_name": class_name}), inventory)


def _from_config(config: dict[str, object], rules: RuleTable, *, where: str) -> Target:
    class_name = class_name_of(config, where)
    match = find_family(Clues(where, class_name, config, repo=repo_of(config)), rules)
    name = component_name(match, "", class_name, rules)
    spec = spec_for(match, name, class_name, rules)
    inventory = _config_inventory(config, class_name, spec, match, rules)
    return Target(
        family=match.family,
        source=where,
        recognised_by=match.how,
        components={name: _component(spec, inventory)},
    )


def _config_inventory(
    config: dict[str, object],
    class_name: str,
    spec: ComponentSpec,
    match: FamilyMatch,
    rules: RuleTable,
) -> Inventory:
    released = effective_config(class_name, spec.config)
    if spec.inventory and effective_config(class_name, config) == released:
        return load_inventory(spec.inventory)
    from quantpolicy.inventory.live import inventory_from_config

    inventory = inventory_from_config(
        class_name, config, dtype=spec.dtype, keep_in_fp32=spec.keep_in_fp32
    )
    shipped = shipped_for(match, spec, rules)
    return inventory.with_rows_of(shipped[0]) if shipped else inventory
