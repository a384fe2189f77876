"""From a folder or a configuration to a Target, without torch where the files tell enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from quantpolicy.errors import RequestError
from quantpolicy.family_match import Clues, FamilyMatch, effective_config, find_family
from quantpolicy.inventory.headers import check_dense_config, inventory_from_folder
from quantpolicy.inventory.model import Inventory
from quantpolicy.inventory.shipped import load_inventory
from quantpolicy.inventory.weight_files import CONFIG_FILE, UNREAD, read_json_file
from quantpolicy.model_folder import (
    INDEX_FILE,
    MODULAR_INDEX_FILE,
    check_path,
    class_name_of,
    component_folders,
    index_file,
    is_component,
    read_pipeline_index,
    repo_of,
)
from quantpolicy.paths import is_dir, is_file, list_folder
from quantpolicy.rule_schema import ComponentSpec
from quantpolicy.target import Target, TargetComponent
from quantpolicy.target_parts import (
    component_name,
    in_order,
    is_planned,
    make_component,
    pipeline_clues,
    shipped_for,
    spec_for,
)

if TYPE_CHECKING:
    from quantpolicy.rules import RuleTable


def target_from_path(path: Path, rules: RuleTable) -> Target:
    """Return the target of a folder or a config.json; see ``recognise.target_from``."""
    check_path(path)
    if is_dir(path):
        return _from_folder(path, rules)
    if path.name == CONFIG_FILE:
        return target_from_config(read_json_file(path), rules, where=str(path))
    if path.name in (INDEX_FILE, MODULAR_INDEX_FILE):
        raise _wrong_file(path, "the file of a whole pipeline", f"give its folder {path.parent}")
    if path.suffix in UNREAD:
        raise _wrong_file(path, UNREAD[path.suffix], "give a folder with dense safetensors weights")
    raise _wrong_file(path, f"not a {CONFIG_FILE}", f"give a folder or a {CONFIG_FILE}")


def _wrong_file(path: Path, found: str, remedy: str) -> RequestError:
    return RequestError(str(path), found, remedy=remedy)


def _from_folder(folder: Path, rules: RuleTable) -> Target:
    index = index_file(folder)
    if index is not None:
        return _from_pipeline_folder(index, rules)
    if is_component(folder):
        return _from_component_folder(folder, rules)
    gguf = next((path for path in list_folder(folder) if path.suffix == ".gguf"), None)
    if gguf is not None:
        raise _wrong_file(gguf, UNREAD[".gguf"], "give the dense model")
    raise RequestError(
        str(folder),
        f"holds neither {INDEX_FILE} nor {CONFIG_FILE}",
        allowed="the folder of a pipeline or of one component",
        remedy="give the folder that `save_pretrained` wrote",
    )


def _from_pipeline_folder(path: Path, rules: RuleTable) -> Target:
    index = read_pipeline_index(path)
    folders = component_folders(path, index.classes)
    index = replace(index, classes={name: index.classes[name] for name in folders})
    clues = pipeline_clues(index, str(path.parent))
    config = read_json_file(folders[clues.denoisers[0]] / CONFIG_FILE)
    match = find_family(replace(clues, config=config), rules)
    planned = {name: part for name, part in folders.items() if is_planned(name, match, rules)}
    for name, folder in planned.items():
        _check_class(folder, name, index.classes[name], path)
    components = {
        name: _folder_component(folder, name, index.classes[name], match, rules)
        for name, folder in planned.items()
    }
    return Target(
        family=match.family,
        source=str(path.parent),
        recognised_by=match.how,
        components=in_order(components),
    )


def _check_class(folder: Path, name: str, class_name: str, index: Path) -> None:
    """Refuse a component whose configuration names another diffusers class than the index."""
    config = folder / CONFIG_FILE
    own = read_json_file(config).get("_class_name", class_name) if is_file(config) else class_name
    if own != class_name:
        raise RequestError(
            str(config),
            f"names class {own}, but {index.name} says that the {name} is a {class_name}",
            remedy="restore the folder as it was published",
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
    return make_component(spec.model_copy(update={"class_name": class_name}), inventory)


def target_from_config(config: Mapping[str, object], rules: RuleTable, *, where: str) -> Target:
    """Return the target of one component's configuration; see ``recognise.target_from``."""
    class_name = class_name_of(config, where)
    check_dense_config(config, where)
    match = find_family(Clues(where, class_name, config, repo=repo_of(config)), rules)
    name = component_name(match, "", class_name, rules)
    spec = spec_for(match, name, class_name, rules)
    inventory = _config_inventory(config, class_name, spec, match, rules)
    return Target(
        family=match.family,
        source=where,
        recognised_by=match.how,
        components={name: make_component(spec, inventory)},
    )


def _config_inventory(
    config: Mapping[str, object],
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
    return inventory.with_rows_of(*shipped_for(match, spec, rules))
