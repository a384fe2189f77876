"""Quantised modules for the benchmarks, built with torchao as a checkpoint holds them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from torchao.float8.inference import Float8MMConfig
from torchao.quantization import Float8Tensor, Int8Tensor, PerRow
from torchao.quantization.quantize_.workflows.float8.float8_tensor import (
    QuantizeTensorToFloat8Kwargs,
)
from torchao.quantization.quantize_.workflows.int8.int8_tensor import QuantizeTensorToInt8Kwargs

from quantpolicy.schemes import Scheme


def quantised_weight(weight: torch.Tensor, scheme: Scheme, floor: float) -> torch.Tensor:
    """Return a weight with one scale a row and dynamic row-wise activations."""
    if scheme is Scheme.INT8:
        return Int8Tensor.from_hp(
            weight, PerRow(), act_quant_kwargs=QuantizeTensorToInt8Kwargs(PerRow())
        )
    return Float8Tensor.from_hp(
        weight,
        torch.float8_e4m3fn,
        PerRow(),
        mm_config=Float8MMConfig(use_fast_accum=True),
        act_quant_kwargs=QuantizeTensorToFloat8Kwargs(
            torch.float8_e4m3fn, PerRow(), hp_value_lb=floor
        ),
    )


def quantised_linear(linear: nn.Linear, scheme: Scheme, floor: float) -> nn.Linear:
    """Return a copy of a Linear with a torchao weight; the bias is shared."""
    result = copy.copy(linear)
    result._parameters = dict(linear._parameters)
    result._buffers = dict(linear._buffers)
    result.weight = nn.Parameter(
        quantised_weight(linear.weight.detach(), scheme, floor), requires_grad=False
    )
    return result


def quantise_matching(
    model: nn.Module, scheme: Scheme, floor: float, matches: Callable[[str], bool]
) -> list[str]:
    """Quantise, in place, every Linear whose name matches; return the names."""
    names = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and matches(name):
            module.weight = nn.Parameter(
                quantised_weight(module.weight.detach(), scheme, floor), requires_grad=False
            )
            names.append(name)
    return names
