"""The plan's notes: what a reader must know that no decision or layer says."""

from __future__ import annotations

from collections.abc import Mapping

from quantpolicy.candidates import Case
from quantpolicy.decisions import Outcome
from quantpolicy.plan import ComponentPlan, MemoryPlan
from quantpolicy.schemes import ComponentKind, Confidence, Scheme
from quantpolicy.text import format_bytes


def write_notes(
    case: Case,
    outcomes: Mapping[str, Outcome],
    components: Mapping[str, ComponentPlan],
    memory: MemoryPlan,
    lifted: tuple[str, ...],
) -> tuple[str, ...]:
    """Return the notes of a plan, in a fixed order."""
    notes = [f"recognised by {case.target.recognised_by}"]
    if case.family is None:
        notes.append(
            "the class is in no family of the table: the generic rules apply, and nothing is "
            "measured"
        )
    elif all(part.kind is not ComponentKind.DENOISER for part in components.values()):
        notes.append(
            f"no denoiser is here: {case.target.family} is the family whose rules apply, not a "
            "claim about the model that this component belongs to"
        )
    if case.workload is None and (case.request.resolution or case.request.frames):
        notes.append("resolution and frames are not used: no geometry is known for this class")
    for outcome in outcomes.values():
        notes += outcome.notes
    for name, component in components.items():
        if component.scheme is not Scheme.DENSE:
            notes += _scheme_notes(case, name, component)
    notes += _time_notes(case, outcomes)
    if (case.request.memory_bytes or 0) > case.host.memory_bytes:
        notes.append(
            f"the memory asked for is more than {case.host.name} has: its "
            f"{format_bytes(case.host.memory_bytes)} are the budget"
        )
    if not memory.fits and not any("offload" in note for note in notes):
        notes.append(
            f"the plan needs {format_bytes(memory.total_bytes)}, over "
            f"{format_bytes(memory.budget_bytes)}: offload a component"
        )
    idle = [rule_id for rule_id in case.request.lift if rule_id not in lifted]
    notes += [f"lifting {rule_id} changed nothing here" for rule_id in idle]
    return tuple(notes)


def _time_notes(case: Case, outcomes: Mapping[str, Outcome]) -> list[str]:
    """Return a note when no time is predicted, or no measured step speaks for what is."""
    rates = case.host.rates
    if rates is None:
        return [f"no rates are known for {case.host.name}: no time is predicted"]
    if not any(outcome.assessment.predicted for outcome in outcomes.values()):
        return []
    if rates.measured_tokens is None:
        return [f"predicted times: no step is measured on {case.host.name}, its rates are derived"]
    low, high = rates.measured_tokens
    if case.workload is None or low <= case.workload.image_tokens <= high:
        return []
    return [
        f"predicted times: the measured steps have {low} to {high} image tokens; this workload has "
        f"{case.workload.image_tokens}"
    ]


def _scheme_notes(case: Case, name: str, component: ComponentPlan) -> list[str]:
    notes = []
    scheme = component.scheme
    if component.confidence is Confidence.DERIVED:
        notes.append(f"{name}: {scheme} is derived, not measured on {case.target.family}")
    elif component.kind is ComponentKind.DENOISER:
        notes += _domain_notes(case, name, scheme)
    if scheme is not Scheme.LAYERWISE_FP8:
        unknown = sum(linear.rows is None for linear in case.grouped[name].linears)
        padded = max((layer.pad_rows for layer in component.layers), default=0)
        if unknown and padded:
            notes.append(
                f"{name}: the rows of {unknown} Linears are not known; those that need "
                f"it are padded to {padded} rows"
            )
    return notes


def _domain_notes(case: Case, name: str, scheme: Scheme) -> list[str]:
    """Return a note when the workload is outside what the evidence of the scheme speaks for."""
    if case.family is None or case.workload is None:
        return []
    records = [case.rules.evidence[key] for key in case.family.measured.get(scheme, ())]
    tokens = case.workload.image_tokens
    domains = [
        (record.min_tokens or 0, record.max_tokens)
        for record in records
        if record.min_tokens is not None or record.max_tokens is not None
    ]
    inside = any(low <= tokens and (high is None or tokens <= high) for low, high in domains)
    if not domains or inside:
        return []
    spans = ", ".join(_span(low, high) for low, high in domains)
    return [f"{name}: {scheme} is measured at {spans} image tokens; this workload has {tokens}"]


def _span(low: int, high: int | None) -> str:
    if high is None:
        return f"{low} or more"
    return f"{low} to {high}" if low < high else str(low)
