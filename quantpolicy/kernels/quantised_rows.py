"""Rows that come quantised, in the place of the activation that they stand for.

What a producer writes and fused Linears of its scheme read; nothing else can.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class QuantisedRows(NamedTuple):
    """Codes with one scale a row.

    Args:
        codes: [..., K] e4m3.
        scale: [..., 1] fp32.
        dtype: of the activation, and of what a Linear makes of it.
    """

    codes: Tensor
    scale: Tensor
    dtype: torch.dtype
