"""Rows that a program holds in one or two powers of two, and how the row quantisers are launched.

What a row's codes and scale are is in the kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantpolicy.kernels.keyed_launch import keyed_launch
from quantpolicy.kernels.rows import as_rows

REGISTER_COLUMNS = 32768
_LONG_BLOCK = 8192


def row_amax_reference(x: Tensor) -> Tensor:
    """Return the largest magnitude of each row, [..., 1], 0 for a row of no columns."""
    if x.shape[-1] == 0:
        return x.new_zeros((*x.shape[:-1], 1))
    return x.abs().amax(dim=-1, keepdim=True)


def split_columns(columns: int) -> tuple[int, int]:
    """Return two powers of two that cover a row: the largest within it, and the rest (0: none)."""
    columns = int(columns)
    first = 1 << (columns.bit_length() - 1)
    rest = columns - first
    return first, 1 << (rest - 1).bit_length() if rest else 0


def row_warps(columns: int) -> int:
    """Return the warps of a program that holds one row in registers, about 100 values a thread."""
    columns = int(columns)
    return max(2 if columns > 2048 else 1, (1 << (columns - 1).bit_length()) // 4096)


def launch_rows(
    kernel: Any,
    long_kernel: Any,
    x: Tensor,
    dtype: torch.dtype,
    *,
    scalars: tuple[float, ...] = (),
    flags: tuple[bool, ...] = (),
    empty_scale: float,
) -> tuple[Tensor, Tensor]:
    """Quantise every row of ``x``: codes [M, K] and scales [M, 1].

    Args:
        long_kernel: for rows longer than REGISTER_COLUMNS, which it reads twice.
        dtype: of the codes.
        scalars, flags: further arguments, at run time behind the strides and at compile time last.
        empty_scale: the scale of a row of no columns.
    """
    rows = as_rows(x)
    total, columns = rows.total, rows.columns
    codes = torch.empty((total, columns), dtype=dtype, device=x.device)
    scale = torch.empty((total, 1), dtype=torch.float32, device=x.device)
    if total == 0 or columns == 0:
        return codes, scale.fill_(empty_scale)
    is_long = columns > REGISTER_COLUMNS
    keyed_launch(
        long_kernel if is_long else kernel,
        (total, 1),
        (
            rows.data,
            codes,
            scale,
            rows.inner,
            rows.outer_stride,
            rows.inner_stride,
            *scalars,
            columns,
            *((_LONG_BLOCK,) if is_long else split_columns(columns)),
            *flags,
        ),
        free=(3,),
        num_warps=8 if is_long else row_warps(columns),
        enable_fp_fusion=True,
    )
    return codes, scale
