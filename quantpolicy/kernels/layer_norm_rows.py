"""The kernel of the LayerNorms in fp32: rows in, rows or codes out, with a sum before the norm.

    stream = round(x + update * gate)
    out    = round((norm(stream) * weight + bias) * (1 + scale) + shift)

Without an update the stream is x; see ``layer_norm_fp32``, ``layer_norm_fp8`` and
``add_layer_norm_fp8``.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from quantpolicy.kernels.keyed_launch import keyed_launch
from quantpolicy.kernels.registry import HAS_TRITON
from quantpolicy.kernels.row_quantise_fp8 import needs_exact_division, rounded_floor
from quantpolicy.kernels.row_tiles import NORMED, NORMED_CODES, SUM_CODES, tiles_for, turns_for
from quantpolicy.kernels.token_rows import is_by_token, vector_strides


class Codes(NamedTuple):
    """Where a row becomes e4m3 codes.

    Args:
        scale: one fp32 value a row.
        floor: of a row's largest magnitude.
    """

    scale: Tensor
    floor: float


class Sum(NamedTuple):
    """What is added to the rows before they are normed.

    Args:
        update: of the shape of the rows.
        gate: a vector, see ``why_not_vector``; None for 1.
        gate_table: [D], added to the gate in fp32.
        stream: contiguous, of the shape of the rows, which it gets with the update added.
    """

    update: Tensor
    gate: Tensor | None
    gate_table: Tensor | None
    stream: Tensor


if HAS_TRITON:
    import triton
    import triton.language as tl

    from quantpolicy.kernels.row_math import product, rounded_pairs
    from quantpolicy.kernels.row_tiles import load_tile, store_codes, store_tile
    from quantpolicy.kernels.token_rows import load_vector

    @triton.jit
    def _vector_tile(
        vector, table, i: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, TABLE: tl.constexpr
    ):
        """Load a tile of a vector as fp32, with its table added."""
        cols = i * TILE + tl.arange(0, TILE)
        return load_vector(vector, table, cols, D, (i + 1) * TILE > D, TABLE)

    @triton.jit
    def _modulation(
        vectors,
        tables,
        D: tl.constexpr,
        TILE: tl.constexpr,
        TILES: tl.constexpr,
        AFFINE: tl.constexpr,
        MODULATED: tl.constexpr,
        TABLES: tl.constexpr,
        GATED: tl.constexpr,
        GATE_TABLE: tl.constexpr,
    ):
        """Return factors and offsets of all parts of a normed row, and gates of its update."""
        weight, bias, scale, shift, gate = vectors
        scale_table, shift_table, gate_table = tables
        factors: tl.tuple = ()
        offsets: tl.tuple = ()
        gates: tl.tuple = ()
        for i in tl.static_range(TILES):
            factor = tl.full((TILE,), 1.0, tl.float32)
            offset = tl.zeros((TILE,), tl.float32)
            if AFFINE:
                factor = load_tile(weight, i, D, TILE)
                offset = load_tile(bias, i, D, TILE)
            if MODULATED:
                outer = 1.0 + _vector_tile(scale, scale_table, i, D, TILE, TABLES)
                factor *= outer
                offset = offset * outer + _vector_tile(shift, shift_table, i, D, TILE, TABLES)
            factors += (factor,)
            offsets += (offset,)
        for i in tl.static_range(TILES):
            # Without a gate, what is in its place is not read.
            part = _vector_tile(gate, gate_table, i, D, TILE, GATE_TABLE) if GATED else factors[i]
            gates += (part,)
        return factors, offsets, gates

    @triton.jit
    def _summed(
        x_row,
        update_row,
        stream_row,
        gates,
        DTYPE: tl.constexpr,
        D: tl.constexpr,
        TILE: tl.constexpr,
        TILES: tl.constexpr,
        ADDED: tl.constexpr,
        GATED: tl.constexpr,
    ):
        """Return the parts of a row, with the update added and stored as the stream."""
        parts: tl.tuple = ()
        for i in tl.static_range(TILES):
            x = load_tile(x_row, i, D, TILE)
            if ADDED:
                update = load_tile(update_row, i, D, TILE)
                if GATED:
                    update = product(update, gates[i])
                x = rounded_pairs(x + update, DTYPE)
                store_tile(stream_row, i, x, D, TILE)
            parts += (x,)
        return parts

    @triton.jit
    def _normed(parts, eps, D: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr):
        """Norm the parts of a row; the sums over parts come before those over threads."""
        total = parts[0]
        for i in tl.static_range(1, TILES):
            total += parts[i]
        mean = tl.sum(total, axis=0) / D
        centred: tl.tuple = ()
        squares = tl.zeros((TILE,), tl.float32)
        for i in tl.static_range(TILES):
            x = parts[i] - mean
            if (i + 1) * TILE > D:
                x = tl.where(i * TILE + tl.arange(0, TILE) < D, x, 0.0)
            centred += (x,)
            squares = x * x if i == 0 else squares + x * x
        rstd = tl.rsqrt(tl.sum(squares, axis=0) / D + tl.cast(eps, tl.float32))
        normed: tl.tuple = ()
        for i in tl.static_range(TILES):
            normed += (centred[i] * rstd,)
        return normed

    @triton.jit(do_not_specialize=["tokens", "programs"])
    def _layer_norm_kernel(
        x_ptr,
        weight_ptr,
        bias_ptr,
        scale_ptr,
        scale_table_ptr,
        shift_ptr,
        shift_table_ptr,
        out_ptr,
        row_scale_ptr,
        update_ptr,
        gate_ptr,
        gate_table_ptr,
        stream_ptr,
        tokens,
        programs,
        x_b,
        x_s,
        scale_b,
        scale_s,
        shift_b,
        shift_s,
        update_b,
        update_s,
        gate_b,
        gate_s,
        eps,
        floor,
        D: tl.constexpr,
        TILE: tl.constexpr,
        TILES: tl.constexpr,
        AFFINE: tl.constexpr,
        MODULATED: tl.constexpr,
        TABLES: tl.constexpr,
        BY_TOKEN: tl.constexpr,
        ADDED: tl.constexpr,
        GATED: tl.constexpr,
        GATE_TABLE: tl.constexpr,
        QUANTISED: tl.constexpr,
        EXACT_DIVISION: tl.constexpr,
        STAGES: tl.constexpr,
    ):
        first = tl.program_id(0)
        batch = tl.program_id(1).to(tl.int64)
        scale = scale_ptr + batch * scale_b
        shift = shift_ptr + batch * shift_b
        gate = gate_ptr + batch * gate_b
        vectors = (weight_ptr, bias_ptr, scale, shift, gate)
        tables = (scale_table_ptr, shift_table_ptr, gate_table_ptr)
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        if not BY_TOKEN:
            factors, offsets, gates = _modulation(
                vectors, tables, D, TILE, TILES, AFFINE, MODULATED, TABLES, GATED, GATE_TABLE
            )
        for turn in tl.range(0, tl.cdiv(tokens - first, programs), num_stages=STAGES):
            token = first.to(tl.int64) + turn * programs
            row = batch * tokens + token
            out = out_ptr + row * D
            if BY_TOKEN:
                scale_at, shift_at = scale + token * scale_s, shift + token * shift_s
                vectors = (weight_ptr, bias_ptr, scale_at, shift_at, gate + token * gate_s)
                factors, offsets, gates = _modulation(
                    vectors, tables, D, TILE, TILES, AFFINE, MODULATED, TABLES, GATED, GATE_TABLE
                )
            x_row = x_ptr + batch * x_b + token * x_s
            update_row = update_ptr + batch * update_b + token * update_s
            stream_row = stream_ptr + row * D
            parts = _summed(
                x_row, update_row, stream_row, gates, dtype, D, TILE, TILES, ADDED, GATED
            )
            normed = _normed(parts, eps, D, TILE, TILES)
            if QUANTISED:
                results: tl.tuple = ()
                for i in tl.static_range(TILES):
                    results += (rounded_pairs(normed[i] * factors[i] + offsets[i], dtype),)
                at = row_scale_ptr + row
                store_codes(out, at, results, floor, dtype, D, TILE, TILES, EXACT_DIVISION)
            else:
                for i in tl.static_range(TILES):
                    store_tile(out, i, normed[i] * factors[i] + offsets[i], D, TILE)


def norm_rows(
    out: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    scale_table: Tensor | None,
    shift: Tensor | None,
    shift_table: Tensor | None,
    eps: float,
    *,
    codes: Codes | None = None,
    added: Sum | None = None,
) -> None:
    """Run the Triton kernel, with rows or with codes as result.

    Args:
        out: contiguous, of the shape of x: rows, or e4m3 codes where ``codes`` is given.
    """
    if out.numel() == 0:
        return
    batch, tokens, columns = x.shape
    gate, gate_table = (None, None) if added is None else (added.gate, added.gate_table)
    kind = NORMED if codes is None else NORMED_CODES if added is None else SUM_CODES
    tiles = tiles_for(columns, kind)
    by_token = any(is_by_token(vector) for vector in (scale, shift, gate))
    turns = turns_for(tokens, x.device, kind, by_token=by_token)
    tensors = (weight, bias, scale, scale_table, shift, shift_table, out)
    keyed_launch(
        _layer_norm_kernel,
        (turns.programs, batch),
        (
            x,
            *(x if each is None else each for each in tensors),
            x if codes is None else codes.scale,
            x if added is None else added.update,
            x if gate is None else gate,
            x if gate_table is None else gate_table,
            x if added is None else added.stream,
            tokens,
            turns.programs,
            x.stride(0),
            x.stride(1),
            *vector_strides(scale),
            *vector_strides(shift),
            *((0, 0) if added is None else added.update.stride()[:2]),
            *vector_strides(gate),
            eps,
            0.0 if codes is None else rounded_floor(codes.floor, x.dtype),
            columns,
            tiles.columns,
            tiles.number,
            weight is not None,
            scale is not None,
            scale_table is not None,
            by_token,
            added is not None,
            gate is not None,
            gate_table is not None,
            codes is not None,
            codes is not None and needs_exact_division(codes.floor),
            turns.stages,
        ),
        free=(13, 14),
        num_warps=tiles.warps,
        enable_fp_fusion=True,
    )
