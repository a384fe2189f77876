"""Check a rule table against the released models. Torch-free unless ``meta`` is asked for.

Beyond what loading checks, lint finds: evidence that nothing cites, counts that differ from
``expect``, dead tokens, layers that the probe says need a rule and that have none, rules that the
probe does not justify, and rules that win nowhere (``lint_wins``). With ``meta`` the released
classes are built and compared with the shipped inventories (``lint_meta``; needs diffusers).
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from quantpolicy.errors import RequestError, RuleTableError
from quantpolicy.fusions import fusion_places
from quantpolicy.host import load_presets
from quantpolicy.inventory.model import Inventory, LinearFacts
from quantpolicy.inventory.shipped import load_inventory
from quantpolicy.match import first_matching_token, matches_token
from quantpolicy.record import Record
from quantpolicy.rule_schema import ComponentSpec, Effect, FamilySpec, Rule
from quantpolicy.rules import RuleTable, is_whole_table, load_table
from quantpolicy.schemes import Cause, ComponentKind, Scheme

_MODULE_EFFECTS = (Effect.EXCLUDE, Effect.PAD_ROWS)
_MEASURED_CAUSES = (Cause.OUTLIERS, Cause.BLACK_FRAMES, Cause.SEMANTIC_DAMAGE, Cause.SLOWER)


class Severity(StrEnum):
    """``error``: the table says something wrong; ``warning``: it says too much or too little."""

    ERROR = "error"
    WARNING = "warning"


class LintFinding(Record):
    """One thing to repair.

    Args:
        code: stable name of the check.
        where: file and line of the rule or of the section concerned.
    """

    severity: Severity
    code: str
    where: str
    message: str


class Released(NamedTuple):
    """A component of a family whose released inventory ships."""

    family: str
    name: str
    spec: ComponentSpec
    inventory: Inventory


def lint(table: RuleTable, *files: str | Path, meta: bool = False) -> list[LintFinding]:
    """Return everything to repair in a table; empty when it is sound.

    Args:
        table: checked when no files are given, and the base of the overlays among them.
        files: complete tables, each checked alone, and overlays, checked merged.
        meta: also build the released classes on the meta device and compare. Imports torch.
    """
    if not files:
        return [*_lint_table(table), *(_lint_meta(table) if meta else ())]
    findings: list[LintFinding] = []
    overlays = []
    for path in files:
        try:
            if is_whole_table(path):
                findings += lint(load_table(path), meta=meta)
            else:
                overlays.append(path)
        except RuleTableError as error:
            findings += _schema_findings(error)
    if overlays:
        try:
            findings += lint(table.with_overlays(*overlays), meta=meta)
        except RuleTableError as error:
            findings += _schema_findings(error)
    return findings


def _schema_findings(error: RuleTableError) -> Iterator[LintFinding]:
    for each in (error, *error.others):
        message = "; ".join(filter(None, (each.found, each.allowed, each.remedy)))
        yield _error("schema", each.where, message)


def _error(code: str, where: str, message: str) -> LintFinding:
    return LintFinding(severity=Severity.ERROR, code=code, where=where, message=message)


def _warning(code: str, where: str, message: str) -> LintFinding:
    return LintFinding(severity=Severity.WARNING, code=code, where=where, message=message)


def _lint_meta(table: RuleTable) -> Iterator[LintFinding]:
    from quantpolicy.lint_meta import compare_released

    for where, message in compare_released(table):
        yield _error("released_class", where, message)


def _lint_table(table: RuleTable) -> Iterator[LintFinding]:
    yield from _unused_evidence(table)
    yield from _missing_evidence(table)
    released: list[Released] = []
    for family, spec in table.families.items():
        found, findings = _released_components(table, family, spec)
        released += found
        yield from findings
    for rule_id in table.rule_ids():
        yield from _counts(table, table.rule(rule_id), released)
        yield from _unjustified(table, table.rule(rule_id), released)
    for item in released:
        yield from _fusion_counts(table, item)
        yield from _unprobed(table, item)
        yield from _uncovered(table, item)
    if len(released) == sum(bool(part.inventory) for _, part in _components(table)):
        yield from _never_winning(table)


def _components(table: RuleTable) -> Iterator[tuple[str, ComponentSpec]]:
    for family, spec in table.families.items():
        yield from ((family, component) for component in spec.components.values())


def _released_components(
    table: RuleTable, family: str, spec: FamilySpec
) -> tuple[list[Released], list[LintFinding]]:
    released, findings = [], []
    for name, component in spec.components.items():
        if not component.inventory:
            continue
        try:
            inventory = load_inventory(component.inventory)
            released.append(Released(family, name, component, inventory))
        except RequestError as error:
            where = table.where("families", family, "components", name, "inventory")
            findings.append(_error("inventory", where, str(error)))
    return released, findings


def _unused_evidence(table: RuleTable) -> Iterator[LintFinding]:
    used = {name for rule_id in table.rule_ids() for name in table.rule(rule_id).evidence}
    used.update(name for policy in table.schemes.values() for name in policy.evidence)
    for spec in table.families.values():
        used.update(name for names in spec.measured.values() for name in names)
        used.update(name for use in spec.fusions.values() for name in use.evidence)
        used.update(name for kernel in spec.kernels for name in kernel.evidence)
    for name in table.evidence:
        if name not in used:
            where = table.where("evidence", name)
            yield _warning("unused_evidence", where, "nothing cites it; cite or remove it")


def _missing_evidence(table: RuleTable) -> Iterator[LintFinding]:
    for rule_id in table.rule_ids():
        rule = table.rule(rule_id)
        if rule.because in _MEASURED_CAUSES and not rule.evidence:
            message = f"{rule_id}: {rule.because.value} is a measurement; cite its evidence"
            yield _error("missing_evidence", table.origin(rule_id), message)


def _counts(table: RuleTable, rule: Rule, released: list[Released]) -> Iterator[LintFinding]:
    """Compare the matches of a rule with ``expect``, in each component that it applies to."""
    if rule.effect not in _MODULE_EFFECTS:
        return
    where = table.origin(rule.id)
    unmatched = set(rule.tokens)
    applies = [
        item
        for item in released
        if item.spec.kind is rule.component and rule in table.rules_for(item.family)
    ]
    for item in applies:
        names = [linear.name for linear in item.inventory.linears]
        unmatched -= {token for token in unmatched if any(matches_token(n, token) for n in names)}
        count = sum(first_matching_token(name, rule.tokens) is not None for name in names)
        expected = rule.expect.get(item.family) if isinstance(rule.expect, dict) else rule.expect
        if rule.expect is not None and count != expected:
            shown = "no number" if expected is None else str(expected)
            message = (
                f"{rule.id} matches {count} Linears of {item.family} {item.name}, "
                f"expect says {shown}; correct the tokens or the number"
            )
            yield _error("expect", where, message)
    for token in sorted(unmatched) if applies else ():
        yield _error(
            "dead_token", where, f"{rule.id}: token {token!r} matches no Linear; remove it"
        )


def _fusion_counts(table: RuleTable, item: Released) -> Iterator[LintFinding]:
    """Compare the places of a fusion in a denoiser with ``expect``."""
    if item.spec.kind is not ComponentKind.DENOISER:
        return
    names = [linear.name for linear in item.inventory.linears]
    for fusion, use in table.families[item.family].fusions.items():
        count = len(fusion_places(table.file.fusions[fusion], names))
        if count != use.expect:
            yield _error(
                "fusion_expect",
                table.where("families", item.family, "fusions", fusion),
                f"its parts stand in {count} modules of {item.name}, expect says {use.expect}; "
                "correct within, parts or the number",
            )


def fewest_rows(linear: LinearFacts, spec: FamilySpec) -> int | None:
    """Return the fewest rows that a request can give the Linear, None when not known."""
    token = first_matching_token(linear.name, tuple(spec.short_streams))
    known = [linear.rows, spec.short_streams[token] if token else None]
    return min((rows for rows in known if rows is not None), default=None)


def needs_rule(linear: LinearFacts, spec: FamilySpec, cause: Cause) -> bool:
    """Tell whether the probe's facts justify a small_m or zero_rows rule on the Linear."""
    if cause is Cause.ZERO_ROWS:
        return linear.zero_rows
    rows = fewest_rows(linear, spec)
    return rows is not None and rows < _int8_rows(linear.in_features, linear.has_bias)


