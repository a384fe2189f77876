"""One weight to one torchao tensor, and the parts such a tensor is stored as.

The tensors are those that torchao's ``quantize_`` makes of ``torchao_config``, attribute for
attribute, but are built through the tensor classes: no device is asserted and no compiler flag set.
Layerwise fp8 has no such config; its tensor is torchao's too, so that the weight keeps its dtype in
the eyes of the model (T5 casts its activations to a weight's dtype).

What the stored parts hold (bf16 weight W [N, K]; every step rounds to the dtype named):

    floor = bf16(1e-12)                            amax = bf16 max |W| over the row, block or tensor
    fp8    scale [N, 1] f32 = f32(bf16(max(amax, floor) / 448))       (240 for float8_e4m3fnuz)
           qdata [N, K]     = e4m3(clamp(f32(W) / scale, -448, 448))
    int8   scale [N, 1] f32 = f32(max(bf16(amax / 127.5), bf16(2^-23)))    zero_point [N, 1] i8 = 0
           qdata [N, K]     = clamp(round(f32(W) * (1 / scale)), -128, 127)
    mxfp8  one e8m0 scale per 32 values, rounded up; swizzled in tiles of 128 rows by 4 scales
    nvfp4  per_tensor_scale f32 = f32(max(amax, floor)) / 2688; one e4m3 scale per 16 values,
           swizzled likewise; two e2m1 values a byte
    layerwise_fp8    qdata = e4m3(W), with one scale of 1: a storage format, multiplied as W's dtype

All of it gives the same bits on a CPU and on CUDA; nvfp4 does because it is computed on the CPU.

The floor differs from ``quantize_`` only for a row (nvfp4: a tensor) whose absolute maximum is
below it. There ``quantize_`` divides by a scale of zero and stores NaN; here zeros stay zeros.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torchao.prototype.mx_formats import (
    MXDynamicActivationMXWeightConfig,
    NVFP4DynamicActivationNVFP4WeightConfig,
    ScaleCalculationMode,
)
from torchao.prototype.mx_formats.mx_tensor import MXTensor, QuantizeTensorToMXKwargs
from torchao.prototype.mx_formats.nvfp4_tensor import (
    NVFP4Tensor,
    QuantizeTensorToNVFP4Kwargs,
    per_tensor_amax_to_scale,
)
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    Float8MMConfig,
    Float8Tensor,
    Int8DynamicActivationInt8WeightConfig,
    Int8Tensor,
    PerRow,
)
from torchao.quantization.quantize_.common import KernelPreference
from torchao.quantization.quantize_.workflows import (
    QuantizeTensorToFloat8Kwargs,
    QuantizeTensorToInt8Kwargs,
)
from torchao.utils import TorchAOBaseTensor

from quantpolicy.errors import Mismatch, PlanMismatchError
from quantpolicy.kernels.stored_scheme import scheme_of
from quantpolicy.plan import SchemeSettings
from quantpolicy.schemes import Scheme

WEIGHT_FLOOR = 1e-12
MX_BLOCK = 32
NVFP4_BLOCK = 16
GEMM_SCHEMES = frozenset({Scheme.INT8, Scheme.FP8, Scheme.MXFP8, Scheme.NVFP4})

_BFLOAT16_ONLY = frozenset({Scheme.FP8, Scheme.MXFP8, Scheme.NVFP4})
_IN_FEATURES_MULTIPLE = {Scheme.MXFP8: MX_BLOCK, Scheme.NVFP4: NVFP4_BLOCK}


@torch.no_grad()
def quantise_weight(weight: torch.Tensor, scheme: Scheme, settings: SchemeSettings) -> torch.Tensor:
    """Return the weight quantised, on the weight's own device.

    Shapes: ``weight``: [out_features, in_features], floating point, bf16 for all but int8.

    Raises:
        PlanMismatchError: the weight's dtype or shape does not suit the scheme, or a value in it
            is not finite (layerwise fp8: or beyond the range of fp8).
    """
    _check_weight(weight, scheme)
    dense = weight.detach().contiguous()
    quantised = _QUANTISERS[scheme](dense, settings)
    _check_finite(dense, quantised, scheme)
    return quantised


def torchao_config(scheme: Scheme, settings: SchemeSettings) -> object:
    """Return the public torchao config whose tensors ``quantise_weight`` makes.

    For a checkpoint's ``quantization_config``: none of the configs sets a compiler flag.
    """
    if scheme is Scheme.INT8:
        return Int8DynamicActivationInt8WeightConfig(
            granularity=PerRow(), set_inductor_config=False
        )
    if scheme is Scheme.FP8:
        dtype = _fp8_dtype(settings)
        return Float8DynamicActivationFloat8WeightConfig(
            activation_dtype=dtype,
            weight_dtype=dtype,
            granularity=PerRow(),
            mm_config=Float8MMConfig(use_fast_accum=True),
            activation_value_lb=settings.activation_floor or None,
            set_inductor_config=False,
        )
    if scheme is Scheme.MXFP8:
        return MXDynamicActivationMXWeightConfig()
    if scheme is Scheme.NVFP4:
        return NVFP4DynamicActivationNVFP4WeightConfig(use_triton_kernel=False)
    raise ValueError(f"{scheme} has no torchao config")


def tensor_parts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the plain tensors a weight is stored as, by torchao's names.

    ``qdata`` is the data, every other part belongs to the scales; a plain tensor is its own
    ``qdata``.
    """
    if not isinstance(tensor, TorchAOBaseTensor):
        return {"qdata": tensor}
    names, _ = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}


