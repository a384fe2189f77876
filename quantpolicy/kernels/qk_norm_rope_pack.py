"""RMSNorm per head, rotary embedding and packing of image and text Q, K, V in one pass.

    out_q = cat(rotate(norm(q)[:, :R]), norm(q)[:, R:], text_norm(text_q))      the same for k
    out_v = cat(v, text_v)

``qk_rms_norm`` followed by ``rope_qkv_pack``, with the same roundings. Contract: high.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from quantpolicy.kernels.contract import define_fusion
from quantpolicy.kernels.keyed_launch import keyed_launch
from quantpolicy.kernels.qk_rms_norm import head_norm_reference, why_not_head_norm
from quantpolicy.kernels.registry import HAS_TRITON
from quantpolicy.kernels.rope_qkv_pack import rope_qkv_pack_reference, why_not_rope_qkv_pack
from quantpolicy.kernels.rotary import HEAD_TILE, packed_like, token_strides

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = "qk_norm_rope_pack"


def qk_norm_rope_pack_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    text_q: Tensor | None,
    text_k: Tensor | None,
    text_v: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    text_q_weight: Tensor | None,
    text_k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> list[Tensor]:
    """Norm, rotate and pack in plain torch."""
    texts = [
        head_norm_reference(text, weight, eps) if text is not None and weight is not None else text
        for text, weight in ((text_q, text_q_weight), (text_k, text_k_weight))
    ]
    q, k = head_norm_reference(q, q_weight, eps), head_norm_reference(k, k_weight, eps)
    return rope_qkv_pack_reference(q, k, v, texts[0], texts[1], text_v, cos, sin)


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    text_q: Tensor | None,
    text_k: Tensor | None,
    text_v: Tensor | None,
    *others: object,
) -> list[Tensor]:
    del others
    pairs = ((q, text_q), (k, text_k), (v, text_v))
    return [packed_like(x, text) for x, text in pairs if x is not None]


def _why_not(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    text_q: Tensor | None,
    text_k: Tensor | None,
    text_v: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    text_q_weight: Tensor | None,
    text_k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> str:
    del eps
    reason = why_not_rope_qkv_pack(q, k, v, text_q, text_k, text_v, cos, sin)
    reason = reason or why_not_head_norm(q, q_weight) or why_not_head_norm(k, k_weight)
    for text, weight in ((text_q, text_q_weight), (text_k, text_k_weight)):
        if not reason and text is not None:
            reason = (
                why_not_head_norm(text, weight)
                if weight is not None
                else "text tokens have no norm weight"
            )
    return reason


if HAS_TRITON:
    import triton
    import triton.language as tl

    from quantpolicy.kernels.qk_rms_norm import _norm_token, head_norm
    from quantpolicy.kernels.rope_qkv_pack import _copy_token
    from quantpolicy.kernels.rotary import load_pairs, rotate_pairs

    @triton.jit
    def _norm_rotate_token(
        source,
        target,
        stride_h,
        weight_ptr,
        cos_row,
        sin_row,
        eps,
        heads: tl.constexpr,
        HEADS: tl.constexpr,
        D: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        cols = tl.arange(0, BLOCK)
        cos_even, cos_odd = load_pairs(cos_row, cols, cols < D, BLOCK)
        sin_even, sin_odd = load_pairs(sin_row, cols, cols < D, BLOCK)
        cols = cols[None, :]
        weight = tl.load(weight_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
        for start in tl.static_range(0, heads, HEADS):
            head = start + tl.arange(0, HEADS)[:, None]
            mask = (head < heads) & (cols < D)
            x = tl.load(source + head.to(tl.int64) * stride_h + cols, mask=mask, other=0.0)
            y = head_norm(x.to(tl.float32), weight, eps, D, target.dtype.element_ty)
            out = rotate_pairs(y.to(tl.float32), cos_even, cos_odd, sin_even, sin_odd, HEADS, BLOCK)
            tl.store(target + head * D + cols, out.to(target.dtype.element_ty), mask=mask)

    @triton.jit(do_not_specialize=["tokens", "text_tokens", "rotary_rows"])
    def _qk_norm_rope_pack_kernel(
        q_ptr,
        k_ptr,
        v_ptr,
        text_q_ptr,
        text_k_ptr,
        text_v_ptr,
        q_weight_ptr,
        k_weight_ptr,
        text_q_weight_ptr,
        text_k_weight_ptr,
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
        eps,
        H: tl.constexpr,
        D: tl.constexpr,
        BLOCK: tl.constexpr,
        HEADS: tl.constexpr,
        HAS_V: tl.constexpr,
    ):
        token = tl.program_id(0).to(tl.int64)
        batch = tl.program_id(1).to(tl.int64)
        out = (batch * (tokens + text_tokens) + token) * (H * D)
        out_q, out_k = out_q_ptr + out, out_k_ptr + out
        if token < tokens:
            q_row = q_ptr + batch * q_b + token * q_s
            k_row = k_ptr + batch * k_b + token * k_s
            if token < rotary_rows:
                cos_row = cos_ptr + token * cos_s
                sin_row = sin_ptr + token * sin_s
                _norm_rotate_token(
                    q_row, out_q, q_h, q_weight_ptr, cos_row, sin_row, eps, H, HEADS, D, BLOCK
                )
                _norm_rotate_token(
                    k_row, out_k, k_h, k_weight_ptr, cos_row, sin_row, eps, H, HEADS, D, BLOCK
                )
            else:
                _norm_token(q_row, out_q, q_h, q_weight_ptr, eps, H, HEADS, D, BLOCK)
                _norm_token(k_row, out_k, k_h, k_weight_ptr, eps, H, HEADS, D, BLOCK)
            if HAS_V:
                v_row = v_ptr + batch * v_b + token * v_s
                _copy_token(v_row, out_v_ptr + out, v_h, H, HEADS, D, BLOCK)
        else:
            text = token - tokens
            q_row = text_q_ptr + batch * tq_b + text * tq_s
            k_row = text_k_ptr + batch * tk_b + text * tk_s
            _norm_token(q_row, out_q, tq_h, text_q_weight_ptr, eps, H, HEADS, D, BLOCK)
            _norm_token(k_row, out_k, tk_h, text_k_weight_ptr, eps, H, HEADS, D, BLOCK)
            if HAS_V:
                v_row = text_v_ptr + batch * tv_b + text * tv_s
                _copy_token(v_row, out_v_ptr + out, tv_h, H, HEADS, D, BLOCK)


def launch_qk_norm_rope_pack(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    text_q: Tensor | None,
    text_k: Tensor | None,
    text_v: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    text_q_weight: Tensor | None,
    text_k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> list[Tensor]:
    """Run the Triton kernel: one program a token and batch row, all heads of Q, K and V."""
    out = _fake(q, k, v, text_q, text_k, text_v)
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
        _qk_norm_rope_pack_kernel,
        (total, batch),
        (
            q,
            k,
            value,
            *texts,
            q_weight,
            k_weight,
            text_q_weight if text_q_weight is not None else q_weight,
            text_k_weight if text_k_weight is not None else k_weight,
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
            eps,
            heads,
            size,
            triton.next_power_of_2(int(size)),
            HEAD_TILE,
            v is not None,
        ),
        free=(15, 16, 17),
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out


qk_norm_rope_pack: Callable[..., list[Tensor]] = define_fusion(  # type: ignore[assignment]
    f"{_NAME}(Tensor q, Tensor k, Tensor? v, Tensor? text_q, Tensor? text_k, Tensor? text_v,"
    " Tensor q_weight, Tensor k_weight, Tensor? text_q_weight, Tensor? text_k_weight,"
    " Tensor cos, Tensor sin, float eps) -> Tensor[]",
    kernel=launch_qk_norm_rope_pack,
    reference=qk_norm_rope_pack_reference,
    why_not=_why_not,
    fake=_fake,
)
