"""Block shapes of the GEMM with a SwiGLU in its epilogue, against the vendor GEMM and two passes.

    python -m bench.swiglu_tiles --json OUT [--rows 35980 1285] [--seconds 0.5]

Sizes are those of the MiniMax-H3 decoder: 28 tiles and one. Every figure is the mean of calls that
follow each other for half a second at least, behind as long a warm-up, because a GPU at its power
limit is slower than in a short burst; the baseline is measured before and after the candidates. The
rule in quantpolicy.kernels.gated_tiles comes from here.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from triton.runtime.errors import OutOfResources

from bench.timing import (
    copies_for,
    envelope,
    relative_error,
    require_gpu,
    sustained_ms,
    write_json,
)
from quantpolicy.kernels.gated_tiles import GATED_TILES, GatedTiles
from quantpolicy.kernels.swiglu import swiglu
from quantpolicy.kernels.swiglu_linear import launch_swiglu_linear

K, N = 2048, 8192
ROWS = (35980, 1285)
CANDIDATES = (
    GATED_TILES,
    GatedTiles(128, 128, 64, 8, 4),
    GatedTiles(128, 128, 64, 8, 3),
    GatedTiles(128, 128, 64, 8, 3, flatten=True),
    GatedTiles(128, 128, 64, 8, 4, group_m=16),
    GatedTiles(128, 128, 64, 8, 4, group_m=4),
    GatedTiles(128, 128, 128, 8, 2),
    GatedTiles(256, 64, 64, 8, 4),
    GatedTiles(256, 64, 64, 8, 4, flatten=True),
    GatedTiles(128, 64, 64, 4, 3, per_processor=2),
    GatedTiles(64, 128, 64, 4, 2, per_processor=2),
    GatedTiles(64, 64, 128, 4, 4),
)


def bench_rows(m: int, seconds: float) -> list[dict[str, object]]:
    """Time the vendor GEMM alone, with the second pass, and every candidate."""
    sets = copies_for(2 * (m * K + 2 * N * K + m * N), 4)
    operands = [_operands(m) for _ in range(sets)]
    expected = _separate(*operands[0])
    rows = [_row(m, "F.linear", F.linear, operands, seconds, None)]
    rows.append(_row(m, "F.linear + swiglu", _separate, operands, seconds, expected))
    for tiles in CANDIDATES:

        def fused(x: Tensor, weight: Tensor, bias: Tensor, tiles: GatedTiles = tiles) -> Tensor:
            return launch_swiglu_linear(x, weight, bias, tiles)

        rows.append(_row(m, _name(tiles), fused, operands, seconds, expected))
        rows[-1] |= {"tiles": tiles._asdict(), "chosen": tiles == GATED_TILES}
    rows.append(_row(m, "F.linear + swiglu, again", _separate, operands, seconds, expected))
    return rows


def _operands(m: int) -> tuple[Tensor, Tensor, Tensor]:
    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.float16)

    return noise(m, K), noise(2 * N, K) / K**0.5, noise(2 * N) / 10


def _separate(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return swiglu(F.linear(x, weight, bias))


def _name(tiles: GatedTiles) -> str:
    words = [f"{tiles.m} x 2 x {tiles.n} x {tiles.k}", f"{tiles.warps} warps"]
    words.append(f"{tiles.stages} stages")
    words += ["flatten"] if tiles.flatten else []
    words += [f"group {tiles.group_m}"] if tiles.group_m != 8 else []
    words += [f"{tiles.per_processor} a processor"] if tiles.per_processor > 1 else []
    return ", ".join(words)


def _row(
    m: int,
    name: str,
    call: Callable[..., Tensor],
    operands: Sequence[tuple[Tensor, ...]],
    seconds: float,
    expected: Tensor | None,
) -> dict[str, object]:
    """Return time, throughput and error of one way, or why the GPU refuses it."""
    row: dict[str, object] = {"m": m, "way": name}
    try:
        out = call(*operands[0])
    except (RuntimeError, OutOfResources) as error:
        row["refused"] = str(error).splitlines()[0]
        return row
    if expected is not None:
        row["error"] = relative_error(out, expected)
    del out
    ms = sustained_ms([lambda args=args: call(*args) for args in operands], seconds)
    row |= {"ms": ms, "tflop_s": 4 * m * N * K / ms / 1e9}
    return row


def print_table(rows: Sequence[dict[str, object]]) -> None:
    """Print one line a way, the fastest first at each number of rows."""
    for row in sorted(rows, key=lambda row: (-int(str(row["m"])), row.get("ms", math.inf))):
        if "refused" in row:
            print(f"{row['m']:6} {'refused':>9} {'':15} {row['way']}: {row['refused']}")
            continue
        error = f"{row['error']:.1e}" if "error" in row else ""
        mark = " (chosen)" if row.get("chosen") else ""
        print(f"{row['m']:6} {row['ms']:9.4f} {row['tflop_s']:7.1f} {error:>7} {row['way']}{mark}")


def main() -> None:
    """Time all candidates and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--seconds", type=float, default=0.5)
    arguments = parser.parse_args()
    require_gpu(parser, arguments.json)
    torch.manual_seed(0)
    rows = [row for m in arguments.rows for row in bench_rows(m, arguments.seconds)]
    write_json(arguments.json, envelope(k=K, n=N, seconds=arguments.seconds, ways=rows))
    print("  rows        ms  TFLOP/s  error  way")
    print_table(rows)


if __name__ == "__main__":
    with torch.no_grad():
        main()
