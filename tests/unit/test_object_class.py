"""Objects that hooks were on before or while they had another class: what runs is what they are."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules
from fused_plans import fused, fusions_of, is_equal, run
from torch import nn

from quantpolicy.kernels.contract import op_counts
from quantpolicy.kernels.linear import FusedLinear
from quantpolicy.measure.tiny import build_tiny
from quantpolicy.object_class import exchange_class, is_forward_replaced
from quantpolicy.runtime import apply_plan, switch_execution, unmount
from quantpolicy.runtime.linear import QuantisedLinear
from quantpolicy.runtime.mount import mount
from quantpolicy.schemes import Scheme

WAN = "wan2.1-t2v-14b"
SCHEMES = (Scheme.FP8, Scheme.INT8)


def hooked_once(model: nn.Module) -> None:
    """Put a hook on every module and take it off again."""
    for module in model.modules():
        add_hook_to_module(module, ModelHook())
    remove_hook_from_submodules(model)
    assert any("forward" in vars(module) for module in model.modules())


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_a_class_is_exchanged_with_what_hooks_left() -> None:
    linear = nn.Linear(3, 2)
    x = torch.ones(1, 3)
    expected = linear(x)
    linear.forward = linear.forward
    assert not is_forward_replaced(linear)
    exchange_class(linear, Doubled)
    assert "forward" not in vars(linear)
    assert torch.equal(linear(x), 2 * expected)
    linear.forward = lambda input: 3 * nn.Linear.forward(linear, input)
    assert is_forward_replaced(linear)
    exchange_class(linear, nn.Linear)
    assert is_forward_replaced(linear)
    assert torch.equal(linear(x), 3 * expected)


@pytest.fixture
def plans_of(component_plan, quant_plan):
    """Return a function that plans a scheme for a model, under torchao and fused with joins."""

    def make(model, scheme):
        part = component_plan(model, scheme, pad_rows=40)
        plan = quant_plan(transformer=part)
        fusions = fusions_of(WAN, part, scheme)
        assert fusions
        return plan, fused(plan, *fusions)

    return make


@pytest.mark.parametrize("scheme", SCHEMES)
def test_models_that_were_hooked_once_are_quantised(scheme, plans_of, monkeypatch):
    model, inputs = build_tiny(WAN)
    (plan, fused_plan), known = plans_of(model, scheme), copy.deepcopy(model)
    apply_plan(known, plan)
    expected = run(known, inputs)
    hooked_once(model)
    apply_plan(model, plan)
    called = []
    multiply = QuantisedLinear._multiply
    monkeypatch.setattr(
        QuantisedLinear, "_multiply", lambda self, x: called.append(self) or multiply(self, x)
    )
    assert is_equal(run(model, inputs), expected)
    assert len(set(called)) == len(plan.components["transformer"].layers)
    hooked_once(model)
    switch_execution(model, fused_plan)
    called.clear()
    found = run(model, inputs)
    assert called == []
    switch_execution(known, fused_plan)
    assert is_equal(found, run(known, inputs))


@pytest.mark.parametrize("is_live", [False, True], ids=["removed", "live"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_execution_is_given_back_after_hooks_and_under_them(scheme, is_live, plans_of):
    model, inputs = build_tiny(WAN)
    plan, fused_plan = plans_of(model, scheme)
    stock = copy.deepcopy(model)
    apply_plan(stock, plan)
    apply_plan(model, fused_plan)
    cpu_offload(model, execution_device=torch.device("cpu"))
    if not is_live:
        remove_hook_from_submodules(model)
    unmount(model)
    assert not any(isinstance(module, FusedLinear) for module in model.modules())
    assert is_equal(run(model, inputs), run(stock, inputs))


def test_kernels_are_mounted_on_models_that_were_hooked_once() -> None:
    model, inputs = build_tiny(WAN)
    expected = run(model, inputs)
    hooked_once(model)
    before = op_counts().get("layer_norm_fp32")
    declined = sum(before.declines.values()) if before else 0
    assert mount(model, ("layer_norm_fp32",)).mounted == {"layer_norm_fp32": 2}
    assert is_equal(run(model, inputs), expected)
    # On a CPU the op runs its plain chain and counts why.
    assert sum(op_counts()["layer_norm_fp32"].declines.values()) == declined + 3 * 2
