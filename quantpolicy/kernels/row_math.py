"""Triton functions that turn the values of a row into codes and a scale, as torchao does.

Shared by the row quantisers and by every producer that ends in a row quantisation. A scale is
rounded to the dtype of the activation, as torchao's eager chain computes it there.
"""

from __future__ import annotations

import triton
import triton.language as tl

INVERSE_E4M3_MAX = tl.constexpr(1.0 / 448.0)
INVERSE_INT8_HALF_RANGE = tl.constexpr(1.0 / 127.5)
FP16_TINY = tl.constexpr(2.0**-14)
INT8_EPS = tl.constexpr(2.0**-23)
ROUNDING_MAGIC = tl.constexpr(12582912.0)
MINUS_LOG2_E = tl.constexpr(-1.4426950408889634)

# Triton's interpreter runs no assembly; the plain expressions beside it are what it stands for.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_SIGMOID = tl.constexpr(
    "{ .reg .f32 power;"
    " ex2.approx.ftz.f32 power, $1;"
    " add.ftz.f32 power, power, 0f3F800000;"
    " rcp.approx.ftz.f32 $0, power; }"
)
_ROUND_TWO_TO_BF16 = tl.constexpr(
    "{ .reg .b32 pair;"
    " cvt.rn.bf16x2.f32 pair, $3, $2;"
    " shl.b32 $0, pair, 16;"
    " and.b32 $1, pair, 0xFFFF0000; }"
)


@triton.jit
def product(x, y):
    """Return x * y in fp32, rounded before anything is added: no fused multiply-add takes it."""
    if INTERPRETED:
        out = x * y
    else:
        out = tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )
    return out


@triton.jit
def larger(a, b):
    """Return the larger value; NaN wins."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def row_amax(x):
    """Return the largest magnitude of each row, [R, K] to [R]; NaN if the row holds one."""
    return tl.reduce(tl.abs(x), 1, larger)


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)) of fp32 values, two instructions of the special function unit."""
    if INTERPRETED:
        result = 1.0 / (1.0 + tl.exp(-x))
    else:
        result = tl.inline_asm_elementwise(
            _SIGMOID, "=f,f", [x * MINUS_LOG2_E], dtype=tl.float32, is_pure=True, pack=1
        )
    return result


@triton.jit
def rounded_pairs(x, DTYPE: tl.constexpr):
    """Round fp32 values to a dtype and give them back as fp32, two bf16 values an instruction."""
    # A tile of one value has no pair.
    single: tl.constexpr = x.shape[-1] == 1
    if INTERPRETED or single or tl.bfloat16 != DTYPE:
        result = x.to(DTYPE).to(tl.float32)
    else:
        result = tl.inline_asm_elementwise(
            _ROUND_TWO_TO_BF16, "=f,=f,f,f", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    return result


@triton.jit
def fp8_scale(amax, floor, DTYPE: tl.constexpr):
    """Return the scale of an e4m3 row whose magnitudes reach ``amax``."""
    unrounded = larger(amax, tl.cast(floor, tl.float32)) * INVERSE_E4M3_MAX
    scale = unrounded.to(DTYPE).to(tl.float32)
    if tl.float16 == DTYPE:
        scale = tl.where(unrounded < FP16_TINY, unrounded, scale)
    return scale


@triton.jit
def fp8_codes(x, scale, EXACT_DIVISION: tl.constexpr):
    """Return x / scale, correctly rounded, as e4m3.

    One reciprocal a row and a Newton step an element give the rounded quotient, signed zeros
    included, for bf16 and fp16 values over a scale that is far from underflow.
    """
    if EXACT_DIVISION:
        quotient = tl.div_rn(x, scale)
    else:
        inverse = tl.div_rn(1.0, scale)
        finite = tl.where(scale == float("inf"), 0.0, scale)
        estimate = x * inverse
        quotient = tl.fma(tl.fma(estimate, finite, -x), -inverse, estimate)
    return quotient.to(tl.float8e4nv)


@triton.jit
def int8_scale(amax, DTYPE: tl.constexpr):
    """Return the scale of a symmetric int8 row whose magnitudes reach ``amax``."""
    scale = (amax * INVERSE_INT8_HALF_RANGE).to(DTYPE).to(tl.float32)
    return larger(scale, INT8_EPS)


@triton.jit
def int8_codes(x, scale):
    """Return x times the reciprocal of scale, rounded half to even and clamped, as int8.

    Adding 1.5 * 2^23 rounds in fp32. The bounds stand between product and sum, so that no fused
    multiply-add can take both.
    """
    value = x * tl.div_rn(1.0, scale)
    value = tl.minimum(tl.maximum(value, -128.0), 127.0)
    rounded = value + ROUNDING_MAGIC
    return (rounded.to(tl.int32, bitcast=True) & 0xFF).to(tl.int8)
