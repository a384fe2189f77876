"""From what a caller names to a Target: a family name, folder, config, repository id or live model.

Torch-free for names, folders and released configurations; other configurations and live models are
read by ``inventory.live``. A family name comes before a folder of the same name (write ``./NAME``).
Nothing is downloaded.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from quantpolicy.errors import RequestError
from quantpolicy.inventory.shipped import load_inventory
from quantpolicy.inventory.weight_files import UNREAD
from quantpolicy.model_folder import cached_snapshot
from quantpolicy.target import Target
from quantpolicy.target_parts import in_order, make_component

if TYPE_CHECKING:
    from quantpolicy.rules import RuleTable


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
        from quantpolicy.recognise_folder import target_from_config

        return target_from_config(model, rules, where="config")
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
    suffixes = (".json", ".safetensors", *UNREAD, "/")
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
    folder = cached_snapshot(repo)
    if folder is not None:
        return _from_path(folder, rules)
    raise RequestError(
        f"model {repo!r}",
        "neither an existing path, nor a repository of the rule table, nor in the local cache",
        remedy=f"download it with `hf download {repo}`, or give a family name",
    )


def _from_family(family: str, rules: RuleTable, *, source: str, how: str) -> Target:
    components = {}
    for name, spec in rules.families[family].components.items():
        inventory = load_inventory(spec.inventory) if spec.inventory else None
        components[name] = make_component(spec, inventory)
    return Target(family=family, source=source, recognised_by=how, components=in_order(components))


def _from_path(path: Path, rules: RuleTable) -> Target:
    from quantpolicy.recognise_folder import target_from_path

    return target_from_path(path, rules)
