"""The rule table: families.yaml, the tables of installed packages and overlays, merged and checked.

Nothing is decided here: the resolver reads the table. How overlays merge is told in ``overlay``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from quantpolicy.errors import RequestError, RuleTableError
from quantpolicy.host import Host
from quantpolicy.record import sha256_of
from quantpolicy.rule_checks import GENERIC, check_table, family_rules, iterate_rules
from quantpolicy.rule_errors import raise_all, validate_source
from quantpolicy.rule_schema import EvidenceRecord, FamilySpec, Rule, RuleFile, SchemePolicy
from quantpolicy.schemes import Scheme
from quantpolicy.yaml_source import YamlPath, YamlSource, read_yaml

if TYPE_CHECKING:
    from quantpolicy.overlay import Items, Places

ENTRY_POINT_GROUP = "quantpolicy.rules"
TABLE_NAME = "families.yaml"

_PACKAGE = Path(__file__).parent
_SWITCH_WORDS = "true or false; a bare yes, no, on or off is text here"


class RuleTable:
    """A merged, checked rule table.

    Args:
        file: the merged table.
        places: (source, path) of every rule by id.
        sources: the complete table, then its overlays in order.
    """

    def __init__(self, file: RuleFile, places: Places, sources: Sequence[YamlSource]) -> None:
        self.file = file
        self.sources = tuple(sources)
        self._places = dict(places)
        self._rules = {rule.id: rule for _, rule in iterate_rules(file)}
        self._by_family: dict[str, tuple[Rule, ...]] = {}

    @property
    def families(self) -> dict[str, FamilySpec]:
        """The families by key, in the order of the table."""
        return self.file.families

    @property
    def evidence(self) -> dict[str, EvidenceRecord]:
        """The evidence records by id."""
        return self.file.evidence

    @property
    def schemes(self) -> dict[Scheme, SchemePolicy]:
        """What each scheme requires of hosts and layers."""
        return self.file.schemes

    @property
    def min_features(self) -> int:
        """Linears with fewer input or output features stay dense."""
        return self.file.min_features

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON of the merged table."""
        return sha256_of(self.file.model_dump(mode="json"))

    def rules_for(self, family: str) -> tuple[Rule, ...]:
        """Return the rules of a family: common ones, its groups' in order, its own.

        Raises:
            RequestError: the table has no such family; ``generic`` always exists.
        """
        if family != GENERIC and family not in self.families:
            raise _unknown("family", family, [*self.families, GENERIC])
        if family not in self._by_family:
            self._by_family[family] = family_rules(self.file, family)
        return self._by_family[family]

    def rule(self, rule_id: str) -> Rule:
        """Return a rule by id.

        Raises:
            RequestError: there is none; the message names the nearest ids.
        """
        if rule_id not in self._rules:
            raise _unknown("rule", rule_id, list(self._rules))
        return self._rules[rule_id]

    def rule_ids(self) -> tuple[str, ...]:
        """Return every rule id, in the order of the table."""
        return tuple(self._rules)

    def origin(self, rule_id: str) -> str:
        """Return the place of a rule, such as ``families.yaml:41``; see ``rule``."""
        self.rule(rule_id)
        source, path = self._places[rule_id]
        return f"{source.name}:{source.line(path)}"

    def where(self, *path: str | int) -> str:
        """Return the place of a value, such as ``families.yaml:9 evidence.d.one``; see ``origin``.

        Where several files give it, the last one counts.
        """
        sources = [source for source in self.sources if source.has(path)]
        return (sources or self.sources[:1])[-1].where(path)

    def with_overlays(self, *paths: str | Path) -> RuleTable:
        """Return this table with further overlays merged in; see ``load_rules``."""
        base, *given = self.sources
        return build_table(base, (*given, *(read_yaml(path) for path in paths)))

    def ladder_for(self, host: Host) -> tuple[Scheme, ...]:
        """Return the candidates of the first ladder that matches the host; empty when none does."""
        for ladder in self.file.ladders:
            if (
                ladder.backend is host.backend
                and host.host_class in ladder.host_classes
                and host.sm >= ladder.min_sm
                and (not ladder.archs or host.arch in ladder.archs)
            ):
                return ladder.schemes
        return ()


def load_rules(*overlays: str | Path) -> RuleTable:
    """Load the shipped table, the tables of installed packages, then overlays, in this order.

    Raises:
        RuleTableError: a file is malformed; the error carries every fault of that file.
    """
    return _load_cached() if not overlays else build_table(_shipped(), _overlays(overlays))


