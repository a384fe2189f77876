"""The scheme that a weight is stored in, read off its tensor class."""

from __future__ import annotations

import torch
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
from torchao.quantization import Float8Tensor, Int8Tensor
from torchao.utils import TorchAOBaseTensor

from quantpolicy.schemes import Scheme

_TENSOR_SCHEMES = {
    Int8Tensor: Scheme.INT8,
    MXTensor: Scheme.MXFP8,
    NVFP4Tensor: Scheme.NVFP4,
}


def scheme_of(tensor: torch.Tensor) -> Scheme | None:
    """Return the scheme a weight is stored in; None for one that no scheme here stores."""
    if isinstance(tensor, Float8Tensor):
        return Scheme.LAYERWISE_FP8 if tensor.act_quant_kwargs is None else Scheme.FP8
    for tensor_class, scheme in _TENSOR_SCHEMES.items():
        if isinstance(tensor, tensor_class):
            return scheme
    if isinstance(tensor, TorchAOBaseTensor) or not tensor.is_floating_point():
        return None
    return Scheme.LAYERWISE_FP8 if tensor.dtype.itemsize == 1 else Scheme.DENSE
