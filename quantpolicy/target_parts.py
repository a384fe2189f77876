"""The components of a Target: which a plan speaks of, their names, specifications, inventories.

Shared by ``recognise``, ``recognise_folder`` and ``recognise_live``. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from quantpolicy.errors import RequestError
from quantpolicy.family_match import Clues, FamilyMatch
from quantpolicy.inventory.model import Inventory
from quantpolicy.inventory.shipped import load_inventory
from quantpolicy.rule_checks import GENERIC
from quantpolicy.rule_schema import ComponentSpec
from quantpolicy.schemes import ComponentKind
from quantpolicy.target import TargetComponent

if TYPE_CHECKING:
    from quantpolicy.model_folder import PipelineIndex
    from quantpolicy.rules import RuleTable

DEFAULT_DENOISER = "transformer"
SECOND_DENOISER = "transformer_2"
KIND_OF_PREFIX = {
    "transformer": ComponentKind.DENOISER,
    "unet": ComponentKind.DENOISER,
    "text_encoder": ComponentKind.TEXT_ENCODER,
    "vae": ComponentKind.VAE,
}
KIND_ORDER = (ComponentKind.DENOISER, ComponentKind.TEXT_ENCODER, ComponentKind.VAE)


def kind_of_name(name: str) -> ComponentKind | None:
    """Return what kind of component a pipeline calls by this name, None for one that is ignored."""
    for prefix, kind in KIND_OF_PREFIX.items():
        if name == prefix or name.removeprefix(f"{prefix}_").isdigit():
            return kind
    return None


def make_component(spec: ComponentSpec, inventory: Inventory | None) -> TargetComponent:
    """Return the component that a specification and an inventory describe."""
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
