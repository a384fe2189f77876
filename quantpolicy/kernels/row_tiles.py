"""Rows that a program holds as tiles: equal parts, of which every thread has eight values each.

What is summed over a row is summed over its tiles first, so that threads meet once for each sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from quantpolicy.kernels.launch import processors
from quantpolicy.kernels.registry import HAS_TRITON

_MAX_WARPS = 16
_VALUES = 8


class Kind(NamedTuple):
    """What kernels of one kind hold of the rows; see bench/results/row_tiles.json.

    Args:
        values: of a row that a thread holds at most, if warps allow it.
        programs: a multiprocessor, where all rows of a sample share their vectors.
        stages: rows that such a program has on their way, the one that it computes included.
    """

    values: int
    programs: int = 0
    stages: int = 0


# Activated into codes; normed into rows, or into codes, by vectors that threads hold as well; two
# rows added, and normed into codes.
ACTIVATED = Kind(64)
NORMED = Kind(80, programs=4, stages=3)
NORMED_CODES = Kind(80, programs=4, stages=4)
SUM_CODES = Kind(40, programs=2, stages=4)


class Tiles(NamedTuple):
    """How a program holds a row.

    Args:
        columns: of a tile; eight values, 16 bytes of half precision, a thread.
        number: tiles that cover the row; the last one may reach beyond it.
    """

    warps: int
    columns: int
    number: int


def tiles_for(columns: int, kind: Kind) -> Tiles:
    """Return the tiles of a row."""
    warps = 1
    while warps < _MAX_WARPS and warps * 32 * kind.values < columns:
        warps *= 2
    tile = warps * 32 * _VALUES
    return Tiles(warps, tile, -(-columns // tile))


class Turns(NamedTuple):
    """How programs share the rows of a sample.

    Args:
        programs: of a sample, each of which takes one in ``programs`` rows.
        stages: rows that a program has on their way, the one that it computes included.
    """

    programs: int
    stages: int


def turns_for(tokens: int, device: torch.device, kind: Kind, *, by_token: bool) -> Turns:
    """Return the turns in which rows are modulated.

    Vectors that all rows share stay in registers from row to row: read anew for each they cost
    more than the rows. Where each row has vectors of its own a program takes one.
    """
    if by_token:
        return Turns(tokens, 1)
    return Turns(min(tokens, kind.programs * processors(device)), kind.stages)


if HAS_TRITON:
    import triton
    import triton.language as tl

    from quantpolicy.kernels.row_math import fp8_codes, fp8_scale, larger
    from quantpolicy.kernels.token_rows import load_fp32, store_row

    @triton.jit
    def load_tile(row, i: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr):
        """Load a tile of a row as fp32, zero past the row's end."""
        return load_fp32(row, i * TILE + tl.arange(0, TILE), D, (i + 1) * TILE > D)

    @triton.jit
    def store_tile(row, i: tl.constexpr, x, D: tl.constexpr, TILE: tl.constexpr):
        """Store a tile of a row in the dtype of its pointer."""
        store_row(row, i * TILE + tl.arange(0, TILE), x, D, (i + 1) * TILE > D)

    @triton.jit
    def store_codes(
        out,
        scale_at,
        tiles,
        floor,
        DTYPE: tl.constexpr,
        D: tl.constexpr,
        TILE: tl.constexpr,
        TILES: tl.constexpr,
        EXACT_DIVISION: tl.constexpr,
    ):
        """Store the e4m3 codes and the scale of a row whose values are rounded to its dtype."""
        magnitudes = tl.abs(tiles[0])
        for i in tl.static_range(1, TILES):
            magnitudes = larger(magnitudes, tl.abs(tiles[i]))
        scale = fp8_scale(tl.reduce(magnitudes, 0, larger), floor, DTYPE)
        tl.store(scale_at, scale)
        for i in tl.static_range(TILES):
            store_tile(out, i, fp8_codes(tiles[i], scale, EXACT_DIVISION), D, TILE)
