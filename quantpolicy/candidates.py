"""One candidate at a time: what a scheme would do to a component, and what refuses it.

Nothing is chosen here; ``choice`` compares the candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quantpolicy.cost import WeightBytes, component_bytes
from quantpolicy.host import GPU_BACKENDS, Backend, Host
from quantpolicy.layers import (
    GroupedLinears,
    Terms,
    Verdict,
    is_met_by_floor,
    judge,
    rules_in_force,
)
from quantpolicy.ops import COMPILED_ROWS, OPS, OpFacts
from quantpolicy.plan import TimeItem, Workload
from quantpolicy.request import Request
from quantpolicy.rule_schema import Effect, FamilySpec, Rule, SchemePolicy
from quantpolicy.rules import RuleTable
from quantpolicy.schemes import (
    ROW_SCALED,
    Cause,
    ComponentKind,
    Confidence,
    Contract,
    Execution,
    Quality,
    Scheme,
    SchemeChoice,
    Tier,
)
from quantpolicy.step_time import Forward, Setting, predict_step, total_ms
from quantpolicy.target import Target, TargetComponent
from quantpolicy.workload import RowScale

# The float8 type that fused ops know.
FUSED_FP8_DTYPE = "float8_e4m3fn"

# Schemes that multiply in a float8 type, which the host's matrix units must have.
FP8_COMPUTE = frozenset({Scheme.FP8, Scheme.MXFP8})


@dataclass(frozen=True, slots=True)
class Case:
    """All that one resolve reads.

    Args:
        family: None for the generic family.
        scale: how rows follow the workload.
        grouped: the Linears of each component.
        tier: of the plan, never auto.
    """

    target: Target
    host: Host
    request: Request
    rules: RuleTable
    family: FamilySpec | None
    workload: Workload | None
    scale: RowScale
    grouped: dict[str, GroupedLinears]
    tier: Tier

    def requested(self, name: str) -> SchemeChoice:
        """Return what the request says of a component."""
        return self.requested_of(self.target.components[name].kind)

    def requested_of(self, kind: ComponentKind) -> SchemeChoice:
        """Return what the request says of a kind of component."""
        if kind is ComponentKind.DENOISER:
            return self.request.transformer
        if kind is ComponentKind.TEXT_ENCODER:
            return self.request.text_encoder
        return self.request.vae

    def rules_of(self, name: str) -> tuple[Rule, ...]:
        """Return the rules of the family that speak of a component's kind."""
        kind = self.target.components[name].kind
        rules = self.rules.rules_for(self.target.family)
        return tuple(rule for rule in rules if rule.component is kind)

    def lifting(self, rule_id: str) -> Case:
        """Return the case of a request that also lifts the rule."""
        request = self.request.model_copy(update={"lift": (*self.request.lift, rule_id)})
        return replace(self, request=request)

    def confidence(self, name: str, scheme: Scheme) -> Confidence:
        """Return whether there is evidence for the scheme; dense needs none."""
        if scheme is Scheme.DENSE:
            return Confidence.MEASURED
        is_denoiser = self.target.components[name].kind is ComponentKind.DENOISER
        measured = self.family is not None and is_denoiser and scheme in self.family.measured
        return Confidence.MEASURED if measured else Confidence.DERIVED


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a candidate is out, whoever asks for it.

    Args:
        rule: id of the rule that refuses, "" when a fact does.
        flag: a flag, with its value, that would lift the refusal; "" for none.
    """

    because: Cause
    detail: str
    rule: str = ""
    evidence: tuple[str, ...] = ()
    flag: str = ""


@dataclass(frozen=True, slots=True)
class Assessment:
    """What a scheme would do to a component.

    Args:
        verdicts: of each group of Linears.
        predicted: time of one step, itemised; empty when there is no basis for it.
        waived: rules that would bind the scheme and do not, each with the reason.
    """

    component: str
    scheme: Scheme
    verdicts: tuple[Verdict, ...]
    weights: WeightBytes
    predicted: tuple[TimeItem, ...]
    waived: tuple[str, ...] = ()
    refusal: Refusal | None = None

    @property
    def predicted_ms(self) -> float | None:
        """Time of one step, None when there is no basis for it."""
        return total_ms(self.predicted)


def assess(case: Case, name: str, scheme: Scheme) -> Assessment:
    """Return what a scheme would do to a component, and what refuses it."""
    grouped = case.grouped[name]
    policy = case.rules.schemes.get(scheme)
    verdicts = (Verdict(),) * len(grouped.groups)
    waived: tuple[str, ...] = ()
    refusal = None
    if scheme is not Scheme.DENSE:
        if policy is None:
            detail = f"the rule table says nothing of what {scheme} requires"
            refusal = Refusal(Cause.NOT_OFFERED, detail)
        else:
            verdicts = _judge_all(case, name, scheme, policy)
            waived = _waived(case, name, scheme, policy)
            refusal = _refuse(case, name, scheme, policy, verdicts)
    component = case.target.components[name]
    work = component.inventory.forward if component.inventory is not None else None
    forward = Forward(grouped.groups, work, case.scale)
    unmasked = _drops_mask(case, name, scheme)
    setting = Setting.of(case.host, case.request.execution, case.tier, unmasked=unmasked)
    return Assessment(
        component=name,
        scheme=scheme,
        verdicts=verdicts,
        weights=component_bytes(component, grouped, verdicts, scheme),
        predicted=predict_step(forward, verdicts, scheme, setting) if refusal is None else (),
        waived=waived,
        refusal=refusal,
    )


def describe_rule(rule: Rule) -> str:
    """Return a rule's id, cause and evidence; its line is left out, so that a plan is pure."""
    evidence = f"; evidence {', '.join(rule.evidence)}" if rule.evidence else ""
    return f"{rule.id} ({rule.because}{evidence})"


