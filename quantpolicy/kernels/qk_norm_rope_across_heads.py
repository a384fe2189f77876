"""RMSNorm of Q and K over all heads at once and rotary embedding, from projected rows, in one pass.

    y[b, s, :] = round(x[b, s, :] * rsqrt(mean(x^2) + eps) * weight)      x: [B, S, H * D]
    out        = rotate(y), [B, S, H, D]                                  weight: [H * D]

Wan's tables are [1, S, 1, D] with every value twice; as Wan does, the cosine is read at even and
the sine at odd channels. Contract: high; only the order of the sum differs. A norm of each head
(weight [D]) is another op: a weight of that size is refused here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from quantpolicy.kernels.contract import define_fusion
from quantpolicy.kernels.keyed_launch import keyed_launch
from quantpolicy.kernels.registry import HAS_TRITON
from quantpolicy.kernels.rotary import HALF_DTYPES
from quantpolicy.kernels.row_launch import row_warps, split_columns
from quantpolicy.kernels.token_rows import MAX_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = "qk_norm_rope_across_heads"


def norm_rope_across_heads_reference(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> Tensor:
    """Norm and rotate in plain torch, the chain of diffusers' Wan."""
    normed = F.rms_norm(x, x.shape[-1:], weight, eps)
    return rotate_heads_reference(normed.unflatten(2, (-1, cos.shape[-1])), cos, sin)


def rotate_heads_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [B, S, H, D] in plain torch, the chain of diffusers' Wan."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).to(x.dtype)


