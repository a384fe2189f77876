"""A plan onto a model: check everything, quantise exactly the listed modules, count, or undo."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import nn

from quantpolicy.errors import Mismatch, PlanMismatchError
from quantpolicy.host import Backend
from quantpolicy.plan import CompilePlan, ComponentPlan, Decision, PlannedLayer, QuantPlan
from quantpolicy.runtime.check import (
    component_mismatches,
    refuse_quantised,
    stored_mismatches,
)
from quantpolicy.runtime.count import count_component, count_mismatches
from quantpolicy.runtime.execution import (
    allow_saving,
    check_execution,
    execution_mismatches,
    refuse_saving,
    switch_component,
)
from quantpolicy.runtime.linear import guard_linear, release_linear
from quantpolicy.runtime.locate import linear_modules, linears_by_weight, select_components
from quantpolicy.runtime.mount import check_mounts, mount_planned
from quantpolicy.runtime.report import ApplyReport
from quantpolicy.runtime.smoke import failed_gemms
from quantpolicy.runtime.weights import quantise_weight
from quantpolicy.schemes import Cause, ComponentKind, Scheme

_CORRECT_THE_PAIR = "resolve the plan for this model as it is loaded"


def apply_plan(
    model: object,
    plan: QuantPlan,
    *,
    component: str | None = None,
    compile: bool = False,
) -> ApplyReport:
    """Quantise a model in place as the plan says, and report what its tensors hold afterwards.

    Everything is checked before anything is changed. On a failure half-way (out of memory, a NaN
    in a weight) every module holds the weight object it held before. That needs the dense weights
    of the whole call until it has succeeded: at its peak a device holds dense and quantised
    weights of all components concerned. Where that is too much, apply ``component`` by component,
    or apply on the CPU and move the result: GEMMs are then tried on the GPU the plan is for.

    Under fused execution the quantised Linears then run in fused ops, and the plan's fusions are
    joined. The plan's kernels are mounted on their components, dense ones included; one that a
    site does not take is left out and reported. ``unmount`` takes all of that back, and the
    report's ``op_counts`` says after a run what the kernels did. ``save_pretrained`` of a
    quantised component refuses.

    The weights of a dense component are not touched. A text encoder whose GEMM does not run on its
    device stays dense, and the report says so; for any other component that is an error.

    Args:
        model: a module (compiled, PEFT-wrapped or nested in another is fine), a diffusers pipeline,
            or a mapping of component names to modules.
        component: apply this component of the plan alone; needed for a single module when the plan
            has two denoisers or the module is none.
        compile: also compile the repeated blocks of the denoisers when the plan's compile mode is
            ``regional``. Off by default: compiling belongs after every other change to the model,
            such as loading adapters or moving it. To compile later, as the plan says:
            ``model.compile_repeated_blocks(**plan.compile.options)``.

    Raises:
        PlanMismatchError: the plan does not fit the model (all mismatches are collected), the model
            is already quantised, a GEMM does not run on the device, or the counts afterwards are
            not the plan's.
        KernelMountError: the plan names a kernel that this version lacks, or joins projections
            that carry a LoRA adapter.
        RequestError: the component is unknown or ambiguous.
    """
    check_mounts(plan)
    roots, mismatches = select_components(model, plan, component)
    for name, root in roots.items():
        refuse_quantised(name, root)
        if plan.components[name].scheme is not Scheme.DENSE:
            mismatches += component_mismatches(name, root, plan.components[name])
    compiling = _compile_targets(roots, plan) if compile else {}
    mismatches += _compile_mismatches(compiling)
    _raise_any(plan, mismatches, _CORRECT_THE_PAIR)
    check_execution(roots, plan)

    parts, decisions = _drop_unrunnable(plan, roots)
    with ExitStack() as undo:
        for name, root in roots.items():
            _quantise_component(root, parts[name], undo)
            if parts[name].layers:
                undo.callback(allow_saving, root)
                refuse_saving(name, root)
            switch_component(name, root, parts[name], plan, undo)
        mounted, declined = mount_planned(roots, plan.kernels, undo)
        report = _report(plan, roots, parts, decisions, compiling).model_copy(
            update={"mounted": mounted, "declined": declined}
        )
        for root in compiling.values():
            _compile_blocks(root, plan.compile, undo)
        undo.pop_all()
    return report


def switch_execution(
    model: object, plan: QuantPlan, *, component: str | None = None
) -> ApplyReport:
    """Run a model that holds the plan's quantised weights already in the plan's execution.

    For checkpoints loaded by other means: ``apply_plan`` and ``prequant.load`` do it themselves.
    All or nothing, and taken back by ``unmount``. Nothing is mounted or compiled.

    Args:
        model, component: as for ``apply_plan``.

    Raises:
        PlanMismatchError: a listed Linear is missing, is not stored in the plan's scheme, or runs
            in fused ops already.
        KernelMountError: a weight is quantised in a way that fused ops do not multiply, an offload
            hook or a LoRA adapter is in the way.
        RequestError: the component is unknown or ambiguous.
    """
    roots, mismatches = select_components(model, plan, component)
    for name, root in roots.items():
        mismatches += stored_mismatches(name, root, plan.components[name])
    _raise_any(plan, mismatches, "load the checkpoint that this plan describes")
    check_execution(roots, plan)
    with ExitStack() as undo:
        for name, root in roots.items():
            switch_component(name, root, plan.components[name], plan, undo)
        report = _report(plan, roots, {name: plan.components[name] for name in roots}, [], {})
        undo.pop_all()
    return report


def _quantise_component(root: nn.Module, plan: ComponentPlan, undo: ExitStack) -> None:
    linears, _ = linear_modules(root)
    sharing = linears_by_weight(root)
    for layer in plan.layers:
        dense = linears[layer.name].weight
        assert isinstance(dense, nn.Parameter), layer.name
        stored = _quantise(dense, layer, plan)
        for module in sharing[id(dense)]:
            undo.callback(_restore, module, dense)
            module.weight = stored
            guard_linear(module, layer.pad_rows)


def _quantise(dense: torch.Tensor, layer: PlannedLayer, plan: ComponentPlan) -> nn.Parameter:
    try:
        stored = quantise_weight(dense, layer.scheme, plan.settings)
    except PlanMismatchError as error:
        mismatches = [
            Mismatch(item.code, f"{layer.name}.weight", item.expected, item.found)
            for item in error.mismatches
        ]
        raise PlanMismatchError(layer.name, mismatches, remedy=error.remedy) from error
    return nn.Parameter(stored, requires_grad=False)


def _restore(module: nn.Linear, dense: nn.Parameter) -> None:
    release_linear(module)
    # Not through setattr: a registration hook that made the change fail would fail this too.
    module._parameters["weight"] = dense


def _drop_unrunnable(
    plan: QuantPlan, roots: dict[str, nn.Module]
) -> tuple[dict[str, ComponentPlan], list[Decision]]:
    """Return each component's plan, dense for a text encoder whose GEMM does not run."""
    parts = {name: plan.components[name] for name in roots}
    decisions: list[Decision] = []
    mismatches: list[Mismatch] = []
    for name, root in roots.items():
        for scheme, device, failure in _failures(root, parts[name], plan):
            if parts[name].kind is ComponentKind.TEXT_ENCODER:
                decisions.append(_left_dense(name, scheme, device, failure))
            else:
                mismatches.append(
                    Mismatch("gemm_fails", f"{name} {scheme.value}", f"a GEMM on {device}", failure)
                )
    _raise_any(plan, mismatches, "resolve the plan for this machine")
    for decision in decisions:
        parts[decision.component] = parts[decision.component].model_copy(
            update={"scheme": Scheme.DENSE, "layers": (), "kept": ()}
        )
    return parts, decisions


