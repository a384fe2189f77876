"""The choice: which candidate each component gets, with a reason for every one that it does not.

auto takes the first candidate of the host's ladder that is sound, faster than dense and resident.
A demoted candidate (not faster than dense, or a mere memory lever) is taken only when dense does
not fit. When nothing fits, the first is taken and needs offloading: so more memory leads from an
offloaded plan to a resident one, and from there only up the ladder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quantpolicy.candidates import Case, assess, describe_rule
from quantpolicy.cost import WeightBytes
from quantpolicy.decisions import (
    FLAGS,
    Contender,
    Outcome,
    Reason,
    denial,
    over_budget,
    write_outcomes,
)
from quantpolicy.plan import MemoryPlan
from quantpolicy.rule_schema import Effect
from quantpolicy.schemes import Cause, ComponentKind, Confidence, Scheme, SchemeChoice, Tier
from quantpolicy.text import format_bytes

MemoryOf = Callable[[dict[str, WeightBytes]], MemoryPlan]
Reasons = dict[Scheme, Reason]


def choose(case: Case, names: Sequence[str], memory_of: MemoryOf) -> dict[str, Outcome]:
    """Return the outcome of components that choose together.

    Args:
        names: all denoisers, or one other component.
        memory_of: the memory estimate of the plan when these components have these bytes.

    Raises:
        DeniedError: the request names a scheme that a rule or the host refuses.
        RequestError: the request names a scheme for a component whose modules are not known.
    """
    requested = case.requested(names[0])
    kind = case.target.components[names[0]].kind
    contenders = []
    for scheme in _candidates(case, kind, requested):
        parts = tuple(assess(case, name, scheme) for name in names)
        memory = memory_of({part.component: part.weights for part in parts})
        contenders.append(Contender(scheme, parts, memory))
    if requested is not SchemeChoice.AUTO:
        return _choose_requested(case, contenders, Scheme(requested.value))
    if case.request.speed is Tier.OFF:
        detail = "speed off keeps every component dense unless its scheme is asked for"
        return _choose_dense(contenders, Reason(Cause.TIER_OFF, detail))
    if kind is not ComponentKind.DENOISER:
        detail = f"auto leaves it dense unless {FLAGS[kind]} says otherwise"
        return _choose_dense(contenders, Reason(Cause.DENSE_COMPONENT, detail))
    return _choose_auto(case, contenders)


def _candidates(case: Case, kind: ComponentKind, requested: SchemeChoice) -> list[Scheme]:
    """Return the ladder (of denoisers), the scheme asked for, and dense, each once, dense last."""
    ladder = case.rules.ladder_for(case.host) if kind is ComponentKind.DENOISER else ()
    asked = () if requested is SchemeChoice.AUTO else (Scheme(requested.value),)
    quantised = dict.fromkeys(scheme for scheme in (*ladder, *asked) if scheme is not Scheme.DENSE)
    return [*quantised, Scheme.DENSE]


def _choose_dense(contenders: list[Contender], reason: Reason) -> dict[str, Outcome]:
    rejected = {entry.scheme: reason for entry in contenders[:-1]}
    return write_outcomes(contenders, contenders[-1], reason, rejected)


def _choose_requested(case: Case, contenders: list[Contender], asked: Scheme) -> dict[str, Outcome]:
    chosen = next(entry for entry in contenders if entry.scheme is asked)
    rejected = _refusals(contenders)
    for entry in contenders:
        rejected.setdefault(entry.scheme, Reason(Cause.REQUESTED, f"{asked} was asked for"))
    if chosen.refusal is not None:
        raise denial(case, contenders, chosen, chosen.refusal, rejected)
    notes = []
    dense = contenders[-1].predicted_ms
    if dense is not None and chosen.predicted_ms is not None and chosen.predicted_ms > dense:
        notes.append(
            f"{chosen.names}: {asked} was asked for; expect slower than dense "
            f"({chosen.predicted_ms:.1f} ms a step predicted against {dense:.1f} ms)"
        )
    return write_outcomes(contenders, chosen, Reason(Cause.REQUESTED, ""), rejected, tuple(notes))


def _choose_auto(case: Case, contenders: list[Contender]) -> dict[str, Outcome]:
    rejected = {**_unconfident(case, contenders), **_refusals(contenders)}
    dense = contenders[-1]
    sound = [entry for entry in contenders[:-1] if entry.scheme not in rejected]
    demoted = _demotions(case, contenders, sound)
    chosen, notes = _pick(sound, dense, demoted)
    for entry in contenders:
        if entry.scheme not in rejected:
            rejected[entry.scheme] = _why_not(case, entry, chosen, demoted)
    because = Cause.MEMORY if chosen.scheme in demoted else Cause.FIRST_ACCEPTED
    taken = Reason(because, "; ".join(notes))
    return write_outcomes(contenders, chosen, taken, rejected, notes)


def _pick(
    sound: list[Contender], dense: Contender, demoted: Reasons
) -> tuple[Contender, tuple[str, ...]]:
    """Return the choice of auto and what must be said about it."""
    for entry in sound:
        if entry.scheme not in demoted and entry.memory.fits:
            return entry, ()
    if dense.memory.fits:
        return dense, ()
    chosen = next((entry for entry in sound if entry.memory.fits), None)
    notes = []
    if chosen is None:
        preferred = [entry for entry in sound if entry.scheme not in demoted]
        chosen = [*preferred, *sound, dense][0]
        notes.append(
            f"not even {chosen.scheme} fits {format_bytes(dense.memory.budget_bytes)} in full: "
            "offload a component"
        )
    if chosen.scheme in demoted:
        notes.append(
            f"{chosen.names}: {chosen.scheme} for memory; expect slower than dense "
            f"({demoted[chosen.scheme].detail})"
        )
    return chosen, tuple(notes)


def _why_not(case: Case, entry: Contender, chosen: Contender, demoted: Reasons) -> Reason:
    if entry.scheme in demoted and chosen.scheme not in demoted:
        return demoted[entry.scheme]
    if not entry.memory.fits:
        return over_budget(entry.memory)
    return Reason(Cause.FIRST_ACCEPTED, f"{chosen.scheme} comes first on {case.host.name}")


def _demotions(case: Case, contenders: list[Contender], sound: list[Contender]) -> Reasons:
    """Return the sound candidates that are worth taking only when dense does not fit."""
    demoted = {}
    dense = contenders[-1].predicted_ms
    for entry in sound:
        fallback = _memory_lever(case, contenders[0], entry.scheme)
        if fallback is not None:
            demoted[entry.scheme] = fallback
        elif dense is not None and entry.predicted_ms is not None and entry.predicted_ms >= dense:
            detail = f"predicted {entry.predicted_ms:.1f} ms a step against {dense:.1f} ms dense"
            demoted[entry.scheme] = Reason(Cause.SLOWER, detail)
    return demoted


def _memory_lever(case: Case, first: Contender, scheme: Scheme) -> Reason | None:
    """Return why a scheme only saves memory here: a rule denies the host's first pick."""
    if first.refusal is None or not first.refusal.rule:
        return None
    for rule in case.rules_of(first.parts[0].component):
        if (
            rule.effect is Effect.KEEP_DENSE_IF_RESIDENT
            and scheme in rule.schemes
            and rule.id not in case.request.lift
        ):
            detail = (
                f"{first.scheme} is denied, so {scheme} would only save memory: "
                f"rule {describe_rule(rule)}"
            )
            return Reason(rule.because, detail, rule.id)
    return None


def _refusals(contenders: list[Contender]) -> Reasons:
    return {
        entry.scheme: Reason(entry.refusal.because, entry.refusal.detail, entry.refusal.rule)
        for entry in contenders
        if entry.refusal is not None
    }


def _unconfident(case: Case, contenders: list[Contender]) -> Reasons:
    """Return the candidates without evidence, when the request accepts measured ones only."""
    if case.request.confidence is not Confidence.MEASURED:
        return {}
    return {
        entry.scheme: Reason(
            Cause.CONFIDENCE,
            f"no evidence for {entry.scheme} on {case.target.family}, and measured was asked for",
        )
        for entry in contenders
        if case.confidence(entry.parts[0].component, entry.scheme) is Confidence.DERIVED
    }