@lru_cache
def _int8_rows(in_features: int, has_bias: bool) -> int:
    """Return the rows that int8 takes on every host preset."""
    hosts = load_presets().values()
    return max(host.min_rows(Scheme.INT8, in_features, has_bias) for host in hosts)


def _uncovered(table: RuleTable, item: Released) -> Iterator[LintFinding]:
    spec = table.families[item.family]
    rules = [rule for rule in table.rules_for(item.family) if rule.component is item.spec.kind]
    for scheme, cause in ((Scheme.INT8, Cause.SMALL_M), (Scheme.FP8, Cause.ZERO_ROWS)):
        own = [rule for rule in rules if scheme in rule.schemes]
        if any(rule.effect is Effect.DENY for rule in own):
            continue
        tokens = [t for rule in own if rule.effect in _MODULE_EFFECTS for t in rule.tokens]
        names = [
            linear.name
            for linear in item.inventory.linears
            if needs_rule(linear, spec, cause)
            and linear.dtype != "float32"
            and first_matching_token(linear.name, tokens) is None
        ]
        if names:
            yield _error(
                f"uncovered_{cause.value}",
                table.where("families", item.family, "components", item.name),
                f"the probe finds {cause.value} in {_listed(names)}, and no {scheme.value} rule "
                f"covers them; add an exclude or pad_rows rule",
            )


