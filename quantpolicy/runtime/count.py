"""Counting a component's tensors after a plan was applied."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import nn

from quantpolicy.errors import Mismatch
from quantpolicy.kernels.linear import FusedLinear
from quantpolicy.kernels.stored_scheme import scheme_of
from quantpolicy.match import is_adapter, natural_key
from quantpolicy.plan import ComponentPlan, KeptLayer
from quantpolicy.runtime.joined import JoinedLinear
from quantpolicy.runtime.linear import QuantisedLinear
from quantpolicy.runtime.locate import linear_modules
from quantpolicy.runtime.report import ComponentReport, SchemeCount, SkippedLayers
from quantpolicy.runtime.weights import stored_bytes
from quantpolicy.schemes import Cause, Scheme


def count_component(
    name: str, root: nn.Module, plan: ComponentPlan, *, planned: Scheme, compiled: str = "none"
) -> ComponentReport:
    """Return what the component's tensors are stored as; only the reasons come from the plan."""
    linears, _ = linear_modules(root)
    # A fused Linear wraps its weight anew at every access.
    weights = {module: module.weight for module in linears.values()}
    by_scheme: dict[Scheme, list[nn.Linear]] = defaultdict(list)
    for module, weight in weights.items():
        scheme = scheme_of(weight)
        assert scheme is not None, "refused before anything was changed"
        by_scheme[scheme].append(module)
    by_scheme.pop(Scheme.DENSE, None)
    quantised = {id(weights[module]) for group in by_scheme.values() for module in group}
    tensors = _own_tensors(root)
    return ComponentReport(
        name=name,
        class_name=type(root).__name__,
        planned=planned,
        schemes=tuple(_count(scheme, by_scheme[scheme], weights) for scheme in sorted(by_scheme)),
        dense_bytes=sum(
            sum(stored_bytes(tensor)) for key, tensor in tensors.items() if key not in quantised
        ),
        linear_parameters=_numel(weights.values()),
        total_parameters=_numel(
            tensor for tensor in tensors.values() if isinstance(tensor, nn.Parameter)
        )
        + sum(_parameters_in_buffers(module) for module in weights),
        skipped=_skipped(plan),
        compiled=compiled,
        joined=sum(isinstance(one, JoinedLinear) and one is one.leader for one in weights),
    )


def count_mismatches(report: ComponentReport, plan: ComponentPlan) -> list[Mismatch]:
    """Compare the layers found per scheme with those planned."""
    planned: dict[Scheme, int] = defaultdict(int)
    for layer in plan.layers:
        planned[layer.scheme] += 1
    found = {count.scheme: count.layers for count in report.schemes}
    mismatches = [
        Mismatch(
            "layer_count",
            f"{report.name} {scheme.value}",
            f"{planned.get(scheme, 0)} layers",
            f"{found.get(scheme, 0)}",
        )
        for scheme in sorted(planned.keys() | found.keys())
        if planned.get(scheme, 0) != found.get(scheme, 0)
    ]
    if plan.scheme is not Scheme.DENSE and not found:
        mismatches.append(
            Mismatch("nothing_quantised", report.name, f"{plan.scheme.value} layers", "none")
        )
    return mismatches


def _count(
    scheme: Scheme, modules: list[nn.Linear], weights: dict[nn.Linear, torch.Tensor]
) -> SchemeCount:
    stored = [weights[module] for module in modules]
    sizes = [stored_bytes(weight) for weight in _unique(stored)]
    guarded = [module for module in modules if isinstance(module, QuantisedLinear)]
    return SchemeCount(
        scheme=scheme,
        layers=len(modules),
        parameters=_numel(stored),
        data_bytes=sum(data for data, _ in sizes),
        scale_bytes=sum(scales for _, scales in sizes),
        padded=sum(module.pad_rows > 0 for module in guarded),
        emulated=sum(
            module.emulate_on_cpu and module.weight.device.type == "cpu" for module in guarded
        ),
        fused=sum(isinstance(module, FusedLinear) for module in modules),
    )


def _skipped(plan: ComponentPlan) -> tuple[SkippedLayers, ...]:
    groups: dict[tuple[Cause, str], list[KeptLayer]] = defaultdict(list)
    for layer in plan.kept:
        groups[layer.because, layer.rule].append(layer)
    return tuple(
        SkippedLayers(
            because=because,
            rule=rule,
            layers=len(layers),
            parameters=sum(layer.shape[0] * layer.shape[1] for layer in layers),
            names=tuple(sorted((layer.name for layer in layers), key=natural_key)),
        )
        for (because, rule), layers in sorted(groups.items())
    )


def _own_tensors(root: nn.Module) -> dict[int, torch.Tensor]:
    """Return all parameters and buffers, but the buffers that a fused Linear's weight wraps."""
    named = (*root.named_parameters(), *root.named_buffers())
    tensors = {id(tensor): tensor for name, tensor in named if not is_adapter(name)}
    for module in root.modules():
        if isinstance(module, FusedLinear):
            for buffer in module.buffers(recurse=False):
                tensors.pop(id(buffer), None)
        bias = module.bias if isinstance(module, JoinedLinear) else None
        if bias is not None:
            tensors[id(bias)] = bias
    return tensors


def _parameters_in_buffers(linear: nn.Linear) -> int:
    """Return the parameters that a fused Linear keeps as buffers."""
    if not isinstance(linear, FusedLinear):
        return 0
    bias = linear.bias if isinstance(linear, JoinedLinear) else None
    own = linear.in_features * linear.out_features
    return own if bias is None else own + bias.numel()


def _unique(tensors: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    return {id(tensor): tensor for tensor in tensors}.values()


def _numel(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in _unique(tensors))
