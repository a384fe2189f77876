"""Quantised weights and their Linears on a CUDA device, against the CPU and torchao's quantize_."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torchao.quantization import quantize_

from quantpolicy.errors import PlanMismatchError
from quantpolicy.runtime import apply_plan, quantise_weight, tensor_parts, torchao_config
from quantpolicy.runtime.smoke import smoke_test
from quantpolicy.schemes import ComponentKind, Scheme

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch and torchao announce their own changes while they compile.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

BLOCK_SCALED = (Scheme.MXFP8, Scheme.NVFP4)


def random_rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def model_of(features: int = 512) -> nn.Module:
    model = nn.Sequential(
        nn.Linear(features, 4 * features), nn.GELU(), nn.Linear(4 * features, features)
    ).bfloat16()
    for seed, parameter in enumerate(model.parameters()):
        parameter.data = random_rows(*parameter.shape, seed=seed) / features**0.5
    return model.requires_grad_(False)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8).cpu()


@pytest.mark.parametrize("shape", [(512, 3072), (3072, 512), (272, 1056)])
@pytest.mark.parametrize("scheme", [Scheme.INT8, Scheme.FP8, *BLOCK_SCALED])
def test_device_equals_cpu(scheme, shape, settings):
    weight = random_rows(*shape)
    weight[3] = 0
    on_cpu = tensor_parts(quantise_weight(weight, scheme, settings[scheme]))
    on_device = tensor_parts(quantise_weight(weight.cuda(), scheme, settings[scheme]))
    assert list(on_cpu) == list(on_device)
    for name in on_cpu:
        assert torch.equal(raw(on_cpu[name]), raw(on_device[name])), name


@pytest.mark.parametrize("scheme", [Scheme.INT8, Scheme.FP8])
def test_equals_quantize(scheme, settings):
    linear = nn.Linear(512, 3072, dtype=torch.bfloat16, device="cuda")
    found = quantise_weight(linear.weight, scheme, settings[scheme])
    quantize_(linear, torchao_config(scheme, settings[scheme]))
    expected = linear.weight.data
    assert type(found) is type(expected)
    assert found.__tensor_flatten__() == expected.__tensor_flatten__()
    for name, part in tensor_parts(found).items():
        assert torch.equal(raw(part), raw(getattr(expected, name))), name


@pytest.mark.parametrize("scheme", [Scheme.INT8, Scheme.FP8])
def test_any_number_of_rows(scheme, settings, component_plan, quant_plan):
    model = model_of().cuda()
    dense = copy.deepcopy(model)
    apply_plan(model, quant_plan(transformer=component_plan(model, scheme, pad_rows=17)))
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for rows in (64, 17, 16, 2, 1, 0):
        input = random_rows(rows, 512, seed=9).cuda()
        expected = dense(input).float()
        for run in (model, compiled):
            output = run(input)
            assert output.shape == expected.shape
            error = (output.float() - expected).norm() / expected.norm().clamp(min=1e-6)
            assert error < 0.06, (rows, run is compiled)
    torch.compiler.reset()


def test_fp8_zero_rows_are_exact_zeros(settings, component_plan, quant_plan):
    model = nn.Sequential(nn.Linear(512, 512, bias=False)).bfloat16().cuda()
    apply_plan(model, quant_plan(transformer=component_plan(model, Scheme.FP8)))
    input = random_rows(32, 512).cuda()
    input[5] = 0
    output = model(input)
    assert output.isfinite().all()
    assert output[5].count_nonzero() == 0


@pytest.mark.parametrize("scheme", BLOCK_SCALED)
def test_block_scaled_gemm_is_judged_by_the_device(scheme, settings, component_plan, quant_plan):
    runs = torch.cuda.get_device_capability() >= (10, 0)
    failure = smoke_test(scheme, settings[scheme], torch.device("cuda"), torch.bfloat16)
    assert (failure == "") is runs
    model = model_of().cuda()
    plan = component_plan(model, scheme, kind=ComponentKind.TEXT_ENCODER)
    report = apply_plan(model, quant_plan(text_encoder=plan), component="text_encoder")
    assert report.quantised_layers == (2 if runs else 0)
    assert len(report.decisions) == (0 if runs else 1)
    if not runs:
        assert type(model[0]) is nn.Linear
        plan = component_plan(model, scheme)
        with pytest.raises(PlanMismatchError, match="gemm_fails"):
            apply_plan(model, quant_plan(transformer=plan))
    assert model(random_rows(32, 512).cuda()).isfinite().all()


@pytest.mark.parametrize("scheme", BLOCK_SCALED)
def test_a_plan_for_a_gpu_is_tried_there_before_the_model_is_moved(
    scheme, component_plan, quant_plan
):
    model = model_of()
    plan = quant_plan(host="b200", transformer=component_plan(model, scheme))
    if torch.cuda.get_device_capability() >= (10, 0):
        assert apply_plan(model, plan).quantised_layers == 2
    else:
        with pytest.raises(PlanMismatchError, match="expected a GEMM on cuda"):
            apply_plan(model, plan)


@pytest.mark.parametrize("scheme", [Scheme.INT8, Scheme.FP8, Scheme.LAYERWISE_FP8])
def test_move_between_devices(scheme, component_plan, quant_plan):
    model = model_of()
    apply_plan(model, quant_plan(host="h200", transformer=component_plan(model, scheme)))
    input = random_rows(32, 512)
    expected = model(input).float()
    output = model.cuda()(input.cuda()).float().cpu()
    # A rounding that differs in the first Linear can move an activation by a whole fp8 step.
    assert (output - expected).norm() / expected.norm() < 0.03
    assert model[0].weight.device.type == "cuda"