def qk_norm_rope_across_heads_reference(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Norm and rotate queries and keys in plain torch."""
    return (
        norm_rope_across_heads_reference(q, q_weight, cos, sin, eps),
        norm_rope_across_heads_reference(k, k_weight, cos, sin, eps),
    )


def _fake(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    del q_weight, k_weight, sin, eps
    size = cos.shape[-1]
    shape = (*q.shape[:2], q.shape[2] // size, size)
    return q.new_empty(shape), k.new_empty(shape)


def why_not_qk_norm_rope_across_heads(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> str:
    """Return why the kernel cannot take these tensors, "" when it can."""
    del eps
    if q.dtype not in HALF_DTYPES or any(x.dtype is not q.dtype for x in (k, q_weight, k_weight)):
        return "activations and norm weights are not all bfloat16 or all float16"
    if q.dim() != 3 or q.shape != k.shape or q.shape[2] > MAX_COLUMNS:
        return f"queries and keys are not [B, S, H * D] of one shape, up to {MAX_COLUMNS} channels"
    if q_weight.shape != q.shape[2:] or k_weight.shape != q.shape[2:]:
        return "the norm weights are not [H * D] for [B, S, H * D]"
    if cos.dtype is not torch.float32 or sin.dtype is not torch.float32:
        return "the rotary tables are not float32"
    if cos.dim() != 4 or sin.shape != cos.shape or cos.shape[:3] != (1, q.shape[1], 1):
        return "the rotary tables are not [1, S, 1, D]"
    size = cos.shape[3]
    if size % 2 or size > 256 or q.shape[2] % size:
        return "the head size is odd, above 256, or no divisor of the channels"
    if any(x.stride(-1) != 1 for x in (q, k, q_weight, k_weight, cos, sin)):
        return "channels are not contiguous"
    return ""


if HAS_TRITON:
    import triton
    import triton.language as tl

    from quantpolicy.kernels.rotary import load_pairs, rotate_pairs
    from quantpolicy.kernels.row_math import product
    from quantpolicy.kernels.token_rows import rounded

    @triton.jit
    def _rotated(
        x, weight_row, at, mask, cos, sin, DTYPE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr
    ):
        """Weight and rotate the normed heads of a tile, [HEADS, D]."""
        weight = tl.load(weight_row + at, mask=mask, other=0.0).to(tl.float32)
        return rotate_pairs(rounded(x * weight, DTYPE), cos, cos, sin, sin, HEADS, D).to(DTYPE)

    @triton.jit
    def _norm_rotate_row(
        source,
        target,
        weight_row,
        cos,
        sin,
        eps,
        H: tl.constexpr,
        D: tl.constexpr,
        BLOCK: tl.constexpr,
        HEADS_A: tl.constexpr,
        HEADS_B: tl.constexpr,
    ):
        dtype: tl.constexpr = target.dtype.element_ty
        cols = tl.arange(0, BLOCK)[None, :]
        head_a = tl.arange(0, HEADS_A)[:, None]
        mask_a = (head_a < H) & (cols < D)
        a = tl.load(source + head_a * D + cols, mask=mask_a, other=0.0).to(tl.float32)
        squares = tl.sum(tl.sum(product(a, a), axis=1), axis=0)
        if HEADS_B > 0:
            head_b = HEADS_A + tl.arange(0, HEADS_B)[:, None]
            mask_b = (head_b < H) & (cols < D)
            b = tl.load(source + head_b * D + cols, mask=mask_b, other=0.0).to(tl.float32)
            squares += tl.sum(tl.sum(product(b, b), axis=1), axis=0)
        factor = tl.rsqrt(squares / (H * D) + tl.cast(eps, tl.float32))
        at_a = head_a * D + cols
        out = _rotated(a * factor, weight_row, at_a, mask_a, cos, sin, dtype, HEADS_A, BLOCK)
        tl.store(target + at_a, out, mask=mask_a)
        if HEADS_B > 0:
            at_b = head_b * D + cols
            out = _rotated(b * factor, weight_row, at_b, mask_b, cos, sin, dtype, HEADS_B, BLOCK)
            tl.store(target + at_b, out, mask=mask_b)

    @triton.jit(do_not_specialize=["tokens"])
    def _qk_norm_rope_across_heads_kernel(
        q_ptr,
        k_ptr,
        q_weight_ptr,
        k_weight_ptr,
        cos_ptr,
        sin_ptr,
        q_out_ptr,
        k_out_ptr,
        tokens,
        q_b,
        q_s,
        k_b,
        k_s,
        cos_s,
        sin_s,
        eps,
        H: tl.constexpr,
        D: tl.constexpr,
        BLOCK: tl.constexpr,
        HEADS_A: tl.constexpr,
        HEADS_B: tl.constexpr,
    ):
        token = tl.program_id(0).to(tl.int64)
        batch = tl.program_id(1).to(tl.int64)
        out = (batch * tokens + token) * (H * D)
        q_row = q_ptr + batch * q_b + token * q_s
        k_row = k_ptr + batch * k_b + token * k_s
        cols = tl.arange(0, BLOCK)
        cos, _ = load_pairs(cos_ptr + token * cos_s, cols, cols < D, BLOCK)
        _, sin = load_pairs(sin_ptr + token * sin_s, cols, cols < D, BLOCK)
        _norm_rotate_row(
            q_row, q_out_ptr + out, q_weight_ptr, cos, sin, eps, H, D, BLOCK, HEADS_A, HEADS_B
        )
        _norm_rotate_row(
            k_row, k_out_ptr + out, k_weight_ptr, cos, sin, eps, H, D, BLOCK, HEADS_A, HEADS_B
        )


def launch_qk_norm_rope_across_heads(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Run the Triton kernel: one program a token and batch row, all heads of Q and K."""
    q_out, k_out = _fake(q, k, q_weight, k_weight, cos, sin, eps)
    if q_out.numel() == 0:
        return q_out, k_out
    batch, tokens, heads, size = q_out.shape
    keyed_launch(
        _qk_norm_rope_across_heads_kernel,
        (tokens, batch),
        (
            q,
            k,
            q_weight,
            k_weight,
            cos,
            sin,
            q_out,
            k_out,
            tokens,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            cos.stride(1),
            sin.stride(1),
            eps,
            heads,
            size,
            triton.next_power_of_2(int(size)),
            *split_columns(heads),
        ),
        free=(8,),
        num_warps=2 * row_warps(heads * size),
        enable_fp_fusion=True,
    )
    return q_out, k_out


qk_norm_rope_across_heads: Callable[..., tuple[Tensor, Tensor]] = define_fusion(  # type: ignore[assignment]
    f"{_NAME}(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin,"
    " float eps) -> (Tensor, Tensor)",
    kernel=launch_qk_norm_rope_across_heads,
    reference=qk_norm_rope_across_heads_reference,
    why_not=why_not_qk_norm_rope_across_heads,
    fake=_fake,
)
