"""A dense Linear over two inputs side by side, without laying them side by side.

    out = cat(head, x) @ weight.T + bias = (head @ weight[:, :N].T + bias) + x @ weight[:, N:].T

The first product is rounded before the second is added to it. Contract: high.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from quantpolicy.kernels.contract import define_fusion
from quantpolicy.kernels.rotary import HALF_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = "split_linear"


def split_linear_reference(head: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Concatenate and multiply in plain torch."""
    return F.linear(torch.cat([head, x], dim=-1), weight, bias)


def _fake(head: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    del x, bias
    return head.new_empty((*head.shape[:-1], weight.shape[0]))


def _why_not(head: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> str:
    tensors = (head, x, weight, bias)
    if head.dtype not in HALF_DTYPES or any(item.dtype is not head.dtype for item in tensors):
        return "activations, weight and bias are not all bfloat16 or all float16"
    if head.shape[:-1] != x.shape[:-1] or head.shape[-1] + x.shape[-1] != weight.shape[1]:
        return "the two inputs do not make up the weight's columns"
    if head.numel() == 0:
        return "there are no rows"
    return ""


def launch_split_linear(head: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Run both GEMMs, the second on top of the first."""
    width = head.shape[-1]
    out = F.linear(head.reshape(-1, width), weight[:, :width], bias)
    out.addmm_(x.reshape(-1, x.shape[-1]), weight[:, width:].t())
    return out.view(*head.shape[:-1], weight.shape[0])


split_linear: Callable[..., Tensor] = define_fusion(  # type: ignore[assignment]
    f"{_NAME}(Tensor head, Tensor x, Tensor weight, Tensor bias) -> Tensor",
    kernel=launch_split_linear,
    reference=split_linear_reference,
    why_not=_why_not,
    fake=_fake,
)
