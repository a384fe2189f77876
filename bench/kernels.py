"""Every fused op at production shapes, and at the shape of one decoder tile.

    python -m bench.kernels --json OUT

Times are GPU times, launches queued ahead; ``wall_ms`` is what a caller sees with an idle device.
Bandwidth counts each input read once and each output written once, against a copy in the same run.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from bench.kernel_case import Case, noise
from bench.kernels_gated import GATED, bench_swiglu_fp8_linear
from bench.kernels_gated import TOKENS as GATED_TOKENS
from bench.kernels_rms_norm import rms_norm_cases
from bench.kernels_wan import TOKENS as WAN
from bench.kernels_wan import bench_gelu_fp8_linear, wan_cases
from bench.timing import (
    copies_for,
    copy_ceiling_tb_s,
    envelope,
    gpu_ms,
    relative_error,
    require_gpu,
    wall_ms,
    write_json,
)
from quantpolicy.kernels.gated_residual import gated_residual, gated_residual_reference
from quantpolicy.kernels.layer_norm_modulate import (
    layer_norm_modulate,
    layer_norm_modulate_reference,
)
from quantpolicy.kernels.linear_gelu import launch_linear_gelu, linear_gelu_reference
from quantpolicy.kernels.qk_norm_rope_pack import qk_norm_rope_pack, qk_norm_rope_pack_reference
from quantpolicy.kernels.qk_rms_norm import qk_rms_norm, qk_rms_norm_reference
from quantpolicy.kernels.qk_rms_norm_rope import qk_rms_norm_rope, qk_rms_norm_rope_reference
from quantpolicy.kernels.rms_norm import rms_norm, rms_norm_reference
from quantpolicy.kernels.rope_qkv_pack import rope_qkv_pack, rope_qkv_pack_reference
from quantpolicy.kernels.scale_add_rms_norm import (
    scale_add_rms_norm,
    scale_add_rms_norm_reference,
)
from quantpolicy.kernels.swiglu import swiglu, swiglu_reference

HEADS, SIZE = 24, 128
COLUMNS = HEADS * SIZE
DECODER_COLUMNS = 2048
HUNYUAN = (1285, 27_030, 75_600, 118_800)
TILES = (1, 28)
TILE_TOKENS = 1285


def _heads(tokens: int) -> list[Tensor]:
    return [noise(1, tokens, HEADS, SIZE) for _ in range(3)]


def _tables(tokens: int) -> tuple[Tensor, Tensor]:
    angles = torch.rand(tokens, SIZE // 2, device="cuda") * 50
    return angles.cos().repeat_interleave(2, 1), angles.sin().repeat_interleave(2, 1)


def hunyuan_cases(tokens: int) -> list[Case]:
    """The ops of HunyuanVideo, bf16, at a number of image tokens and 256 text tokens."""
    text = 256
    row = COLUMNS * 2
    packed = 6 * (tokens + text) * row + tokens * SIZE * 8
    weights = [noise(SIZE) for _ in range(4)]

    def pack() -> tuple[object, ...]:
        return (*_heads(tokens), *_heads(text), *_tables(tokens))

    def norm_pack() -> tuple[object, ...]:
        return (*_heads(tokens), *_heads(text), *weights, *_tables(tokens), 1e-6)

    def modulation() -> tuple[Tensor, ...]:
        return noise(1, 6 * COLUMNS).chunk(6, dim=1)

    return [
        Case("rope_qkv_pack", tokens, rope_qkv_pack, rope_qkv_pack_reference, pack, packed),
        Case(
            "qk_norm_rope_pack",
            tokens,
            qk_norm_rope_pack,
            qk_norm_rope_pack_reference,
            norm_pack,
            packed,
        ),
        Case(
            "qk_rms_norm",
            tokens,
            qk_rms_norm,
            qk_rms_norm_reference,
            lambda: (*_heads(tokens)[:2], *weights[:2], 1e-6),
            4 * tokens * row,
        ),
        Case(
            "layer_norm_modulate",
            tokens,
            layer_norm_modulate,
            layer_norm_modulate_reference,
            lambda: (noise(1, tokens, COLUMNS), *modulation()[:2], 1e-6),
            2 * tokens * row,
        ),
        Case(
            "gated_residual",
            tokens,
            gated_residual,
            gated_residual_reference,
            lambda: (noise(1, tokens, COLUMNS), noise(1, tokens, COLUMNS), modulation()[2]),
            3 * tokens * row,
        ),
    ]


def decoder_cases(tiles: int) -> list[Case]:
    """The ops of the MiniMax-H3 decoder, fp16 with an fp32 stream, at a number of tiles."""
    tokens, half = tiles * TILE_TOKENS, torch.float16
    row = DECODER_COLUMNS * 2
    weight, scale = (noise(DECODER_COLUMNS, dtype=torch.float32) for _ in range(2))

    def stream() -> Tensor:
        return noise(tiles, TILE_TOKENS, DECODER_COLUMNS, dtype=torch.float32)

    def update() -> Tensor:
        return noise(tiles, TILE_TOKENS, DECODER_COLUMNS, dtype=half)

    def rotary() -> tuple[object, ...]:
        fused = noise(tiles, TILE_TOKENS, 3 * DECODER_COLUMNS, dtype=half)
        q, k, _ = (part.unflatten(2, (32, 64)) for part in fused.chunk(3, dim=-1))
        angles = torch.rand(tiles, TILE_TOKENS, 1, 24, device="cuda").tile(2) * 6
        return q, k, angles.cos(), angles.sin(), 1e-5

    return [
        Case(
            "rms_norm",
            tokens,
            rms_norm,
            rms_norm_reference,
            lambda: (stream(), weight, 1e-5, half),
            3 * tokens * row,
        ),
        Case(
            "scale_add_rms_norm",
            tokens,
            scale_add_rms_norm,
            scale_add_rms_norm_reference,
            lambda: (stream(), update(), scale, weight, 1e-5),
            6 * tokens * row,
        ),
        Case(
            "gated_residual fp32",
            tokens,
            gated_residual,
            gated_residual_reference,
            lambda: (stream(), update(), scale),
            5 * tokens * row,
        ),
        Case(
            "qk_rms_norm_rope",
            tokens,
            qk_rms_norm_rope,
            qk_rms_norm_rope_reference,
            rotary,
            4 * tokens * row + tokens * 48 * 8,
        ),
        Case(
            "swiglu",
            tokens,
            swiglu,
            swiglu_reference,
            lambda: (noise(tiles, TILE_TOKENS, 8 * DECODER_COLUMNS, dtype=half),),
            12 * tokens * row,
        ),
    ]


def bench_case(case: Case, ceiling: float) -> dict[str, object]:
    """Time one op and the eager chain over rotating inputs, and compare their results."""
    inputs = [case.make() for _ in range(copies_for(case.moved_bytes, 8))]
    fused = [(lambda args=args: case.fused(*args)) for args in inputs]
    eager = [(lambda args=args: case.eager(*args)) for args in inputs]
    found, expected = case.fused(*inputs[0]), case.eager(*inputs[0])
    pairs = list(zip(_tensors(found), _tensors(expected), strict=True))
    ms = gpu_ms(fused, 30)
    rate = case.moved_bytes / ms / 1e9
    return {
        "op": case.name,
        "tokens": case.tokens,
        "ms": ms,
        "eager_ms": gpu_ms(eager, 10),
        "wall_ms": wall_ms(fused, 30),
        "eager_wall_ms": wall_ms(eager, 30),
        "tb_s": rate,
        "of_copy": rate / ceiling,
        "error": max(relative_error(one, other) for one, other in pairs),
        "equal": all(torch.equal(one, other) for one, other in pairs),
    }


def bench_linear_gelu(tokens: int) -> dict[str, object]:
    """The GEMM with its epilogue against two launches."""
    x, weight = noise(tokens, COLUMNS), noise(4 * COLUMNS, COLUMNS) / 55
    args = (x, weight, noise(4 * COLUMNS))
    return {
        "op": "linear_gelu",
        "tokens": tokens,
        "ms": gpu_ms([lambda: launch_linear_gelu(*args)], 10),
        "eager_ms": gpu_ms([lambda: linear_gelu_reference(*args)], 10),
        "gemm_ms": gpu_ms([lambda: torch.nn.functional.linear(*args)], 10),
        "error": relative_error(launch_linear_gelu(*args), linear_gelu_reference(*args)),
    }


def _tensors(result: object) -> list[Tensor]:
    """Return the tensors of a result, e4m3 codes as numbers."""
    found = [result] if isinstance(result, Tensor) else list(result)  # type: ignore[call-overload]
    return [x.half() if x.dtype is torch.float8_e4m3fn else x for x in found]


def _short(row: dict[str, object]) -> str:
    cells = [f"{row['op']:26} {row['tokens']:>7}"]
    cells += [
        f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row.items()
        if name not in ("op", "tokens")
    ]
    return " | ".join(cells)


def main() -> None:
    """Run everything and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", required=True)
    arguments = parser.parse_args()
    require_gpu(parser, arguments.json)
    torch.manual_seed(0)
    ceiling = copy_ceiling_tb_s()
    rows = [bench_linear_gelu(tokens) for tokens in (256, 27_030, 27_286)]
    rows += [bench_gelu_fp8_linear(tokens) for tokens in WAN]
    for tokens in GATED_TOKENS:
        for shape in GATED:
            rows.append(bench_swiglu_fp8_linear(shape, tokens, ceiling))
            torch.cuda.empty_cache()
    cases = [case for tokens in HUNYUAN for case in hunyuan_cases(tokens)]
    cases += [case for tokens in WAN for case in wan_cases(tokens)]
    cases += rms_norm_cases()
    cases += [case for tiles in TILES for case in decoder_cases(tiles)]
    for case in cases:
        rows.append(bench_case(case, ceiling))
        torch.cuda.empty_cache()
    for row in rows:
        print(_short(row), flush=True)
    write_json(arguments.json, envelope(copy_tb_s=ceiling, ops=rows))


if __name__ == "__main__":
    with torch.no_grad():
        main()
