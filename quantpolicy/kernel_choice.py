"""Which kernels a plan names: a family's list against the host, the tier, the scheme and quality.

Every listed op leaves a decision. Where an op goes on a model is not known here: a site that does
not fit declines when the plan is applied.
"""

from __future__ import annotations

from collections.abc import Mapping

from quantpolicy.candidates import Case, op_refusal
from quantpolicy.ops import OPS
from quantpolicy.plan import ComponentPlan, KernelDecision, PlannedKernel
from quantpolicy.rule_schema import KernelSpec
from quantpolicy.schemes import Contract

_PROMISES = {
    Contract.LOSSLESS: "bit-exact, verified at the first use of every signature",
    Contract.EQUIVALENT: "equal but for rounding, at every tier but off",
    Contract.HIGH: "numerically relaxed, as quality high allows",
}


def plan_kernels(
    case: Case, components: Mapping[str, ComponentPlan]
) -> tuple[tuple[PlannedKernel, ...], tuple[KernelDecision, ...]]:
    """Return the kernels to mount, and a decision on each that the family lists."""
    listed = case.family.kernels if case.family is not None else ()
    decisions = _without_replaced(
        [
            _decide(case, name, part, kernel)
            for name, part in components.items()
            for kernel in listed
            if kernel.component is part.kind
        ]
    )
    planned = tuple(
        PlannedKernel(component=each.component, op=each.op, contract=each.contract)
        for each in decisions
        if each.accepted
    )
    return planned, decisions


def _without_replaced(decisions: list[KernelDecision]) -> tuple[KernelDecision, ...]:
    """Reject the ops whose sites another accepted op of the same component takes."""
    takers = {
        (each.component, replaced): each.op
        for each in decisions
        if each.accepted
        for replaced in OPS[each.op].replaces
    }
    return tuple(
        each.model_copy(update={"accepted": False, "detail": f"{taker} takes its sites"})
        if each.accepted and (taker := takers.get((each.component, each.op)))
        else each
        for each in decisions
    )


def _decide(case: Case, name: str, part: ComponentPlan, kernel: KernelSpec) -> KernelDecision:
    facts = OPS[kernel.op]
    reason = op_refusal(case, name, part.scheme, facts)
    cited = f"evidence {', '.join(kernel.evidence)}" if kernel.evidence else "not measured"
    return KernelDecision(
        component=name,
        op=kernel.op,
        contract=facts.contract,
        accepted=not reason,
        detail=reason or f"{_PROMISES[facts.contract]}; {cited}",
    )