def stored_bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes of a weight's data and of its scales, counted on its parts."""
    sizes = {
        name: part.numel() * part.element_size() for name, part in tensor_parts(tensor).items()
    }
    data = sizes.pop("qdata")
    return data, sum(sizes.values())


def _quantise_int8(weight: torch.Tensor, settings: SchemeSettings) -> torch.Tensor:  # noqa: ARG001
    tensor: torch.Tensor = Int8Tensor.from_hp(
        weight,
        granularity=PerRow(),
        act_quant_kwargs=QuantizeTensorToInt8Kwargs(granularity=PerRow()),
    )
    return tensor


def _quantise_fp8(weight: torch.Tensor, settings: SchemeSettings) -> torch.Tensor:
    dtype = _fp8_dtype(settings)
    tensor: torch.Tensor = Float8Tensor.from_hp(
        weight,
        float8_dtype=dtype,
        granularity=PerRow(),
        mm_config=Float8MMConfig(use_fast_accum=True),
        hp_value_lb=WEIGHT_FLOOR,
        act_quant_kwargs=QuantizeTensorToFloat8Kwargs(
            float8_dtype=dtype,
            granularity=PerRow(),
            hp_value_lb=settings.activation_floor or None,
        ),
    )
    return tensor


def _quantise_mxfp8(weight: torch.Tensor, settings: SchemeSettings) -> torch.Tensor:  # noqa: ARG001
    tensor: torch.Tensor = MXTensor.to_mx(
        weight,
        torch.float8_e4m3fn,
        block_size=MX_BLOCK,
        scaling_mode=ScaleCalculationMode.RCEIL,
        kernel_preference=KernelPreference.AUTO,
        act_quant_kwargs=QuantizeTensorToMXKwargs(
            elem_dtype=torch.float8_e4m3fn,
            block_size=MX_BLOCK,
            scaling_mode=ScaleCalculationMode.RCEIL,
            kernel_preference=KernelPreference.AUTO,
            is_swizzled_scales=True,
        ),
        is_swizzled_scales=True,
    )
    return tensor


