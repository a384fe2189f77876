"""Find the rules that decide nothing: every family is resolved on every host preset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from quantpolicy.errors import DeniedError, RequestError
from quantpolicy.host import Host, load_presets
from quantpolicy.match import first_matching_token
from quantpolicy.plan import Decision, QuantPlan
from quantpolicy.recognise import target_from
from quantpolicy.request import Request
from quantpolicy.resolver import resolve_target
from quantpolicy.rule_checks import GENERIC
from quantpolicy.rule_schema import Effect, Rule
from quantpolicy.rules import RuleTable
from quantpolicy.schemes import SchemeChoice
from quantpolicy.target import Target
from quantpolicy.text import GIB


def rules_that_never_win(table: RuleTable) -> tuple[str, ...]:
    """Return the ids of rules that no plan names, in the order of the table.

    Tried are auto, each scheme explicitly for each kind of component, and little memory. A rule
    that names modules of a kind for which no inventory ships cannot be judged, and is left out.
    """
    pending = {
        rule_id: table.rule(rule_id)
        for rule_id in table.rule_ids()
        if _can_be_judged(table, table.rule(rule_id))
    }
    for target in _targets(table):
        _try_target(table, target, pending)
    return tuple(pending)


def _can_be_judged(table: RuleTable, rule: Rule) -> bool:
    return not rule.tokens or any(
        component.inventory
        for spec in table.families.values()
        for component in spec.components.values()
        if component.kind is rule.component
    )


def _targets(table: RuleTable) -> Iterator[Target]:
    """Yield every family, and each again as if its class were unknown."""
    targets = [target_from(family, table) for family in table.families]
    yield from targets
    yield from (target.model_copy(update={"family": GENERIC}) for target in targets)


def _try_target(table: RuleTable, target: Target, pending: dict[str, Rule]) -> None:
    """Drop from ``pending`` the rules that win for the target, until none of its own is left."""
    own = {rule.id for rule in table.rules_for(target.family)}
    for host in load_presets().values():
        for request in _requests(target, host):
            if own.isdisjoint(pending):
                return
            for rule_id in _winners(table, target, host, request, pending):
                pending.pop(rule_id, None)


def _requests(target: Target, host: Host) -> Iterator[Request]:
    yield Request()
    for choice in SchemeChoice:
        if choice not in (SchemeChoice.AUTO, SchemeChoice.DENSE):
            yield Request(transformer=choice)
            yield Request(text_encoder=choice)
            yield Request(vae=choice)
    total = sum(part.dense_bytes for part in target.components.values())
    for memory_bytes in (total * 3 // 4, total // 2):
        if GIB < memory_bytes < host.memory_bytes:
            yield Request(memory_bytes=memory_bytes)


def _winners(
    table: RuleTable, target: Target, host: Host, request: Request, pending: dict[str, Rule]
) -> set[str]:
    try:
        plan = resolve_target(target, host, request, table)
    except DeniedError as error:
        return _named(error.decisions, pending)
    except RequestError:
        return set()
    kept = {layer.rule for part in plan.components.values() for layer in part.kept}
    pads = [rule for rule in pending.values() if rule.effect is Effect.PAD_ROWS]
    own = table.rules_for(target.family)
    return (
        _named(plan.decisions, pending) | kept | {r.id for r in pads if r in own and _pads(plan, r)}
    )


def _named(decisions: tuple[Decision, ...], pending: Iterable[str]) -> set[str]:
    """Return the rules behind the decisions, and those that a detail names as lifted."""
    words = {word.strip(";,()") for decision in decisions for word in decision.detail.split()}
    return {decision.rule for decision in decisions} | words & set(pending)


def _pads(plan: QuantPlan, rule: Rule) -> bool:
    """Tell whether a layer of the plan is padded as the rule says."""
    parts = [part for part in plan.components.values() if part.kind is rule.component]
    return any(
        layer.pad_rows >= (rule.rows or 0) and layer.scheme in rule.schemes
        for part in parts
        for layer in part.layers
        if first_matching_token(layer.name, rule.tokens) is not None
    )