def _failures(
    root: nn.Module, part: ComponentPlan, plan: QuantPlan
) -> list[tuple[Scheme, torch.device, str]]:
    linears, _ = linear_modules(root)
    weights = ((layer.scheme, linears[layer.name].weight) for layer in part.layers)
    gemms = (
        (scheme, run_device(weight.device, plan.host.backend), weight.dtype)
        for scheme, weight in weights
    )
    return failed_gemms(gemms, part.settings, plan.execution)


def run_device(device: torch.device, backend: Backend) -> torch.device:
    """Return where a model on the device will run: it may be applied before it is moved."""
    if device.type != "cpu":
        return device
    if backend in (Backend.CUDA, Backend.ROCM) and torch.cuda.is_available():
        return torch.device("cuda")
    if backend is Backend.MPS and torch.backends.mps.is_available():
        return torch.device("mps")
    return device


def _left_dense(name: str, scheme: Scheme, device: torch.device, failure: str) -> Decision:
    return Decision(
        component=name,
        candidate=scheme,
        accepted=False,
        because=Cause.CAPABILITY,
        rule="",
        detail=f"{name} stays dense: a small {scheme.value} GEMM failed on {device} ({failure})",
    )


def _report(
    plan: QuantPlan,
    roots: dict[str, nn.Module],
    parts: dict[str, ComponentPlan],
    decisions: list[Decision],
    compiling: dict[str, nn.Module],
) -> ApplyReport:
    counted = {}
    mismatches: list[Mismatch] = []
    for name, root in roots.items():
        mode = plan.compile.mode if name in compiling else "none"
        counted[name] = count_component(
            name, root, parts[name], planned=plan.components[name].scheme, compiled=mode
        )
        mismatches += count_mismatches(counted[name], parts[name])
        mismatches += execution_mismatches(counted[name], parts[name], plan)
    _raise_any(plan, mismatches, _CORRECT_THE_PAIR)
    return ApplyReport(
        family=plan.family,
        weights_digest=plan.weights_digest,
        plan_digest=plan.plan_digest,
        components=counted,
        decisions=tuple(decisions),
        execution=plan.execution,
    )


def _compile_targets(roots: dict[str, nn.Module], plan: QuantPlan) -> dict[str, nn.Module]:
    if plan.compile.mode != "regional":
        return {}
    return {
        name: root
        for name, root in roots.items()
        if plan.components[name].kind is ComponentKind.DENOISER
    }


def _compile_mismatches(compiling: dict[str, nn.Module]) -> list[Mismatch]:
    return [
        Mismatch("compile_unsupported", name, "repeated blocks", type(root).__name__)
        for name, root in compiling.items()
        if not _repeated_blocks(root)
    ]


def _compile_blocks(root: nn.Module, plan: CompilePlan, undo: ExitStack) -> None:
    for block in _repeated_blocks(root):
        undo.callback(setattr, block, "_compiled_call_impl", block._compiled_call_impl)
    root.compile_repeated_blocks(**plan.options)  # type: ignore[operator]


def _repeated_blocks(root: nn.Module) -> list[nn.Module]:
    """Return the modules that diffusers compiles one by one, as the model's class names them."""
    names = getattr(root, "_repeated_blocks", None) or ()
    return [module for module in root.modules() if type(module).__name__ in names]


def _raise_any(plan: QuantPlan, mismatches: list[Mismatch], remedy: str) -> None:
    if mismatches:
        raise PlanMismatchError(f"plan for {plan.family}", mismatches, remedy=remedy)
