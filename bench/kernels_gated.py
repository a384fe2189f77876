"""SwiGLU before an fp8 Linear at the shapes of released models, for ``bench.kernels``."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from bench.kernel_case import noise
from bench.timing import copies_for, gpu_ms, relative_error
from quantpolicy.kernels.row_quantise_fp8 import row_quantise_fp8
from quantpolicy.kernels.swiglu_fp8_linear import (
    launch_swiglu_fp8_linear,
    swiglu_fp8_linear_reference,
    swiglu_quantise,
    swiglu_rows,
)

# An image of 1024x1024 with its prompt, and the packed sequence of MiniMax-H3.
TOKENS = (4_352, 17_738)
FLOOR = 1e-12


class Gated(NamedTuple):
    """One feed-forward, or block with one beside its attention.

    Args:
        hidden: channels of value and gate each.
        width: channels of the attention beside them.
        columns: of the result.
        projections: whether value and gate are halves of one, or two; ahead of them in the one lie
            three parts as wide as the attention.
    """

    name: str
    hidden: int
    width: int
    columns: int
    projections: int = 1


GATED = (
    Gated("flux.2-dev", 18_432, 0, 6144),
    Gated("flux.2-dev single", 18_432, 6144, 6144),
    Gated("z-image", 10_240, 0, 3840, projections=2),
    Gated("minimax-h3", 14_336, 0, 5376),
)


def _inputs(shape: Gated, tokens: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return value, gate and head as a model gives them."""
    if shape.projections == 2:
        return noise(1, tokens, shape.hidden), noise(1, tokens, shape.hidden), None
    projected = noise(1, tokens, 3 * shape.width + 2 * shape.hidden)[..., 3 * shape.width :]
    gate, value = projected.chunk(2, dim=-1)
    return value, gate, noise(1, tokens, shape.width) if shape.width else None


def bench_swiglu_fp8_linear(shape: Gated, tokens: int, ceiling: float) -> dict[str, object]:
    """The gate, its quantisation and the GEMM behind them against four launches.

    Args:
        ceiling: of a copy, in TB/s.
    """
    row = shape.hidden + shape.width
    # Value, gate and head in two bytes each, codes in one, and a scale.
    moved_bytes = tokens * (4 * shape.hidden + 2 * shape.width + row + 4)
    inputs = [_inputs(shape, tokens) for _ in range(copies_for(moved_bytes, 8))]
    weight, scale = row_quantise_fp8(noise(shape.columns, row) / row**0.5, 0.0)
    operands = (weight, scale, None, FLOOR)
    quantise_ms = gpu_ms([lambda x=x: swiglu_quantise(*x, FLOOR) for x in inputs], 30)
    found = launch_swiglu_fp8_linear(*inputs[0], *operands)
    return {
        "op": f"swiglu_fp8_linear {shape.name}",
        "tokens": tokens,
        "ms": gpu_ms([lambda x=x: launch_swiglu_fp8_linear(*x, *operands) for x in inputs], 10),
        "eager_ms": gpu_ms(
            [lambda x=x: swiglu_fp8_linear_reference(*x, *operands) for x in inputs], 10
        ),
        "quantise_ms": quantise_ms,
        "eager_quantise_ms": gpu_ms(
            [lambda x=x: row_quantise_fp8(swiglu_rows(*x), FLOOR) for x in inputs], 10
        ),
        "quantise_bytes": moved_bytes,
        "quantise_of_copy": moved_bytes / quantise_ms / 1e9 / ceiling,
        "error": relative_error(found, swiglu_fp8_linear_reference(*inputs[0], *operands)),
    }
