"""How a quantised weight is spelt in a safetensors file: names, dtypes, shapes, torchao's metadata.

Everything is read off a one-tile sample that ``quantise_weight`` makes, so nothing about torchao's
tensor classes is written down here. The arithmetic belongs to ``rows`` and ``quantpolicy.runtime``.
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torchao.core.config import config_to_dict
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

from prequant.forms import quantization_config_form
from quantpolicy.plan import ComponentPlan, SchemeSettings
from quantpolicy.runtime.weights import quantise_weight, torchao_config
from quantpolicy.schemes import Scheme

# Rows that share one tile of scales: chunks of whole tiles are quantised alone and then joined.
TILE_ROWS = {Scheme.INT8: 1, Scheme.FP8: 1, Scheme.MXFP8: 128, Scheme.NVFP4: 128}

FILE_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int8: "I8",
    torch.uint8: "U8",
}
TORCH_DTYPES = {name: dtype for dtype, name in FILE_DTYPES.items()}
PLAIN_METADATA = json.dumps({"_type": torch.Tensor.__name__})


class Part(NamedTuple):
    """One plain tensor of a quantised weight.

    Args:
        name: torchao's name, ``qdata`` for the data.
        dtype: dtype of its values.
        shape: of the whole weight's part.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


class Encoding(NamedTuple):
    """How one weight is stored: torchao's metadata entry and the parts, data first."""

    metadata: str
    parts: tuple[Part, ...]


def part_name(weight: str, part: str) -> str:
    """Return the name in the file of a part of the weight ``module.weight``."""
    module, _, leaf = weight.rpartition(".")
    return f"{module}._{leaf}_{part}"


@lru_cache(maxsize=1024)
def encode_weight(
    scheme: Scheme, settings: SchemeSettings, shape: tuple[int, int], dtype: torch.dtype
) -> Encoding:
    """Return how a weight of this shape and dense dtype is stored."""
    rows, features = shape
    tile = TILE_ROWS[scheme]
    sample = quantise_weight(torch.zeros(tile, features, dtype=dtype), scheme, settings)
    tensors, metadata = flatten_tensor_state_dict({"m.weight": sample})
    tiles = math.ceil(rows / tile)
    parts = []
    for key, tensor in tensors.items():
        name = key.removeprefix("m._weight_")
        if tensor.dim() == 0:
            part_shape: tuple[int, ...] = ()
        else:
            first = rows if name == "qdata" else tensor.shape[0] * tiles
            part_shape = (first, *tensor.shape[1:])
        parts.append(Part(name, tensor.dtype, part_shape))
    parts.sort(key=lambda part: part.name != "qdata")
    return Encoding(metadata["m.weight"], tuple(parts))


def quantization_config(plan: ComponentPlan) -> dict[str, object]:
    """Return the ``quantization_config`` of config.json, its torchao configs made by torchao."""
    quant_types = {
        scheme: config_to_dict(torchao_config(scheme, plan.settings))
        for scheme in {layer.scheme for layer in plan.layers}
    }
    return quantization_config_form(plan, quant_types)
