"""RMSNorm of each head of Q and K, one weight per channel of a head, from strided views.

    y[b, s, h, :] = round(x * rsqrt(mean(x^2) + eps)) * weight        x: [B, S, H, D], weight: [D]

The normed value is rounded to the weight's dtype before it is weighted, as diffusers' RMSNorm does.
Contract: high; only the order of the sum differs. A norm across heads (weight [H * D], as Wan has
it) is another op: a weight of that size is refused here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantpolicy.kernels.contract import define_fusion
from quantpolicy.kernels.keyed_launch import keyed_launch
from quantpolicy.kernels.registry import HAS_TRITON
from quantpolicy.kernels.rotary import HALF_DTYPES, HEAD_TILE, packed_like, token_strides

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = "qk_rms_norm"


def head_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm each head in plain torch, the chain of diffusers' RMSNorm."""
    variance = x.float().pow(2).mean(-1, keepdim=True)
    return (x * torch.rsqrt(variance + eps)).to(weight.dtype) * weight


def qk_rms_norm_reference(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Norm queries and keys in plain torch."""
    q_out, k_out = (head_norm_reference(x, w, eps) for x, w in ((q, q_weight), (k, k_weight)))
    return q_out.contiguous(), k_out.contiguous()


def _fake(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    del q_weight, k_weight, eps
    return packed_like(q, None), packed_like(k, None)


def why_not_head_norm(x: Tensor, weight: Tensor) -> str:
    """Return why the kernels cannot norm the heads of a tensor, "" when they can."""
    if x.dtype not in HALF_DTYPES or weight.dtype is not x.dtype:
        return "activations and norm weight are not both bfloat16 or both float16"
    if x.dim() != 4 or weight.shape != x.shape[-1:]:
        return "the norm weight is not [D] for [B, S, H, D]"
    if x.shape[-1] > 256:
        return "the head size is above 256"
    if x.stride(-1) != 1 or not weight.is_contiguous():
        return "channels are not contiguous"
    return ""


def _why_not(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> str:
    del eps
    reason = why_not_head_norm(q, q_weight) or why_not_head_norm(k, k_weight)
    if not reason and q.shape != k.shape:
        reason = "queries and keys differ in shape"
    return reason


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def head_norm(x, weight, eps, D: tl.constexpr, DTYPE: tl.constexpr):
        """Norm fp32 [HEADS, BLOCK], zero past D, with weight [1, BLOCK]; rounded as diffusers."""
        variance = tl.sum(x * x, axis=1)[:, None] / D
        normed = (x * tl.rsqrt(variance + tl.cast(eps, tl.float32))).to(DTYPE).to(tl.float32)
        return (normed * weight).to(DTYPE)

    @triton.jit
    def _norm_token(
        source,
        target,
        stride_h,
        weight_ptr,
        eps,
        heads: tl.constexpr,
        HEADS: tl.constexpr,
        D: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        cols = tl.arange(0, BLOCK)[None, :]
        weight = tl.load(weight_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
        for start in tl.static_range(0, heads, HEADS):
            head = start + tl.arange(0, HEADS)[:, None]
            mask = (head < heads) & (cols < D)
            x = tl.load(source + head.to(tl.int64) * stride_h + cols, mask=mask, other=0.0)
            y = head_norm(x.to(tl.float32), weight, eps, D, target.dtype.element_ty)
            tl.store(target + head * D + cols, y, mask=mask)

    @triton.jit(do_not_specialize=["tokens"])
    def _qk_rms_norm_kernel(
        q_ptr,
        k_ptr,
        q_weight_ptr,
        k_weight_ptr,
        q_out_ptr,
        k_out_ptr,
        tokens,
        q_b,
        q_s,
        q_h,
        k_b,
        k_s,
        k_h,
        eps,
        H: tl.constexpr,
        D: tl.constexpr,
        BLOCK: tl.constexpr,
        HEADS: tl.constexpr,
    ):
        token = tl.program_id(0).to(tl.int64)
        batch = tl.program_id(1).to(tl.int64)
        out = (batch * tokens + token) * (H * D)
        q_row = q_ptr + batch * q_b + token * q_s
        k_row = k_ptr + batch * k_b + token * k_s
        _norm_token(q_row, q_out_ptr + out, q_h, q_weight_ptr, eps, H, HEADS, D, BLOCK)
        _norm_token(k_row, k_out_ptr + out, k_h, k_weight_ptr, eps, H, HEADS, D, BLOCK)


def launch_qk_rms_norm(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Run the Triton kernel: one program a token and batch row, all heads of Q and K."""
    q_out, k_out = packed_like(q, None), packed_like(k, None)
    if q_out.numel() == 0:
        return q_out, k_out
    batch, tokens, heads, size = q.shape
    keyed_launch(
        _qk_rms_norm_kernel,
        (tokens, batch),
        (
            q,
            k,
            q_weight,
            k_weight,
            q_out,
            k_out,
            tokens,
            *token_strides(q),
            *token_strides(k),
            eps,
            heads,
            size,
            triton.next_power_of_2(int(size)),
            HEAD_TILE,
        ),
        free=(6,),
        num_warps=4,
        enable_fp_fusion=True,
    )
    return q_out, k_out


qk_rms_norm: Callable[..., tuple[Tensor, Tensor]] = define_fusion(  # type: ignore[assignment]
    f"{_NAME}(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps) -> (Tensor, Tensor)",
    kernel=launch_qk_rms_norm,
    reference=qk_rms_norm_reference,
    why_not=_why_not,
    fake=_fake,
)
