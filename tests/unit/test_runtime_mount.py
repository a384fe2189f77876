"""What is refused until there are kernels, and that unmounting nothing changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quantpolicy.errors import KernelMountError
from quantpolicy.plan import PlannedKernel
from quantpolicy.runtime import apply_plan, unmount
from quantpolicy.schemes import Contract, Scheme


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64)).bfloat16()


def test_unknown_kernel(model, component_plan, quant_plan):
    kernel = PlannedKernel(component="transformer", op="rope_pack", contract=Contract.LOSSLESS)
    plan = quant_plan(transformer=component_plan(model, Scheme.INT8))
    with pytest.raises(KernelMountError, match=r"transformer\.rope_pack: no such kernel"):
        apply_plan(model, plan.model_copy(update={"kernels": (kernel,)}))
    assert type(model[0]) is nn.Linear


def test_unmount_nothing(model, component_plan, quant_plan):
    apply_plan(model, quant_plan(transformer=component_plan(model, Scheme.INT8)))
    rows = torch.ones(3, 64).bfloat16()
    before, weight = model(rows), model[0].weight
    assert unmount(model).restored == {}
    assert model[0].weight is weight
    assert torch.equal(model(rows), before)
