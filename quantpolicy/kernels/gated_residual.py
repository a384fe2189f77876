"""Add an update, scaled channel by channel, to the residual stream in one pass.

    out[b, s, :] = residual[b, s, :] + round(update[b, s, :] * (table + gate[b, s, :]))

The gate may be one for all, one a sample or one a token. With a table [D], which is added to it in
fp32, it is fp32.

Contract: lossless. The product is rounded to the dtype that torch promotes update and gate to, the
sum to the promoted dtype of both, as the eager multiply and add round them; or to the residual's,
as a cast of the sum does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantpolicy.kernels.contract import define_fusion
from quantpolicy.kernels.keyed_launch import keyed_launch
from quantpolicy.kernels.registry import HAS_TRITON
from quantpolicy.kernels.row_launch import row_warps, split_columns
from quantpolicy.kernels.token_rows import (
    FLOATS,
    full_vector,
    vector_strides,
    why_not_rows,
    why_not_table,
    why_not_vector,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = "gated_residual"


def gated_residual_reference(
    residual: Tensor,
    update: Tensor,
    gate: Tensor,
    keep_dtype: bool = False,
    table: Tensor | None = None,
) -> Tensor:
    """Multiply and add in plain torch; the gate is [D], [B, D], [B, 1, D] or [B, S, D]."""
    if table is not None:
        gate = full_vector(gate, table)
    total = residual + update * (gate.unsqueeze(1) if gate.dim() == 2 else gate)
    return (total.to(residual.dtype) if keep_dtype else total).contiguous()


def _product_dtype(update: Tensor, gate: Tensor, table: Tensor | None) -> torch.dtype:
    return torch.promote_types(update.dtype, gate.dtype if table is None else torch.float32)


def _fake(
    residual: Tensor,
    update: Tensor,
    gate: Tensor,
    keep_dtype: bool = False,
    table: Tensor | None = None,
) -> Tensor:
    dtype = residual.dtype
    if not keep_dtype:
        dtype = torch.promote_types(dtype, _product_dtype(update, gate, table))
    return residual.new_empty(residual.shape, dtype=dtype)


def why_not_gated_residual(
    residual: Tensor,
    update: Tensor,
    gate: Tensor,
    keep_dtype: bool = False,
    table: Tensor | None = None,
) -> str:
    """Return why the kernel cannot take these tensors, "" when it can."""
    del keep_dtype
    if any(x.dtype not in FLOATS for x in (residual, update, gate)):
        return "a dtype is not bfloat16, float16 or float32"
    reason = why_not_rows(residual, update) or why_not_vector(residual, gate)
    return reason or why_not_table(residual, table)


if HAS_TRITON:
    import triton
    import triton.language as tl

    from quantpolicy.kernels.token_rows import load_fp32, load_vector, rounded, store_row

    TL_DTYPES = {
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
        torch.float32: tl.float32,
    }

    @triton.jit
    def _part(
        residual,
        update,
        gate,
        table,
        out,
        cols,
        PRODUCT: tl.constexpr,
        D: tl.constexpr,
        M: tl.constexpr,
        TABLE: tl.constexpr,
    ):
        r = load_fp32(residual, cols, D, M)
        u = load_fp32(update, cols, D, M)
        g = load_vector(gate, table, cols, D, M, TABLE)
        store_row(out, cols, r + rounded(u * g, PRODUCT), D, M)

    @triton.jit(do_not_specialize=["tokens"])
    def _gated_residual_kernel(
        residual_ptr,
        update_ptr,
        gate_ptr,
        table_ptr,
        out_ptr,
        tokens,
        residual_b,
        residual_s,
        update_b,
        update_s,
        gate_b,
        gate_s,
        D: tl.constexpr,
        BLOCK_A: tl.constexpr,
        BLOCK_B: tl.constexpr,
        PRODUCT: tl.constexpr,
        TABLE: tl.constexpr,
    ):
        token = tl.program_id(0).to(tl.int64)
        batch = tl.program_id(1).to(tl.int64)
        residual = residual_ptr + batch * residual_b + token * residual_s
        update = update_ptr + batch * update_b + token * update_s
        gate = gate_ptr + batch * gate_b + token * gate_s
        out = out_ptr + (batch * tokens + token) * D
        cols = tl.arange(0, BLOCK_A)
        _part(residual, update, gate, table_ptr, out, cols, PRODUCT, D, False, TABLE)
        if BLOCK_B > 0:
            cols = BLOCK_A + tl.arange(0, BLOCK_B)
            masked: tl.constexpr = D < BLOCK_A + BLOCK_B
            _part(residual, update, gate, table_ptr, out, cols, PRODUCT, D, masked, TABLE)


def launch_gated_residual(
    residual: Tensor,
    update: Tensor,
    gate: Tensor,
    keep_dtype: bool = False,
    table: Tensor | None = None,
) -> Tensor:
    """Run the Triton kernel: one program a token and batch row."""
    out = _fake(residual, update, gate, keep_dtype, table)
    if out.numel() == 0:
        return out
    batch, tokens, columns = residual.shape
    first, rest = split_columns(columns)
    keyed_launch(
        _gated_residual_kernel,
        (tokens, batch),
        (
            residual,
            update,
            gate,
            gate if table is None else table,
            out,
            tokens,
            residual.stride(0),
            residual.stride(1),
            update.stride(0),
            update.stride(1),
            *vector_strides(gate),
            columns,
            first,
            rest,
            TL_DTYPES[_product_dtype(update, gate, table)],
            table is not None,
        ),
        free=(5,),
        num_warps=row_warps(columns),
        enable_fp_fusion=False,
    )
    return out


gated_residual: Callable[..., Tensor] = define_fusion(  # type: ignore[assignment]
    f"{_NAME}(Tensor residual, Tensor update, Tensor gate, bool keep_dtype=False,"
    " Tensor? table=None) -> Tensor",
    kernel=launch_gated_residual,
    reference=gated_residual_reference,
    why_not=why_not_gated_residual,
    fake=_fake,
)
