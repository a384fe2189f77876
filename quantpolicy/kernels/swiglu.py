"""SwiGLU over a fused projection: the first half of the channels times SiLU of the second.

    out[..., n] = x[..., n] * round(silu(x[..., N + n]))        x: [..., 2 N]

Contract: high; exponential, quotient and roundings are those of torch's own kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import functional as F

from quantpolicy.kernels.contract import define_fusion
from quantpolicy.kernels.keyed_launch import keyed_launch
from quantpolicy.kernels.registry import HAS_TRITON
from quantpolicy.kernels.rotary import HALF_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = "swiglu"
_BLOCK = 2048


def swiglu_reference(x: Tensor) -> Tensor:
    """Gate in plain torch, as diffusers' SwiGLU does behind its projection."""
    value, gate = x.chunk(2, dim=-1)
    return (value * F.silu(gate)).contiguous()


def _fake(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _why_not(x: Tensor) -> str:
    if x.dtype not in HALF_DTYPES:
        return "activations are not bfloat16 or float16"
    if x.shape[-1] % 2 or not x.is_contiguous():
        return "the projection is not a contiguous [..., 2 N]"
    return ""


if HAS_TRITON:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    from quantpolicy.kernels.row_math import INTERPRETED
    from quantpolicy.kernels.token_rows import rounded

    @triton.jit
    def _swiglu_kernel(x_ptr, out_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = cols < N
        value = tl.load(x_ptr + row * (2 * N) + cols, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(x_ptr + row * (2 * N) + N + cols, mask=mask, other=0.0).to(tl.float32)
        # libdevice's exponential is the one in torch's kernels; the interpreter has no libdevice.
        power = tl.exp(-gate) if INTERPRETED else libdevice.exp(-gate)
        silu = rounded(tl.div_rn(gate, 1.0 + power), x_ptr.dtype.element_ty)
        tl.store(out_ptr + row * N + cols, (value * silu).to(out_ptr.dtype.element_ty), mask=mask)


def launch_swiglu(x: Tensor) -> Tensor:
    """Run the Triton kernel: a program a row and block of channels."""
    out = _fake(x)
    if out.numel() == 0:
        return out
    columns = int(out.shape[-1])
    rows = out.numel() // columns
    block = min(_BLOCK, triton.next_power_of_2(columns))
    keyed_launch(
        _swiglu_kernel,
        (rows, triton.cdiv(columns, block)),
        (x, out, columns, block),
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out


swiglu: Callable[[Tensor], Tensor] = define_fusion(  # type: ignore[assignment]
    f"{_NAME}(Tensor x) -> Tensor",
    kernel=launch_swiglu,
    reference=swiglu_reference,
    why_not=_why_not,
    fake=_fake,
)
