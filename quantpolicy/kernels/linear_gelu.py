"""A dense Linear with a bias and tanh-GELU in the epilogue of its GEMM.

    out = gelu_tanh(x @ weight.T + bias)

The product is not rounded before the activation. Contract: high. The first call of a signature on
an idle capture-free stream times both ways; where the epilogue gains nothing, that signature stays
on two launches for good.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from quantpolicy.kernels.contract import count_call, declined, on_cpu
from quantpolicy.kernels.gain_probe import NO_GAIN, gains
from quantpolicy.kernels.registry import define_op, is_disabled
from quantpolicy.kernels.rotary import HALF_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = "linear_gelu"


def linear_gelu_reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Multiply and activate in plain torch."""
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def _fake(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    del bias
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def why_not_linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> str:
    """Return why the epilogue cannot take these tensors, "" when it can."""
    if x.dtype not in HALF_DTYPES or weight.dtype is not x.dtype or bias.dtype is not x.dtype:
        return "activations, weight and bias are not all bfloat16 or all float16"
    if not weight.is_contiguous() or not bias.is_contiguous():
        return "weight or bias is not contiguous"
    if x.numel() == 0:
        return "there are no rows"
    return ""


def launch_linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Run the GEMM with its epilogue."""
    out: Tensor = torch._addmm_activation(
        bias, x.reshape(-1, x.shape[-1]), weight.t(), use_gelu=True
    )
    return out.view(*x.shape[:-1], weight.shape[0])


def _cuda(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    args = (x, weight, bias)
    reason = f"{_NAME} is switched off" if is_disabled(_NAME) else why_not_linear_gelu(*args)
    if not reason and not gains(_NAME, launch_linear_gelu, linear_gelu_reference, args):
        reason = NO_GAIN
    if reason:
        return declined(_NAME, reason, linear_gelu_reference, args)  # type: ignore[return-value]
    count_call(_NAME)
    return launch_linear_gelu(*args)


linear_gelu: Callable[[Tensor, Tensor, Tensor], Tensor] = define_op(  # type: ignore[assignment]
    f"{_NAME}(Tensor x, Tensor weight, Tensor bias) -> Tensor",
    cpu=on_cpu(_NAME, linear_gelu_reference),
    cuda=_cuda,
    fake=_fake,
)
