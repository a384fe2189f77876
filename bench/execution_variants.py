"""The variants that whole denoisers are measured in: what each one is, and how a model becomes it.

What a variant takes from the rule table is what the resolver plans from it for fp8 in fused
execution on an H200, at quality high.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from bench.execution_shapes import Shape
from bench.quantised import quantise_matching
from quantpolicy import Host, QuantPlan, Request, load_rules, resolve
from quantpolicy.fusions import fusion_places
from quantpolicy.inventory.live import model_class
from quantpolicy.kernels.linear import FusedLinear
from quantpolicy.rule_schema import Pays
from quantpolicy.rules import RuleTable
from quantpolicy.runtime.joined import join_linears
from quantpolicy.runtime.mount import mount
from quantpolicy.schemes import Execution, Scheme

FLOOR = 1e-12
DENOISER = "transformer"


@functools.cache
def fp8_plan(family: str, without: tuple[str, ...] = ()) -> QuantPlan:
    """Return what is planned for fp8 in fused execution, as if some ops were not in the table."""
    rules = load_rules()
    spec = rules.families[family]
    kept = tuple(kernel for kernel in spec.kernels if kernel.op not in without)
    families = {**rules.families, family: spec.model_copy(update={"kernels": kept})}
    table = RuleTable(rules.file.model_copy(update={"families": families}), {}, rules.sources)
    request = Request(transformer="fp8", execution="fused", quality="high")
    return resolve(family, host=Host.load("h200"), request=request, rules=table)


def planned_kernels(family: str, without: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the ops that are planned for a family's denoiser; see ``fp8_plan``."""
    kernels = fp8_plan(family, without).kernels
    return tuple(kernel.op for kernel in kernels if kernel.component == DENOISER)


def _no_kernels(shape: Shape) -> tuple[str, ...]:
    del shape
    return ()


def _named_kernels(shape: Shape) -> tuple[str, ...]:
    return shape.kernels


def _all_kernels(shape: Shape) -> tuple[str, ...]:
    return planned_kernels(shape.family)


class Variant(NamedTuple):
    """One way to execute a model.

    Args:
        joined: whether the groups of projections that pay in the rule table are joined.
        kernels: the fusions that are mounted on a shape.
    """

    execution: Execution = Execution.TORCHAO
    scheme: Scheme = Scheme.DENSE
    joined: bool = False
    kernels: Callable[[Shape], tuple[str, ...]] = _no_kernels

    @property
    def is_stock(self) -> bool:
        """Whether nothing is joined or mounted, which a prediction leaves out."""
        return not self.joined and self.kernels is _no_kernels

    @property
    def is_torchao(self) -> bool:
        """Whether torchao's tensors are in the Linears."""
        return self.execution is Execution.TORCHAO and self.scheme is not Scheme.DENSE


_FUSED_FP8 = Variant(Execution.FUSED, Scheme.FP8)
VARIANTS = {
    "dense": Variant(),
    "fused_fp8": _FUSED_FP8,
    "fused_fp8_joined": _FUSED_FP8._replace(joined=True),
    "fused_fp8_kernels": _FUSED_FP8._replace(kernels=_named_kernels),
    "fused_fp8_joined_kernels": _FUSED_FP8._replace(joined=True, kernels=_named_kernels),
    "fused_fp8_all_kernels": _FUSED_FP8._replace(kernels=_all_kernels),
    "fused_int8": Variant(Execution.FUSED, Scheme.INT8),
    "torchao_fp8": Variant(scheme=Scheme.FP8),
    "torchao_int8": Variant(scheme=Scheme.INT8),
}


def build_dense(shape: Shape, device: str) -> nn.Module:
    """Return the model with random weights in bf16."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model: nn.Module = model_class(shape.class_name)(**shape.config)
    finally:
        torch.set_default_dtype(default)
    return model.eval().requires_grad_(False)


def made_variant(dense: nn.Module, shape: Shape, variant: Variant) -> nn.Module:
    """Return a variant of a dense model: a copy, or the model itself when it is dense."""
    if variant.scheme is Scheme.DENSE:
        return dense
    model = copy.deepcopy(dense)
    quantise(model, shape, variant)
    mount_all(model, variant.kernels(shape))
    return model


def quantise(model: nn.Module, shape: Shape, variant: Variant) -> None:
    """Quantise the Linears that a shape names, in place, fuse them and join some."""
    names = quantise_matching(model, variant.scheme, FLOOR, shape.matches)
    if variant.execution is not Execution.FUSED:
        return
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        FusedLinear.adopt(linear, name=name)
    if variant.joined:
        _join(model, shape.family, names)


def mount_all(model: nn.Module, ops: Sequence[str]) -> None:
    """Mount fusions, of which none may be left out."""
    report = mount(model, ops)
    assert not report.declined, report.declined


def _join(model: nn.Module, family: str, names: list[str]) -> None:
    rules = load_rules()
    for fusion, use in rules.families[family].fusions.items():
        if use.pays is not Pays.MEASURED:
            continue
        for parts in fusion_places(rules.file.fusions[fusion], names).values():
            join_linears([model.get_submodule(part) for part in parts])  # type: ignore[misc]
