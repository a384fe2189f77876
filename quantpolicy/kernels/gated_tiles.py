"""Which block shape the GEMM with a gate in its epilogue uses, one rule for all callers."""

from __future__ import annotations

from typing import NamedTuple


class GatedTiles(NamedTuple):
    """Block shape and launch of a GEMM whose result is one half of its columns times the other.

    Args:
        n: columns of the result, for which a program multiplies ``n`` rows of either weight half.
        joint: one product over both halves, read as one block of three dimensions, instead of two.
        flatten: whether the loads of the next tile start before this one is stored.
        per_processor: programs that one multiprocessor holds at a time.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    joint: bool = False
    group_m: int = 8
    flatten: bool = False
    per_processor: int = 1


def choose_gated_tiles(m: int) -> GatedTiles:
    """Return the block shape for ``m`` rows; bench/swiglu_tiles.py measures the candidates."""
    if m <= 64:
        return GatedTiles(64, 64, 128, warps=4, stages=4)
    return GatedTiles(128, 128, 64, warps=8, stages=4)
