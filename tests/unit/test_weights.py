"""Weights against torchao's own quantize_, against plain arithmetic, and at their edges."""

from __future__ import annotations

import pytest
import torch
import torchao.prototype.mx_formats.inference_workflow
import torchao.quantization.quant_api
from torch import nn
from torch.nn import functional as F
from torchao.quantization import quantize_

from quantpolicy.errors import PlanMismatchError
from quantpolicy.runtime.weights import (
    quantise_weight,
    scheme_of,
    stored_bytes,
    tensor_parts,
    torchao_config,
)
from quantpolicy.schemes import Scheme, weight_bytes

SCHEMES = (Scheme.INT8, Scheme.FP8, Scheme.MXFP8, Scheme.NVFP4)


def random_weight(out_features: int, in_features: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(out_features, in_features, generator=generator).bfloat16()


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def assert_same_tensor(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert type(found) is type(expected)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    names, attributes = found.__tensor_flatten__()
    assert (names, attributes) == expected.__tensor_flatten__()
    for name in names:
        part, other = getattr(found, name), getattr(expected, name)
        assert (part.shape, part.dtype) == (other.shape, other.dtype), name
        assert torch.equal(raw(part), raw(other)), name


@pytest.fixture
def no_gpu_asserts(monkeypatch: pytest.MonkeyPatch) -> None:
    """quantize_ refuses fp8 and nvfp4 without a GPU, though their arithmetic runs anywhere."""
    monkeypatch.setattr(torchao.quantization.quant_api, "_check_hardware_support", lambda _: None)
    monkeypatch.setattr(
        torchao.prototype.mx_formats.inference_workflow, "is_sm_at_least_100", lambda: True
    )


@pytest.mark.usefixtures("no_gpu_asserts")
@pytest.mark.parametrize("shape", [(96, 256), (128, 64), (16, 32), (272, 1056)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_equals_quantize(scheme, shape, settings):
    linear = nn.Linear(shape[1], shape[0], dtype=torch.bfloat16)
    linear.weight = nn.Parameter(random_weight(*shape))
    found = quantise_weight(linear.weight, scheme, settings[scheme])
    quantize_(linear, torchao_config(scheme, settings[scheme]))
    assert_same_tensor(found, linear.weight.data)


def test_fp8_is_the_documented_arithmetic(settings):
    weight = random_weight(48, 320)
    amax = weight.abs().amax(1, keepdim=True)
    scale = (amax.clamp(min=1e-12) / 448).float()
    data = (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    parts = tensor_parts(quantise_weight(weight, Scheme.FP8, settings[Scheme.FP8]))
    assert list(parts) == ["qdata", "scale"]
    assert torch.equal(parts["scale"], scale)
    assert torch.equal(raw(parts["qdata"]), raw(data))


def test_int8_is_the_documented_arithmetic(settings):
    weight = random_weight(48, 320)
    amax = weight.abs().amax(1, keepdim=True)
    scale = (amax / 127.5).clamp(min=2**-23).float()
    data = (weight.float() * (1 / scale)).round().clamp(-128, 127).to(torch.int8)
    parts = tensor_parts(quantise_weight(weight, Scheme.INT8, settings[Scheme.INT8]))
    assert list(parts) == ["qdata", "scale", "zero_point"]
    assert torch.equal(parts["scale"], scale)
    assert torch.equal(parts["qdata"], data)
    assert torch.equal(parts["zero_point"], torch.zeros(48, 1, dtype=torch.int8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_int8_takes_other_float_dtypes(dtype, settings):
    weight = random_weight(32, 64).to(dtype)
    quantised = quantise_weight(weight, Scheme.INT8, settings[Scheme.INT8])
    assert quantised.dtype is dtype
    assert quantised.dequantize().sub(weight).norm() / weight.norm() < 0.01


@pytest.mark.parametrize("scheme", SCHEMES)
def test_strided_weight_equals_contiguous(scheme, settings):
    weight = random_weight(64, 128)
    strided = weight.t().contiguous().t()
    assert not strided.is_contiguous()
    assert_same_tensor(
        quantise_weight(strided, scheme, settings[scheme]),
        quantise_weight(weight, scheme, settings[scheme]),
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_zero_weight_row_is_exact_zero(scheme, settings):
    weight = random_weight(32, 64)
    weight[5] = 0
    quantised = quantise_weight(weight, scheme, settings[scheme])
    dense = quantised.dequantize(torch.float32)
    assert dense.isfinite().all()
    assert torch.equal(dense[5], torch.zeros(64))
    assert dense[6].count_nonzero() > 32


@pytest.mark.parametrize("scheme", SCHEMES)
def test_zero_weight_is_exact_zero(scheme, settings):
    quantised = quantise_weight(torch.zeros(32, 64).bfloat16(), scheme, settings[scheme])
    assert torch.equal(quantised.dequantize(torch.float32), torch.zeros(32, 64))


def test_fp8_zero_weight_row_leaves_the_others(settings):
    weight = random_weight(32, 64)
    whole = tensor_parts(quantise_weight(weight, Scheme.FP8, settings[Scheme.FP8]))
    weight[5] = 0
    parts = tensor_parts(quantise_weight(weight, Scheme.FP8, settings[Scheme.FP8]))
    others = torch.arange(32) != 5
    assert torch.equal(parts["scale"][others], whole["scale"][others])
    assert torch.equal(raw(parts["qdata"].float()[others]), raw(whole["qdata"].float()[others]))


def test_fp8_zero_activation_row_gives_the_bias(settings):
    quantised = quantise_weight(random_weight(32, 64), Scheme.FP8, settings[Scheme.FP8])
    rows = random_weight(20, 64, seed=1)
    rows[3] = 0
    bias = random_weight(1, 32, seed=2)[0]
    assert torch.equal(F.linear(rows, quantised)[3], torch.zeros(32).bfloat16())
    output = F.linear(rows, quantised, bias)
    assert output.isfinite().all()
    assert torch.equal(output[3], bias)


def test_fp8_without_floor_is_not_finite(settings):
    bare = settings[Scheme.FP8].model_copy(update={"activation_floor": 0.0})
    quantised = quantise_weight(random_weight(32, 64), Scheme.FP8, bare)
    assert not F.linear(torch.zeros(1, 64).bfloat16(), quantised).isfinite().any()


@pytest.mark.parametrize("scheme", [Scheme.INT8, Scheme.FP8])
def test_outlier_row_leaves_the_other_rows(scheme, settings):
    weight, rows = random_weight(128, 256), random_weight(24, 256, seed=1)
    weight[7, 9] = 6.6e4
    rows[2, 100] = 6.6e4
    exact = rows.double() @ weight.double().T
    output = F.linear(rows, quantise_weight(weight, scheme, settings[scheme])).double()
    errors = (output - exact).abs()
    kept_rows, kept_columns = torch.arange(24) != 2, torch.arange(128) != 7
    clean = (kept_rows[:, None] & kept_columns[None, :]).double()
    assert (errors * clean).norm() / (exact * clean).norm() < 0.05


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_refuses_values_that_are_not_finite(scheme, value, settings):
    weight = random_weight(32, 64)
    weight[3, 4] = value
    with pytest.raises(PlanMismatchError, match="expected finite values within") as caught:
        quantise_weight(weight, scheme, settings[scheme])
    assert [item.code for item in caught.value.mismatches] == ["weight_not_finite"]


@pytest.mark.parametrize("scheme", [Scheme.FP8, Scheme.MXFP8, Scheme.NVFP4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_refuses_other_dtypes(scheme, dtype, settings):
    with pytest.raises(PlanMismatchError, match=r"expected torch\.bfloat16"):
        quantise_weight(torch.zeros(32, 64, dtype=dtype), scheme, settings[scheme])


@pytest.mark.parametrize(
    ("scheme", "shape"),
    [(Scheme.MXFP8, (32, 48)), (Scheme.NVFP4, (32, 24)), (Scheme.NVFP4, (24, 32))],
)
def test_refuses_misaligned_blocks(scheme, shape, settings):
    with pytest.raises(PlanMismatchError, match="weight_alignment"):
        quantise_weight(torch.zeros(shape).bfloat16(), scheme, settings[scheme])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_refuses_a_quantised_weight(scheme, settings):
    quantised = quantise_weight(random_weight(32, 64), scheme, settings[scheme])
    with pytest.raises(PlanMismatchError, match="expected a dense matrix"):
        quantise_weight(quantised, scheme, settings[scheme])


@pytest.mark.parametrize("scheme", [Scheme.DENSE, Scheme.LAYERWISE_FP8])
def test_has_no_config_for_schemes_without_gemm(scheme, settings):
    with pytest.raises(ValueError, match="has no torchao config"):
        torchao_config(scheme, settings[scheme])


def test_has_no_quantised_weight_for_dense(settings):
    with pytest.raises(ValueError, match="stores no quantised weight"):
        quantise_weight(random_weight(32, 64), Scheme.DENSE, settings[Scheme.DENSE])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layerwise_fp8_is_a_cast(dtype, settings):
    weight = random_weight(32, 64).to(dtype)
    quantised = quantise_weight(weight, Scheme.LAYERWISE_FP8, settings[Scheme.LAYERWISE_FP8])
    assert quantised.dtype is dtype
    assert torch.equal(quantised.dequantize(), weight.to(torch.float8_e4m3fn).to(dtype))
    rows = random_weight(5, 64, seed=1).to(dtype)
    assert torch.equal(F.linear(rows, quantised), F.linear(rows, quantised.dequantize()))


@pytest.mark.parametrize("value", [500.0, float("nan"), float("inf")])
def test_layerwise_fp8_refuses_what_it_cannot_hold(value, settings):
    weight = random_weight(32, 64)
    weight[3, 4] = value
    with pytest.raises(PlanMismatchError, match="weight_not_finite"):
        quantise_weight(weight, Scheme.LAYERWISE_FP8, settings[Scheme.LAYERWISE_FP8])


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        (Scheme.INT8, (256 * 64, 256 * 5)),
        (Scheme.FP8, (256 * 64, 256 * 4)),
        (Scheme.MXFP8, (256 * 64, 256 * 4)),
        (Scheme.NVFP4, (256 * 32, 256 * 4 + 4)),
        (Scheme.LAYERWISE_FP8, (256 * 64, 4)),
    ],
)
def test_stored_bytes(scheme, expected, settings):
    quantised = quantise_weight(random_weight(256, 64), scheme, settings[scheme])
    assert stored_bytes(quantised) == expected
    assert scheme_of(quantised) is scheme
    assert scheme_of(nn.Parameter(quantised, requires_grad=False)) is scheme


@pytest.mark.parametrize("shape", [(256, 64), (272, 1056), (16, 32), (3072, 128)])
@pytest.mark.parametrize("scheme", [*SCHEMES, Scheme.LAYERWISE_FP8])
def test_predicted_bytes_are_the_stored_ones(scheme, shape, settings):
    quantised = quantise_weight(random_weight(*shape), scheme, settings[scheme])
    assert weight_bytes(scheme, *shape, "bfloat16") == sum(stored_bytes(quantised))


def test_stored_bytes_of_plain_tensors():
    weight = random_weight(8, 4)
    assert stored_bytes(weight) == (64, 0)
    assert scheme_of(weight) is Scheme.DENSE
    assert stored_bytes(weight.to(torch.float8_e4m3fn)) == (32, 0)
    assert scheme_of(weight.to(torch.float8_e4m3fn)) is Scheme.LAYERWISE_FP8
    assert scheme_of(weight.to(torch.int8)) is None


@pytest.mark.parametrize("scheme", SCHEMES)
def test_needs_no_gradient(scheme, settings):
    parameter = nn.Parameter(random_weight(32, 64))
    quantised = quantise_weight(parameter, scheme, settings[scheme])
    assert not quantised.requires_grad
    assert parameter.requires_grad
