"""Every difference between a component's plan and the module it is to be applied to."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from quantpolicy.errors import Mismatch, PlanMismatchError
from quantpolicy.kernels.linear import FusedLinear
from quantpolicy.kernels.stored_scheme import scheme_of
from quantpolicy.match import natural_key
from quantpolicy.object_class import is_forward_replaced
from quantpolicy.plan import ComponentPlan, KeptLayer, PlannedLayer
from quantpolicy.runtime.locate import linear_modules, linears_by_weight
from quantpolicy.schemes import Scheme


def refuse_quantised(name: str, root: nn.Module) -> None:
    """Refuse a component that holds weights which are already quantised.

    Raises:
        PlanMismatchError: a Linear's weight is not a plain floating-point tensor.
    """
    linears, _ = linear_modules(root)
    quantised = [
        subject for subject, module in linears.items() if _stored_as(module) != Scheme.DENSE.value
    ]
    if quantised:
        stored = ", ".join(sorted({_stored_as(linears[subject]) for subject in quantised}))
        raise PlanMismatchError(
            name,
            [
                Mismatch("already_quantised", f"{name}.{subject}", "dense", stored)
                for subject in quantised
            ],
            found=f"already quantised: {len(quantised)} of {len(linears)} Linears hold {stored}",
            remedy="apply the plan to the dense model",
        )


def component_mismatches(name: str, root: nn.Module, plan: ComponentPlan) -> list[Mismatch]:
    """Return every mismatch between a component and its plan; changes nothing."""
    linears, mismatches = linear_modules(root)
    sharing = linears_by_weight(root)
    listed: tuple[PlannedLayer | KeptLayer, ...] = (*plan.layers, *plan.kept)
    for layer in listed:
        module = linears.get(layer.name)
        if module is None:
            mismatches.append(Mismatch("layer_missing", layer.name, "a Linear", "nothing"))
            continue
        mismatches += _layer_mismatches(module, layer)
        if isinstance(layer, PlannedLayer):
            for sharer in sharing[id(module.weight)]:
                mismatches += _unquantisable(sharer, layer)
    for subject in linears.keys() - {layer.name for layer in listed}:
        mismatches.append(
            Mismatch("layer_extra", subject, "no such Linear", str(_shape(linears[subject])))
        )
    mismatches.sort(key=lambda mismatch: (mismatch.code, natural_key(mismatch.subject)))
    return [
        Mismatch(item.code, f"{name}.{item.subject}", item.expected, item.found)
        for item in mismatches
    ]


def stored_mismatches(name: str, root: nn.Module, plan: ComponentPlan) -> list[Mismatch]:
    """Return where a quantised component does not hold what its plan lists; changes nothing."""
    linears, mismatches = linear_modules(root)
    for layer in plan.layers:
        module = linears.get(layer.name)
        stored = "nothing" if module is None else _stored_as(module)
        if isinstance(module, FusedLinear):
            stored += " in fused ops"
        if stored != layer.scheme.value:
            mismatches.append(
                Mismatch("layer_scheme", f"{name}.{layer.name}", layer.scheme.value, stored)
            )
    return mismatches


def _layer_mismatches(module: nn.Linear, layer: PlannedLayer | KeptLayer) -> Iterator[Mismatch]:
    if _shape(module) != layer.shape:
        yield Mismatch("layer_shape", layer.name, str(layer.shape), str(_shape(module)))
    dtype = str(module.weight.dtype).removeprefix("torch.")
    if dtype != layer.dtype:
        yield Mismatch("layer_dtype", layer.name, layer.dtype, dtype)


def _unquantisable(module: nn.Linear, layer: PlannedLayer) -> Iterator[Mismatch]:
    if type(module) is not nn.Linear:
        yield Mismatch("layer_class", layer.name, "torch.nn.Linear", type(module).__qualname__)
    elif is_forward_replaced(module):
        yield Mismatch(
            "layer_hooked", layer.name, "its own forward", "one that an offload hook replaced"
        )
    if module.weight.is_meta:
        yield Mismatch("layer_meta", layer.name, "a loaded weight", "one on the meta device")


def _shape(module: nn.Linear) -> tuple[int, ...]:
    return tuple(module.weight.shape)


def _stored_as(module: nn.Linear) -> str:
    scheme = scheme_of(module.weight)
    if scheme is None:
        return f"{type(module.weight.data).__name__} of {module.weight.dtype}"
    return scheme.value
