"""The resolver: model, host and request in, one plan out.

``resolve_target`` is pure: it reads no clock, environment, device or file. Which Linears a scheme
takes is told in ``layers``, what refuses a candidate in ``candidates``, which one wins in
``choice``, what runs on top in ``fusions`` and ``kernel_choice``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantpolicy.candidates import Case
from quantpolicy.choice import choose
from quantpolicy.cost import WeightBytes, activation_bytes, plan_memory
from quantpolicy.decisions import FLAGS, Outcome
from quantpolicy.errors import DeniedError, RequestError
from quantpolicy.fusions import plan_fusions
from quantpolicy.host import GPU_BACKENDS, Backend, Host
from quantpolicy.kernel_choice import plan_kernels
from quantpolicy.layers import Verdict, group_linears, list_layers
from quantpolicy.notes import write_notes
from quantpolicy.plan import (
    CompilePlan,
    ComponentPlan,
    KeptLayer,
    MemoryPlan,
    PlannedLayer,
    QuantPlan,
    SchemeSettings,
)
from quantpolicy.request import Request
from quantpolicy.rule_schema import WeightDtype
from quantpolicy.schemes import Cause, ComponentKind, Scheme, SchemeChoice, Tier
from quantpolicy.workload import plan_workload

if TYPE_CHECKING:
    from quantpolicy.rules import RuleTable
    from quantpolicy.target import Target

# The compiler behind torch.compile supports no older CUDA device.
MIN_COMPILE_SM = 70


def resolve(
    model: object,
    *,
    host: Host,
    request: Request | None = None,
    rules: RuleTable | None = None,
) -> QuantPlan:
    """Resolve one plan.

    Args:
        model: a family name, a folder, a config, a cached repository id, a module or a pipeline.
        request: what the caller asks for; all defaults when None.
        rules: the shipped table when None.

    Raises:
        RequestError: the model is not recognised, or the request makes no sense for it.
        DeniedError: a rule or the host refuses what the request asks for.
    """
    from quantpolicy.recognise import target_from
    from quantpolicy.rules import load_rules

    rules = load_rules() if rules is None else rules
    return resolve_target(target_from(model, rules), host, request or Request(), rules)


def resolve_target(target: Target, host: Host, request: Request, rules: RuleTable) -> QuantPlan:
    """Resolve one plan for a target; see ``resolve``. Equal arguments give equal plans."""
    for rule_id in request.lift:
        rules.rule(rule_id)
    tier, compiled = _plan_tier(host, request)
    case = _open_case(target, host, request, rules, tier)
    _check_components(case)
    outcomes, memory = _choose_all(case)
    components = {name: _component_plan(case, name, outcomes[name]) for name in target.components}
    lifted = _effective_lifts(case, components)
    fusions, fusion_notes = plan_fusions(case, components, tier)
    kernels, kernel_decisions = plan_kernels(case, components)
    return QuantPlan(
        family=target.family,
        tier=tier,
        quality=request.quality,
        execution=request.execution,
        host=host,
        request=request,
        rules_digest=rules.digest,
        workload=case.workload,
        components=components,
        decisions=tuple(
            decision for name in target.components for decision in outcomes[name].decisions
        ),
        kernels=kernels,
        compile=compiled,
        memory=memory,
        lifted=lifted,
        notes=(*write_notes(case, outcomes, components, memory, lifted), *fusion_notes),
        fusions=fusions,
        kernel_decisions=kernel_decisions,
    )


def _open_case(target: Target, host: Host, request: Request, rules: RuleTable, tier: Tier) -> Case:
    family = rules.families.get(target.family)
    has_denoiser = any(
        component.kind is ComponentKind.DENOISER for component in target.components.values()
    )
    geometry = family.geometry if family is not None and has_denoiser else None
    workload, scale = plan_workload(geometry, request, target.family)
    short_streams = family.short_streams if family is not None else {}
    family_rules = rules.rules_for(target.family)
    grouped = {
        name: group_linears(
            component,
            [rule for rule in family_rules if rule.component is component.kind],
            scale,
            short_streams if component.kind is ComponentKind.DENOISER else {},
        )
        for name, component in target.components.items()
    }
    return Case(target, host, request, rules, family, workload, scale, grouped, tier)


def _choose_all(case: Case) -> tuple[dict[str, Outcome], MemoryPlan]:
    """Choose for the denoisers last, because their choice depends on the memory of the others."""
    components = case.target.components
    denoisers = [n for n, part in components.items() if part.kind is ComponentKind.DENOISER]
    reserve = max((activation_bytes(case.grouped[name].groups) for name in denoisers), default=0)
    budget = min(case.request.memory_bytes or case.host.memory_bytes, case.host.memory_bytes)
    outcomes: dict[str, Outcome] = {}

    def memory_of(parts: dict[str, WeightBytes]) -> MemoryPlan:
        chosen = {name: outcome.assessment.weights for name, outcome in outcomes.items()}
        merged = {**chosen, **parts}
        ordered = {name: merged[name] for name in components if name in merged}
        return plan_memory(ordered, reserve, case.host, budget)

    others = [name for name in components if name not in denoisers]
    for name in others:
        outcomes.update(choose(case, [name], memory_of))
    if denoisers:
        outcomes.update(choose(case, denoisers, memory_of))
        for name in others:  # the same choices again: their sentences tell the whole plan's memory
            outcomes.update(choose(case, [name], memory_of))
    return outcomes, memory_of({})


def _component_plan(case: Case, name: str, outcome: Outcome) -> ComponentPlan:
    component = case.target.components[name]
    scheme = outcome.assessment.scheme
    layers: tuple[PlannedLayer, ...] = ()
    kept: tuple[KeptLayer, ...] = ()
    verdicts = outcome.assessment.verdicts
    if scheme is not Scheme.DENSE:
        layers, kept = list_layers(case.grouped[name], verdicts, scheme)
    elif component.kind is ComponentKind.DENOISER:
        # Other dense components are copied as they are, whether their modules are known or not.
        verdicts = (Verdict(Cause.DENSE_COMPONENT, "derived.dense_component"),) * len(verdicts)
        layers, kept = list_layers(case.grouped[name], verdicts, scheme)
    return ComponentPlan(
        kind=component.kind,
        class_name=component.class_name,
        scheme=scheme,
        confidence=case.confidence(name, scheme),
        dtype=component.dtype,
        keep_in_fp32=component.keep_in_fp32,
        settings=_settings(case, scheme),
        layers=layers,
        kept=kept,
    )


def _settings(case: Case, scheme: Scheme) -> SchemeSettings:
    if scheme is Scheme.DENSE:
        return SchemeSettings()
    policy = case.rules.schemes[scheme]
    own = policy.weight_dtype
    is_of_host = own is WeightDtype.HOST_FLOAT8
    return SchemeSettings(
        granularity=policy.granularity,
        weight_dtype=case.host.fp8_dtype if is_of_host else own.value,
        activation_floor=policy.activation_floor,
    )


def _check_components(case: Case) -> None:
    """Refuse a scheme for a kind of component that the model does not have."""
    kinds = {component.kind for component in case.target.components.values()}
    for kind in ComponentKind:
        asked = case.requested_of(kind)
        if kind not in kinds and asked not in (SchemeChoice.AUTO, SchemeChoice.DENSE):
            raise RequestError(
                case.target.source,
                f"{asked} was asked for a {kind.replace('_', ' ')}, and there is none",
                allowed="components: " + ", ".join(case.target.components),
                remedy=f"leave {FLAGS[kind]} out, or give the whole pipeline as the model",
            )


def _plan_tier(host: Host, request: Request) -> tuple[Tier, CompilePlan]:
    """Return the tier that auto stands for on the host, and how the denoiser is compiled."""
    can_compile = host.backend is not Backend.CUDA or host.sm >= MIN_COMPILE_SM
    tier = request.speed
    if tier is Tier.AUTO:
        compiles = host.backend in GPU_BACKENDS and can_compile
        tier = Tier.COMPILE if compiles else Tier.EAGER
    if tier not in (Tier.COMPILE, Tier.MAX):
        return tier, CompilePlan()
    if not can_compile:
        raise DeniedError(
            f"speed on {host.name}",
            f"{tier} needs sm{MIN_COMPILE_SM}; this host is {host.arch}",
            allowed="what would run here: off, auto, eager",
            remedy="give --speed one of these",
        )
    return tier, CompilePlan(mode="regional", max_autotune=tier is Tier.MAX, dynamic=True)


def _effective_lifts(case: Case, components: dict[str, ComponentPlan]) -> tuple[str, ...]:
    """Return the lifted rules without which the components would have come out otherwise."""
    return tuple(
        rule_id for rule_id in case.request.lift if not _is_idle(case, components, rule_id)
    )


def _is_idle(case: Case, components: dict[str, ComponentPlan], rule_id: str) -> bool:
    lift = tuple(other for other in case.request.lift if other != rule_id)
    request = case.request.model_copy(update={"lift": lift})
    other = _open_case(case.target, case.host, request, case.rules, case.tier)
    try:
        outcomes, _ = _choose_all(other)
    except DeniedError:
        return False
    return all(
        _component_plan(other, name, outcomes[name]) == component
        for name, component in components.items()
    )
