"""What an fp8 Linear over activated rows does besides its activation: codes, then the GEMM.

    rows = cat(head, activation(*inputs))
    out  = (q(rows) @ weight.T) * row_scale * weight_scale + bias

Arguments come as an op takes them: the inputs of the activation, [B, S, N] each, then ``head``
[B, S, H] or None, ``weight`` [M, H + N] with its scales, ``bias`` and ``floor``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from quantpolicy.kernels.fp8_linear import multiply_rows
from quantpolicy.kernels.keyed_launch import keyed_launch
from quantpolicy.kernels.registry import HAS_TRITON
from quantpolicy.kernels.rotary import HALF_DTYPES
from quantpolicy.kernels.row_launch import REGISTER_COLUMNS
from quantpolicy.kernels.row_quantise_fp8 import (
    needs_exact_division,
    rounded_floor,
    why_no_e4m3,
)
from quantpolicy.kernels.row_tiles import ACTIVATED, tiles_for

Codes = tuple[Tensor, Tensor]
# Weight, its scales, and the bias.
Operands = tuple[Tensor, Tensor, Tensor | None]


def beside(head: Tensor | None, rows: Tensor) -> Tensor:
    """Put the head before activated rows, in plain torch."""
    return rows if head is None else torch.cat([head, rows], dim=-1)


def fake_linear(*args: Any) -> Tensor:
    """Return the fake result of an op."""
    *rows, weight, _, _, _ = args
    dtypes = [each.dtype for each in rows if each is not None]
    x, dtype = rows[0], functools.reduce(torch.promote_types, dtypes)
    fake: Tensor = x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype)
    return fake


def why_not_activated(*args: Any) -> str:
    """Return why no kernel can take an op's arguments, "" when one can."""
    *inputs, head, weight, _, _, _ = args
    x = inputs[0]
    given = inputs if head is None else [*inputs, head]
    if x.dtype not in HALF_DTYPES or any(each.dtype is not x.dtype for each in given):
        return "activations are not all bfloat16 or all float16"
    if any(row_stride(each) is None for each in given):
        return "rows are not regular, or their channels not contiguous"
    if any(each.shape != x.shape for each in inputs):
        return "the inputs of the activation differ in shape"
    if any(each.shape[:-1] != x.shape[:-1] for each in given):
        return "the head has other rows"
    if weight.shape[1] != x.shape[-1] + (0 if head is None else head.shape[-1]):
        return "the rows do not make up the weight's columns"
    if weight.shape[1] > REGISTER_COLUMNS:
        return f"rows are longer than {REGISTER_COLUMNS}"
    if x.numel() == 0:
        return "there are no rows"
    return why_no_e4m3(x.device)


def row_stride(x: Tensor) -> int | None:
    """Return the stride from each row of [B, S, K] to the next, None when there is no such one."""
    if x.dim() != 3 or x.stride(-1) != 1:
        return None
    regular = x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    return x.stride(1) if regular else None


def launch_codes(
    kernel: Any, inputs: tuple[Tensor, ...], head: Tensor | None, floor: float
) -> Codes:
    """Run a kernel that activates and quantises, one program a row: codes [M, K], scales [M, 1].

    Args:
        kernel: takes the inputs and the head, codes and scales, the floor, the row strides of
            inputs and head, and H, H + N, columns and number of tiles and whether it must divide
            exactly.
    """
    x = inputs[0]
    width = 0 if head is None else head.shape[-1]
    columns = width + x.shape[-1]
    rows = x.numel() // x.shape[-1]
    tiles = tiles_for(columns, ACTIVATED)
    codes = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    keyed_launch(
        kernel,
        (rows, 1),
        (
            *inputs,
            x if head is None else head,
            codes,
            scale,
            rounded_floor(floor, x.dtype),
            *(each.stride(1) for each in inputs),
            0 if head is None else head.stride(1),
            width,
            columns,
            tiles.columns,
            tiles.number,
            needs_exact_division(floor),
        ),
        num_warps=tiles.warps,
        enable_fp_fusion=True,
    )
    return codes, scale


def multiply_codes(x: Tensor, codes: Codes, operands: Operands) -> Tensor:
    """Run the GEMM that ``fp8_linear`` runs; the result has the rows and the dtype of ``x``."""
    (rows, scale), (weight, weight_scale, bias) = codes, operands
    out = multiply_rows(rows, scale, weight, weight_scale, bias, x.dtype)
    return out.view(*x.shape[:-1], weight.shape[0])


if HAS_TRITON:
    import triton
    import triton.language as tl

    from quantpolicy.kernels.token_rows import load_fp32

    @triton.jit
    def load_head(row, i: tl.constexpr, TILE: tl.constexpr):
        """Load a tile that lies in the head, as fp32."""
        return load_fp32(row, i * TILE + tl.arange(0, TILE), 0, False)

    @triton.jit
    def load_input(row, i: tl.constexpr, TILE: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
        """Load a tile of an input behind the head as fp32, zero where there is none."""
        cols = i * TILE + tl.arange(0, TILE)
        if i * TILE < N or (i + 1) * TILE > K:
            x = tl.load(row + cols - N, mask=(cols >= N) & (cols < K), other=0.0)
        else:
            x = tl.load(row + cols - N)
        return x.to(tl.float32)

    @triton.jit
    def with_head(y, row, i: tl.constexpr, TILE: tl.constexpr, N: tl.constexpr):
        """Return an activated tile with the end of the head in it."""
        cols = i * TILE + tl.arange(0, TILE)
        if i * TILE < N:
            head = tl.load(row + cols, mask=cols < N, other=0.0).to(tl.float32)
            y = tl.where(cols < N, head, y)
        return y
