"""The trace: how candidates become decisions, and how a refused request becomes an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from quantpolicy.candidates import Assessment, Case, Refusal, assess
from quantpolicy.errors import DeniedError, RequestError
from quantpolicy.plan import Decision, MemoryPlan
from quantpolicy.schemes import Cause, ComponentKind, Scheme
from quantpolicy.text import format_bytes

FLAGS = {
    ComponentKind.DENOISER: "--transformer",
    ComponentKind.TEXT_ENCODER: "--text-encoder",
    ComponentKind.VAE: "--vae",
}


class Reason(NamedTuple):
    """Why a candidate was taken or not; ``rule`` is "" when a fact decided."""

    because: Cause
    detail: str
    rule: str = ""


@dataclass(frozen=True, slots=True)
class Contender:
    """One scheme over all components that choose together.

    Args:
        parts: every denoiser, or one other component.
        memory: the estimate of the whole plan under it.
    """

    scheme: Scheme
    parts: tuple[Assessment, ...]
    memory: MemoryPlan

    @property
    def refusal(self) -> Refusal | None:
        """The first refusal of a part, None when all parts are sound."""
        return next((part.refusal for part in self.parts if part.refusal is not None), None)

    @property
    def predicted_ms(self) -> float | None:
        """Sum over the parts, None when one is not known."""
        times = [part.predicted_ms for part in self.parts]
        known = [time for time in times if time is not None]
        return sum(known) if len(known) == len(times) else None

    @property
    def names(self) -> str:
        """The components, for a sentence."""
        return " and ".join(part.component for part in self.parts)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one component gets.

    Args:
        decisions: one for each candidate, in the order considered.
        notes: what a reader of the plan must know.
    """

    assessment: Assessment
    decisions: tuple[Decision, ...]
    notes: tuple[str, ...] = ()


def write_outcomes(
    contenders: Sequence[Contender],
    chosen: Contender,
    taken: Reason,
    rejected: Mapping[Scheme, Reason],
    notes: tuple[str, ...] = (),
) -> dict[str, Outcome]:
    """Return the outcome of each part of the chosen contender.

    Args:
        contenders: all of them, dense last.
        rejected: the reason of each one that was not chosen.
    """
    outcomes = {}
    for position, part in enumerate(chosen.parts):
        dense = contenders[-1].parts[position]
        detail = "; ".join(filter(None, [taken.detail, _numbers(part, dense, chosen.memory)]))
        decisions = tuple(
            _decision(part, Reason(taken.because, detail), accepted=True)
            if entry is chosen
            else _decision(entry.parts[position], rejected[entry.scheme], accepted=False)
            for entry in contenders
        )
        outcomes[part.component] = Outcome(part, decisions, notes if position == 0 else ())
    return outcomes


def denial(
    case: Case,
    contenders: Sequence[Contender],
    chosen: Contender,
    refusal: Refusal,
    rejected: Mapping[Scheme, Reason],
) -> RequestError:
    """Return the error for a scheme that was asked for and cannot be had."""
    name = next(part.component for part in chosen.parts if part.refusal is refusal)
    component = case.target.components[name]
    flag = FLAGS[component.kind]
    if component.inventory is None and refusal.because is Cause.NO_LAYERS:
        return RequestError(
            f"{case.target.source} {name}",
            f"{chosen.scheme} was asked for, but only the size of {name} is known",
            allowed="its modules are read from a folder or a live pipeline",
            remedy=f"give one of these as the model, or leave {flag} out",
        )
    names = [part.component for part in chosen.parts]
    runs = [scheme for scheme in Scheme if _is_sound(case, names, scheme)]
    lift = stands = ""
    if refusal.rule:
        if _is_sound(case.lifting(refusal.rule), names, chosen.scheme):
            lift = f", or lift the rule with --lift {refusal.rule}"
        stands = f", which stands at {case.rules.origin(refusal.rule)}"
    elif refusal.flag:
        lift = f", or ask for {refusal.flag}"
    elif refusal.because is Cause.NO_LAYERS:
        features = _largest_min_features(case, names, chosen)
        lift = f", or give --min-features {features} or less" if features else ""
    return DeniedError(
        f"{case.target.family} {name} on {case.host.name}",
        f"{chosen.scheme} was asked for: {refusal.detail}{stands}",
        allowed="what would run here: " + ", ".join(runs),
        remedy=f"give {flag} one of these{lift}",
        decisions=[
            _decision(entry.parts[0], rejected[entry.scheme], accepted=False)
            for entry in contenders
        ],
        rule=refusal.rule,
        evidence=refusal.evidence,
    )


def _largest_min_features(case: Case, names: Sequence[str], chosen: Contender) -> int:
    """Return the largest minimum of features under which the scheme is sound, 0 for none."""
    sizes = {
        min(group.sample.in_features, group.sample.out_features)
        for part in chosen.parts
        for group, verdict in zip(case.grouped[part.component].groups, part.verdicts, strict=True)
        if verdict.because is Cause.MIN_FEATURES
    }
    for size in sorted(sizes, reverse=True):
        request = case.request.model_copy(update={"min_features": size})
        if _is_sound(replace(case, request=request), names, chosen.scheme):
            return size
    return 0


def _is_sound(case: Case, names: Sequence[str], scheme: Scheme) -> bool:
    return all(assess(case, name, scheme).refusal is None for name in names)


def over_budget(memory: MemoryPlan) -> Reason:
    """Return the reason of a contender that does not fit."""
    need, budget = format_bytes(memory.total_bytes), format_bytes(memory.budget_bytes)
    return Reason(Cause.MEMORY, f"the plan would need {need} of {budget}")


def _decision(part: Assessment, reason: Reason, *, accepted: bool) -> Decision:
    return Decision(
        component=part.component,
        candidate=part.scheme,
        accepted=accepted,
        because=reason.because,
        rule=reason.rule,
        detail=reason.detail,
        predicted_ms=part.predicted_ms,
        predicted=part.predicted,
    )


def _numbers(part: Assessment, dense: Assessment, memory: MemoryPlan) -> str:
    weights = f"{format_bytes(part.weights.total)} of weights"
    time = ""
    if part.predicted_ms is not None:
        time = f"predicted {part.predicted_ms:.1f} ms a step"
    if part.scheme is not Scheme.DENSE:
        weights += f" instead of {format_bytes(dense.weights.total)}"
        if time and dense.predicted_ms is not None:
            time += f" against {dense.predicted_ms:.1f} ms dense"
    fit = "within" if memory.fits else "over"
    budget = format_bytes(memory.budget_bytes)
    need = f"the plan needs {format_bytes(memory.total_bytes)}, {fit} {budget}"
    return "; ".join(filter(None, [weights, time, need, *part.waived]))
