"""From a live module or pipeline to a Target. Imports torch; ``recognise`` is the way in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from quantpolicy.errors import RequestError
from quantpolicy.family_match import Clues, FamilyMatch, find_family
from quantpolicy.inventory.live import class_name_of, dominant_dtype, inventory_from_module, unwrap
from quantpolicy.model_folder import PipelineIndex, repo_of
from quantpolicy.target import Target, TargetComponent
from quantpolicy.target_parts import (
    component_name,
    in_order,
    is_planned,
    pipeline_clues,
    shipped_for,
    spec_for,
)

if TYPE_CHECKING:
    from quantpolicy.rules import RuleTable


def target_from_live(model: object, rules: RuleTable) -> Target:
    """Return the target of an ``nn.Module`` or of a pipeline, read from its tensors' shapes.

    Raises:
        RequestError: it is neither, or it is quantised already.
    """
    if isinstance(model, nn.Module):
        return _from_module(model, rules)
    components = getattr(model, "components", None)
    if not isinstance(components, Mapping):
        raise RequestError(
            "model",
            f"a {type(model).__name__} is no module and no pipeline",
            remedy="give an nn.Module or a diffusers pipeline",
        )
    return _from_pipeline(model, components, rules)


def _config(module: nn.Module) -> dict[str, object]:
    config = getattr(unwrap(module), "config", None)
    if isinstance(config, Mapping):
        return dict(config)
    to_dict = getattr(config, "to_dict", None)
    return dict(to_dict()) if callable(to_dict) else {}


def _from_module(module: nn.Module, rules: RuleTable) -> Target:
    class_name, config = class_name_of(module), _config(module)
    match = find_family(Clues(class_name, class_name, config, repo=repo_of(config)), rules)
    name = component_name(match, "", class_name, rules)
    return Target(
        family=match.family,
        source=class_name,
        recognised_by=match.how,
        components={name: _component(module, name, match, rules)},
    )


def _from_pipeline(pipeline: object, parts: Mapping[str, object], rules: RuleTable) -> Target:
    where = type(pipeline).__name__
    modules = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    classes = {name: class_name_of(module) for name, module in modules.items()}
    settings = getattr(pipeline, "config", {})
    index = PipelineIndex(where, classes, dict(settings), repo_of(settings))
    clues = pipeline_clues(index, where)
    config = _config(modules[clues.denoisers[0]])
    clues = replace(clues, config=config, repo=clues.repo or repo_of(config))
    match = find_family(clues, rules)
    components = {
        name: _component(module, name, match, rules)
        for name, module in modules.items()
        if is_planned(name, match, rules)
    }
    return Target(
        family=match.family,
        source=where,
        recognised_by=match.how,
        components=in_order(components),
    )


def _component(
    module: nn.Module, name: str, match: FamilyMatch, rules: RuleTable
) -> TargetComponent:
    class_name = class_name_of(module)
    spec = spec_for(match, name, class_name, rules)
    inventory = inventory_from_module(module).with_rows_of(*shipped_for(match, spec, rules))
    own = getattr(unwrap(module), "_keep_in_fp32_modules", None) or ()
    return TargetComponent(
        kind=spec.kind,
        class_name=class_name,
        dtype=dominant_dtype(module),
        keep_in_fp32=spec.keep_in_fp32 or tuple(own),
        inventory=inventory,
        dense_bytes=inventory.dense_bytes,
    )
