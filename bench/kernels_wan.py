"""The ops of Wan at the shapes of its 5B model, for ``bench.kernels``."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.kernel_case import Case, noise
from bench.timing import gpu_ms, relative_error
from quantpolicy.kernels.add_layer_norm_fp8 import (
    add_layer_norm_fp8,
    add_layer_norm_fp8_reference,
)
from quantpolicy.kernels.gated_residual import gated_residual, gated_residual_reference
from quantpolicy.kernels.gelu_fp8_linear import (
    gelu_fp8_linear_reference,
    gelu_quantise,
    gelu_rows,
    launch_gelu_fp8_linear,
)
from quantpolicy.kernels.layer_norm_fp8 import layer_norm_fp8, layer_norm_fp8_reference
from quantpolicy.kernels.layer_norm_fp32 import layer_norm_fp32, layer_norm_fp32_reference
from quantpolicy.kernels.qk_norm_rope_across_heads import (
    qk_norm_rope_across_heads,
    qk_norm_rope_across_heads_reference,
)
from quantpolicy.kernels.rms_norm import rms_norm, rms_norm_reference
from quantpolicy.kernels.row_quantise_fp8 import row_quantise_fp8

TOKENS = (1_120, 27_280)
COLUMNS, SIZE, FFN = 3072, 128, 14_336
EPS, FLOOR = 1e-6, 1e-12


def wan_cases(tokens: int) -> list[Case]:
    """The ops of Wan's blocks, bf16 with an fp32 table of modulation, at a number of tokens."""
    row = tokens * COLUMNS * 2
    weight, bias = (noise(COLUMNS, dtype=torch.float32) for _ in range(2))
    half_weight, table = noise(COLUMNS), noise(6, COLUMNS, dtype=torch.float32).unbind(0)

    def rows() -> Tensor:
        return noise(1, tokens, COLUMNS)

    def by_sample() -> list[tuple[Tensor, Tensor]]:
        return list(zip(noise(1, 6, COLUMNS).unbind(1), table, strict=True))

    def by_token() -> list[tuple[Tensor, Tensor]]:
        return list(zip(noise(1, tokens, 6, COLUMNS).unbind(2), table, strict=True))

    def rotary() -> tuple[object, ...]:
        angles = torch.rand(1, tokens, 1, SIZE // 2, device="cuda").repeat_interleave(2, -1) * 50
        return rows(), rows(), half_weight, half_weight, angles.cos(), angles.sin(), EPS

    norm = (layer_norm_fp32, layer_norm_fp32_reference)
    add = (gated_residual, gated_residual_reference)
    add_norm = (add_layer_norm_fp8, add_layer_norm_fp8_reference)
    ends = (EPS, FLOOR)

    def sums() -> tuple[Tensor, Tensor]:
        return rows(), rows()

    return [
        Case(
            "qk_norm_rope_across_heads",
            tokens,
            qk_norm_rope_across_heads,
            qk_norm_rope_across_heads_reference,
            rotary,
            4 * row + tokens * SIZE * 8,
        ),
        Case(
            "rms_norm bf16",
            tokens,
            rms_norm,
            rms_norm_reference,
            lambda: (rows(), half_weight, EPS, torch.bfloat16),
            2 * row,
        ),
        Case(
            "layer_norm_fp32",
            tokens,
            *norm,
            lambda: (rows(), None, None, *by_sample()[1], *by_sample()[0], EPS),
            2 * row,
        ),
        Case(
            "layer_norm_fp32 affine",
            tokens,
            *norm,
            lambda: (rows(), weight, bias, None, None, None, None, EPS),
            2 * row,
        ),
        Case(
            "layer_norm_fp32 token",
            tokens,
            *norm,
            lambda: (rows(), None, None, *(part for pair in by_token()[:2] for part in pair), EPS),
            4 * row,
        ),
        Case(
            "layer_norm_fp8",
            tokens,
            layer_norm_fp8,
            layer_norm_fp8_reference,
            lambda: (rows(), None, None, *by_sample()[1], *by_sample()[0], EPS, FLOOR),
            row + row // 2,
        ),
        Case(
            "add_layer_norm_fp8",
            tokens,
            *add_norm,
            lambda: (*sums(), None, None, None, None, *by_sample()[1], *by_sample()[0], *ends),
            3 * row + row // 2,
        ),
        Case(
            "add_layer_norm_fp8 gated",
            tokens,
            *add_norm,
            lambda: (*sums(), *by_sample()[2], weight, bias, None, None, None, None, *ends),
            3 * row + row // 2,
        ),
        Case(
            "gated_residual keep",
            tokens,
            *add,
            lambda: (rows(), rows(), by_sample()[2][0], True, table[2]),
            3 * row,
        ),
        Case(
            "gated_residual token",
            tokens,
            *add,
            lambda: (rows(), rows(), by_token()[2][0], True, table[2]),
            4 * row,
        ),
    ]


def bench_gelu_fp8_linear(tokens: int) -> dict[str, object]:
    """The GELU, its quantisation and the GEMM behind them against three launches."""
    x = noise(1, tokens, FFN)
    weight, scale = row_quantise_fp8(noise(COLUMNS, FFN) / FFN**0.5, 0.0)
    args = (x, None, weight, scale, noise(COLUMNS), FLOOR)
    return {
        "op": "gelu_fp8_linear",
        "tokens": tokens,
        "ms": gpu_ms([lambda: launch_gelu_fp8_linear(*args)], 10),
        "eager_ms": gpu_ms([lambda: gelu_fp8_linear_reference(*args)], 10),
        "quantise_ms": gpu_ms([lambda: gelu_quantise(x, None, FLOOR)], 30),
        "eager_quantise_ms": gpu_ms([lambda: row_quantise_fp8(gelu_rows(x, None), FLOOR)], 10),
        "error": relative_error(launch_gelu_fp8_linear(*args), gelu_fp8_linear_reference(*args)),
    }