def _quantise_nvfp4(weight: torch.Tensor, settings: SchemeSettings) -> torch.Tensor:  # noqa: ARG001
    # CUDA divides by a constant through its reciprocal, which rounds nvfp4's fp32 scales otherwise
    # than a CPU does. Computed on the CPU everywhere, a baked weight is the one made at run time.
    values = weight.cpu()
    amax = values.abs().max().clamp(min=WEIGHT_FLOOR)
    tensor: torch.Tensor = NVFP4Tensor.to_nvfp4(
        values,
        block_size=NVFP4_BLOCK,
        per_tensor_scale=per_tensor_amax_to_scale(amax),
        is_swizzled_scales=True,
        act_quant_kwargs=QuantizeTensorToNVFP4Kwargs(
            use_dynamic_per_tensor_scale=True, is_swizzled_scales=True
        ),
    )
    return tensor.to(weight.device)


def _cast_fp8(weight: torch.Tensor, settings: SchemeSettings) -> torch.Tensor:
    tensor: torch.Tensor = Float8Tensor(
        weight.to(_fp8_dtype(settings)),
        torch.ones(1, 1, device=weight.device),
        block_size=list(weight.shape),
        dtype=weight.dtype,
    )
    return tensor


_QUANTISERS: dict[Scheme, Callable[[torch.Tensor, SchemeSettings], torch.Tensor]] = {
    Scheme.INT8: _quantise_int8,
    Scheme.FP8: _quantise_fp8,
    Scheme.MXFP8: _quantise_mxfp8,
    Scheme.NVFP4: _quantise_nvfp4,
    Scheme.LAYERWISE_FP8: _cast_fp8,
}


def _fp8_dtype(settings: SchemeSettings) -> torch.dtype:
    dtype = getattr(torch, settings.weight_dtype)
    assert isinstance(dtype, torch.dtype), settings.weight_dtype
    return dtype


def _refuse(scheme: Scheme, code: str, expected: str, found: str, remedy: str) -> PlanMismatchError:
    return PlanMismatchError(
        "weight", (Mismatch(code, f"{scheme.value} weight", expected, found),), remedy=remedy
    )


def _check_weight(weight: torch.Tensor, scheme: Scheme) -> None:
    if scheme not in _QUANTISERS:
        raise ValueError(f"{scheme} stores no quantised weight")
    if weight.dim() != 2 or scheme_of(weight) is not Scheme.DENSE:
        raise _refuse(
            scheme,
            "weight_kind",
            "a dense matrix",
            f"{type(weight).__name__} {weight.dtype} of {weight.dim()} dimensions",
            "quantise the dense weight of a Linear",
        )
    if scheme in _BFLOAT16_ONLY and weight.dtype is not torch.bfloat16:
        raise _refuse(
            scheme,
            "weight_dtype",
            "torch.bfloat16",
            str(weight.dtype),
            "load the component in bfloat16, or choose int8",
        )
    multiple = _IN_FEATURES_MULTIPLE.get(scheme, 1)
    if weight.shape[1] % multiple or (scheme is Scheme.NVFP4 and weight.shape[0] % multiple):
        raise _refuse(
            scheme,
            "weight_alignment",
            f"features that are multiples of {multiple}",
            str(tuple(weight.shape)),
            "keep this Linear dense",
        )


def _check_finite(dense: torch.Tensor, quantised: torch.Tensor, scheme: Scheme) -> None:
    # Only a scale that is a float shows what was not finite; the others saturate without a word.
    if scheme in (Scheme.MXFP8, Scheme.LAYERWISE_FP8):
        judges = [dense.abs().amax()]
    else:
        judges = [part for name, part in tensor_parts(quantised).items() if name != "qdata"]
    limit = torch.finfo(torch.float32).max
    if scheme is Scheme.LAYERWISE_FP8:
        limit = torch.finfo(tensor_parts(quantised)["qdata"].dtype).max
    if not all(bool((judge.float() <= limit).all()) for judge in judges):
        raise _refuse(
            scheme,
            "weight_not_finite",
            f"finite values within {limit:g}",
            "others",
            "repair or re-download the dense checkpoint, or keep this Linear dense",
        )
