"""Compare the shipped inventories with the released classes; building those imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from quantpolicy.errors import RequestError
from quantpolicy.inventory.model import Inventory, LinearFacts
from quantpolicy.inventory.shipped import load_inventory
from quantpolicy.rule_schema import ComponentSpec
from quantpolicy.rules import RuleTable
from quantpolicy.schemes import ComponentKind

_COMPARED = ("out_features", "in_features", "dtype", "has_bias")


def compare_released(table: RuleTable) -> Iterator[tuple[str, str]]:
    """Yield (where, message) for every difference, each distinct model built once.

    Raises:
        ImportError: the packages that build the models are missing.
    """
    import_module("diffusers")
    seen: list[ComponentSpec] = []
    for family, spec in table.families.items():
        for name, component in spec.components.items():
            if component.inventory and component.class_name and component not in seen:
                seen.append(component)
                where = table.where("families", family, "components", name)
                yield from ((where, message) for message in _differences(component))


def _differences(spec: ComponentSpec) -> Iterator[str]:
    try:
        shipped = load_inventory(spec.inventory)
        if spec.kind is ComponentKind.DENOISER:
            built, declared = _build_denoiser(spec)
        else:
            built, declared = _build_text_encoder(spec), set(spec.keep_in_fp32)
    except RequestError as error:
        yield str(error)
        return
    yield from compare_inventories(shipped, built)
    if declared != set(spec.keep_in_fp32):
        yield (
            f"keep_in_fp32 is {sorted(spec.keep_in_fp32)}, the class declares {sorted(declared)}; "
            "take over the class's list"
        )


def _build_denoiser(spec: ComponentSpec) -> tuple[Inventory, set[str]]:
    """Return the inventory, and the modules that the class itself keeps in fp32."""
    from quantpolicy.inventory.live import build_on_meta, inventory_from_config

    module = build_on_meta(spec.class_name, spec.config)
    inventory = inventory_from_config(
        spec.class_name, spec.config, dtype=spec.dtype, keep_in_fp32=spec.keep_in_fp32
    )
    return inventory, set(getattr(module, "_keep_in_fp32_modules", None) or ())


def _build_text_encoder(spec: ComponentSpec) -> Inventory:
    from quantpolicy.measure.generate import text_encoder_inventory

    try:
        return text_encoder_inventory(spec)
    except (AttributeError, TypeError, ValueError) as error:
        raise RequestError(
            spec.class_name,
            f"cannot be built: {error}",
            remedy="correct the class name or the configuration",
        ) from error


def compare_inventories(shipped: Inventory, built: Inventory) -> Iterator[str]:
    """Yield the differences of two inventories, one sentence a kind of difference."""
    old = {linear.name: linear for linear in shipped.linears}
    new = {linear.name: linear for linear in built.linears}
    regenerate = "run `python -m quantpolicy.measure.generate`"
    for label, names in (
        ("only in the shipped inventory", [name for name in old if name not in new]),
        ("missing from the shipped inventory", [name for name in new if name not in old]),
        ("different", [n for n in old if n in new and _facts(old[n]) != _facts(new[n])]),
    ):
        if names:
            yield f"{len(names)} Linears are {label}, first {names[0]}; {regenerate}"
    if shipped.other_bytes != built.other_bytes:
        yield (
            f"{shipped.other_bytes} bytes outside Linears, the class has {built.other_bytes}; "
            f"{regenerate}"
        )


def _facts(linear: LinearFacts) -> tuple[object, ...]:
    return tuple(getattr(linear, field) for field in _COMPARED)
