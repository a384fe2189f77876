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
from quantpolicy.kernels.token_rows import (
    FLOATS,
    full_vector,
    row_warps,
    split_columns,
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

    from quantpolicy.kernels.row_math import (
        fp8_codes,
        fp8_scale,
        larger,
        rounded_pairs,
        row_amax,
    )
    from quantpolicy.kernels.token_rows import load_fp32, load_vector, store_row

    @triton.jit
    def _transformed(
        normed,
        weight,
        bias,
        scale,
        shift,
        scale_table,
        shift_table,
        cols,
        D: tl.constexpr,
        M: tl.constexpr,
        AFFINE: tl.constexpr,
        MODULATED: tl.constexpr,
        TABLES: tl.constexpr,
    ):
        if AFFINE:
            normed = normed * load_fp32(weight, cols, D, M) + load_fp32(bias, cols, D, M)
        if MODULATED:
            factor = 1.0 + load_vector(scale, scale_table, cols, D, M, TABLES)
            normed = normed * factor + load_vector(shift, shift_table, cols, D, M, TABLES)
        return normed

    @triton.jit(do_not_specialize=["tokens"])
    def _layer_norm_fp32_kernel(
        x_ptr,
        weight_ptr,
        bias_ptr,
        scale_ptr,
        shift_ptr,
        scale_table_ptr,
        shift_table_ptr,
        out_ptr,
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
        AFFINE: tl.constexpr,
        MODULATED: tl.constexpr,
        TABLES: tl.constexpr,
        QUANTISED: tl.constexpr,
        EXACT_DIVISION: tl.constexpr,
    ):
        token = tl.program_id(0).to(tl.int64)
        batch = tl.program_id(1).to(tl.int64)
        x_row = x_ptr + batch * x_b + token * x_s
        scale = scale_ptr + batch * scale_b + token * scale_s
        shift = shift_ptr + batch * shift_b + token * shift_s
        row = batch * tokens + token
        out = out_ptr + row * D
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        masked: tl.constexpr = D < BLOCK_A + BLOCK_B
        cols_a = tl.arange(0, BLOCK_A)[None, :]
        a = load_fp32(x_row, cols_a, D, False)
        total = tl.sum(a, axis=1)
        if BLOCK_B > 0:
            cols_b = BLOCK_A + tl.arange(0, BLOCK_B)[None, :]
            b = load_fp32(x_row, cols_b, D, masked)
            total += tl.sum(b, axis=1)
        mean = total[:, None] / D
        a = a - mean
        squares = tl.sum(a * a, axis=1)
        if BLOCK_B > 0:
            b = tl.where(cols_b < D, b - mean, 0.0)
            squares += tl.sum(b * b, axis=1)
        rstd = tl.rsqrt(squares[:, None] / D + tl.cast(eps, tl.float32))
        a = _transformed(
            a * rstd,
            weight_ptr,
            bias_ptr,
            scale,
            shift,
            scale_table_ptr,
            shift_table_ptr,
            cols_a,
            D,
            False,
            AFFINE,
            MODULATED,
            TABLES,
        )
        if BLOCK_B > 0:
            b = _transformed(
                b * rstd,
                weight_ptr,
                bias_ptr,
                scale,
                shift,
                scale_table_ptr,
                shift_table_ptr,
                cols_b,
                D,
                masked,
                AFFINE,
                MODULATED,
                TABLES,
            )
        if QUANTISED:
            a = rounded_pairs(a, dtype)
            amax = row_amax(a)
            if BLOCK_B > 0:
                b = rounded_pairs(b, dtype)
                amax = larger(amax, row_amax(b))
            row_scale = fp8_scale(amax, floor, dtype)[:, None]
            tl.store(row_scale_ptr + row + tl.zeros((1, 1), dtype=tl.int32), row_scale)
            tl.store(out + cols_a, fp8_codes(a, row_scale, EXACT_DIVISION))
            if BLOCK_B > 0:
                codes = fp8_codes(b, row_scale, EXACT_DIVISION)
                tl.store(out + cols_b, codes, mask=cols_b < D)
        else:
            store_row(out, cols_a, a, D, False)
            if BLOCK_B > 0:
                store_row(out, cols_b, b, D, masked)


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
    """Run the Triton kernel, one program a token and batch row, with rows or with codes as result.

    Args:
        out: contiguous, of the shape of x: rows, or e4m3 codes when there is a ``row_scale``.
        row_scale: one fp32 value a row.
    """
    if out.numel() == 0:
        return
    batch, tokens, columns = x.shape
    keyed_launch(
        _layer_norm_fp32_kernel,
        (tokens, batch),
        (
            x,
            x if weight is None else weight,
            x if bias is None else bias,
            x if scale is None else scale,
            x if shift is None else shift,
            x if scale_table is None else scale_table,
            x if shift_table is None else shift_table,
            out,
            x if row_scale is None else row_scale,
            tokens,
            x.stride(0),
            x.stride(1),
            *((0, 0) if scale is None else vector_strides(scale)),
            *((0, 0) if shift is None else vector_strides(shift)),
            eps,
            floor,
            columns,
            *split_columns(columns),
            weight is not None,
            scale is not None,
            scale_table is not None,
            row_scale is not None,
            exact_division,
        ),
        free=(9,),
        num_warps=row_warps(columns),
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
    traced=launch_layer_norm_fp32,
    reference=layer_norm_fp32_reference,
    why_not=why_not_layer_norm,
    fake=_fake,
)
