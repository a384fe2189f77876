"""How a model's quantised Linears are run: torchao's tensors, or fused ops, joined where planned.

Switching moves no weight and changes no value: the same tensors, the same checkpoint. Ops and the
choice of what is joined do not belong here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from quantpolicy.errors import KernelMountError, Mismatch, RequestError
from quantpolicy.kernels.linear import FusedLinear
from quantpolicy.object_class import is_forward_replaced
from quantpolicy.plan import ComponentPlan, QuantPlan
from quantpolicy.runtime import mount
from quantpolicy.runtime.joined import JoinedLinear, join_linears, separate_linears
from quantpolicy.runtime.locate import adapted_linears, linear_modules, linears_by_weight, roots_of
from quantpolicy.runtime.mount import UnmountReport
from quantpolicy.runtime.report import ComponentReport
from quantpolicy.schemes import ROW_SCALED, Execution

FUSED, JOINED = "fused_execution", "joined_projections"
_SAVE, _APPLY = "save_pretrained", "_apply"


def check_execution(roots: Mapping[str, nn.Module], plan: QuantPlan) -> None:
    """Refuse to join projections that carry an adapter; changes nothing.

    Raises:
        KernelMountError: a LoRA adapter sits on a part of a planned fusion.
    """
    for name, root in roots.items():
        adapted = adapted_linears(root)
        for fusion in plan.fusions:
            taken = [part for part in fusion.parts if part in adapted]
            if fusion.component == name and taken:
                raise KernelMountError(
                    f"{name} {fusion.name}",
                    f"a LoRA adapter sits on {taken[0]}",
                    allowed="projections are joined before adapters are added",
                    remedy="remove the adapter, apply the plan and add it again, or request "
                    f"execution={Execution.TORCHAO.value}",
                )


def switch_component(
    name: str, root: nn.Module, part: ComponentPlan, plan: QuantPlan, undo: ExitStack
) -> None:
    """Run a component's quantised Linears as the plan says; ``undo`` takes what gives them back.

    Args:
        part: what was quantised of the component, which can be less than the plan's.

    Raises:
        KernelMountError: a weight is not one that fused ops multiply.
    """
    if plan.execution is not Execution.FUSED:
        return
    linears, _ = linear_modules(root)
    sharing = linears_by_weight(root)
    for layer in part.layers:
        if layer.scheme in ROW_SCALED:
            for module in sharing[id(linears[layer.name].weight)]:
                _check_hooks(layer.name, module)
                FusedLinear.adopt(module, name=f"{name}.{layer.name}")
                undo.callback(_release, module)
    if any(isinstance(module, FusedLinear) for module in root.modules()):
        undo.callback(allow_casts, root)
        refuse_casts(root)
    quantised = {layer.name for layer in part.layers}
    for fusion in plan.fusions:
        if fusion.component == name and quantised.issuperset(fusion.parts):
            leader = join_linears([_fused(linears[part]) for part in fusion.parts])
            undo.callback(separate_linears, leader)


def execution_mismatches(
    report: ComponentReport, part: ComponentPlan, plan: QuantPlan
) -> Iterator[Mismatch]:
    """Yield where the Linears found are not run as the plan says."""
    is_fused = plan.execution is Execution.FUSED
    planned = sum(layer.scheme in ROW_SCALED for layer in part.layers) if is_fused else 0
    found = sum(count.fused for count in report.schemes)
    if found != planned:
        yield Mismatch("fused_count", report.name, f"{planned} fused layers", str(found))
    groups = sum(fusion.component == report.name for fusion in plan.fusions) if part.layers else 0
    if report.joined != groups:
        yield Mismatch("joined_count", report.name, f"{groups} groups", str(report.joined))


def unmount(model: object) -> UnmountReport:
    """Give back whatever runs on top of the weights: mounted kernels, joins, fused execution.

    Quantised weights stay, as torchao's tensors; a model without any of it stays as it is.

    Args:
        model: a module, a pipeline, or a mapping of names to modules.
    """
    restored = dict(mount.unmount(model).restored)
    for root in roots_of(model):
        for module in list(root.modules()):
            allow_casts(module)
            if isinstance(module, JoinedLinear) and module is module.leader:
                separate_linears(module)
                restored[JOINED] = restored.get(JOINED, 0) + 1
        weights: dict[int, nn.Parameter] = {}
        for module in list(root.modules()):
            if isinstance(module, FusedLinear):
                _release_sharing(module, weights)
                restored[FUSED] = restored.get(FUSED, 0) + 1
    return UnmountReport(restored=restored)


class SavingRefused:
    """Stands in for ``save_pretrained`` of a model whose weights were quantised in place.

    The folder would lack what a loader needs to know of the quantised tensors.
    """

    def __init__(self, component: str) -> None:
        self.component = component

    def __call__(self, *_arguments: object, **_options: object) -> None:
        """Refuse.

        Raises:
            RequestError: always.
        """
        raise RequestError(
            f"{self.component}.{_SAVE}",
            "the weights were quantised in place",
            allowed="dense models are saved so",
            remedy="write the quantised checkpoint from the dense one with `prequant bake`",
        )


def refuse_saving(name: str, root: nn.Module) -> None:
    """Make ``save_pretrained`` refuse; the attribute shadows the method of the class."""
    if hasattr(root, _SAVE):
        setattr(root, _SAVE, SavingRefused(name))


def allow_saving(root: nn.Module) -> None:
    """Undo ``refuse_saving``."""
    vars(root).pop(_SAVE, None)


class CastRefused:
    """Stands in for ``_apply`` of a model with fused Linears, through which moves and casts go.

    A fused Linear refuses a cast by itself; what was visited before it would be cast already.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root

    def __call__(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move the model.

        Raises:
            KernelMountError: it is a cast; nothing was changed.
        """
        for module in self.root.modules():
            if recurse and isinstance(module, FusedLinear):
                module.refuse_cast(fn)
        root: Any = self.root
        moved: nn.Module = type(root)._apply(root, fn, recurse)
        return moved


def refuse_casts(root: nn.Module) -> None:
    """Make a cast of the model fail before it changes anything; moves go on."""
    vars(root)[_APPLY] = CastRefused(root)


def allow_casts(root: nn.Module) -> None:
    """Undo ``refuse_casts``."""
    vars(root).pop(_APPLY, None)


def _check_hooks(name: str, module: nn.Linear) -> None:
    if is_forward_replaced(module):
        raise KernelMountError(
            name,
            "its forward was replaced, as offload hooks do",
            allowed="execution is switched before hooks are added",
            remedy="remove the hooks, switch, and add them again",
        )


def _fused(linear: nn.Linear) -> FusedLinear:
    assert isinstance(linear, FusedLinear), type(linear)
    return linear


def _release(module: nn.Linear) -> None:
    _fused(module).release()


def _release_sharing(module: FusedLinear, weights: dict[int, nn.Parameter]) -> None:
    """Release a Linear; those over the same data get the same weight again."""
    data = module.qdata
    linear = module.release()
    own = linear.weight
    assert isinstance(own, nn.Parameter)
    shared = weights.setdefault(id(data), own)
    if shared is not own:
        linear.weight = shared
