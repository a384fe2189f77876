"""The guards of quantised Linears, on real multiplications."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from quantpolicy.runtime.linear import (
    QuantisedLinear,
    guard_linear,
    is_emulated_on_cpu,
    release_linear,
)
from quantpolicy.runtime.weights import quantise_weight
from quantpolicy.schemes import Scheme

SCHEMES = (Scheme.INT8, Scheme.FP8, Scheme.MXFP8, Scheme.NVFP4, Scheme.LAYERWISE_FP8)
ERROR = {
    Scheme.INT8: 0.01,
    Scheme.FP8: 0.045,
    Scheme.MXFP8: 0.045,
    Scheme.NVFP4: 0.16,
    Scheme.LAYERWISE_FP8: 0.035,
}
OUT, IN = 96, 64


def random_rows(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def dense_linear(*, bias: bool = True) -> nn.Linear:
    linear = nn.Linear(IN, OUT, bias=bias, dtype=torch.bfloat16)
    linear.weight = nn.Parameter(random_rows(OUT, IN, seed=2))
    if bias:
        linear.bias = nn.Parameter(random_rows(OUT, seed=3))
    return linear.requires_grad_(False)


def quantised_linear(scheme, settings, *, pad_rows=0, bias=True) -> QuantisedLinear:
    linear = dense_linear(bias=bias)
    weight = quantise_weight(linear.weight, scheme, settings[scheme])
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return guard_linear(linear, pad_rows)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_is_close_to_dense(scheme, bias, settings):
    rows = random_rows(2, 20, IN)
    expected = dense_linear(bias=bias)(rows).float()
    output = quantised_linear(scheme, settings, bias=bias)(rows)
    assert output.shape == expected.shape
    assert output.dtype is torch.bfloat16
    assert (output.float() - expected).norm() / expected.norm() < ERROR[scheme]


@pytest.mark.parametrize("shape", [(0, IN), (2, 0, IN), (0, 3, IN)])
@pytest.mark.parametrize("pad_rows", [0, 17])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_rows(scheme, pad_rows, shape, settings):
    output = quantised_linear(scheme, settings, pad_rows=pad_rows)(random_rows(*shape))
    assert output.shape == (*shape[:-1], OUT)
    assert output.dtype is torch.bfloat16


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 18])
@pytest.mark.parametrize("scheme", [Scheme.INT8, Scheme.FP8])
def test_padding_keeps_the_rows(scheme, rows, settings):
    input = random_rows(rows, IN)
    padded = quantised_linear(scheme, settings, pad_rows=17)(input)
    assert torch.equal(padded, quantised_linear(scheme, settings)(input))


@pytest.mark.parametrize("shape", [(1, IN), (2, 1, IN), (1, 1, 5, IN)])
def test_padding_keeps_the_shape(shape, settings):
    input = random_rows(*shape)
    padded = quantised_linear(Scheme.INT8, settings, pad_rows=17)(input)
    assert padded.shape == (*shape[:-1], OUT)
    assert torch.equal(padded, quantised_linear(Scheme.INT8, settings)(input))


@pytest.mark.parametrize(("rows", "given"), [(1, 17), (2, 17), (16, 17), (17, 17), (18, 18)])
def test_gemm_is_given_the_padded_rows(rows, given, settings):
    linear = quantised_linear(Scheme.INT8, settings, pad_rows=17)
    input = random_rows(rows, IN)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        linear(input)
    shapes = [event.input_shapes for event in recorded.events() if event.name == "aten::_int_mm"]
    assert shapes
    assert all(shape[0][0] == given for shape in shapes)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_strided_input(scheme, settings):
    linear = quantised_linear(scheme, settings)
    strided = random_rows(20, 3, IN).transpose(0, 1)
    assert not strided.is_contiguous()
    assert torch.equal(linear(strided), linear(strided.contiguous()))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_zero_input_gives_the_bias(scheme, bias, settings):
    linear = quantised_linear(scheme, settings, bias=bias)
    expected = linear.bias if bias else torch.zeros(OUT).bfloat16()
    output = linear(torch.zeros(3, IN).bfloat16())
    assert torch.equal(output, expected.expand(3, OUT))


@pytest.mark.parametrize("scheme", [Scheme.FP8, Scheme.MXFP8, Scheme.NVFP4])
def test_nan_input_is_not_hidden(scheme, settings):
    input = random_rows(4, IN)
    input[1, 3] = float("nan")
    assert quantised_linear(scheme, settings)(input)[1].isnan().any()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_looks_like_the_linear_it_was(scheme, settings):
    dense, linear = dense_linear(), quantised_linear(scheme, settings, pad_rows=17)
    assert isinstance(linear, nn.Linear)
    assert list(linear.state_dict()) == list(dense.state_dict()) == ["weight", "bias"]
    assert (linear.in_features, linear.out_features) == (IN, OUT)
    assert linear.weight.shape == dense.weight.shape
    assert linear.weight.dtype is torch.bfloat16


@pytest.mark.parametrize("scheme", SCHEMES)
def test_deepcopy(scheme, settings):
    linear = quantised_linear(scheme, settings, pad_rows=17)
    twin = copy.deepcopy(linear)
    assert type(twin) is QuantisedLinear
    assert twin.pad_rows == 17
    assert twin.weight is not linear.weight
    rows = random_rows(4, IN)
    assert torch.equal(twin(rows), linear(rows))


@pytest.mark.parametrize("scheme", [Scheme.INT8, Scheme.FP8])
def test_compiles_without_a_break(scheme, settings):
    torch.compiler.reset()
    linear = quantised_linear(scheme, settings, pad_rows=17)
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (33, 17, 16, 2, 1, 0):
        input = random_rows(rows, IN)
        output, expected = compiled(input), linear(input)
        assert output.shape == expected.shape
        assert torch.allclose(output.float(), expected.float(), rtol=0.02, atol=0.02)
    torch.compiler.reset()


def test_emulated_fp8_equals_the_gemm(settings, monkeypatch):
    """A torch whose _scaled_mm takes no scale per row on a CPU is told apart, and emulated."""

    def per_tensor_only(*args: object, **kwargs: object) -> torch.Tensor:
        raise RuntimeError("only supports per-tensor scaling for CPU backend")

    rows = random_rows(20, IN)
    rows[3] = 0
    native = quantised_linear(Scheme.FP8, settings)(rows)
    is_emulated_on_cpu.cache_clear()
    monkeypatch.setattr(torch, "_scaled_mm", per_tensor_only)
    linear = quantised_linear(Scheme.FP8, settings)
    is_emulated_on_cpu.cache_clear()
    assert linear.emulate_on_cpu
    output = linear(rows)
    assert torch.equal(output[3], linear.bias)
    assert (output - native).float().norm() / native.float().norm() < 0.005


def test_hooks_stay(settings):
    linear = dense_linear()
    seen = []
    linear.register_forward_hook(lambda module, _, output: seen.append((module, output.shape)))
    linear.weight = nn.Parameter(
        quantise_weight(linear.weight, Scheme.INT8, settings[Scheme.INT8]), requires_grad=False
    )
    guard_linear(linear)(random_rows(2, IN))
    assert seen == [(linear, (2, OUT))]


def test_release_gives_the_class_back(settings):
    linear = quantised_linear(Scheme.INT8, settings, pad_rows=17)
    release_linear(linear)
    assert type(linear) is nn.Linear
    assert not {"pad_rows", "emulate_on_cpu"} & set(vars(linear))
    assert "pad_rows" not in repr(linear)


def test_repr_names_storage_and_padding(settings):
    text = repr(quantised_linear(Scheme.INT8, settings, pad_rows=17))
    assert text == (
        f"QuantisedLinear(in_features={IN}, out_features={OUT}, bias=True, "
        "weight=Int8Tensor, pad_rows=17)"
    )
