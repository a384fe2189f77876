"""A residual add and ``layer_norm_fp8`` of its sum in one pass: the sum is written once, not read.

    stream           = round(x + update * gate)
    codes, row_scale = layer_norm_fp8(stream, ...)

Gate and product are fp32, and the stream is that of the eager chain bit for bit. Contract: high, as
the norm's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantpolicy.kernels.contract import define_fusion
from quantpolicy.kernels.gated_residual import gated_residual_reference
from quantpolicy.kernels.layer_norm_fp8 import layer_norm_fp8_reference
from quantpolicy.kernels.layer_norm_fp32 import why_not_layer_norm
from quantpolicy.kernels.layer_norm_rows import Codes, Sum, norm_rows
from quantpolicy.kernels.row_quantise_fp8 import why_no_e4m3
from quantpolicy.kernels.rows import row_scales_like
from quantpolicy.kernels.token_rows import FLOATS, why_not_rows, why_not_table, why_not_vector

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = "add_layer_norm_fp8"

Result = tuple[Tensor, Tensor, Tensor]


def add_layer_norm_fp8_reference(
    x: Tensor, update: Tensor, gate: Tensor | None, gate_table: Tensor | None, *others: Any
) -> Result:
    """Add, norm and quantise in plain torch: stream and codes [B, S, D], scales [B, S, 1].

    Args:
        gate: a vector, see ``why_not_vector``, and ``gate_table`` [D] is added to it; None for 1.
        others: the other arguments of ``layer_norm_fp8``.
    """
    stream = (
        (x + update).contiguous()
        if gate is None
        else gated_residual_reference(x, update, gate, True, gate_table)
    )
    return (stream, *layer_norm_fp8_reference(stream, *others))


def _fake(x: Tensor, update: Tensor, gate: Tensor | None = None, *others: object) -> Result:
    del others
    dtype = x.dtype if gate is not None else torch.promote_types(x.dtype, update.dtype)
    codes = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    return x.new_empty(x.shape, dtype=dtype), codes, row_scales_like(x)


def _why_not(
    x: Tensor, update: Tensor, gate: Tensor | None, gate_table: Tensor | None, *others: Any
) -> str:
    if reason := why_no_e4m3(x.device) or why_not_layer_norm(x, *others[:-1]):
        return reason
    if update.dtype is not x.dtype:
        return "the update is not of the stream's dtype"
    if reason := why_not_rows(x, update):
        return reason
    if gate is None:
        return "a table comes without a gate" if gate_table is not None else ""
    if gate.dtype not in FLOATS or (gate_table is None and gate.dtype is not torch.float32):
        return "the gate with its table is not float32"
    return why_not_vector(x, gate) or why_not_table(x, gate_table)


def launch_add_layer_norm_fp8(
    x: Tensor, update: Tensor, gate: Tensor | None, gate_table: Tensor | None, *others: Any
) -> Result:
    """Run the kernel of the norms with a sum before and codes behind."""
    *norm, floor = others
    stream, codes, row_scale = _fake(x, update)
    added = Sum(update, gate, gate_table, stream)
    norm_rows(codes, x, *norm, codes=Codes(row_scale, floor), added=added)
    return stream, codes, row_scale


add_layer_norm_fp8: Callable[..., Result] = define_fusion(  # type: ignore[assignment]
    f"{_NAME}(Tensor x, Tensor update, Tensor? gate, Tensor? gate_table, Tensor? weight,"
    " Tensor? bias, Tensor? scale, Tensor? scale_table, Tensor? shift, Tensor? shift_table,"
    " float eps, float floor) -> (Tensor, Tensor, Tensor)",
    kernel=launch_add_layer_norm_fp8,
    reference=add_layer_norm_fp8_reference,
    why_not=_why_not,
    fake=_fake,
)