def load_table(path: str | Path) -> RuleTable:
    """Load one complete table alone, such as a changed families.yaml; see ``load_rules``."""
    return build_table(read_yaml(path), ())


def is_whole_table(path: str | Path) -> bool:
    """Tell a complete table from an overlay: it has every section that a table must have."""
    required = {name for name, info in RuleFile.model_fields.items() if info.is_required()}
    return required <= set(read_yaml(path).values)


def find_families_file() -> Path:
    """Return the shipped table: package data in a wheel, the project's root elsewhere.

    Raises:
        RuleTableError: it is in neither place.
    """
    places = (_PACKAGE / "data" / TABLE_NAME, _PACKAGE.parent / TABLE_NAME)
    for path in places:
        if path.is_file():
            return path
    raise RuleTableError(
        str(places[0]), "no such file", remedy="reinstall quantpolicy; its rule table is missing"
    )


def build_table(base: YamlSource, overlays: Iterable[YamlSource]) -> RuleTable:
    """Validate, merge and check a complete table and its overlays; see ``load_rules``."""
    _check_switches(base)
    file = validate_source(RuleFile, base)
    places: Places = {}
    raise_all(_collect_places(file, base, places))
    items: Items = {}
    sources = [base]
    for source in overlays:
        from quantpolicy.overlay import merge_overlay

        _check_switches(source)
        file = merge_overlay(file, source, sources, places, items)
        sources.append(source)

    def where(path: YamlPath) -> str:
        for cut, part in enumerate(path):
            if isinstance(part, int) and path[:cut] in items:
                source, index = items[path[:cut]][part]
                return source.where((*path[:cut], index, *path[cut + 1 :]))
        holder = next((item for item in reversed(sources) if item.has(path)), base)
        return holder.where(path)

    def rule_where(rule_id: str, field: YamlPath) -> str:
        source, path = places[rule_id]
        return source.where((*path, *field))

    raise_all(check_table(file, rule_where, where))
    return RuleTable(file, places, sources)


@lru_cache(maxsize=1)
def _load_cached() -> RuleTable:
    return build_table(_shipped(), _overlays(()))


def _shipped() -> YamlSource:
    return read_yaml(find_families_file(), name=TABLE_NAME)


def _overlays(paths: Iterable[str | Path]) -> list[YamlSource]:
    installed = entry_points(group=ENTRY_POINT_GROUP)
    given = [path for point in sorted(installed) for path in _entry_point_paths(point)]
    return [read_yaml(path) for path in (*given, *paths)]


def _entry_point_paths(point: EntryPoint) -> list[str | Path]:
    """Return the overlay paths that an entry point gives, directly or through a function."""
    where = f"entry point {ENTRY_POINT_GROUP}:{point.name} ({point.value})"
    try:
        value = point.load()
    except (ImportError, AttributeError) as error:
        raise RuleTableError(
            where, f"cannot be loaded: {error}", remedy="repair or uninstall that package"
        ) from error
    if callable(value):
        value = value()
    paths = [value] if isinstance(value, str | Path) else value
    if not isinstance(paths, list | tuple) or not all(isinstance(p, str | Path) for p in paths):
        raise RuleTableError(
            where,
            f"gives {type(value).__name__}",
            allowed="a path, a list of paths, or a function that returns one of these",
            remedy="repair or uninstall that package",
        )
    return list(paths)


def _collect_places(file: RuleFile, source: YamlSource, places: Places) -> Iterable[RuleTableError]:
    for path, rule in iterate_rules(file):
        if rule.id in places:
            other, other_path = places[rule.id]
            yield RuleTableError(
                source.where((*path, "id")),
                f"rule id {rule.id!r} is already taken at {other.name}:{other.line(other_path)}",
                remedy="rename one of the two",
            )
        places.setdefault(rule.id, (source, path))


def _check_switches(source: YamlSource) -> None:
    """Refuse yes, no, on and off where free-form values would keep them as text unnoticed."""
    raise_all(
        RuleTableError(
            source.where(path), f"the bare word {word!r}", remedy=f"write {_SWITCH_WORDS}"
        )
        for path, word in source.bare_words
        if "config" in path
    )


def _unknown(kind: str, name: str, known: list[str]) -> RequestError:
    near = difflib.get_close_matches(name, known, n=3)
    allowed = "near: " + ", ".join(near) if near else "known: " + ", ".join(sorted(known)[:40])
    return RequestError(
        f"{kind} {name!r}",
        f"the rule table has no such {kind}",
        allowed=allowed,
        remedy="see `quantpolicy families`",
    )
