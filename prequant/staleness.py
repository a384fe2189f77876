"""What shows that a baked component is outdated: today's rules would make other bytes. Torch-free.

The plan of today is resolved for the host and request in the header, over an inventory rebuilt from
the shards themselves. Damage belongs to ``damage``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import TYPE_CHECKING

from prequant.baked import BakedFiles
from prequant.forms import quantization_config_form, tensor_metadata
from prequant.header import FORMAT_VERSION, Header
from quantpolicy.errors import DeniedError, Mismatch, RequestError
from quantpolicy.family_match import FamilyMatch
from quantpolicy.inventory.headers import inventory_from_headers
from quantpolicy.inventory.model import Inventory, LinearFacts
from quantpolicy.match import natural_key
from quantpolicy.plan import ComponentPlan, KeptLayer, PlannedLayer, QuantPlan
from quantpolicy.resolver import resolve_target
from quantpolicy.rule_checks import GENERIC
from quantpolicy.rule_schema import ComponentSpec
from quantpolicy.schemes import ComponentKind
from quantpolicy.target import Target, TargetComponent
from quantpolicy.target_parts import shipped_for, spec_for

if TYPE_CHECKING:
    from quantpolicy.host import Host
    from quantpolicy.request import Request
    from quantpolicy.rules import RuleTable


def version_mismatches(header: Header) -> Iterator[Mismatch]:
    """Yield a difference of the header's version."""
    if header.format_version != FORMAT_VERSION:
        found = str(header.format_version)
        yield Mismatch("format_version", "format_version", str(FORMAT_VERSION), found)


def family_mismatches(header: Header, rules: RuleTable) -> Iterator[Mismatch]:
    """Yield whether the model in the folder is of the header's family no more."""
    if header.family == GENERIC:
        return
    family = rules.families.get(header.family)
    if family is None:
        yield Mismatch("family", "family", "a family of the rule table", header.family)
        return
    spec = family.components.get(header.component)
    if spec is None:
        known = ", ".join(family.components)
        yield Mismatch("component", header.component, f"of {header.family}: {known}", "unknown")
    elif spec.class_name and spec.class_name != header.class_name:
        yield Mismatch("class_name", header.family, spec.class_name, header.class_name)


def identity_mismatches(plan: QuantPlan, header: Header) -> Iterator[Mismatch]:
    """Yield where a given plan is about another model."""
    if plan.family != header.family:
        yield Mismatch("family", "family", plan.family, header.family)
    part = plan.components.get(header.component)
    if part is None:
        known = ", ".join(plan.components)
        yield Mismatch("component", header.component, f"one of {known}", "not in the plan")
    elif part.class_name != header.class_name:
        yield Mismatch("class_name", header.component, part.class_name, header.class_name)


def plan_today(
    header: Header,
    baked: QuantPlan,
    files: BakedFiles,
    rules: RuleTable,
    host: Host,
    request: Request,
) -> tuple[QuantPlan | None, list[Mismatch]]:
    """Return the plan that today's rules make of the model in the folder."""
    target = _target(header, baked, files, rules)
    try:
        return resolve_target(target, host, request, rules), []
    except DeniedError as error:
        rule = f"{error.rule}: " if error.rule else ""
        found = f"denied today ({rule}{error.found})"
        return None, [Mismatch("denied", header.component, header.scheme, found)]
    except RequestError as error:
        return None, [Mismatch("request", error.where, "a request that resolves", error.found)]


def weights_mismatches(
    expected: ComponentPlan, header: Header, baked: ComponentPlan
) -> Iterator[Mismatch]:
    """Yield every difference between what should be baked and what was."""
    if expected.weights_digest == header.weights_digest:
        return
    yield Mismatch(
        "weights_digest", header.component, expected.weights_digest, header.weights_digest
    )
    pairs = {
        "scheme": (expected.scheme, header.scheme),
        "granularity": (expected.settings.granularity, header.settings.granularity),
        "weight_dtype": (expected.settings.weight_dtype, header.settings.weight_dtype),
        "activation_floor": (expected.settings.activation_floor, header.settings.activation_floor),
        "dtype": (expected.dtype, header.dtype),
        "keep_in_fp32": (sorted(expected.keep_in_fp32), sorted(header.keep_in_fp32)),
    }
    for code, (wanted, found) in pairs.items():
        if wanted != found:
            yield Mismatch(code, header.component, str(wanted), str(found))
    yield from _layer_mismatches(expected, baked)


