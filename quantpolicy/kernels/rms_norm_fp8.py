"""RMSNorm with a modulation and the row quantisation behind it in one pass: no row is written.

    row[b, s, :] = round(x[b, s, :] * rsqrt(mean(x^2) + eps) * weight * scale + shift)
    codes, row_scale = row_quantise_fp8(row, floor)

For rows that only fp8 Linears read. Weight [D], scale and shift may each be absent. The scale is
multiplied as it is given: a model that scales by 1 + s hands over the sum, rounded as it rounds it.
Scale and shift are one for all, one a sample or one a token; or, with an index [S], tables [R, D]
of which each token has one row, so that nothing is gathered before. The caller answers for indices.

Contract: high; it is computed in fp32 and rounded once, to the dtype of x, where models round after
every step. The quantisation of what it gives is exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from quantpolicy.kernels.contract import define_fusion
from quantpolicy.kernels.keyed_launch import keyed_launch
from quantpolicy.kernels.registry import HAS_TRITON
from quantpolicy.kernels.rotary import HALF_DTYPES
from quantpolicy.kernels.row_quantise_fp8 import (
    needs_exact_division,
    rounded_floor,
    row_quantise_fp8_reference,
    why_no_e4m3,
)
from quantpolicy.kernels.row_tiles import NORMED_CODES, tiles_for, turns_for
from quantpolicy.kernels.rows import row_scales_like
from quantpolicy.kernels.token_rows import (
    FLOATS,
    full_vector,
    is_by_token,
    vector_strides,
    why_not_rows,
    why_not_vector,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = "rms_norm_fp8"


def rms_norm_rows(
    x: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    index: Tensor | None,
    eps: float,
) -> Tensor:
    """Return the rows [B, S, D] that are quantised, in plain torch."""
    rows = F.rms_norm(x.float(), x.shape[-1:], None if weight is None else weight.float(), eps)
    if scale is not None:
        rows = rows * _by_token(scale, index)
    if shift is not None:
        rows = rows + _by_token(shift, index)
    return rows.to(x.dtype).contiguous()


def _by_token(vector: Tensor, index: Tensor | None) -> Tensor:
    return full_vector(vector if index is None else vector.index_select(0, index)[None], None)


def rms_norm_fp8_reference(
    x: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    index: Tensor | None,
    eps: float,
    floor: float,
) -> tuple[Tensor, Tensor]:
    """Norm and quantise in plain torch: codes [B, S, D] and scales [B, S, 1]."""
    rows = rms_norm_rows(x, weight, scale, shift, index, eps)
    return row_quantise_fp8_reference(rows, floor)


def _fake(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), row_scales_like(x)


def why_not_rms_norm_fp8(
    x: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    index: Tensor | None,
    eps: float,
    floor: float,
) -> str:
    """Return why the kernel cannot take these tensors, "" when it can."""
    del eps, floor
    if x.dtype not in HALF_DTYPES:
        return "activations are not bfloat16 or float16"
    if reason := why_not_rows(x):
        return reason
    if weight is not None and (weight.shape != x.shape[-1:] or not weight.is_contiguous()):
        return "the norm weight is not a contiguous [D]"
    vectors = [vector for vector in (scale, shift) if vector is not None]
    if any(v.dtype not in FLOATS for v in (weight, scale, shift) if v is not None):
        return "a vector is not bfloat16, float16 or float32"
    if index is None:
        return why_not_vector(x, *vectors)
    return _why_not_tables(x, index, vectors)


def _why_not_tables(x: Tensor, index: Tensor, tables: list[Tensor]) -> str:
    is_integer = index.dtype in (torch.int32, torch.int64)
    if not is_integer or index.shape != x.shape[1:2] or not index.is_contiguous():
        return "the index is not a contiguous [S] of int32 or int64"
    if any(table.dim() != 2 or table.shape[1:] != x.shape[-1:] for table in tables):
        return "a table of vectors is not [R, D]"
    if any(table.stride(-1) != 1 for table in tables):
        return "a table's channels are not contiguous"
    return ""


def _why_not(x: Tensor, *others: object) -> str:
    return why_no_e4m3(x.device) or why_not_rms_norm_fp8(x, *others)  # type: ignore[arg-type]


if HAS_TRITON:
    import triton
    import triton.language as tl

    from quantpolicy.kernels.row_math import rounded_pairs
    from quantpolicy.kernels.row_tiles import load_tile, store_codes

    @triton.jit
    def _modulation(
        weight,
        scale,
        shift,
        D: tl.constexpr,
        TILE: tl.constexpr,
        TILES: tl.constexpr,
        WEIGHTED: tl.constexpr,
        SCALED: tl.constexpr,
        SHIFTED: tl.constexpr,
    ):
        """Return factors and offsets of all parts of a row."""
        factors: tl.tuple = ()
        offsets: tl.tuple = ()
        for i in tl.static_range(TILES):
            factor = tl.full((TILE,), 1.0, tl.float32)
            offset = tl.zeros((TILE,), tl.float32)
            if WEIGHTED:
                factor = load_tile(weight, i, D, TILE)
            if SCALED:
                factor *= load_tile(scale, i, D, TILE)
            if SHIFTED:
                offset = load_tile(shift, i, D, TILE)
            factors += (factor,)
            offsets += (offset,)
        return factors, offsets

    @triton.jit
    def _read(row, eps, D: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr):
        """Return the parts of a row and what norms them; parts are added up before threads are."""
        parts: tl.tuple = ()
        squares = tl.zeros((TILE,), tl.float32)
        for i in tl.static_range(TILES):
            x = load_tile(row, i, D, TILE)
            parts += (x,)
            squares = x * x if i == 0 else squares + x * x
        rstd = tl.rsqrt(tl.sum(squares, axis=0) / D + tl.cast(eps, tl.float32))
        return parts, rstd

    @triton.jit(do_not_specialize=["tokens", "programs"])
    def _rms_norm_fp8_kernel(
        x_ptr,
        weight_ptr,
        scale_ptr,
        shift_ptr,
        index_ptr,
        codes_ptr,
        row_scale_ptr,
        tokens,
        programs,
        x_b,
        x_s,
        scale_b,
        scale_s,
        shift_b,
        shift_s,
        eps,
        floor,
        D: tl.constexpr,
        TILE: tl.constexpr,
        TILES: tl.constexpr,
        WEIGHTED: tl.constexpr,
        SCALED: tl.constexpr,
        SHIFTED: tl.constexpr,
        INDEXED: tl.constexpr,
        BY_TOKEN: tl.constexpr,
        EXACT_DIVISION: tl.constexpr,
        STAGES: tl.constexpr,
    ):
        first = tl.program_id(0)
        batch = tl.program_id(1).to(tl.int64)
        scale = scale_ptr + batch * scale_b
        shift = shift_ptr + batch * shift_b
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        if not BY_TOKEN:
            factors, offsets = _modulation(
                weight_ptr, scale, shift, D, TILE, TILES, WEIGHTED, SCALED, SHIFTED
            )
        for turn in tl.range(0, tl.cdiv(tokens - first, programs), num_stages=STAGES):
            token = first.to(tl.int64) + turn * programs
            row = batch * tokens + token
            if BY_TOKEN:
                entry = token
                if INDEXED:
                    entry = tl.load(index_ptr + token).to(tl.int64)
                scale_at, shift_at = scale + entry * scale_s, shift + entry * shift_s
                factors, offsets = _modulation(
                    weight_ptr, scale_at, shift_at, D, TILE, TILES, WEIGHTED, SCALED, SHIFTED
                )
            parts, rstd = _read(x_ptr + batch * x_b + token * x_s, eps, D, TILE, TILES)
            results: tl.tuple = ()
            for i in tl.static_range(TILES):
                results += (rounded_pairs(parts[i] * rstd * factors[i] + offsets[i], dtype),)
            codes, at = codes_ptr + row * D, row_scale_ptr + row
            store_codes(codes, at, results, floor, dtype, D, TILE, TILES, EXACT_DIVISION)


def launch_rms_norm_fp8(
    x: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    index: Tensor | None,
    eps: float,
    floor: float,
) -> tuple[Tensor, Tensor]:
    """Run the Triton kernel: codes [B, S, D] and scales [B, S, 1]."""
    codes, row_scale = results = _fake(x)
    if codes.numel() == 0:
        return results
    batch, tokens, columns = x.shape
    tiles = tiles_for(columns, NORMED_CODES)
    given = (weight, scale, shift, index)
    by_token = index is not None or is_by_token(scale) or is_by_token(shift)
    turns = turns_for(tokens, x.device, NORMED_CODES, by_token=by_token)
    keyed_launch(
        _rms_norm_fp8_kernel,
        (turns.programs, batch),
        (
            x,
            *(x if each is None else each for each in given),
            codes,
            row_scale,
            tokens,
            turns.programs,
            x.stride(0),
            x.stride(1),
            *_strides(scale, index),
            *_strides(shift, index),
            eps,
            rounded_floor(floor, x.dtype),
            columns,
            tiles.columns,
            tiles.number,
            *(each is not None for each in given),
            by_token,
            needs_exact_division(floor),
            turns.stages,
        ),
        free=(7, 8),
        num_warps=tiles.warps,
        enable_fp_fusion=True,
    )
    return results


def _strides(vector: Tensor | None, index: Tensor | None) -> tuple[int, int]:
    if vector is None or index is None:
        return vector_strides(vector)
    return 0, vector.stride(0)


rms_norm_fp8: Callable[..., tuple[Tensor, Tensor]] = define_fusion(  # type: ignore[assignment]
    f"{_NAME}(Tensor x, Tensor? weight, Tensor? scale, Tensor? shift, Tensor? index, float eps,"
    " float floor) -> (Tensor, Tensor)",
    kernel=launch_rms_norm_fp8,
    reference=rms_norm_fp8_reference,
    why_not=_why_not,
    fake=_fake,
)
