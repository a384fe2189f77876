"""FusedLinear: taking over a torchao Linear and giving it back, checkpoints, casts, compile."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torchao.float8.inference import Float8MMConfig
from torchao.quantization import Float8Tensor, Int8Tensor, PerRow, PerTensor
from torchao.quantization.quant_primitives import MappingType
from torchao.quantization.quantize_.workflows.float8.float8_tensor import (
    QuantizeTensorToFloat8Kwargs,
)
from torchao.quantization.quantize_.workflows.int8.int8_tensor import QuantizeTensorToInt8Kwargs

from quantpolicy.errors import KernelMountError
from quantpolicy.kernels.linear import FusedLinear
from quantpolicy.schemes import Scheme

FLOOR = 1e-12
FP8_ROWS = QuantizeTensorToFloat8Kwargs(torch.float8_e4m3fn, PerRow(), hp_value_lb=FLOOR)
FAST = Float8MMConfig(use_fast_accum=True)


def quantised(weight: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    if scheme is Scheme.INT8:
        return Int8Tensor.from_hp(
            weight, PerRow(), act_quant_kwargs=QuantizeTensorToInt8Kwargs(PerRow())
        )
    return Float8Tensor.from_hp(
        weight, torch.float8_e4m3fn, PerRow(), mm_config=FAST, act_quant_kwargs=FP8_ROWS
    )


def torchao_linear(scheme: Scheme, *, bias: bool = True, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    linear = nn.Linear(48, 64, bias=bias).bfloat16().eval().requires_grad_(False)
    linear.weight = nn.Parameter(quantised(linear.weight.detach(), scheme), requires_grad=False)
    return linear


@pytest.fixture(params=[Scheme.FP8, Scheme.INT8])
def scheme(request: pytest.FixtureRequest) -> Scheme:
    return request.param


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 5, 48).bfloat16()


def test_adopting_keeps_the_object_and_the_memory(scheme: Scheme) -> None:
    linear = torchao_linear(scheme)
    weight, bias = linear.weight, linear.bias
    fused = FusedLinear.adopt(linear, name="blocks.0.proj")
    assert fused is linear
    assert isinstance(linear, nn.Linear)
    assert fused.scheme is scheme
    assert fused.floor == (FLOOR if scheme is Scheme.FP8 else 0.0)
    assert fused.bias is bias
    assert fused.qdata.data_ptr() == weight.qdata.data_ptr()
    assert fused.scale.data_ptr() == weight.scale.data_ptr()
    assert type(fused.weight) is type(weight)
    assert fused.weight.dtype is torch.bfloat16
    assert [name for name, _ in fused.named_parameters()] == ["bias"]


def test_results_are_torchao_s(scheme: Scheme, x: torch.Tensor) -> None:
    stock = torchao_linear(scheme)
    fused = FusedLinear.adopt(copy.deepcopy(stock))
    if scheme is Scheme.FP8:
        assert torch.equal(fused(x), stock(x))
    else:
        step = torch.finfo(torch.bfloat16).eps * stock(x).abs().amax()
        assert (fused(x) - stock(x)).abs().max() <= step


def test_release_restores_the_linear(scheme: Scheme, x: torch.Tensor) -> None:
    stock = torchao_linear(scheme)
    linear = copy.deepcopy(stock)
    attributes = dict(vars(linear))
    released = FusedLinear.adopt(linear, name="proj").release()
    assert released is linear
    assert list(vars(linear)) == list(attributes)
    for name in vars(linear).keys() - {"_parameters"}:
        assert vars(linear)[name] == attributes[name]
    assert type(released) is nn.Linear
    assert list(released.state_dict()) == list(stock.state_dict())
    assert list(released.named_buffers()) == []
    assert torch.equal(released(x), stock(x))


def test_state_dict_has_torchao_s_layout(scheme: Scheme, x: torch.Tensor) -> None:
    stock = torchao_linear(scheme)
    fused = FusedLinear.adopt(copy.deepcopy(stock))
    state = fused.state_dict()
    assert list(state) == ["weight", "bias"]
    assert type(state["weight"]) is type(stock.weight.data)
    other = torchao_linear(scheme, seed=1)
    other.load_state_dict(state)
    assert torch.equal(other(x), stock(x))
    again = FusedLinear.adopt(torchao_linear(scheme, seed=2))
    again.load_state_dict(stock.state_dict())
    assert torch.equal(again(x), fused(x))


def test_loading_another_layout_is_refused(scheme: Scheme) -> None:
    fused = FusedLinear.adopt(torchao_linear(scheme))
    before = fused.qdata.clone()
    dense = nn.Linear(48, 64).bfloat16().state_dict()
    with pytest.raises(RuntimeError, match="load a checkpoint baked from the same plan"):
        fused.load_state_dict(dense)
    with pytest.raises(RuntimeError, match=r"Missing key.*weight"):
        fused.load_state_dict({"bias": dense["bias"]})
    assert torch.equal(fused.qdata.view(torch.int8), before.view(torch.int8))


@pytest.mark.parametrize(
    "cast",
    [
        lambda m: m.half(),
        lambda m: m.float(),
        lambda m: m.double(),
        lambda m: m.bfloat16(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.to("cpu", torch.float16),
    ],
)
def test_casts_are_refused_and_change_nothing(scheme: Scheme, cast: object) -> None:
    fused = FusedLinear.adopt(torchao_linear(scheme), name="blocks.0.proj")
    dtypes = (fused.qdata.dtype, fused.scale.dtype, fused.bias.dtype)
    with pytest.raises(KernelMountError, match=r"blocks\.0\.proj: a cast to .* device only"):
        cast(fused)  # type: ignore[operator]
    assert (fused.qdata.dtype, fused.scale.dtype, fused.bias.dtype) == dtypes


def test_devices_change_everything(scheme: Scheme) -> None:
    fused = FusedLinear.adopt(torchao_linear(scheme))
    assert fused.to("cpu") is fused
    moved = fused.to("meta")
    assert {tensor.device.type for tensor in (*moved.buffers(), *moved.parameters())} == {"meta"}
    assert moved.weight.device.type == "meta"


def test_deepcopy_is_independent(scheme: Scheme, x: torch.Tensor) -> None:
    fused = FusedLinear.adopt(torchao_linear(scheme))
    twin = copy.deepcopy(fused)
    assert torch.equal(twin(x), fused(x))
    twin.scale.mul_(2)
    assert not torch.equal(twin(x), fused(x))


def test_no_bias(scheme: Scheme, x: torch.Tensor) -> None:
    fused = FusedLinear.adopt(torchao_linear(scheme, bias=False))
    assert list(fused.state_dict()) == ["weight"]
    assert fused.release().bias is None


def test_gradients_are_refused(scheme: Scheme, x: torch.Tensor) -> None:
    fused = FusedLinear.adopt(torchao_linear(scheme), name="proj")
    with pytest.raises(KernelMountError, match="proj: a gradient is wanted"):
        fused(x.requires_grad_())
    with torch.no_grad():
        assert fused(x).shape == (2, 5, 64)


def test_fullgraph_compile_with_an_open_number_of_rows(scheme: Scheme) -> None:
    model = nn.Sequential(
        nn.Linear(48, 48).bfloat16(), FusedLinear.adopt(torchao_linear(scheme)), nn.ReLU()
    ).eval()
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    with torch.no_grad():
        for batch, tokens in ((1, 7), (1, 9), (2, 7), (2, 12), (1, 30), (2, 33)):
            rows = torch.randn(batch, tokens, 48).bfloat16()
            assert torch.equal(compiled(rows), model(rows))
    assert counter.frame_count <= 3


def refused_weights() -> dict[str, torch.Tensor]:
    weight = torch.randn(64, 48).bfloat16()
    fp8 = torch.float8_e4m3fn
    return {
        "the weight is a Parameter": weight,
        "activations are not quantised": Float8Tensor.from_hp(weight, fp8, PerRow()),
        "scales are not per row": Float8Tensor.from_hp(
            weight, fp8, PerTensor(), mm_config=FAST, act_quant_kwargs=FP8_ROWS
        ),
        "fast accumulation is off": Float8Tensor.from_hp(
            weight, fp8, PerRow(), mm_config=Float8MMConfig(), act_quant_kwargs=FP8_ROWS
        ),
        "another dtype or an upper bound": Float8Tensor.from_hp(
            weight,
            fp8,
            PerRow(),
            mm_config=FAST,
            act_quant_kwargs=QuantizeTensorToFloat8Kwargs(fp8, PerRow(), hp_value_ub=1.0),
        ),
        "the data is torch.float8_e5m2": Float8Tensor.from_hp(
            weight, torch.float8_e5m2, PerRow(), mm_config=FAST, act_quant_kwargs=FP8_ROWS
        ),
        "not quantised symmetrically": Int8Tensor.from_hp(
            weight,
            PerRow(),
            act_quant_kwargs=QuantizeTensorToInt8Kwargs(
                PerRow(), mapping_type=MappingType.ASYMMETRIC
            ),
        ),
    }


@pytest.mark.parametrize("found", refused_weights())
def test_other_weights_are_refused_and_left_alone(found: str) -> None:
    linear = nn.Linear(48, 64).bfloat16()
    linear.weight = nn.Parameter(refused_weights()[found], requires_grad=False)
    with pytest.raises(KernelMountError, match=found):
        FusedLinear.adopt(linear, name="proj")
    assert type(linear) is nn.Linear
    assert "weight" in linear._parameters
