"""LayerNorm in fp32, with a weight and bias or a scale and shift of the conditioning, in one pass.

    out[b, s, :] = round((norm(x[b, s, :]) * weight + bias) * (1 + scale) + shift)

Weight and bias are [D]; scale and shift are taken as fp32, one a sample or one a token, and a table
[D] may be added to each in fp32. The result is rounded once, to the dtype of x. Contract: high;
only the order of fp32 operations differs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional as F

from quantpolicy.kernels.contract import define_fusion
from quantpolicy.kernels.keyed_launch import keyed_launch
from quantpolicy.kernels.registry import HAS_TRITON
from quantpolicy.kernels.rotary import HALF_DTYPES
from quantpolicy.kernels.row_tiles import MODULATED_VALUES, tiles_for, turns_for
from quantpolicy.kernels.token_rows import (
    FLOATS,
    full_vector,
    is_by_token,
    vector_strides,
    why_not_rows,
    why_not_table,
    why_not_vector,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = "layer_norm_fp32"


def layer_norm_fp32_reference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    scale_table: Tensor | None,
    shift: Tensor | None,
    shift_table: Tensor | None,
    eps: float,
) -> Tensor:
    """Norm, scale and shift in fp32 and cast, in plain torch."""
    weight, bias = (None if vector is None else vector.float() for vector in (weight, bias))
    normed = F.layer_norm(x.float(), x.shape[-1:], weight, bias, eps)
    if scale is not None and shift is not None:
        shift = full_vector(shift, shift_table)
        normed = normed * (1 + full_vector(scale, scale_table)) + shift
    return normed.to(x.dtype).contiguous()


def _fake(x: Tensor, *others: object) -> Tensor:
    del others
    return x.new_empty(x.shape)


def why_not_layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    scale_table: Tensor | None,
    shift: Tensor | None,
    shift_table: Tensor | None,
    eps: float,
) -> str:
    """Return why the kernel cannot norm these rows, "" when it can."""
    del eps
    if x.dtype not in HALF_DTYPES:
        return "activations are not bfloat16 or float16"
    if (weight is None) != (bias is None) or (scale is None) != (shift is None):
        return "a weight comes without a bias, or a scale without a shift"
    if reason := why_not_rows(x):
        return reason
    affine = [vector for vector in (weight, bias) if vector is not None]
    if any(v.shape != x.shape[-1:] or not v.is_contiguous() for v in affine):
        return "weight and bias are not contiguous [D]"
    modulation = [vector for vector in (scale, shift) if vector is not None]
    if any(vector.dtype not in FLOATS for vector in (*affine, *modulation)):
        return "a vector is not bfloat16, float16 or float32"
    if (scale_table is None) != (shift_table is None):
        return "a table for the scale comes without one for the shift"
    return why_not_vector(x, *modulation) or why_not_table(x, scale_table, shift_table)


if HAS_TRITON:
    import triton
    import triton.language as tl

    from quantpolicy.kernels.row_math import rounded_pairs
    from quantpolicy.kernels.row_tiles import store_codes
    from quantpolicy.kernels.token_rows import load_fp32, load_vector, store_row

    @triton.jit
    def _transform(
        vectors,
        cols,
        D: tl.constexpr,
        M: tl.constexpr,
        AFFINE: tl.constexpr,
        MODULATED: tl.constexpr,
        TABLES: tl.constexpr,
    ):
        """Return the factor and the offset of a part of a normed row."""
        weight, bias, scale, scale_table, shift, shift_table = vectors
        factor = tl.full(cols.shape, 1.0, tl.float32)
        offset = tl.zeros(cols.shape, tl.float32)
        if AFFINE:
            factor = load_fp32(weight, cols, D, M)
            offset = load_fp32(bias, cols, D, M)
        if MODULATED:
            outer = 1.0 + load_vector(scale, scale_table, cols, D, M, TABLES)
            factor *= outer
            offset = offset * outer + load_vector(shift, shift_table, cols, D, M, TABLES)
        return factor, offset

    @triton.jit
    def _transforms(
        vectors,
        D: tl.constexpr,
        TILE: tl.constexpr,
        TILES: tl.constexpr,
        AFFINE: tl.constexpr,
        MODULATED: tl.constexpr,
        TABLES: tl.constexpr,
    ):
        """Return the factors and offsets of all parts."""
        factors: tl.tuple = ()
        offsets: tl.tuple = ()
        for i in tl.static_range(TILES):
            cols = i * TILE + tl.arange(0, TILE)
            factor, offset = _transform(
                vectors, cols, D, (i + 1) * TILE > D, AFFINE, MODULATED, TABLES
            )
            factors += (factor,)
            offsets += (offset,)
        return factors, offsets

    @triton.jit
    def _normed(row, eps, D: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr):
        """Return the parts of a row, normed; the sums over parts come before those over threads."""
        parts: tl.tuple = ()
        total = tl.zeros((TILE,), tl.float32)
        for i in tl.static_range(TILES):
            x = load_fp32(row, i * TILE + tl.arange(0, TILE), D, (i + 1) * TILE > D)
            parts += (x,)
            total = x if i == 0 else total + x
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
    def _layer_norm_fp32_kernel(
        x_ptr,
        weight_ptr,
        bias_ptr,
        scale_ptr,
        scale_table_ptr,
        shift_ptr,
        shift_table_ptr,
        out_ptr,
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
        AFFINE: tl.constexpr,
        MODULATED: tl.constexpr,
        TABLES: tl.constexpr,
        BY_TOKEN: tl.constexpr,
        QUANTISED: tl.constexpr,
        EXACT_DIVISION: tl.constexpr,
        STAGES: tl.constexpr,
    ):
        first = tl.program_id(0)
        batch = tl.program_id(1).to(tl.int64)
        scale = scale_ptr + batch * scale_b
        shift = shift_ptr + batch * shift_b
        vectors = (weight_ptr, bias_ptr, scale, scale_table_ptr, shift, shift_table_ptr)
        if not BY_TOKEN:
            factors, offsets = _transforms(vectors, D, TILE, TILES, AFFINE, MODULATED, TABLES)
        for turn in tl.range(0, tl.cdiv(tokens - first, programs), num_stages=STAGES):
            token = first.to(tl.int64) + turn * programs
            row = batch * tokens + token
            out = out_ptr + row * D
            if BY_TOKEN:
                scale_at, shift_at = scale + token * scale_s, shift + token * shift_s
                vectors = (
                    weight_ptr,
                    bias_ptr,
                    scale_at,
                    scale_table_ptr,
                    shift_at,
                    shift_table_ptr,
                )
                factors, offsets = _transforms(vectors, D, TILE, TILES, AFFINE, MODULATED, TABLES)
            normed = _normed(x_ptr + batch * x_b + token * x_s, eps, D, TILE, TILES)
            if QUANTISED:
                dtype: tl.constexpr = x_ptr.dtype.element_ty
                results: tl.tuple = ()
                for i in tl.static_range(TILES):
                    results += (rounded_pairs(normed[i] * factors[i] + offsets[i], dtype),)
                at = row_scale_ptr + row
                store_codes(out, at, results, floor, dtype, D, TILE, TILES, EXACT_DIVISION)
            else:
                for i in tl.static_range(TILES):
                    y = normed[i] * factors[i] + offsets[i]
                    store_row(out, i * TILE + tl.arange(0, TILE), y, D, (i + 1) * TILE > D)


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
    row_scale: Tensor | None = None,
    floor: float = 0.0,
    exact_division: bool = False,
) -> None:
    """Run the Triton kernel, with rows or with codes as result.

    Args:
        out: contiguous, of the shape of x: rows, or e4m3 codes when there is a ``row_scale``.
        row_scale: one fp32 value a row.
    """
    if out.numel() == 0:
        return
    batch, tokens, columns = x.shape
    tiles = tiles_for(columns, MODULATED_VALUES)
    by_token = is_by_token(scale) or is_by_token(shift)
    turns = turns_for(tokens, x.device, by_token=by_token)
    scale_strides = (0, 0) if scale is None else vector_strides(scale)
    shift_strides = (0, 0) if shift is None else vector_strides(shift)
    keyed_launch(
        _layer_norm_fp32_kernel,
        (turns.programs, batch),
        (
            x,
            x if weight is None else weight,
            x if bias is None else bias,
            x if scale is None else scale,
            x if scale_table is None else scale_table,
            x if shift is None else shift,
            x if shift_table is None else shift_table,
            out,
            x if row_scale is None else row_scale,
            tokens,
            turns.programs,
            x.stride(0),
            x.stride(1),
            *scale_strides,
            *shift_strides,
            eps,
            floor,
            columns,
            tiles.columns,
            tiles.number,
            weight is not None,
            scale is not None,
            scale_table is not None,
            by_token,
            row_scale is not None,
            exact_division,
            turns.stages,
        ),
        free=(9, 10),
        num_warps=tiles.warps,
        enable_fp_fusion=True,
    )


def launch_layer_norm_fp32(x: Tensor, *others: Any) -> Tensor:
    """Run the Triton kernel and return the rows; arguments as the reference's."""
    out = x.new_empty(x.shape)
    norm_rows(out, x, *others)
    return out


layer_norm_fp32: Callable[..., Tensor] = define_fusion(  # type: ignore[assignment]
    f"{_NAME}(Tensor x, Tensor? weight, Tensor? bias, Tensor? scale, Tensor? scale_table,"
    " Tensor? shift, Tensor? shift_table, float eps) -> Tensor",
    kernel=launch_layer_norm_fp32,
    reference=layer_norm_fp32_reference,
    why_not=why_not_layer_norm,
    fake=_fake,
)
