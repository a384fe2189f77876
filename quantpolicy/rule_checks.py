"""What the schema alone cannot say of a rule table: references, tokens, and effects that fit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

from quantpolicy.errors import RuleTableError
from quantpolicy.ops import MOUNTABLE
from quantpolicy.rule_errors import suggest
from quantpolicy.rule_schema import (
    Effect,
    EvidenceRecord,
    FamilySpec,
    FusionUse,
    Pays,
    Rule,
    RuleFile,
)
from quantpolicy.schemes import DTYPE_BYTES, RULE_CAUSES, ComponentKind, Scheme
from quantpolicy.yaml_source import YamlPath

TABLE_VERSION = 1
GENERIC = "generic"

_SEGMENT = re.compile(r"[A-Za-z0-9_*?-]+")
_MODULE_EFFECTS = (Effect.EXCLUDE, Effect.PAD_ROWS)

Where: TypeAlias = Callable[[YamlPath], str]
RuleWhere: TypeAlias = Callable[[str, YamlPath], str]


class Problem(NamedTuple):
    """What is wrong at a path, relative to the thing checked."""

    path: YamlPath
    found: str
    allowed: str
    remedy: str


def iterate_rules(file: RuleFile) -> Iterator[tuple[YamlPath, Rule]]:
    """Yield every rule of the file with its path: common, groups, generic, families."""
    yield from ((("rules", index), rule) for index, rule in enumerate(file.rules))
    for group, rules in file.groups.items():
        yield from ((("groups", group, index), rule) for index, rule in enumerate(rules))
    yield from (((GENERIC, index), rule) for index, rule in enumerate(file.generic))
    for family, spec in file.families.items():
        yield from (
            (("families", family, "rules", index), rule) for index, rule in enumerate(spec.rules)
        )


def family_rules(file: RuleFile, family: str) -> tuple[Rule, ...]:
    """Return the rules of a family: common, groups in order, own. The family must exist."""
    if family == GENERIC:
        return file.rules + file.generic
    spec = file.families[family]
    grouped = tuple(rule for group in spec.groups for rule in file.groups[group])
    return file.rules + grouped + spec.rules


def check_table(file: RuleFile, rule_where: RuleWhere, where: Where) -> Iterator[RuleTableError]:
    """Yield every error of a whole, merged table.

    Args:
        rule_where: gives the place of a field of a rule, ids being unique already.
        where: gives the place of any other path of the table.
    """
    for problem in _check_sections(file):
        yield _error(where(problem.path), problem)
    for path, rule in iterate_rules(file):
        for problem in (*_check_rule(rule, path), *_check_references(file, rule)):
            yield _error(rule_where(rule.id, problem.path), problem)
    if all(group in file.groups for spec in file.families.values() for group in spec.groups):
        yield from _check_expected_families(file, rule_where)


def _error(where: str, problem: Problem) -> RuleTableError:
    return RuleTableError(where, problem.found, allowed=problem.allowed, remedy=problem.remedy)


def _check_sections(file: RuleFile) -> Iterator[Problem]:
    if file.version != TABLE_VERSION:
        yield Problem(
            ("version",), f"version {file.version}", f"{TABLE_VERSION}", "use a matching release"
        )
    if file.min_features < 1:
        yield Problem(("min_features",), str(file.min_features), "1 or more", "raise it")
    for scheme, policy in file.schemes.items():
        yield from _check_dtypes(("schemes", scheme.value, "dtypes"), policy.dtypes)
        yield from _check_cited(file, policy.evidence, ("schemes", scheme.value, "evidence"))
        if policy.alignment < 1:
            yield Problem(
                ("schemes", scheme.value, "alignment"), str(policy.alignment), "1 or more", "fix it"
            )
    for index, ladder in enumerate(file.ladders):
        for scheme in ladder.schemes:
            if scheme is not Scheme.DENSE and scheme not in file.schemes:
                yield Problem(
                    ("ladders", index, "schemes"),
                    f"scheme {scheme.value!r} has no policy",
                    "schemes of the section `schemes`",
                    "add its policy",
                )
    for name, record in file.evidence.items():
        yield from _check_evidence(("evidence", name), record)
    yield from _check_fusions(file)
    for family, spec in file.families.items():
        yield from _check_family(file, family, spec)


def _check_fusions(file: RuleFile) -> Iterator[Problem]:
    for name, fusion in file.fusions.items():
        for token in fusion.within:
            yield from _check_token(("fusions", name, "within"), token)
        yield from _check_parts(("fusions", name, "parts"), fusion.parts)


def _check_parts(path: YamlPath, parts: tuple[str, ...]) -> Iterator[Problem]:
    for part in parts:
        if not re.fullmatch(r"[A-Za-z0-9_]+", part):
            found = f"part {part!r} is no name in a module"
            yield Problem(path, found, "one segment without globs", "name it as in to_q")
        if parts.count(part) > 1:
            yield Problem(path, f"part {part!r} is given twice", "", "keep one")
            break


def _check_dtypes(path: YamlPath, dtypes: tuple[str, ...]) -> Iterator[Problem]:
    for dtype in dtypes:
        if dtype not in DTYPE_BYTES:
            yield Problem(path, f"unknown dtype {dtype!r}", *suggest(dtype, DTYPE_BYTES))


def _check_cited(file: RuleFile, names: tuple[str, ...], path: YamlPath) -> Iterator[Problem]:
    for name in names:
        if name not in file.evidence:
            yield Problem(path, f"unknown evidence {name!r}", *suggest(name, file.evidence))


def _check_evidence(path: YamlPath, record: EvidenceRecord) -> Iterator[Problem]:
    low, high = record.min_tokens, record.max_tokens
    if low is not None and high is not None and low > high:
        yield Problem(
            (*path, "min_tokens"), f"{low} is above max_tokens {high}", "", "swap the two"
        )


def _check_family(file: RuleFile, family: str, spec: FamilySpec) -> Iterator[Problem]:
    path: YamlPath = ("families", family)
    if family == GENERIC:
        yield Problem(path, "the name generic is taken", "", "rename the family")
    yield from _check_family_names(file, spec, path)
    for token in spec.short_streams:
        yield from _check_token((*path, "short_streams", token), token)
    for name, component in spec.components.items():
        yield from _check_dtypes((*path, "components", name, "dtype"), (component.dtype,))
        for token in component.keep_in_fp32:
            yield from _check_token((*path, "components", name, "keep_in_fp32"), token)


def _check_family_names(file: RuleFile, spec: FamilySpec, path: YamlPath) -> Iterator[Problem]:
    for group in spec.groups:
        if group not in file.groups:
            yield Problem(
                (*path, "groups"), f"unknown group {group!r}", *suggest(group, file.groups)
            )
    for scheme, evidence in spec.measured.items():
        yield from _check_cited(file, evidence, (*path, "measured", scheme.value))
    yield from _check_kernels(file, spec, path)
    for name, use in spec.fusions.items():
        yield from _check_fusion_use(file, name, use, (*path, "fusions", name))
    if spec.tiny and spec.tiny not in file.tiny:
        yield Problem(
            (*path, "tiny"), f"unknown tiny model {spec.tiny!r}", *suggest(spec.tiny, file.tiny)
        )


def _check_kernels(file: RuleFile, spec: FamilySpec, path: YamlPath) -> Iterator[Problem]:
    kinds = dict.fromkeys(component.kind for component in spec.components.values())
    seen: set[tuple[str, ComponentKind]] = set()
    for index, kernel in enumerate(spec.kernels):
        place: YamlPath = (*path, "kernels", index)
        if kernel.op not in MOUNTABLE:
            yield Problem(
                (*place, "op"), f"unknown op {kernel.op!r}", *suggest(kernel.op, MOUNTABLE)
            )
        if kernel.component not in kinds:
            found = f"the family has no {kernel.component.value}"
            yield Problem((*place, "component"), found, ", ".join(kinds), "name one of its kinds")
        if (kernel.op, kernel.component) in seen:
            yield Problem((*place, "op"), f"op {kernel.op!r} is listed twice", "", "keep one")
        seen.add((kernel.op, kernel.component))
        yield from _check_cited(file, kernel.evidence, (*place, "evidence"))


def _check_fusion_use(
    file: RuleFile, name: str, use: FusionUse, path: YamlPath
) -> Iterator[Problem]:
    if name not in file.fusions:
        yield Problem(path, f"unknown fusion {name!r}", *suggest(name, file.fusions))
    if use.expect < 0:
        yield Problem((*path, "expect"), "a negative number", "0 or more", "count again")
    if (use.pays is Pays.UNKNOWN) != (not use.evidence):
        remedy = "cite the measurement" if not use.evidence else "say measured or refuted"
        found = f"{use.pays.value} with {len(use.evidence)} evidence records"
        yield Problem((*path, "pays"), found, "unknown without, others with evidence", remedy)
    yield from _check_cited(file, use.evidence, (*path, "evidence"))


def _check_token(path: YamlPath, token: str) -> Iterator[Problem]:
    if not all(_SEGMENT.fullmatch(segment) for segment in token.split(".")):
        yield Problem(
            path,
            f"token {token!r} is no name of modules",
            "dot-separated segments of letters, digits, _, - and the globs * and ?",
            "name whole segments, such as attn1.to_q",
        )


def _check_rule(rule: Rule, path: YamlPath) -> Iterator[Problem]:
    effect = rule.effect.value
    if rule.because not in RULE_CAUSES:
        yield Problem(
            ("because",),
            f"cause {rule.because.value!r} is the resolver's own",
            *suggest(rule.because.value, RULE_CAUSES),
        )
    if Scheme.DENSE in rule.schemes:
        yield Problem(("schemes",), "dense cannot be ruled out", "", "name quantised schemes only")
    if rule.effect in _MODULE_EFFECTS:
        yield from _check_module_rule(rule, path)
    elif rule.tokens or rule.expect is not None:
        field = "tokens" if rule.tokens else "expect"
        yield Problem(
            (field,), f"{effect} speaks of whole components", "", f"remove {field}, or use exclude"
        )
    if (rule.effect is Effect.PAD_ROWS) != (rule.rows is not None):
        remedy = "add rows" if rule.rows is None else "remove rows"
        yield Problem(
            ("rows",), f"rows is {rule.rows or 'missing'} with {effect}", "pad_rows only", remedy
        )


def _check_module_rule(rule: Rule, path: YamlPath) -> Iterator[Problem]:
    if not rule.tokens:
        yield Problem(("tokens",), f"{rule.effect.value} names no module", "", "add tokens")
    for token in rule.tokens:
        yield from _check_token(("tokens",), token)
        if rule.tokens.count(token) > 1:
            yield Problem(("tokens",), f"token {token!r} is given twice", "", "keep one")
            break
    is_counted = path[0] in ("groups", "families")
    if not is_counted and rule.expect is not None:
        yield Problem(
            ("expect",), "common and generic rules have no one count", "", "remove expect"
        )
    if is_counted and rule.expect is None:
        yield Problem(
            ("expect",),
            "the expected number of matches is missing",
            "a number, or a number per family",
            "add expect; `quantpolicy lint` prints the count",
        )
    counts = rule.expect.values() if isinstance(rule.expect, dict) else (rule.expect or 0,)
    if min(counts, default=0) < 0:
        yield Problem(("expect",), "a negative number", "0 or more", "count again")


def _check_references(file: RuleFile, rule: Rule) -> Iterator[Problem]:
    yield from _check_cited(file, rule.evidence, ("evidence",))
    for family in rule.expect if isinstance(rule.expect, dict) else ():
        if family not in file.families:
            yield Problem(
                ("expect",), f"unknown family {family!r}", *suggest(family, file.families)
            )


def _check_expected_families(file: RuleFile, rule_where: RuleWhere) -> Iterator[RuleTableError]:
    users: dict[str, set[str]] = {}
    for family in file.families:
        for rule in family_rules(file, family):
            users.setdefault(rule.id, set()).add(family)
    for _, rule in iterate_rules(file):
        named = set(rule.expect) if isinstance(rule.expect, dict) else set()
        for family in sorted(named & set(file.families) - users.get(rule.id, set())):
            yield RuleTableError(
                rule_where(rule.id, ("expect",)),
                f"the rule does not apply to family {family!r}",
                remedy="remove it, or add the rule's group to the family",
            )
