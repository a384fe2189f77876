"""Which Linears of a component a scheme takes, and why each other one stays dense.

Linears alike in all that a rule or a check reads are judged once, as a group.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quantpolicy.host import Host
from quantpolicy.inventory.model import LinearFacts
from quantpolicy.match import block_pattern, first_matching_token, matches_token
from quantpolicy.plan import KeptLayer, PlannedLayer
from quantpolicy.rule_schema import Effect, Fact, Rule, SchemePolicy
from quantpolicy.schemes import Cause, Scheme
from quantpolicy.target import TargetComponent
from quantpolicy.workload import RowScale

# A segment of digits and globs, other than a lone star, tells one block from another.
_NUMBERED_SEGMENT = re.compile(r"[\d?*]*[\d?][\d?*]*")


@dataclass(frozen=True, slots=True)
class LinearGroup:
    """Linears alike but for the numbers in their names.

    Args:
        sample: one of them.
        count: how many there are.
        rows: their rows at the workload, None when not known.
        fewest_rows: the fewest rows that any request can give them, None when not known.
    """

    sample: LinearFacts
    count: int
    rows: int | None
    fewest_rows: int | None


@dataclass(frozen=True, slots=True)
class GroupedLinears:
    """The Linears of a component and the group of each, in the order of the model."""

    linears: tuple[LinearFacts, ...]
    groups: tuple[LinearGroup, ...]
    index: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a scheme does with the Linears of a group: ``because`` is None when it takes them."""

    because: Cause | None = None
    rule: str = ""
    pad_rows: int = 0


@dataclass(frozen=True, slots=True)
class Terms:
    """All that decides verdicts, beside the Linear itself.

    Args:
        excludes: exclude rules in force, in the order of the table.
        pads: pad_rows rules in force, in the order of the table.
        min_features: Linears with fewer input or output features stay dense.
    """

    scheme: Scheme
    policy: SchemePolicy
    host: Host
    excludes: tuple[Rule, ...]
    pads: tuple[Rule, ...]
    min_features: int
    keep_in_fp32: tuple[str, ...]


def rules_in_force(
    rules: Iterable[Rule], effect: Effect, scheme: Scheme, policy: SchemePolicy, lift: Sequence[str]
) -> tuple[Rule, ...]:
    """Return the rules of one effect that bind a scheme: neither lifted nor met by the floor."""
    return tuple(
        rule
        for rule in rules
        if rule.effect is effect
        and scheme in rule.schemes
        and rule.id not in lift
        and not is_met_by_floor(rule, policy)
    )


def is_met_by_floor(rule: Rule, policy: SchemePolicy) -> bool:
    """Tell whether the activation floor of the scheme lifts the rule."""
    return Fact.ACTIVATION_FLOOR in rule.unless and policy.activation_floor > 0


def group_linears(
    component: TargetComponent,
    rules: Iterable[Rule],
    scale: RowScale,
    short_streams: dict[str, int],
) -> GroupedLinears:
    """Return the Linears of a component in groups that every rule and check treats alike."""
    if component.inventory is None:
        return GroupedLinears((), (), ())
    tokens = {token for rule in rules for token in rule.tokens} | set(short_streams)
    tokens |= set(component.keep_in_fp32)
    numbered = sorted(token for token in tokens if _is_numbered(token))
    positions: dict[tuple[object, ...], int] = {}
    members: list[list[LinearFacts]] = []
    index = []
    for linear in component.inventory.linears:
        key = (
            block_pattern(linear.name),
            linear.out_features,
            linear.in_features,
            linear.dtype,
            linear.has_bias,
            linear.rows,
            linear.zero_rows,
            *(matches_token(linear.name, token) for token in numbered),
        )
        position = positions.setdefault(key, len(members))
        if position == len(members):
            members.append([])
        members[position].append(linear)
        index.append(position)
    groups = tuple(_group(linears, scale, short_streams) for linears in members)
    return GroupedLinears(component.inventory.linears, groups, tuple(index))


def judge(group: LinearGroup, terms: Terms) -> Verdict:
    """Return what the scheme does with a group, the first reason that applies."""
    linear = group.sample
    exclude = _first_match(linear.name, terms.excludes)
    if exclude is not None:
        return Verdict(exclude.because, exclude.id)
    in_fp32 = first_matching_token(linear.name, terms.keep_in_fp32) is not None
    if linear.dtype == "float32" or in_fp32:
        return Verdict(Cause.FP32_KEPT, "derived.fp32_kept")
    if linear.dtype not in terms.policy.dtypes:
        return Verdict(Cause.WEIGHT_DTYPE, "derived.weight_dtype")
    if terms.scheme is Scheme.LAYERWISE_FP8:
        return Verdict()
    return _judge_gemm(group, terms)


def _judge_gemm(group: LinearGroup, terms: Terms) -> Verdict:
    linear, policy = group.sample, terms.policy
    if linear.zero_rows and terms.scheme is Scheme.FP8 and policy.activation_floor == 0:
        return Verdict(Cause.ZERO_ROWS, "derived.zero_rows")
    if linear.in_features % policy.alignment or linear.out_features % policy.alignment:
        return Verdict(Cause.ALIGNMENT, "derived.alignment")
    if min(linear.in_features, linear.out_features) < terms.min_features:
        return Verdict(Cause.MIN_FEATURES, "derived.min_features")
    floor = terms.host.min_rows(terms.scheme, linear.in_features, linear.has_bias)
    pad = _first_match(linear.name, terms.pads)
    if pad is not None:
        return Verdict(rule=pad.id, pad_rows=max(pad.rows or 0, floor))
    if floor == 1:
        return Verdict()
    if group.fewest_rows is None:
        return Verdict(pad_rows=floor)
    if group.fewest_rows < floor:
        return Verdict(Cause.SMALL_M, "derived.small_m")
    return Verdict()


def list_layers(
    grouped: GroupedLinears, verdicts: Sequence[Verdict], scheme: Scheme
) -> tuple[tuple[PlannedLayer, ...], tuple[KeptLayer, ...]]:
    """Return the Linears to quantise and those to keep, in the order of the model."""
    layers: list[PlannedLayer] = []
    kept: list[KeptLayer] = []
    for linear, position in zip(grouped.linears, grouped.index, strict=True):
        verdict = verdicts[position]
        shape = (linear.out_features, linear.in_features)
        if verdict.because is None:
            layers.append(
                PlannedLayer(
                    name=linear.name,
                    scheme=scheme,
                    shape=shape,
                    dtype=linear.dtype,
                    pad_rows=verdict.pad_rows,
                )
            )
        else:
            kept.append(
                KeptLayer(
                    name=linear.name,
                    because=verdict.because,
                    rule=verdict.rule,
                    shape=shape,
                    dtype=linear.dtype,
                )
            )
    return tuple(layers), tuple(kept)


def _is_numbered(token: str) -> bool:
    return any(_NUMBERED_SEGMENT.fullmatch(segment) for segment in token.split("."))


def _group(linears: list[LinearFacts], scale: RowScale, short: dict[str, int]) -> LinearGroup:
    sample = linears[0]
    token = first_matching_token(sample.name, tuple(short))
    fewest = [scale.fewest(sample.rows), short[token] if token else None]
    known = [rows for rows in fewest if rows is not None]
    return LinearGroup(sample, len(linears), scale.apply(sample.rows), min(known, default=None))


def _first_match(name: str, rules: Iterable[Rule]) -> Rule | None:
    return next((rule for rule in rules if first_matching_token(name, rule.tokens)), None)
