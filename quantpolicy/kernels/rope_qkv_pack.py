"""Rotary embedding of image queries and keys while image and text Q, K, V are packed.

    out_q = cat(rotate(q[:, :R]), q[:, R:], text_q)      over tokens; the same for k
    out_v = cat(v, text_v)

Contract: lossless. Bit-exact to diffusers' interleaved ``apply_rotary_emb`` between two ``cat``:
products and sum in fp32, each rounded, the result rounded once to the input's dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantpolicy.kernels.contract import define_fusion
from quantpolicy.kernels.keyed_launch import keyed_launch
from quantpolicy.kernels.registry import HAS_TRITON
from quantpolicy.kernels.rotary import (
    HEAD_TILE,
    packed_like,
    rotate_rows_reference,
    token_strides,
    why_not_rotary,
    why_not_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = "rope_qkv_pack"


def rope_qkv_pack_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    text_q: Tensor | None,
    text_k: Tensor | None,
    text_v: Tensor | None,
    cos: Tensor,
    sin: Tensor,
) -> list[Tensor]:
    """Rotate and pack in plain torch, the chain that diffusers runs in eager mode."""
    packed = [
        _with_text(rotate_rows_reference(x, cos, sin), text)
        for x, text in ((q, text_q), (k, text_k))
    ]
    if v is not None:
        packed.append(_with_text(v if text_v is not None else v.clone(), text_v))
    return packed


def _with_text(x: Tensor, text: Tensor | None) -> Tensor:
    return (torch.cat([x, text], dim=1) if text is not None else x).contiguous()


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    text_q: Tensor | None,
    text_k: Tensor | None,
    text_v: Tensor | None,
    cos: Tensor,
    sin: Tensor,
) -> list[Tensor]:
    del cos, sin
    pairs = ((q, text_q), (k, text_k), (v, text_v))
    return [packed_like(x, text) for x, text in pairs if x is not None]


def why_not_rope_qkv_pack(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    text_q: Tensor | None,
    text_k: Tensor | None,
    text_v: Tensor | None,
    cos: Tensor,
    sin: Tensor,
) -> str:
    """Return why the kernel cannot take these tensors, "" when it can."""
    reason = why_not_rotary(q, k, cos, sin) or why_not_text(q, text_q) or why_not_text(k, text_k)
    if not reason and v is not None:
        reason = why_not_text(v, text_v)
        if not reason and (v.shape != q.shape or v.dtype is not q.dtype or v.stride(-1) != 1):
            reason = "values and queries differ in shape, dtype or layout"
    return reason


if HAS_TRITON:
    import triton
    import triton.language as tl

    from quantpolicy.kernels.rotary import load_pairs, rotate_pairs

    @triton.jit
    def _copy_token(
        source,
        target,
        stride_h,
        heads: tl.constexpr,
        HEADS: tl.constexpr,
        D: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Copy one token, head tile by head tile."""
        cols = tl.arange(0, BLOCK)[None, :]
        for start in tl.static_range(0, heads, HEADS):
            head = start + tl.arange(0, HEADS)[:, None]
            mask = (head < heads) & (cols < D)
            x = tl.load(source + head.to(tl.int64) * stride_h + cols, mask=mask)
            tl.store(target + head * D + cols, x, mask=mask)

    @triton.jit
    def _rotate_token(
        source,
        target,
        stride_h,
        cos_row,
        sin_row,
        heads: tl.constexpr,
        HEADS: tl.constexpr,
        D: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Rotate one token, head tile by head tile."""
        cols = tl.arange(0, BLOCK)
        cos_even, cos_odd = load_pairs(cos_row, cols, cols < D, BLOCK)
        sin_even, sin_odd = load_pairs(sin_row, cols, cols < D, BLOCK)
        cols = cols[None, :]
        for start in tl.static_range(0, heads, HEADS):
            head = start + tl.arange(0, HEADS)[:, None]
            mask = (head < heads) & (cols < D)
            x = tl.load(source + head.to(tl.int64) * stride_h + cols, mask=mask, other=0.0)
            out = rotate_pairs(x.to(tl.float32), cos_even, cos_odd, sin_even, sin_odd, HEADS, BLOCK)
            tl.store(target + head * D + cols, out.to(target.dtype.element_ty), mask=mask)

    @triton.jit(do_not_specialize=["tokens", "text_tokens", "rotary_rows"])
    def _rope_qkv_pack_kernel(
        q_ptr,
        k_ptr,
        v_ptr,
        text_q_ptr,
        text_k_ptr,
        text_v_ptr,
        cos_ptr,
        sin_ptr,
        out_q_ptr,
        out_k_ptr,
        out_v_ptr,
        tokens,
        text_tokens,
        rotary_rows,
        q_b,
        q_s,
        q_h,
        k_b,
        k_s,
        k_h,
        v_b,
        v_s,
        v_h,
        tq_b,
        tq_s,
        tq_h,
        tk_b,
        tk_s,
        tk_h,
        tv_b,
        tv_s,
        tv_h,
        cos_s,
        sin_s,
        H: tl.constexpr,
        D: tl.constexpr,
        BLOCK: tl.constexpr,
        HEADS: tl.constexpr,
        HAS_V: tl.constexpr,
    ):
        token = tl.program_id(0).to(tl.int64)
        batch = tl.program_id(1).to(tl.int64)
        out = (batch * (tokens + text_tokens) + token) * (H * D)
        if token < rotary_rows:
            cos_row = cos_ptr + token * cos_s
            sin_row = sin_ptr + token * sin_s
            q_row = q_ptr + batch * q_b + token * q_s
            k_row = k_ptr + batch * k_b + token * k_s
            _rotate_token(q_row, out_q_ptr + out, q_h, cos_row, sin_row, H, HEADS, D, BLOCK)
            _rotate_token(k_row, out_k_ptr + out, k_h, cos_row, sin_row, H, HEADS, D, BLOCK)
            if HAS_V:
                v_row = v_ptr + batch * v_b + token * v_s
                _copy_token(v_row, out_v_ptr + out, v_h, H, HEADS, D, BLOCK)
        elif token < tokens:
            q_row = q_ptr + batch * q_b + token * q_s
            k_row = k_ptr + batch * k_b + token * k_s
            _copy_token(q_row, out_q_ptr + out, q_h, H, HEADS, D, BLOCK)
            _copy_token(k_row, out_k_ptr + out, k_h, H, HEADS, D, BLOCK)
            if HAS_V:
                v_row = v_ptr + batch * v_b + token * v_s
                _copy_token(v_row, out_v_ptr + out, v_h, H, HEADS, D, BLOCK)
        else:
            text = token - tokens
            q_row = text_q_ptr + batch * tq_b + text * tq_s
            k_row = text_k_ptr + batch * tk_b + text * tk_s
            _copy_token(q_row, out_q_ptr + out, tq_h, H, HEADS, D, BLOCK)
            _copy_token(k_row, out_k_ptr + out, tk_h, H, HEADS, D, BLOCK)
            if HAS_V:
                v_row = text_v_ptr + batch * tv_b + text * tv_s
                _copy_token(v_row, out_v_ptr + out, tv_h, H, HEADS, D, BLOCK)


def launch_rope_qkv_pack(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    text_q: Tensor | None,
    text_k: Tensor | None,
    text_v: Tensor | None,
    cos: Tensor,
    sin: Tensor,
) -> list[Tensor]:
    """Run the Triton kernel: one program a token and batch row, all heads of Q, K and V."""
    out = _fake(q, k, v, text_q, text_k, text_v, cos, sin)
    if out[0].numel() == 0:
        return out
    value = v if v is not None else q
    texts = (
        text_q if text_q is not None else q,
        text_k if text_k is not None else k,
        text_v if text_v is not None else value,
    )
    batch, tokens, heads, size = q.shape
    total = out[0].shape[1]
    strides = (stride for x in (q, k, value, *texts) for stride in token_strides(x))
    keyed_launch(
        _rope_qkv_pack_kernel,
        (total, batch),
        (
            q,
            k,
            value,
            *texts,
            cos,
            sin,
            out[0],
            out[1],
            out[-1],
            tokens,
            total - tokens,
            cos.shape[0],
            *strides,
            cos.stride(0),
            sin.stride(0),
            heads,
            size,
            triton.next_power_of_2(size),
            HEAD_TILE,
            v is not None,
        ),
        free=(11, 12, 13),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


rope_qkv_pack: Callable[..., list[Tensor]] = define_fusion(  # type: ignore[assignment]
    f"{_NAME}(Tensor q, Tensor k, Tensor? v, Tensor? text_q, Tensor? text_k, Tensor? text_v,"
    " Tensor cos, Tensor sin) -> Tensor[]",
    kernel=launch_rope_qkv_pack,
    reference=rope_qkv_pack_reference,
    why_not=why_not_rope_qkv_pack,
    fake=_fake,
)
