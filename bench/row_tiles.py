"""Tiles and turns of the kernels that end in codes: how the constants of ``row_tiles`` are chosen.

    python -m bench.row_tiles --json OUT [--op NAME ...]

Times each kernel at the shapes of Wan 5B, few tokens and many, with every number of warps that can
hold a row, and, where rows share vectors, with every number of programs a multiprocessor and of
rows on their way. Prints the fastest beside what is chosen.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from bench.kernel_case import noise
from bench.timing import copies_for, copy_ceiling_tb_s, envelope, gpu_ms, require_gpu, write_json
from quantpolicy.kernels import activated_rows, layer_norm_rows, row_tiles
from quantpolicy.kernels.add_layer_norm_fp8 import launch_add_layer_norm_fp8
from quantpolicy.kernels.gelu_fp8_linear import gelu_quantise
from quantpolicy.kernels.launch import processors
from quantpolicy.kernels.layer_norm_fp8 import launch_layer_norm_fp8
from quantpolicy.kernels.swiglu_fp8_linear import swiglu_quantise

TOKENS = (1_120, 27_280)
COLUMNS, FFN = 3072, 14_336
EPS, FLOOR = 1e-6, 1e-12
WARPS, LEAST_VALUES, MOST_VALUES = (1, 2, 4, 8, 16), 8, 128
PROGRAMS, STAGES = (2, 4, 8, 16), (1, 3, 4)


class Kernel(NamedTuple):
    """One kernel to be timed.

    Args:
        module: whose ``tiles_for`` and ``turns_for`` decide the tiles and turns.
        columns: of a row of codes.
        make: the arguments at a number of tokens.
        bytes_a_value: read and written for each value of the codes.
        takes_turns: whether its programs take rows in turn.
    """

    module: Any
    launch: Callable[..., object]
    columns: int
    make: Callable[[int], tuple[object, ...]]
    bytes_a_value: int
    takes_turns: bool


def _vectors() -> tuple[Tensor, ...]:
    pairs = [(noise(1, COLUMNS), noise(COLUMNS, dtype=torch.float32)) for _ in range(2)]
    return tuple(part for pair in pairs for part in pair)


def _affine() -> tuple[object, ...]:
    return noise(COLUMNS), noise(COLUMNS), None, None, None, None


def _sum(tokens: int) -> tuple[Tensor, Tensor]:
    return noise(1, tokens, COLUMNS), noise(1, tokens, COLUMNS)


def _gated(tokens: int) -> tuple[object, ...]:
    return *_sum(tokens), noise(1, COLUMNS), noise(COLUMNS, dtype=torch.float32), *_affine()


# The launchers are remembered by the signature of their arguments, which tiles are not part of.
_raw_gelu: Callable[..., object] = gelu_quantise.__wrapped__  # type: ignore[attr-defined]
_raw_swiglu: Callable[..., object] = swiglu_quantise.__wrapped__  # type: ignore[attr-defined]

KERNELS = {
    "layer_norm_fp8": Kernel(
        layer_norm_rows,
        launch_layer_norm_fp8,
        COLUMNS,
        lambda tokens: (noise(1, tokens, COLUMNS), None, None, *_vectors(), EPS, FLOOR),
        3,
        True,
    ),
    "add_layer_norm_fp8": Kernel(
        layer_norm_rows,
        launch_add_layer_norm_fp8,
        COLUMNS,
        lambda tokens: (*_sum(tokens), None, None, None, None, *_vectors(), EPS, FLOOR),
        7,
        True,
    ),
    "add_layer_norm_fp8 gated": Kernel(
        layer_norm_rows,
        launch_add_layer_norm_fp8,
        COLUMNS,
        lambda tokens: (*_gated(tokens), EPS, FLOOR),
        7,
        True,
    ),
    "gelu_fp8_linear": Kernel(
        activated_rows,
        _raw_gelu,
        FFN,
        lambda tokens: (noise(1, tokens, FFN), None, FLOOR),
        3,
        False,
    ),
    "swiglu_fp8_linear": Kernel(
        activated_rows,
        _raw_swiglu,
        FFN,
        lambda tokens: (noise(1, tokens, FFN), noise(1, tokens, FFN), None, FLOOR),
        5,
        False,
    ),
}


def ways(kernel: Kernel) -> Iterator[tuple[int | None, int | None, int | None]]:
    """Return warps, programs and stages to try; the first are those that are chosen."""
    yield None, None, None
    fitting = [n for n in WARPS if LEAST_VALUES <= kernel.columns / (32 * n) <= MOST_VALUES]
    turns = list(itertools.product(PROGRAMS, STAGES)) if kernel.takes_turns else [(None, None)]
    for warps, (programs, stages) in itertools.product(fitting, turns):
        yield warps, programs, stages


def bench_kernel(name: str, tokens: int, ceiling: float) -> list[dict[str, object]]:
    """Time one kernel in every way."""
    kernel = KERNELS[name]
    moved = tokens * kernel.columns * kernel.bytes_a_value
    calls = [partial(kernel.launch, *kernel.make(tokens)) for _ in range(copies_for(moved, 8))]
    rows: list[dict[str, object]] = []
    for warps, programs, stages in ways(kernel):
        row: dict[str, object] = {"op": name, "tokens": tokens, "chosen": warps is None}
        with ExitStack() as stack:
            if warps is not None:
                stack.enter_context(patch.object(kernel.module, "tiles_for", _tiles(warps)))
            if programs is not None:
                stack.enter_context(
                    patch.object(kernel.module, "turns_for", _turns(programs, stages))
                )
            row |= {"warps": warps, "programs": programs, "stages": stages}
            try:
                ms = gpu_ms(calls, 20)
            except OutOfResources as error:
                row["failed"] = str(error)[:120]
            else:
                row |= {"ms": ms, "of_copy": moved / ms / 1e9 / ceiling}
        rows.append(row)
    return rows


def _tiles(warps: int) -> Callable[..., row_tiles.Tiles]:
    tile = warps * 32 * 8
    return lambda columns, *_: row_tiles.Tiles(warps, tile, -(-columns // tile))


def _turns(programs: int, stages: int | None) -> Callable[..., row_tiles.Turns]:
    assert stages is not None
    return lambda tokens, device, *_, **__: row_tiles.Turns(
        min(tokens, programs * processors(device)), stages
    )


def table(rows: list[dict[str, object]], best: int = 3) -> str:
    """Return the fastest ways of each kernel and number of tokens, behind the chosen one."""
    lines = []
    for key in dict.fromkeys((row["op"], row["tokens"]) for row in rows):
        tried = [row for row in rows if (row["op"], row["tokens"]) == key]
        timed = [row for row in tried if "ms" in row]
        fastest = sorted(timed, key=lambda row: float(row["ms"]))[:best]  # type: ignore[arg-type]
        for row in [row for row in tried if row["chosen"]] + fastest:
            how = "chosen" if row["chosen"] else "{warps} warps".format(**row)
            if row["programs"] is not None:
                how += ", {programs} programs, {stages} stages".format(**row)
            figures = "failed: {failed}"
            if "ms" in row:
                figures = "{ms:.4f} ms, {of_copy:.3f} of copy"
            lines.append(f"{key[0]:26} {key[1]:>6}  {how:36} {figures.format(**row)}")
    return "\n".join(lines)


def main() -> None:
    """Run the chosen kernels; the JSON file is complete after every one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", required=True)
    parser.add_argument("--op", action="append", choices=tuple(KERNELS))
    arguments = parser.parse_args()
    require_gpu(parser, arguments.json)
    torch.manual_seed(0)
    ceiling = copy_ceiling_tb_s()
    rows: list[dict[str, object]] = []
    for name, tokens in itertools.product(dict.fromkeys(arguments.op or KERNELS), TOKENS):
        rows += bench_kernel(name, tokens, ceiling)
        write_json(arguments.json, envelope(copy_tb_s=ceiling, rows=rows))
        torch.cuda.empty_cache()
    print(table(rows))


if __name__ == "__main__":
    with torch.no_grad():
        main()
