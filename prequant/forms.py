"""What a quantised weight looks like on disk, written down without torch, for the validator.

``encode`` reads the same facts off torchao; a test holds the two together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from quantpolicy.plan import ComponentPlan, SchemeSettings
from quantpolicy.schemes import Scheme

TENSOR_CLASSES = {
    Scheme.INT8: "Int8Tensor",
    Scheme.FP8: "Float8Tensor",
    Scheme.MXFP8: "MXTensor",
    Scheme.NVFP4: "NVFP4Tensor",
}
PART_NAME = re.compile(r"(?P<module>.+)\._weight_(?P<part>[a-z_]+)")
FP8_FILE_DTYPES = {"float8_e4m3fn": "F8_E4M3", "float8_e4m3fnuz": "F8_E4M3FNUZ"}
# Bytes that are NaN in each one-byte float of the format.
NAN_BYTES = {"F8_E4M3": (0x7F, 0xFF), "F8_E4M3FNUZ": (0x80,), "F8_E8M0": (0xFF,)}

_TILE_ROWS, _TILE_SCALE_ROWS, _TILE_SCALES = 128, 32, 4
_BLOCKS = {Scheme.MXFP8: 32, Scheme.NVFP4: 16}


class PartForm(NamedTuple):
    """Dtype, as the format spells it, and shape of one stored part."""

    dtype: str
    shape: tuple[int, ...]


def part_forms(
    scheme: Scheme, settings: SchemeSettings, shape: tuple[int, int]
) -> dict[str, PartForm]:
    """Return the parts that a weight of this shape is stored as, by torchao's names."""
    rows, features = shape
    if scheme is Scheme.INT8:
        return {
            "qdata": PartForm("I8", shape),
            "scale": PartForm("F32", (rows, 1)),
            "zero_point": PartForm("I8", (rows, 1)),
        }
    if scheme is Scheme.FP8:
        return {
            "qdata": PartForm(FP8_FILE_DTYPES.get(settings.weight_dtype, ""), shape),
            "scale": PartForm("F32", (rows, 1)),
        }
    scales = features // _BLOCKS[scheme]
    scale_shape = (
        math.ceil(rows / _TILE_ROWS) * _TILE_SCALE_ROWS,
        math.ceil(scales / _TILE_SCALES) * _TILE_SCALES * _TILE_ROWS // _TILE_SCALE_ROWS,
    )
    if scheme is Scheme.MXFP8:
        return {"qdata": PartForm("F8_E4M3", shape), "scale": PartForm("F8_E8M0", scale_shape)}
    return {
        "qdata": PartForm("U8", (rows, features // 2)),
        "scale": PartForm("F8_E4M3", scale_shape),
        "per_tensor_scale": PartForm("F32", ()),
    }


def stored_scheme(dtypes: dict[str, str]) -> Scheme | None:
    """Return the scheme that parts of these dtypes belong to, None when no scheme stores such."""
    data, scale = dtypes.get("qdata", ""), dtypes.get("scale", "")
    if data == "I8":
        return Scheme.INT8
    if data in FP8_FILE_DTYPES.values():
        return Scheme.MXFP8 if scale == "F8_E8M0" else Scheme.FP8
    return Scheme.NVFP4 if data == "U8" else None


def tensor_metadata(
    scheme: Scheme, settings: SchemeSettings, in_features: int, dtype: str
) -> dict[str, object]:
    """Return torchao's metadata of one quantised weight."""
    data: dict[str, object]
    shared: dict[str, object]
    scaling: dict[str, object]
    if scheme is Scheme.INT8:
        names = ["zero_point", "qdata", "scale"]
        data = {
            "act_quant_kwargs": {
                "_type": "QuantizeTensorToInt8Kwargs",
                "_data": {
                    "granularity": _PER_ROW,
                    "mapping_type": _enum("MappingType", "SYMMETRIC"),
                    "reduce_range": False,
                },
            },
            "reduce_range": False,
            "block_size": [1, in_features],
            "dtype": _dtype(dtype),
        }
    elif scheme is Scheme.FP8:
        names = ["qdata", "scale"]
        data = {
            "block_size": [1, in_features],
            "mm_config": {"_type": "Float8MMConfig", "_data": _FAST_ACCUM},
            "act_quant_kwargs": {
                "_type": "QuantizeTensorToFloat8Kwargs",
                "_data": {
                    "float8_dtype": _dtype(settings.weight_dtype),
                    "granularity": _PER_ROW,
                    "mm_config": None,
                    "hp_value_lb": settings.activation_floor or None,
                    "hp_value_ub": None,
                    "kernel_preference": _AUTO_KERNEL,
                },
            },
            "kernel_preference": _AUTO_KERNEL,
            "dtype": _dtype(dtype),
        }
    elif scheme is Scheme.MXFP8:
        names = ["qdata", "scale"]
        shared = {
            "elem_dtype": _dtype("float8_e4m3fn"),
            "block_size": 32,
            "kernel_preference": _AUTO_KERNEL,
            "is_swizzled_scales": True,
        }
        scaling = {"scaling_mode": _enum("ScaleCalculationMode", "RCEIL")}
        kwargs = {"_type": "QuantizeTensorToMXKwargs", "_data": {**shared, **scaling}}
        data = {**shared, "orig_dtype": _dtype(dtype), "act_quant_kwargs": kwargs}
    else:
        names = ["per_tensor_scale", "qdata", "scale"]
        shared = {"block_size": 16, "is_swizzled_scales": True, "use_triton_kernel": False}
        scaling = {"use_dynamic_per_tensor_scale": True}
        kwargs = {"_type": "QuantizeTensorToNVFP4Kwargs", "_data": {**shared, **scaling}}
        data = {**shared, "orig_dtype": _dtype(dtype), "act_quant_kwargs": kwargs}
    return {"_type": TENSOR_CLASSES[scheme], "_data": data, "_tensor_data_names": names}


def quantization_config_form(
    plan: ComponentPlan, quant_types: Mapping[Scheme, dict[str, object]] | None = None
) -> dict[str, object]:
    """Return the ``quantization_config`` that a baked component's config.json carries.

    One config with the kept modules named where the plan has a single scheme; one config per module
    otherwise, and where a kept name would also hit a quantised module, since diffusers looks for
    ``name.`` anywhere in a parameter's name.

    Args:
        quant_types: torchao's configs by scheme; those written down here when None.
    """
    schemes = {layer.scheme for layer in plan.layers}
    types = quant_types or {scheme: quant_type(scheme, plan.settings) for scheme in schemes}
    kept = sorted(layer.name for layer in plan.kept)
    if len(schemes) == 1 and not _any_hits(kept, [layer.name for layer in plan.layers]):
        return _config_entry(types[schemes.pop()], kept)
    by_name = {
        layer.name: types[layer.scheme]
        for layer in sorted(plan.layers, key=lambda layer: layer.name)
    }
    data = {"fqn_to_config": by_name, "module_fqn_to_config": by_name}
    return _config_entry({"_type": "FqnToConfig", "_version": 1, "_data": data}, [])


def quant_type(scheme: Scheme, settings: SchemeSettings) -> dict[str, object]:
    """Return the torchao config of a scheme as torchao spells it in JSON."""
    if scheme is Scheme.INT8:
        return {
            "_type": "Int8DynamicActivationInt8WeightConfig",
            "_version": 2,
            "_data": {
                "act_mapping_type": _enum("MappingType", "SYMMETRIC"),
                "weight_only_decode": False,
                "granularity": _PER_ROW_CONFIG,
                "set_inductor_config": False,
                "reduce_range": False,
            },
        }
    if scheme is Scheme.FP8:
        dtype = _dtype(settings.weight_dtype)
        return {
            "_type": "Float8DynamicActivationFloat8WeightConfig",
            "_version": 2,
            "_data": {
                "activation_dtype": dtype,
                "weight_dtype": dtype,
                "granularity": [_PER_ROW_CONFIG, _PER_ROW_CONFIG],
                "packing_format": _enum("Float8PackingFormat", "PLAIN"),
                "mm_config": {"_type": "Float8MMConfig", "_version": 1, "_data": _FAST_ACCUM},
                "activation_value_lb": settings.activation_floor or None,
                "activation_value_ub": None,
                "kernel_preference": _AUTO_KERNEL,
                "set_inductor_config": False,
                "alg_id": 0,
            },
        }
    if scheme is Scheme.MXFP8:
        return {
            "_type": "MXDynamicActivationMXWeightConfig",
            "_version": 1,
            "_data": {
                "block_size": 32,
                "activation_dtype": _dtype("float8_e4m3fn"),
                "weight_dtype": _dtype("float8_e4m3fn"),
                "kernel_preference": _AUTO_KERNEL,
                "scaling_mode": _enum("ScaleCalculationMode", "RCEIL"),
            },
        }
    return {
        "_type": "NVFP4DynamicActivationNVFP4WeightConfig",
        "_version": 1,
        "_data": {"use_triton_kernel": False, "use_dynamic_per_tensor_scale": True, "step": None},
    }


def _config_entry(quant_type: dict[str, object], kept: list[str]) -> dict[str, object]:
    return {
        "quant_method": "torchao",
        "quant_type": {"default": quant_type},
        "modules_to_not_convert": kept,
    }


def _any_hits(kept: list[str], planned: list[str]) -> bool:
    """Tell whether a kept name, as diffusers looks for it, is found in a quantised weight's."""
    haystack = "\n".join(f"{name}.weight" for name in planned)
    return any(f"{name}." in haystack for name in kept)


def _enum(name: str, value: str) -> dict[str, object]:
    return {"_type": name, "_data": value}


def _dtype(name: str) -> dict[str, object]:
    return _enum("torch.dtype", name)


_PER_ROW: dict[str, object] = {"_type": "PerRow", "_data": {"dim": -1}}
_PER_ROW_CONFIG: dict[str, object] = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
_AUTO_KERNEL = _enum("KernelPreference", "AUTO")
_FAST_ACCUM: dict[str, object] = {
    "emulate": False,
    "use_fast_accum": True,
    "pad_inner_dim": False,
}
