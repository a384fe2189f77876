"""Which block shape the Triton GEMM uses for which sizes, a rule read off measurements."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tiles(NamedTuple):
    """Block shape and launch of one GEMM kernel.

    Args:
        halves: parts in which a tile is stored; two leave room for another stage.
        flatten: whether the loads of the next tile start before this one is stored.
        per_processor: programs that one multiprocessor holds at a time.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group_m: int = 8
    halves: int = 1
    flatten: bool = False
    per_processor: int = 1


def choose_tiles(
    m: int,
    n: int,
    k: int,
    programs: int,
    *,
    tma: bool = True,
    fp8: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Tiles:
    """Return the block shape for one GEMM.

    Measured on an H200 (bench/results/execution_tiles.json): large tiles when they fill the
    multiprocessors evenly, small ones with several programs each otherwise.

    Args:
        programs: multiprocessors of the GPU.
        tma: whether the tensor memory accelerator moves the tiles.
        dtype: of the output; four bytes a value leave less shared memory.
    """
    if not tma:
        return Tiles(64, 64, 64, warps=4, stages=3) if m > 16 else Tiles(16, 64, 128, 4, 3)
    if m <= 32:
        return _few_rows_tiles(n, fp8=fp8)
    tiles = -(-m // 128) * -(-n // 256)
    if tiles / (-(-tiles // programs) * programs) >= 0.7:
        return _large_tiles(m, k, fp8=fp8, wide_output=dtype.itemsize > 2)
    small = -(-m // 64) * -(-n // 64)
    if small <= programs and m <= 128:
        return Tiles(64, 32, 256, warps=4, stages=4, per_processor=2)
    if m <= 128 and small <= 2 * programs:
        return Tiles(64, 64, 128, warps=4, stages=6, per_processor=2)
    return Tiles(64, 64, 128, warps=4, stages=4, per_processor=3)


def _few_rows_tiles(n: int, *, fp8: bool) -> Tiles:
    if fp8:
        return Tiles(64, 64, 128, warps=4, stages=6, per_processor=2)
    if n <= 4096:
        return Tiles(16, 32, 256, warps=4, stages=4, per_processor=4)
    return Tiles(16, 64, 256, warps=4, stages=4, per_processor=3)


def _large_tiles(m: int, k: int, *, fp8: bool, wide_output: bool) -> Tiles:
    if wide_output:
        return Tiles(128, 128, 128, warps=8, stages=4, halves=2, flatten=True)
    if not fp8 and k < 8192 and -(-m // 256) * 2 <= -(-m // 128) * 1.05:
        return Tiles(256, 128, 128, warps=8, stages=4, halves=2, flatten=True)
    return Tiles(128, 256, 128, warps=8, stages=4, halves=2, flatten=True)
