"""The vocabulary: schemes, tiers, qualities, causes, and what a scheme's stored bytes look like.

What a scheme requires of a host or a layer is policy and lives in families.yaml, not here.
"""

from __future__ import annotations

from enum import StrEnum


class Scheme(StrEnum):
    """How the weights of a component are stored and multiplied."""

    DENSE = "dense"
    INT8 = "int8"
    FP8 = "fp8"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"
    LAYERWISE_FP8 = "layerwise_fp8"


class SchemeChoice(StrEnum):
    """What a request may say of one component: a scheme, or ``auto``."""

    AUTO = "auto"
    DENSE = "dense"
    INT8 = "int8"
    FP8 = "fp8"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"
    LAYERWISE_FP8 = "layerwise_fp8"


class Tier(StrEnum):
    """Speed tier: ``off`` is the bit-exact stock reference, ``auto`` lets the resolver choose."""

    OFF = "off"
    AUTO = "auto"
    EAGER = "eager"
    COMPILE = "compile"
    MAX = "max"


class Quality(StrEnum):
    """Which kernels may be mounted: those that relax nothing, or numerically relaxed ones too."""

    LOSSLESS = "lossless"
    HIGH = "high"


class Contract(StrEnum):
    """What a mounted kernel promises of its result, and with it when it may be mounted.

    lossless: equal to the stock model bit for bit, verified at the first use of every signature.
    equivalent: equal but for rounding, because it only leaves out what counts nothing; mounted
        wherever the tier is not off.
    high: numerically relaxed; mounted where the request's quality is high.
    """

    LOSSLESS = "lossless"
    EQUIVALENT = "equivalent"
    HIGH = "high"


class Execution(StrEnum):
    """How quantised tensors are multiplied: torchao subclasses, or plain tensors in fused ops."""

    TORCHAO = "torchao"
    FUSED = "fused"


class Confidence(StrEnum):
    """``measured``: evidence for this family and scheme; ``derived``: by the probe or analogy."""

    MEASURED = "measured"
    DERIVED = "derived"


class ComponentKind(StrEnum):
    """The role of a pipeline component."""

    DENOISER = "denoiser"
    TEXT_ENCODER = "text_encoder"
    VAE = "vae"


class Cause(StrEnum):
    """Why something was decided. A rule may use the first group only; the resolver uses both."""

    ZERO_ROWS = "zero_rows"
    SMALL_M = "small_m"
    ALIGNMENT = "alignment"
    FP32_KEPT = "fp32_kept"
    OUTLIERS = "outliers"
    BLACK_FRAMES = "black_frames"
    SEMANTIC_DAMAGE = "semantic_damage"
    SLOWER = "slower"
    NOT_VALIDATED = "not_validated"

    REQUESTED = "requested"
    TIER_OFF = "tier_off"
    FIRST_ACCEPTED = "first_accepted"
    CAPABILITY = "capability"
    MEMORY = "memory"
    WEIGHT_DTYPE = "weight_dtype"
    MIN_FEATURES = "min_features"
    NO_LAYERS = "no_layers"
    CONFIDENCE = "confidence"
    NOT_OFFERED = "not_offered"
    DENSE_COMPONENT = "dense_component"


# Schemes stored as one byte a value and one scale a row, which fused ops multiply as they are.
ROW_SCALED = frozenset({Scheme.INT8, Scheme.FP8})

RULE_CAUSES = frozenset(
    {
        Cause.ZERO_ROWS,
        Cause.SMALL_M,
        Cause.ALIGNMENT,
        Cause.FP32_KEPT,
        Cause.OUTLIERS,
        Cause.BLACK_FRAMES,
        Cause.SEMANTIC_DAMAGE,
        Cause.SLOWER,
        Cause.NOT_VALIDATED,
    }
)

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


def weight_bytes(scheme: Scheme, out_features: int, in_features: int, dtype: str) -> int:
    """Return the stored bytes of one [out_features, in_features] weight, data plus scales.

    Args:
        dtype: the dense dtype of the weight, such as ``bfloat16``.

    Source: the tensor layouts of torchao 0.18: fp32 scale per row for int8 (with an int8 zero
        point) and fp8; one e8m0 byte per 32 values for mxfp8; one e4m3 byte per 16 values and one
        fp32 per tensor for nvfp4; one fp32 for layerwise fp8. Block scales fill tiles of 128
        rows by 4.
    """
    numel = out_features * in_features
    if scheme is Scheme.DENSE:
        return numel * DTYPE_BYTES[dtype]
    if scheme is Scheme.INT8:
        return numel + 5 * out_features
    if scheme is Scheme.FP8:
        return numel + 4 * out_features
    if scheme is Scheme.MXFP8:
        return numel + _tiled(out_features, in_features // 32)
    if scheme is Scheme.NVFP4:
        return numel // 2 + _tiled(out_features, in_features // 16) + 4
    return numel + 4


def _tiled(rows: int, columns: int) -> int:
    """Return the number of block scales after both sides are filled up to whole tiles."""
    return -(-rows // 128) * 128 * (-(-columns // 4) * 4)
