"""Which projections share one GEMM at run time: the table's fusions as explicit groups of a plan.

A fusion concerns the run time only: stored weights, their names and the weights digest stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from quantpolicy.candidates import Case
from quantpolicy.inventory.model import LinearFacts
from quantpolicy.match import matches_token
from quantpolicy.plan import ComponentPlan, PlannedFusion
from quantpolicy.rule_schema import FusionSpec, Pays
from quantpolicy.schemes import ComponentKind, Execution, Scheme, Tier


def plan_fusions(
    case: Case, components: Mapping[str, ComponentPlan], tier: Tier
) -> tuple[tuple[PlannedFusion, ...], tuple[str, ...]]:
    """Return the groups of all denoisers, and a note for those that stay apart.

    Under fused execution only, and of a family's fusions those that are measured to pay.
    """
    if case.request.execution is not Execution.FUSED or tier is Tier.OFF or case.family is None:
        return (), ()
    wanted = [name for name, use in case.family.fusions.items() if use.pays is Pays.MEASURED]
    planned: list[PlannedFusion] = []
    notes: list[str] = []
    for component, plan in components.items():
        if plan.kind is ComponentKind.DENOISER and plan.layers:
            groups, reasons = _plan_component(case, component, plan, wanted)
            planned += groups
            notes += reasons
    return tuple(planned), tuple(notes)


def fusion_places(fusion: FusionSpec, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the modules that hold all parts of a fusion, with the full names of the parts."""
    known = dict.fromkeys(names)
    places: dict[str, tuple[str, ...]] = {}
    for name in known:
        place, _, leaf = name.rpartition(".")
        if leaf == fusion.parts[0] and any(matches_token(place, token) for token in fusion.within):
            parts = tuple(f"{place}.{part}" for part in fusion.parts)
            if all(part in known for part in parts):
                places[place] = parts
    return places


def _plan_component(
    case: Case, component: str, plan: ComponentPlan, wanted: Iterable[str]
) -> tuple[list[PlannedFusion], list[str]]:
    linears = {linear.name: linear for linear in case.grouped[component].linears}
    free = {layer.name: layer.scheme for layer in plan.layers}
    planned: list[PlannedFusion] = []
    apart: dict[tuple[str, str], list[str]] = {}
    for name in wanted:
        for place, parts in fusion_places(case.rules.file.fusions[name], linears).items():
            reason = _why_apart([linears[part] for part in parts], free)
            if reason:
                apart.setdefault((name, reason), []).append(place)
                continue
            scheme = free[parts[0]]
            for part in parts:
                del free[part]
            planned.append(
                PlannedFusion(component=component, name=name, parts=parts, scheme=scheme)
            )
    return planned, [_note(component, *key, places) for key, places in apart.items()]


def _why_apart(parts: list[LinearFacts], free: Mapping[str, Scheme]) -> str:
    """Return why projections cannot share a GEMM, "" when they can.

    Args:
        free: schemes of the quantised Linears that no other fusion has.
    """
    for part in parts:
        if part.name not in free:
            return f"{_leaf(part)} is dense or in another fusion"
    first = parts[0]
    for part in parts[1:]:
        if part.in_features != first.in_features:
            widths = f"{part.in_features} input features, {_leaf(first)} {first.in_features}"
            return f"{_leaf(part)} has {widths}"
        if part.has_bias is not first.has_bias:
            return f"{_leaf(part)} and {_leaf(first)} differ in having a bias"
        if free[part.name] is not free[first.name] or part.dtype != first.dtype:
            return f"{_leaf(part)} and {_leaf(first)} differ in scheme or dtype"
    return ""


def _note(component: str, name: str, reason: str, places: list[str]) -> str:
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return f"{component}: fusion {name} leaves {places[0]}{more} apart: {reason}"


def _leaf(linear: LinearFacts) -> str:
    return linear.name.rpartition(".")[2]
