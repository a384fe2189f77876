"""Which kernels a plan names: a family's list against the host, the tier, the scheme and quality.

Every listed op leaves a decision. Where an op goes on a model is not known here: a site that does
not fit declines when the plan is applied.
"""

from __future__ import annotations

from collections.abc import Mapping

from quantpolicy.candidates import Case
from quantpolicy.host import GPU_BACKENDS
from quantpolicy.ops import OPS, OpFacts
from quantpolicy.plan import ComponentPlan, KernelDecision, PlannedKernel
from quantpolicy.rule_schema import KernelSpec
from quantpolicy.schemes import Contract, Quality, Tier

_PROMISES = {
    Contract.LOSSLESS: "bit-exact, verified at the first use of every signature",
    Contract.EQUIVALENT: "equal but for rounding, at every tier but off",
    Contract.HIGH: "numerically relaxed, as quality high allows",
}


def plan_kernels(
    case: Case, components: Mapping[str, ComponentPlan], tier: Tier
) -> tuple[tuple[PlannedKernel, ...], tuple[KernelDecision, ...]]:
    """Return the kernels to mount, and a decision on each that the family lists."""
    listed = case.family.kernels if case.family is not None else ()
    decisions = tuple(
        _decide(case, name, part, kernel, tier)
        for name, part in components.items()
        for kernel in listed
        if kernel.component is part.kind
    )
    planned = tuple(
        PlannedKernel(component=each.component, op=each.op, contract=each.contract)
        for each in decisions
        if each.accepted
    )
    return planned, decisions


def _decide(
    case: Case, name: str, part: ComponentPlan, kernel: KernelSpec, tier: Tier
) -> KernelDecision:
    facts = OPS[kernel.op]
    reason = _why_not(case, name, part, facts, tier)
    cited = f"evidence {', '.join(kernel.evidence)}" if kernel.evidence else "not measured"
    return KernelDecision(
        component=name,
        op=kernel.op,
        contract=facts.contract,
        accepted=not reason,
        detail=reason or f"{_PROMISES[facts.contract]}; {cited}",
    )


def _why_not(case: Case, name: str, part: ComponentPlan, facts: OpFacts, tier: Tier) -> str:
    host = case.host
    if tier is Tier.OFF:
        return "speed off runs the stock model"
    if host.backend not in GPU_BACKENDS:
        return f"it runs on GPUs, and {host.name} is none"
    if facts.min_sm and host.sm < facts.min_sm:
        return f"its kernel needs CUDA sm{facts.min_sm}, and {host.name} is {host.arch}"
    if facts.scheme not in (None, part.scheme):
        return f"it is for {facts.scheme}, and {name} is {part.scheme}"
    if facts.execution not in (None, case.request.execution):
        return f"it is for execution {facts.execution}, not {case.request.execution}"
    if facts.contract is Contract.HIGH and case.request.quality is not Quality.HIGH:
        return "it is numerically relaxed; --quality high mounts it"
    return ""
