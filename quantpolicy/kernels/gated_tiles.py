"""Which block shape the GEMM with a gate in its epilogue uses, one rule for all callers."""

from __future__ import annotations

from typing import NamedTuple


class GatedTiles(NamedTuple):
    """Block shape and launch of a GEMM whose result is one half of its columns times the other.

    Args:
        n: columns of the result, for which a program multiplies ``n`` rows of either weight half,
            both in one product.
        flatten: whether the loads of the next tile start before this one is stored.
        per_processor: programs that one multiprocessor holds at a time.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group_m: int = 8
    flatten: bool = False
    per_processor: int = 1


# The fastest at many rows, by bench/results/swiglu_tiles.json; at few rows two passes are faster.
GATED_TILES = GatedTiles(128, 128, 64, warps=8, stages=4, flatten=True)