def host_refusal(scheme: Scheme, policy: SchemePolicy, host: Host) -> str:
    """Return why the host cannot run a scheme, "" when it can."""
    if host.backend is Backend.CUDA:
        if policy.min_sm is None:
            return f"{scheme} runs on no CUDA device"
        if host.sm < policy.min_sm:
            return f"{scheme} needs sm{policy.min_sm}, and {host.name} is {host.arch}"
    elif host.backend is Backend.ROCM:
        if host.arch not in policy.rocm_archs:
            needed = " or ".join(policy.rocm_archs)
            needs = f"needs {needed}" if needed else "runs on no ROCm device"
            return f"{scheme} {needs}, and {host.name} is {host.arch}"
    elif host.backend not in policy.backends:
        return f"{scheme} does not run on {host.backend}"
    if scheme in FP8_COMPUTE and not host.fp8_dtype:
        return f"the matrix units of {host.name} multiply no float8 type"
    return ""


def execution_refusal(scheme: Scheme, execution: Execution, host: Host) -> str:
    """Return why an execution does not multiply a scheme on the host, "" when it does.

    A scheme without a GEMM of its own is not multiplied by either.
    """
    if execution is not Execution.FUSED or scheme is Scheme.LAYERWISE_FP8:
        return ""
    if scheme not in ROW_SCALED:
        return f"fused execution multiplies {' and '.join(sorted(ROW_SCALED))} only"
    if scheme is Scheme.FP8 and host.fp8_dtype != FUSED_FP8_DTYPE:
        return f"fused execution multiplies {FUSED_FP8_DTYPE}, and {host.name} {host.fp8_dtype}"
    return ""


def op_refusal(case: Case, name: str, scheme: Scheme, facts: OpFacts) -> str:
    """Return why a fused op is not planned for a component of a scheme, "" when it is."""
    host = case.host
    if case.tier is Tier.OFF:
        return "speed off runs the stock model"
    if host.backend not in GPU_BACKENDS:
        return f"it runs on GPUs, and {host.name} is none"
    if facts.min_sm and host.sm < facts.min_sm:
        return f"its kernel needs CUDA sm{facts.min_sm}, and {host.name} is {host.arch}"
    if facts.min_sm and _waits_for_host(case, name):
        return (
            f"compiled code calls it from Python, which shows below {COMPILED_ROWS} image tokens;"
            " speed eager mounts it"
        )
    if facts.scheme not in (None, scheme):
        return f"it is for {facts.scheme}, and {name} is {scheme}"
    if facts.execution not in (None, case.request.execution):
        return f"it is for execution {facts.execution}, not {case.request.execution}"
    if facts.contract is Contract.HIGH and case.request.quality is not Quality.HIGH:
        return "it is numerically relaxed; --quality high mounts it"
    return ""


