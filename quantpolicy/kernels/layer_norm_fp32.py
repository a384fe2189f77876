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
from quantpolicy.kernels.layer_norm_rows import norm_rows
from quantpolicy.kernels.rotary import HALF_DTYPES
from quantpolicy.kernels.token_rows import (
    FLOATS,
    full_vector,
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
