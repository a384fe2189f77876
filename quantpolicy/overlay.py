"""Overlays: files that add to the rule table, or replace parts of it, but only where they say so.

Every section of families.yaml may stand in an overlay; what is not named stays as it is. Rules and
evidence with a new id are added; one with a known id needs ``override: true``, and such a rule
stands in the section of the original. Any other field of the file or of an existing
family is merged: a list gets more items, a mapping new keys. To replace a value, a list or a known
key, name the field in the ``override`` list beside it::

    override: [min_features]
    min_features: 256
    evidence:
      mine.2026: {kind: measured, source: my own run, date: 2026-12-01}
    groups:
      wan:
        - id: wan.deny.nvfp4
          override: true
          schemes: [nvfp4]
          effect: deny
          because: outliers
          evidence: [mine.2026]
    families:
      wan2.2-ti2v-5b:
        override: [note]
        note: fp8 keeps the patch embedding too
        rules:
          - id: wan2.2-ti2v-5b.fp8.patch-embedding
            schemes: [fp8]
            effect: exclude
            because: outliers
            tokens: [proj_out]
            expect: 1
            evidence: [mine.2026]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TypeVar, cast

from pydantic import Field, create_model

from quantpolicy.errors import RuleTableError
from quantpolicy.record import Record
from quantpolicy.rule_errors import raise_all, suggest, validate_source
from quantpolicy.rule_schema import EvidenceRecord, FamilySpec, Rule, RuleFile
from quantpolicy.yaml_source import YamlPath, YamlSource

Places = dict[str, tuple[YamlSource, YamlPath]]
# Of each list that overlays have added to: the source of every item, and its index there.
Items = dict[YamlPath, list[tuple[YamlSource, int]]]
_Model = TypeVar("_Model", bound=Record)


class OverlayRule(Rule):
    """A rule of an overlay; ``override`` says that it replaces the one with its id."""

    override: bool = False


class OverlayEvidence(EvidenceRecord):
    """An evidence record of an overlay; see ``OverlayRule``."""

    override: bool = False


class _OverlayFamily(Record):
    """What differs from FamilySpec; its other fields are added, none of them required."""

    override: tuple[str, ...] = ()
    rules: tuple[OverlayRule, ...] = ()


class _OverlayFile(Record):
    """What differs from RuleFile; its other fields are added, none of them required."""

    override: tuple[str, ...] = ()
    evidence: dict[str, OverlayEvidence] = Field(default_factory=dict)
    rules: tuple[OverlayRule, ...] = ()
    groups: dict[str, tuple[OverlayRule, ...]] = Field(default_factory=dict)
    generic: tuple[OverlayRule, ...] = ()


def merge_overlay(
    file: RuleFile, source: YamlSource, earlier: Sequence[YamlSource], places: Places, items: Items
) -> RuleFile:
    """Return the table with an overlay merged in, its rules and list items entered.

    Args:
        earlier: the sources that the table was merged from, the last one last.

    Raises:
        RuleTableError: the overlay is malformed, or would replace something without saying so.
    """
    overlay = validate_source(_overlay_model(), source)
    merger = _Merger(source, earlier, places, items)
    merged = merger.merge(file, overlay)
    raise_all(merger.errors)
    return merged


@lru_cache(maxsize=1)
def _overlay_model() -> type[_OverlayFile]:
    family = _with_optional_fields(_OverlayFamily, FamilySpec)
    families = (dict[str, family], Field(default_factory=dict))  # type: ignore[var-annotated, valid-type]
    file = create_model("OverlayFileBase", __base__=_OverlayFile, families=families)
    return _with_optional_fields(file, RuleFile)


def _with_optional_fields(base: type[_Model], full: type[Record]) -> type[_Model]:
    """Return the base with the fields of the full record that it lacks; absent ones are None."""
    missing = {
        name: (info.annotation, None)
        for name, info in full.model_fields.items()
        if name not in base.model_fields
    }
    return create_model(f"Overlay{full.__name__}", __base__=base, **missing)  # type: ignore[call-overload, no-any-return]


class _Merger:
    """Merges one overlay and collects what it may not do."""

    def __init__(
        self, source: YamlSource, earlier: Sequence[YamlSource], places: Places, items: Items
    ) -> None:
        self.source = source
        self.earlier = earlier
        self.places = places
        self.items = items
        self.errors: list[RuleTableError] = []

    def fail(self, path: YamlPath, found: str, remedy: str, allowed: str = "") -> None:
        self.errors.append(
            RuleTableError(self.source.where(path), found, allowed=allowed, remedy=remedy)
        )

    def merge(self, file: RuleFile, overlay: _OverlayFile) -> RuleFile:
        updates = self._fields(file, overlay, overlay.override, ())
        updates["evidence"] = self._evidence(file.evidence, overlay.evidence)
        updates["rules"] = self._rules(file.rules, overlay.rules, ("rules",))
        updates["generic"] = self._rules(file.generic, overlay.generic, ("generic",))
        updates["groups"] = file.groups | {
            name: self._rules(file.groups.get(name, ()), rules, ("groups", name))
            for name, rules in overlay.groups.items()
        }
        families: dict[str, _OverlayFamily] = getattr(overlay, "families", {})
        updates["families"] = file.families | {
            name: self._family(file.families.get(name), given, ("families", name))
            for name, given in families.items()
        }
        return file.model_copy(update=updates)

    def _fields(
        self, base: Record, given: Record, override: tuple[str, ...], path: YamlPath
    ) -> dict[str, object]:
        """Return the merged values of the fields that the overlay gives and no one else merges."""
        own = set(given.model_fields_set) & set(type(base).model_fields)
        own -= {"rules", "groups", "generic", "evidence", "families"} if not path else {"rules"}
        for name in override:
            self.items.pop((*path, name), None)
            if name not in own:
                self.fail((*path, "override"), f"{name!r} is not given here", *_remedy(name, own))
        return {
            name: getattr(given, name)
            if name in override
            else self._merged(getattr(base, name), getattr(given, name), (*path, name))
            for name in sorted(own)
        }

    def _merged(self, old: object, new: object, path: YamlPath) -> object:
        name = path[-1]
        remedy = f"add `override: [{name}]` beside it to replace, or remove it"
        if isinstance(old, tuple) and isinstance(new, tuple):
            added = [index for index, item in enumerate(new) if item not in old]
            items = self.items.setdefault(path, self._items(old, path))
            items += ((self.source, index) for index in added)
            return old + tuple(new[index] for index in added)
        if isinstance(old, dict) and isinstance(new, dict):
            for key in sorted(key for key in new if key in old and new[key] != old[key]):
                self.fail((*path, str(key)), f"{str(key)!r} already has another value", remedy)
            return old | new
        if old != new:
            self.fail(path, f"{name} already has another value", remedy)
        return new

    def _items(self, old: tuple[object, ...], path: YamlPath) -> list[tuple[YamlSource, int]]:
        """Return where the items of a list stand that no overlay has added to yet."""
        last = next((one for one in reversed(self.earlier) if one.has(path)), self.earlier[0])
        return [(last, index) for index in range(len(old))]

    def _evidence(
        self, old: dict[str, EvidenceRecord], given: dict[str, OverlayEvidence]
    ) -> dict[str, EvidenceRecord]:
        for name, record in given.items():
            path: YamlPath = ("evidence", name)
            if name in old and not record.override:
                self.fail(path, "this evidence already exists", "add override: true, or rename it")
            if record.override and name not in old:
                self.fail(
                    (*path, "override"), "there is no such evidence to replace", *_remedy(name, old)
                )
        return old | {name: _reduced(record, EvidenceRecord) for name, record in given.items()}

    def _rules(
        self, old: tuple[Rule, ...], given: tuple[OverlayRule, ...], path: YamlPath
    ) -> tuple[Rule, ...]:
        merged = {rule.id: rule for rule in old}
        for index, rule in enumerate(given):
            place = (*path, index)
            if self._may_enter(rule, place, rule.id in merged):
                merged[rule.id] = _reduced(rule, Rule)
                self.places[rule.id] = (self.source, place)
        return tuple(merged.values())

    def _may_enter(self, rule: OverlayRule, path: YamlPath, in_section: bool) -> bool:
        known = self.places.get(rule.id)
        if known is None:
            if rule.override:
                self.fail(
                    (*path, "override"),
                    f"there is no rule {rule.id!r} to replace",
                    *_remedy(rule.id, self.places),
                )
            return not rule.override
        source, other = known
        taken = f"rule id {rule.id!r} is already taken at {source.where(other)}"
        if source is self.source:
            self.fail((*path, "id"), taken, "keep one of the two")
        elif not rule.override:
            self.fail((*path, "id"), taken, "add override: true to replace it, or rename yours")
        elif not in_section:
            self.fail(path, taken, "move the overriding rule to that section")
        return False if source is self.source else rule.override and in_section

    def _family(self, old: FamilySpec | None, given: _OverlayFamily, path: YamlPath) -> FamilySpec:
        rules = self._rules(old.rules if old else (), given.rules, (*path, "rules"))
        if old is not None:
            updates = self._fields(old, given, given.override, path)
            return old.model_copy(update={**updates, "rules": rules})
        if given.override:
            self.fail((*path, "override"), "the family is new", "remove override")
        fields = {name: getattr(given, name) for name in given.model_fields_set - {"override"}}
        for name, info in FamilySpec.model_fields.items():
            if info.is_required() and name not in fields:
                self.fail(
                    path, f"the new family lacks {name!r}", f"add {name}, or name a known family"
                )
        return FamilySpec.model_construct(None, **{**fields, "rules": rules})


def _remedy(name: str, known: Iterable[str]) -> tuple[str, str]:
    allowed, remedy = suggest(name, known)
    return remedy, allowed


def _reduced(record: Record, model: type[_Model]) -> _Model:
    """Return the record without ``override``."""
    fields = {name: getattr(record, name) for name in model.model_fields}
    return cast("_Model", model.model_construct(None, **fields))