def form_mismatches(files: BakedFiles, part: ComponentPlan) -> Iterator[Mismatch]:
    """Yield where metadata or config are not those this version of torchao is written for."""
    for layer in part.layers:
        weight = files.weights.get(layer.name)
        if weight is None:
            continue
        expected = tensor_metadata(layer.scheme, part.settings, layer.shape[1], layer.dtype)
        if weight.metadata != expected:
            yield Mismatch(
                "tensor_version", layer.name, *_first_difference(expected, weight.metadata)
            )
    if files.config is None:
        return
    config = files.config.get("quantization_config")
    form = quantization_config_form(part)
    if config != form:
        found = config if isinstance(config, dict) else {}
        yield Mismatch("quantization_config", "config.json", *_first_difference(form, found))


def _first_difference(expected: object, found: object, path: str = "") -> tuple[str, str]:
    """Return the first value that differs, as expected and as found."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in [*expected, *(key for key in found if key not in expected)]:
            if expected.get(key) != found.get(key):
                inner = f"{path}.{key}" if path else str(key)
                return _first_difference(expected.get(key), found.get(key), inner)
    return f"{path}={expected!r}"[:200], f"{path}={found!r}"[:200]


def _layer_mismatches(expected: ComponentPlan, baked: ComponentPlan) -> Iterator[Mismatch]:
    wanted = {layer.name: layer for layer in expected.layers}
    found = {layer.name: layer for layer in baked.layers}
    reasons = {layer.name: f"dense ({layer.because}: {layer.rule})" for layer in expected.kept}
    for name in _ordered(wanted.keys() - found.keys()):
        yield Mismatch("module_dense", name, wanted[name].scheme, "dense")
    for name in _ordered(found.keys() - wanted.keys()):
        yield Mismatch("module_quantised", name, reasons.get(name, "dense"), found[name].scheme)
    for name in _ordered(wanted.keys() & found.keys()):
        if wanted[name].scheme is not found[name].scheme:
            yield Mismatch("module_scheme", name, wanted[name].scheme, found[name].scheme)
    known = {*wanted, *(layer.name for layer in expected.kept)}
    claimed = {*found, *(layer.name for layer in baked.kept)}
    for name in _ordered(known ^ claimed):
        where = ("a module", "none") if name in known else ("no such module", "one")
        yield Mismatch("module_set", name, *where)


def _ordered(names: Set[str]) -> list[str]:
    return sorted(names, key=natural_key)


def _target(header: Header, baked: QuantPlan, files: BakedFiles, rules: RuleTable) -> Target:
    part = baked.components[header.component]
    match = FamilyMatch(header.family, header.component, "header")
    spec = _spec(match, part, rules)
    inventory = inventory_from_headers(
        files.as_dense(),
        where=str(files.folder),
        class_name=part.class_name,
        dtype=spec.dtype,
        keep_in_fp32=spec.keep_in_fp32,
        shipped=shipped_for(match, spec, rules),
    )
    components = {}
    for name, other in baked.components.items():
        if name == header.component:
            components[name] = TargetComponent(
                kind=part.kind,
                class_name=part.class_name,
                dtype=spec.dtype,
                keep_in_fp32=spec.keep_in_fp32,
                inventory=inventory,
                dense_bytes=inventory.dense_bytes,
            )
        else:
            components[name] = _companion(name, other, baked, rules)
    return Target(
        family=header.family,
        source=str(files.folder),
        recognised_by=match.how,
        components=components,
    )


def _spec(match: FamilyMatch, part: ComponentPlan, rules: RuleTable) -> ComponentSpec:
    spec = spec_for(match, match.component, part.class_name, rules)
    return spec.model_copy(update={"class_name": part.class_name})


def _companion(
    name: str, part: ComponentPlan, baked: QuantPlan, rules: RuleTable
) -> TargetComponent:
    """Return another component of the plan: a second denoiser by its list, the rest by its size."""
    planned_bytes = sum(item.bytes for item in baked.memory.items if item.component == name)
    inventory = None
    linears: Sequence[PlannedLayer | KeptLayer] = (*part.layers, *part.kept)
    if part.kind is ComponentKind.DENOISER and linears:
        match = FamilyMatch(baked.family, name, "header")
        inventory = Inventory(
            class_name=part.class_name,
            linears=tuple(
                LinearFacts(
                    name=layer.name,
                    out_features=layer.shape[0],
                    in_features=layer.shape[1],
                    dtype=layer.dtype,
                    has_bias=True,
                )
                for layer in linears
            ),
            other_bytes=0,
            source="headers",
        )
        shipped = shipped_for(match, _spec(match, part, rules), rules)
        inventory = inventory.with_rows_of(shipped[0]) if shipped else inventory
    return TargetComponent(
        kind=part.kind,
        class_name=part.class_name,
        dtype=part.dtype,
        keep_in_fp32=part.keep_in_fp32,
        inventory=inventory,
        dense_bytes=inventory.dense_bytes if inventory else planned_bytes,
    )
