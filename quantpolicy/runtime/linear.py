"""The Linear that runs a quantised weight: empty inputs, few rows, and devices without the GEMM.

It is a subclass that takes over an existing Linear by changing its class. The module object, its
name, its parameters and its hooks stay, so every reference to it, ``state_dict``, ``deepcopy``,
``isinstance(module, nn.Linear)``, PEFT and ``torch.compile(fullgraph=True)`` see what they saw
before, and giving the class back undoes it. A wrapper module would rename the parameters, a hook
would break the graph, and an assigned ``forward`` would not survive ``deepcopy``.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from torchao.quantization import Float8Tensor

from quantpolicy.kernels.stored_scheme import scheme_of
from quantpolicy.object_class import exchange_class, follows_class
from quantpolicy.plan import SchemeSettings
from quantpolicy.runtime.weights import WEIGHT_FLOOR, quantise_weight
from quantpolicy.schemes import Scheme


class QuantisedLinear(nn.Linear):
    """A Linear over a torchao weight.

    An input without rows gives an output without rows. Fewer rows than ``pad_rows`` are filled up
    with copies of the first and cut off again: scales are per row, so the kept rows are the same.
    Where a CPU has no GEMM for the scheme, both operands are quantised as always and multiplied
    dequantised, which serves checks, not speed.

    Args:
        pad_rows: least number of rows the GEMM is given; 0 for no padding.
        emulate_on_cpu: whether a CPU has no GEMM for the weight's scheme.
    """

    pad_rows: int = 0
    emulate_on_cpu: bool = False

    @follows_class
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``input @ weight.T + bias``; ``input``: [..., in_features]."""
        if not isinstance(self, QuantisedLinear):
            return type(self).forward(self, input)
        rows = math.prod(input.shape[:-1])
        if rows == 0:
            return input.new_empty((*input.shape[:-1], self.out_features))
        if rows >= self.pad_rows:
            return self._multiply(input)
        flat = input.reshape(rows, input.shape[-1])
        padding = flat[:1].expand(self.pad_rows - rows, -1)
        padded = self._multiply(torch.cat((flat, padding)))
        return padded[:rows].reshape(*input.shape[:-1], self.out_features)

    def _multiply(self, input: torch.Tensor) -> torch.Tensor:
        if self.emulate_on_cpu and self.weight.device.type == "cpu":
            output = _multiply_emulated(input, self.weight, self.bias)
        elif isinstance(self.weight, MXTensor | NVFP4Tensor):
            # Block-scaled tensors take contiguous inputs only.
            output = F.linear(input.contiguous(), self.weight, self.bias)
        else:
            output = F.linear(input, self.weight, self.bias)
        if isinstance(self.weight, NVFP4Tensor):
            return _zero_for_zero(input, output, self.bias)
        return output

    def extra_repr(self) -> str:
        """Describe the shape, the weight's storage and the padding."""
        return (
            f"{super().extra_repr()}, weight={type(self.weight).__name__}, pad_rows={self.pad_rows}"
        )


def guard_linear(module: nn.Linear, pad_rows: int = 0) -> QuantisedLinear:
    """Turn a plain Linear into a ``QuantisedLinear``, in place; its weight is quantised already."""
    assert type(module) is nn.Linear, type(module)
    scheme = scheme_of(module.weight)
    assert scheme is not None, type(module.weight)
    exchange_class(module, QuantisedLinear)
    assert isinstance(module, QuantisedLinear)
    module.pad_rows = pad_rows
    module.emulate_on_cpu = is_emulated_on_cpu(scheme)
    return module


def release_linear(module: nn.Linear) -> None:
    """Make the module a plain Linear again; the weight it holds is the caller's business."""
    for name in ("pad_rows", "emulate_on_cpu"):
        module.__dict__.pop(name, None)
    exchange_class(module, nn.Linear)


@cache
def is_emulated_on_cpu(scheme: Scheme) -> bool:
    """Tell whether this torch has no GEMM of the scheme for a CPU.

    It has none for the block-scaled schemes, and for fp8 with a scale per row only in some
    versions, which one multiplication tells.
    """
    if scheme is not Scheme.FP8:
        return scheme in (Scheme.MXFP8, Scheme.NVFP4)
    ones = torch.ones(32, 32, dtype=torch.bfloat16)
    settings = SchemeSettings(weight_dtype="float8_e4m3fn", activation_floor=WEIGHT_FLOOR)
    try:
        F.linear(ones, quantise_weight(ones, scheme, settings))
    except RuntimeError:
        return True
    return False


def _multiply_emulated(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    operands: tuple[Any, Any] = (
        _quantise_rows(input.reshape(-1, input.shape[-1]).contiguous(), weight),
        weight,
    )
    rows, columns = (operand.dequantize(torch.float32) for operand in operands)
    output = F.linear(rows, columns, None if bias is None else bias.float())
    return output.to(input.dtype).reshape(*input.shape[:-1], output.shape[-1])


def _quantise_rows(flat: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return activation rows quantised as the weight's tensor class does before its GEMM."""
    quantised: torch.Tensor
    if isinstance(weight, Float8Tensor):
        kwargs = weight.act_quant_kwargs
        quantised = Float8Tensor.from_hp(
            flat,
            float8_dtype=kwargs.float8_dtype,
            granularity=kwargs.granularity,
            hp_value_lb=kwargs.hp_value_lb,
            hp_value_ub=kwargs.hp_value_ub,
        )
    elif isinstance(weight, MXTensor):
        kwargs = weight.act_quant_kwargs
        quantised = MXTensor.to_mx(
            flat,
            kwargs.elem_dtype,
            block_size=kwargs.block_size,
            scaling_mode=kwargs.scaling_mode,
            kernel_preference=kwargs.kernel_preference,
            is_swizzled_scales=kwargs.is_swizzled_scales,
        )
    else:
        assert isinstance(weight, NVFP4Tensor), type(weight)
        quantised = NVFP4Tensor.to_nvfp4(
            flat,
            block_size=weight.act_quant_kwargs.block_size,
            per_tensor_scale=per_tensor_amax_to_scale(flat.abs().max()),
            is_swizzled_scales=weight.act_quant_kwargs.is_swizzled_scales,
        )
    return quantised


def _zero_for_zero(
    input: torch.Tensor, output: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return the output of an all-zero input: nvfp4's one scale per tensor would make it NaN."""
    empty = torch.zeros((), dtype=output.dtype, device=output.device) if bias is None else bias
    return torch.where(input.abs().amax() == 0, empty.to(output.dtype), output)
