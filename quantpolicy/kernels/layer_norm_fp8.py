"""``layer_norm_fp32`` and the row quantisation behind it in one pass: the rows are never written.

    codes, row_scale = row_quantise_fp8(layer_norm_fp32(x, ...), floor)

For rows that only fp8 Linears read. Contract: high, as the norm's; the quantisation of what it
gives is exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantpolicy.kernels.contract import define_fusion
from quantpolicy.kernels.layer_norm_fp32 import layer_norm_fp32_reference, why_not_layer_norm
from quantpolicy.kernels.layer_norm_rows import Codes, norm_rows
from quantpolicy.kernels.row_quantise_fp8 import row_quantise_fp8_reference, why_no_e4m3
from quantpolicy.kernels.rows import row_scales_like

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = "layer_norm_fp8"


def layer_norm_fp8_reference(x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """Norm and quantise in plain torch: codes [B, S, D] and scales [B, S, 1].

    Args:
        others: the arguments of ``layer_norm_fp32``, then the floor.
    """
    *norm, floor = others
    return row_quantise_fp8_reference(layer_norm_fp32_reference(x, *norm), floor)


def _fake(x: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    del others
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), row_scales_like(x)


def _why_not(x: Tensor, *others: Any) -> str:
    return why_no_e4m3(x.device) or why_not_layer_norm(x, *others[:-1])


def launch_layer_norm_fp8(x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """Run the kernel of the norms with codes and scales as its result."""
    *norm, floor = others
    codes, row_scale = _fake(x)
    norm_rows(codes, x, *norm, codes=Codes(row_scale, floor))
    return codes, row_scale


layer_norm_fp8: Callable[..., tuple[Tensor, Tensor]] = define_fusion(  # type: ignore[assignment]
    f"{_NAME}(Tensor x, Tensor? weight, Tensor? bias, Tensor? scale, Tensor? scale_table,"
    " Tensor? shift, Tensor? shift_table, float eps, float floor) -> (Tensor, Tensor)",
    kernel=launch_layer_norm_fp8,
    reference=layer_norm_fp8_reference,
    why_not=_why_not,
    fake=_fake,
)
