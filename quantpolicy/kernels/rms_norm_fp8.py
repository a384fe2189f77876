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
from quantpolicy.kernels.rows import row_scales_like
from quantpolicy.kernels.token_rows import (
    FLOATS,
    full_vector,
    row_warps,
    split_columns,
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
    if index is not None:
        return vector.index_select(0, index).float()
    return full_vector(vector, None)


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


def _fake(x: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    del others
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
    affine = vectors if weight is None else [weight, *vectors]
    if any(vector.dtype not in FLOATS for vector in affine):
        return "a vector is not bfloat16, float16 or float32"
    if index is None:
        return why_not_vector(x, *vectors)
    return _why_not_tables(x, index, vectors)


def _why_not_tables(x: Tensor, index: Tensor, tables: list[Tensor]) -> str:
    if index.dtype not in (torch.int32, torch.int64):
        return "the index is not int32 or int64"
    if index.shape != x.shape[1:2] or not index.is_contiguous():
        return "the index is not a contiguous [S]"
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

    from quantpolicy.kernels.row_math import (
        fp8_codes,
        fp8_scale,
        larger,
        rounded_pairs,
        row_amax,
    )
    from quantpolicy.kernels.token_rows import load_fp32

    @triton.jit
    def _modulated(
        normed,
        weight,
        scale,
        shift,
        cols,
        DTYPE: tl.constexpr,
        D: tl.constexpr,
        M: tl.constexpr,
        WEIGHTED: tl.constexpr,
        SCALED: tl.constexpr,
        SHIFTED: tl.constexpr,
    ):
        if WEIGHTED:
            normed = normed * load_fp32(weight, cols, D, M)
        if SCALED:
            normed = normed * load_fp32(scale, cols, D, M)
        if SHIFTED:
            normed = normed + load_fp32(shift, cols, D, M)
        return rounded_pairs(normed, DTYPE)

    @triton.jit(do_not_specialize=["tokens"])
    def _rms_norm_fp8_kernel(
        x_ptr,
        weight_ptr,
        scale_ptr,
        shift_ptr,
        index_ptr,
        codes_ptr,
        row_scale_ptr,
        tokens,
        x_b,
        x_s,
        scale_b,
        scale_s,
        shift_b,
        shift_s,
        eps,
        floor,
        D: tl.constexpr,
        BLOCK_A: tl.constexpr,
        BLOCK_B: tl.constexpr,
        WEIGHTED: tl.constexpr,
        SCALED: tl.constexpr,
        SHIFTED: tl.constexpr,
        INDEXED: tl.constexpr,
        EXACT_DIVISION: tl.constexpr,
    ):
        token = tl.program_id(0).to(tl.int64)
        batch = tl.program_id(1).to(tl.int64)
        x_row = x_ptr + batch * x_b + token * x_s
        entry = token
        if INDEXED:
            entry = tl.load(index_ptr + token).to(tl.int64)
        scale = scale_ptr + batch * scale_b + entry * scale_s
        shift = shift_ptr + batch * shift_b + entry * shift_s
        row = batch * tokens + token
        codes = codes_ptr + row * D
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        masked: tl.constexpr = D < BLOCK_A + BLOCK_B
        cols_a = tl.arange(0, BLOCK_A)[None, :]
        a = load_fp32(x_row, cols_a, D, False)
        squares = tl.sum(a * a, axis=1)
        if BLOCK_B > 0:
            cols_b = BLOCK_A + tl.arange(0, BLOCK_B)[None, :]
            b = load_fp32(x_row, cols_b, D, masked)
            squares += tl.sum(b * b, axis=1)
        rstd = tl.rsqrt(squares[:, None] / D + tl.cast(eps, tl.float32))
        a = _modulated(
            a * rstd, weight_ptr, scale, shift, cols_a, dtype, D, False, WEIGHTED, SCALED, SHIFTED
        )
        amax = row_amax(a)
        if BLOCK_B > 0:
            b = _modulated(
                b * rstd,
                weight_ptr,
                scale,
                shift,
                cols_b,
                dtype,
                D,
                masked,
                WEIGHTED,
                SCALED,
                SHIFTED,
            )
            amax = larger(amax, row_amax(b))
        row_scale = fp8_scale(amax, floor, dtype)[:, None]
        tl.store(row_scale_ptr + row + tl.zeros((1, 1), dtype=tl.int32), row_scale)
        tl.store(codes + cols_a, fp8_codes(a, row_scale, EXACT_DIVISION))
        if BLOCK_B > 0:
            tl.store(codes + cols_b, fp8_codes(b, row_scale, EXACT_DIVISION), mask=cols_b < D)


def launch_rms_norm_fp8(
    x: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    index: Tensor | None,
    eps: float,
    floor: float,
) -> tuple[Tensor, Tensor]:
    """Run the Triton kernel, one program a token and batch row."""
    codes, row_scale = _fake(x)
    if codes.numel() == 0:
        return codes, row_scale
    batch, tokens, columns = x.shape
    given = (weight, scale, shift, index)
    keyed_launch(
        _rms_norm_fp8_kernel,
        (tokens, batch),
        (
            x,
            *(x if each is None else each for each in given),
            codes,
            row_scale,
            tokens,
            x.stride(0),
            x.stride(1),
            *_strides(scale, index),
            *_strides(shift, index),
            eps,
            rounded_floor(floor, x.dtype),
            columns,
            *split_columns(columns),
            *(each is not None for each in given),
            needs_exact_division(floor),
        ),
        free=(7,),
        num_warps=row_warps(columns),
        enable_fp_fusion=True,
    )
    return codes, row_scale


def _strides(vector: Tensor | None, index: Tensor | None) -> tuple[int, int]:
    """Return the strides of batch and of token, or of the table's rows."""
    if vector is None:
        return 0, 0
    return vector_strides(vector) if index is None else (0, vector.stride(0))


rms_norm_fp8: Callable[..., tuple[Tensor, Tensor]] = define_fusion(  # type: ignore[assignment]
    f"{_NAME}(Tensor x, Tensor? weight, Tensor? scale, Tensor? shift, Tensor? index, float eps,"
    " float floor) -> (Tensor, Tensor)",
    kernel=launch_rms_norm_fp8,
    reference=rms_norm_fp8_reference,
    why_not=_why_not,
    fake=_fake,
)