def _waits_for_host(case: Case, name: str) -> bool:
    """Tell whether a compiled denoiser has so few rows that a call of an op shows."""
    is_compiled = case.tier is not Tier.EAGER
    is_denoiser = case.target.components[name].kind is ComponentKind.DENOISER
    work = case.workload
    few = work is not None and work.image_tokens * work.batch < COMPILED_ROWS
    return is_compiled and is_denoiser and few


def _drops_mask(case: Case, name: str, scheme: Scheme) -> bool:
    """Tell whether an op is planned that lets the component attend without a mask."""
    kind = case.target.components[name].kind
    return any(
        OPS[kernel.op].drops_mask and not op_refusal(case, name, scheme, OPS[kernel.op])
        for kernel in (case.family.kernels if case.family is not None else ())
        if kernel.component is kind
    )


def _judge_all(case: Case, name: str, scheme: Scheme, policy: SchemePolicy) -> tuple[Verdict, ...]:
    rules, lift = case.rules_of(name), case.request.lift
    terms = Terms(
        scheme=scheme,
        policy=policy,
        host=case.host,
        excludes=rules_in_force(rules, Effect.EXCLUDE, scheme, policy, lift),
        pads=rules_in_force(rules, Effect.PAD_ROWS, scheme, policy, lift),
        min_features=case.request.min_features or case.rules.min_features,
        keep_in_fp32=case.target.components[name].keep_in_fp32,
    )
    return tuple(judge(group, terms) for group in case.grouped[name].groups)


def _waived(case: Case, name: str, scheme: Scheme, policy: SchemePolicy) -> tuple[str, ...]:
    waived = []
    for rule in case.rules_of(name):
        if scheme not in rule.schemes:
            continue
        if rule.id in case.request.lift:
            waived.append(f"rule {rule.id} lifted on request")
        elif is_met_by_floor(rule, policy):
            floor = f"{policy.activation_floor:g}"
            waived.append(f"rule {rule.id} lifted by the activation floor {floor}")
    return tuple(waived)


def _refuse(
    case: Case, name: str, scheme: Scheme, policy: SchemePolicy, verdicts: tuple[Verdict, ...]
) -> Refusal | None:
    component = case.target.components[name]
    denials = rules_in_force(case.rules_of(name), Effect.DENY, scheme, policy, case.request.lift)
    for rule in denials:
        detail = f"denied by rule {describe_rule(rule)}"
        return Refusal(rule.because, detail, rule.id, rule.evidence)
    if component.kind not in policy.kinds:
        detail = f"{scheme} is not offered for {name}"
        return Refusal(Cause.NOT_OFFERED, detail)
    detail = host_refusal(scheme, policy, case.host)
    if detail:
        return Refusal(Cause.CAPABILITY, detail)
    detail = execution_refusal(scheme, case.request.execution, case.host)
    if detail:
        return Refusal(Cause.NOT_OFFERED, detail, flag=f"--execution {Execution.TORCHAO}")
    if component.dtype not in policy.dtypes:
        wanted = " or ".join(policy.dtypes)
        detail = f"{scheme} is made from {wanted}; {name} is loaded in {component.dtype}"
        return Refusal(Cause.WEIGHT_DTYPE, detail)
    return _refuse_empty(component, name, scheme, verdicts)


def _refuse_empty(
    component: TargetComponent, name: str, scheme: Scheme, verdicts: tuple[Verdict, ...]
) -> Refusal | None:
    if component.inventory is None:
        return Refusal(Cause.NO_LAYERS, f"the modules of {name} are not known, only its size")
    if any(verdict.because is None for verdict in verdicts):
        return None
    reasons = sorted({f"{verdict.because} by {verdict.rule}" for verdict in verdicts})
    why = f": kept for {', '.join(reasons)}" if reasons else ""
    return Refusal(Cause.NO_LAYERS, f"{scheme} takes no Linear of {name}{why}")
