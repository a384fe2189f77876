"""Where a plan's components and module names are found in what the caller holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping

from torch import nn

from quantpolicy.errors import Mismatch, RequestError
from quantpolicy.kernels.linear import FusedLinear
from quantpolicy.match import is_adapter, is_output_head, normalise_name
from quantpolicy.plan import ComponentPlan, QuantPlan
from quantpolicy.schemes import ComponentKind, Scheme


def select_components(
    model: object, plan: QuantPlan, component: str | None
) -> tuple[dict[str, nn.Module], list[Mismatch]]:
    """Return the modules that the plan's components are applied to, by component name.

    Args:
        model: one module, a pipeline (anything whose ``components`` is a mapping of modules), or
            such a mapping itself.
        component: restrict the call to this component of the plan; a single module is this one,
            or the plan's only denoiser or component when it is None.

    Raises:
        RequestError: the component is not in the plan, a single module could be several of its
            components, or ``model`` is none of the three.
    """
    if component is not None and component not in plan.components:
        raise RequestError(
            f"component {component!r}",
            f"not in the plan for {plan.family}",
            allowed="components: " + ", ".join(plan.components),
            remedy="name one of them",
        )
    if isinstance(model, nn.Module):
        component = component or _only_denoiser(plan)
        parts: Mapping[str, object] = {component: model}
    else:
        parts = _parts_of(model)
    wanted = tuple(plan.components) if component is None else (component,)
    found: dict[str, nn.Module] = {}
    mismatches: list[Mismatch] = []
    for name in wanted:
        part = parts.get(name)
        expected = plan.components[name]
        if isinstance(part, nn.Module):
            root = find_root(part, expected.class_name)
            if root is not None:
                found[name] = root
                continue
            mismatches.append(
                Mismatch("class_name", name, expected.class_name, type(part).__name__)
            )
        elif expected.scheme is not Scheme.DENSE or component is not None:
            mismatches.append(
                Mismatch("component_missing", name, expected.class_name or "a module", "nothing")
            )
    return found, mismatches


def find_root(model: nn.Module, class_name: str) -> nn.Module | None:
    """Return the module of that class: the model itself, or the only one inside its wrappers.

    None when there is none, or more than one. With an unknown class (``""``) the model is taken as
    it is, out of ``torch.compile``'s wrapper.
    """
    if not class_name:
        inner = getattr(model, "_orig_mod", model)
        assert isinstance(inner, nn.Module)
        return inner
    if type(model).__name__ == class_name:
        return model
    matches = [module for module in model.modules() if type(module).__name__ == class_name]
    return matches[0] if len(matches) == 1 else None


def linear_modules(root: nn.Module) -> tuple[dict[str, nn.Linear], list[Mismatch]]:
    """Return the Linears by normalised name, and any name that two share.

    Adapters and output heads are left out, as in every inventory.
    Of several Linears over one weight the first stands for all; see ``linears_by_weight``.
    """
    linears: dict[str, nn.Linear] = {}
    seen: set[Hashable] = set()
    mismatches = []
    for raw_name, module in root.named_modules():
        if not isinstance(module, nn.Linear) or is_adapter(raw_name) or is_output_head(raw_name):
            continue
        key = weight_key(module)
        if key in seen:
            continue
        seen.add(key)
        name = normalise_name(raw_name)
        if name in linears:
            mismatches.append(Mismatch("name_ambiguous", name, "one module", "two modules"))
        linears[name] = module
    return linears, mismatches


def weight_key(linear: nn.Linear) -> Hashable:
    """Return what is equal for Linears over one weight, while they live."""
    if not isinstance(linear, FusedLinear):
        return id(linear.weight)
    data = linear.qdata
    return id(linear) if data.is_meta else (data.device, data.data_ptr())


def adapted_linears(root: nn.Module) -> set[str]:
    """Return the normalised names of the Linears that an adapter wraps."""
    return {
        normalise_name(raw_name)
        for raw_name, module in root.named_modules()
        if isinstance(module, nn.Linear) and "base_layer" in raw_name.split(".")
    }


def roots_of(model: object) -> list[nn.Module]:
    """Return the modules of a module, a pipeline, or a mapping of names to modules."""
    if isinstance(model, nn.Module):
        return [model]
    return [part for part in _parts_of(model).values() if isinstance(part, nn.Module)]


def linears_by_weight(root: nn.Module) -> dict[int, list[nn.Linear]]:
    """Return all Linears that hold each weight, by the weight's ``id``."""
    sharing: dict[int, list[nn.Linear]] = defaultdict(list)
    for module in root.modules():
        if isinstance(module, nn.Linear):
            sharing[id(module.weight)].append(module)
    return sharing


def denoisers(plan: QuantPlan) -> dict[str, ComponentPlan]:
    """Return the plan's denoisers by name."""
    return {
        name: part for name, part in plan.components.items() if part.kind is ComponentKind.DENOISER
    }


def _only_denoiser(plan: QuantPlan) -> str:
    names = tuple(denoisers(plan) or plan.components)
    if len(names) == 1:
        return names[0]
    raise RequestError(
        "apply_plan",
        f"a single module for a plan with {len(denoisers(plan))} denoisers",
        allowed="components: " + ", ".join(plan.components),
        remedy="give the pipeline, or say component=",
    )


def _parts_of(model: object) -> Mapping[str, object]:
    parts = model if isinstance(model, Mapping) else getattr(model, "components", None)
    if isinstance(parts, Mapping):
        return parts
    raise RequestError(
        "apply_plan",
        f"a {type(model).__name__}",
        allowed="a torch module, a diffusers pipeline or a mapping of component names to modules",
        remedy="give one of them",
    )
