"""Which family a model belongs to: its class, configuration, pipeline, repository and experts.

Pure: clues in, a family of the rule table out. Where clues come from belongs to ``recognise``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from quantpolicy.errors import RequestError
from quantpolicy.rule_checks import GENERIC
from quantpolicy.schemes import ComponentKind

if TYPE_CHECKING:
    from quantpolicy.rule_schema import FamilySpec
    from quantpolicy.rules import RuleTable

DEFAULTS_FILE = Path(__file__).parent / "data" / "class_defaults.json"


@dataclass(frozen=True, slots=True)
class Clues:
    """What is known of a model before its family is.

    Args:
        where: the folder, file or object, for messages.
        class_name: class of the denoiser, or of the only component at hand.
        config: configuration of that component; empty when not known.
        pipeline: class of the pipeline, "" when there is none.
        repo: repository id, "" when not known.
        denoisers: names of the pipeline's denoisers; empty when there is no pipeline.
    """

    where: str
    class_name: str
    config: Mapping[str, object] = field(default_factory=dict)
    pipeline: str = ""
    repo: str = ""
    denoisers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FamilyMatch:
    """The family found.

    Args:
        family: key in the rule table, ``generic`` for an unknown class.
        component: name of the component that has the class.
        how: what decided, for a person.
    """

    family: str
    component: str
    how: str


@lru_cache(maxsize=1)
def _class_defaults() -> dict[str, dict[str, object]]:
    values: dict[str, dict[str, object]] = json.loads(DEFAULTS_FILE.read_bytes())
    return values


def effective_config(class_name: str, config: Mapping[str, object]) -> dict[str, object]:
    """Return the constructor arguments that a configuration means, defaults of the class included.

    Keys that a known class does not take, such as ``_diffusers_version``, are left out.
    """
    defaults = _class_defaults().get(class_name)
    given = {key: _plain(value) for key, value in config.items() if not key.startswith("_")}
    if defaults is None:
        return given
    return {**defaults, **{key: value for key, value in given.items() if key in defaults}}


def _plain(value: object) -> object:
    """Return tuples as lists, as JSON and YAML have them."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def find_family(clues: Clues, rules: RuleTable) -> FamilyMatch:
    """Return the family that fits the clues best.

    The class decides first; then, as far as more than one family is left, a known repository id,
    configuration facts, the pipeline's class and its set of denoisers. Families that are still
    equal take the first of the table when their rules are the same.

    Raises:
        RequestError: several families fit and their rules differ.
    """
    component_of = {
        family: component
        for family, spec in rules.families.items()
        if (component := _component_of_class(spec, clues.class_name))
    }
    if not component_of:
        return FamilyMatch(GENERIC, "", f"no family of the table has class {clues.class_name}")
    families = list(component_of)
    how = [f"class {clues.class_name}"]
    families = _narrow(families, _of_repo(families, rules, clues), f"repository {clues.repo}", how)
    if _kind(rules, families[0], component_of) is ComponentKind.DENOISER:
        families = _by_config(families, rules, clues, how)
    by_pipeline = [
        family
        for family in families
        if clues.pipeline in rules.families[family].recognise.pipelines
    ]
    families = _narrow(families, by_pipeline, f"pipeline {clues.pipeline}", how)
    by_denoisers = [
        family
        for family in families
        if set(clues.denoisers) == set(_denoisers(rules.families[family]))
    ]
    families = _narrow(families, by_denoisers, "denoisers " + ", ".join(clues.denoisers), how)
    if len(families) > 1:
        how.append(_settle(families, rules, clues, component_of))
    return FamilyMatch(families[0], component_of[families[0]], "; ".join(how))


def _component_of_class(spec: FamilySpec, class_name: str) -> str:
    """Return the first component of this class, "" when the family has none."""
    names = (name for name, part in spec.components.items() if part.class_name == class_name)
    return next(names, "")


def _denoisers(spec: FamilySpec) -> Iterable[str]:
    return (name for name, part in spec.components.items() if part.kind is ComponentKind.DENOISER)


def _kind(rules: RuleTable, family: str, component_of: Mapping[str, str]) -> ComponentKind:
    return rules.families[family].components[component_of[family]].kind


def _narrow(families: list[str], fitting: list[str], fact: str, how: list[str]) -> list[str]:
    """Return the fitting families, or all of them when none fits or the fact tells nothing."""
    if not fitting or len(fitting) == len(families):
        return families
    how.append(fact)
    return fitting


def _of_repo(families: Sequence[str], rules: RuleTable, clues: Clues) -> list[str]:
    return [family for family in families if clues.repo in rules.families[family].recognise.repos]


def _by_config(families: list[str], rules: RuleTable, clues: Clues, how: list[str]) -> list[str]:
    """Keep the families whose facts all hold, the most facts first, or else those nearest."""
    if len(families) == 1 or not clues.config:
        return families
    config = effective_config(clues.class_name, clues.config)
    scores = {
        family: _fact_score(rules.families[family].recognise.config, config) for family in families
    }
    whole = {family: score for family, score in scores.items() if not score[1]}
    pool = whole or scores
    best = max(pool.values())
    nearest = [family for family, score in pool.items() if score == best]
    facts = rules.families[nearest[0]].recognise.config
    equal = [f"{key} {value}" for key, value in facts.items() if config.get(key) == _plain(value)]
    fact = ", ".join(equal)
    if not whole:
        same = f" (the same: {fact})" if fact else ""
        how.append(f"nearest to the configuration of {' and '.join(nearest)}{same}")
        return nearest
    return _narrow(families, nearest, fact, how) if fact else nearest


def _fact_score(facts: Mapping[str, object], config: Mapping[str, object]) -> tuple[int, int]:
    """Return how many facts hold and, negated, how many do not."""
    equal = sum(config.get(key) == _plain(value) for key, value in facts.items())
    return equal, equal - len(facts)


def _settle(
    families: Sequence[str], rules: RuleTable, clues: Clues, component_of: Mapping[str, str]
) -> str:
    """Return the note on families that nothing tells apart.

    Raises:
        RequestError: their rules differ.
    """
    policies = {family: _policy(rules, family, component_of) for family in families}
    if any(policy != policies[families[0]] for policy in policies.values()):
        raise RequestError(
            clues.where,
            "fits several families whose rules differ: " + ", ".join(families),
            remedy="give the whole pipeline, or the family's name",
        )
    return f"told from {', '.join(families[1:])} by nothing, and their rules are the same"


def _policy(rules: RuleTable, family: str, component_of: Mapping[str, str]) -> object:
    kind = _kind(rules, family, component_of)
    spec = rules.families[family].components[component_of[family]]
    own = tuple(rule for rule in rules.rules_for(family) if rule.component is kind)
    return own, spec.dtype, spec.keep_in_fp32