def _unjustified(table: RuleTable, rule: Rule, released: list[Released]) -> Iterator[LintFinding]:
    """Find Linears that a rule covers without a cause that the probe sees, or a note."""
    if (
        rule.effect not in _MODULE_EFFECTS
        or rule.because not in (Cause.SMALL_M, Cause.ZERO_ROWS)
        or rule.note
    ):
        return
    names = [
        f"{item.family}:{linear.name}"
        for item in released
        if item.spec.kind is rule.component and rule in table.rules_for(item.family)
        for linear in item.inventory.linears
        if first_matching_token(linear.name, rule.tokens) is not None
        and linear.rows is not None
        and not needs_rule(linear, table.families[item.family], rule.because)
    ]
    if names:
        yield _warning(
            "unjustified",
            table.origin(rule.id),
            f"{rule.id} covers {_listed(names)}, where the probe finds no {rule.because.value}; "
            "narrow the tokens, or say why in its note",
        )


def _unprobed(table: RuleTable, item: Released) -> Iterator[LintFinding]:
    """Find denoiser Linears without rows; those of a text encoder depend on the prompt alone."""
    names = [linear.name for linear in item.inventory.linears if linear.rows is None]
    if names and item.spec.kind is ComponentKind.DENOISER:
        yield _error(
            "unprobed",
            table.where("families", item.family, "components", item.name, "inventory"),
            f"the rows of {_listed(names)} are not known; probe the class and generate it again",
        )


def _never_winning(table: RuleTable) -> Iterator[LintFinding]:
    from quantpolicy.lint_wins import rules_that_never_win

    for rule_id in rules_that_never_win(table):
        message = f"{rule_id} decides nothing on any host preset; remove it, or move it forward"
        yield _error("dead_rule", table.origin(rule_id), message)


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest
