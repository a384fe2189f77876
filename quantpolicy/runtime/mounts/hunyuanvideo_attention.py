"""The attention processors of HunyuanVideo 1.0 and 1.5, rewritten with their parts as slots.

What a fused part computes is in ``kernels``; the blocks around them are not here.
"""

from __future__ import annotations

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.normalization import RMSNorm
from torch import Tensor
from torch.nn import functional as F

from quantpolicy.kernels.qk_norm_rope_pack import qk_norm_rope_pack
from quantpolicy.kernels.qk_rms_norm import qk_rms_norm
from quantpolicy.kernels.quantised_rows import QuantisedRows
from quantpolicy.kernels.rope_qkv_pack import rope_qkv_pack, rope_qkv_pack_reference
from quantpolicy.runtime.mounts.site import Part, Rewrite, is_still

Rotary = tuple[Tensor, Tensor]


class JointAttention(Rewrite):
    """The attention processor of both versions.

    Args:
        packs: rotation and packing in one op.
        norms: queries and keys normed by an op; in the same pass when ``packs`` is on too.
        unmasked: attention may come without a mask, which version 1.5 cannot take otherwise.
        takes_codes: rows may come quantised, apart for each stream, or joined without ``text``.
    """

    packs = False
    norms = False
    unmasked = False
    takes_codes = False

    def __call__(
        self: Part,
        attn: Part,
        hidden_states: Tensor | QuantisedRows,
        encoder_hidden_states: Tensor | QuantisedRows | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return image and text rows after the joint attention, as the stock processor does."""
        text = encoder_hidden_states
        rows = hidden_states
        joins = attn.add_q_proj is None
        if joins and text is not None:
            rows = torch.cat([hidden_states, text], dim=1)  # type: ignore[list-item]
        image = [_heads(project(rows), attn) for project in (attn.to_q, attn.to_k, attn.to_v)]
        texts: list[Tensor | None] = [None, None, None]
        if text is not None and not joins:
            added = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            texts = [_heads(project(text), attn) for project in added]
        query, key, value = self._prepare(attn, image, texts, image_rotary_emb)
        mask = self._mask(attention_mask, query)
        out = dispatch_attention_fn(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=0.0,
            is_causal=False,
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        )
        out = out.flatten(2, 3).to(query.dtype)
        if text is None:
            return out, None
        tokens = text.codes if isinstance(text, QuantisedRows) else text
        return _project_out(attn, out, tokens.shape[1])

    def _mask(self: Part, mask: Tensor | None, query: Tensor) -> Tensor | None:
        """Return what attention gets; version 1.5 makes a square mask of the text tokens' one."""
        if mask is None or mask.dim() == 4:
            return mask
        batch, tokens = query.shape[:2]
        valid = F.pad(mask, (tokens - mask.shape[1], 0), value=True).bool()
        columns = valid.view(batch, 1, 1, tokens)
        return columns & columns.transpose(2, 3)

    def _prepare(
        self: Part,
        attn: Part,
        image: list[Tensor],
        texts: list[Tensor | None],
        rotary: Rotary | None,
    ) -> list[Tensor]:
        """Return normed, rotated and packed Q, K, V: [B, S + T, H, D]."""
        (query, key, value), (text_q, text_k, text_v) = image, texts
        norms = [attn.norm_q, attn.norm_k]
        if text_q is not None:
            norms += [attn.norm_added_q, attn.norm_added_k]
        fused = self.norms and is_still(RMSNorm, *norms)
        if self.packs and fused and rotary is not None:
            packed: list[Tensor] = self._in_one_pass(attn, image, texts, rotary)
            return packed
        query, key = _normed(query, key, norms[:2], fused)
        if text_q is not None and text_k is not None:
            text_q, text_k = _normed(text_q, text_k, norms[2:], fused)
        if rotary is None:
            pairs = ((query, text_q), (key, text_k), (value, text_v))
            return [x if text is None else torch.cat([x, text], dim=1) for x, text in pairs]
        pack = rope_qkv_pack if self.packs else rope_qkv_pack_reference
        packed = pack(
            query, key, value if text_v is not None else None, text_q, text_k, text_v, *rotary
        )
        return packed if text_v is not None else [*packed, value]

    def _in_one_pass(
        self: Part, attn: Part, image: list[Tensor], texts: list[Tensor | None], rotary: Rotary
    ) -> list[Tensor]:
        has_text = texts[0] is not None
        packed = qk_norm_rope_pack(
            image[0],
            image[1],
            image[2] if has_text else None,
            *texts,
            attn.norm_q.weight,
            attn.norm_k.weight,
            attn.norm_added_q.weight if has_text else None,
            attn.norm_added_k.weight if has_text else None,
            *rotary,
            attn.norm_q.eps,
        )
        return packed if has_text else [*packed, image[2]]


def _normed(query: Tensor, key: Tensor, norms: list[Part], fused: bool) -> tuple[Tensor, Tensor]:
    norm_q, norm_k = norms
    if fused:
        return qk_rms_norm(query, key, norm_q.weight, norm_k.weight, norm_q.eps)
    return (
        norm_q(query) if norm_q is not None else query,
        norm_k(key) if norm_k is not None else key,
    )


def _heads(x: Tensor, attn: Part) -> Tensor:
    return x.view(*x.shape[:2], attn.heads, x.shape[2] // attn.heads)


def _project_out(attn: Part, out: Tensor, text_tokens: int) -> tuple[Tensor, Tensor]:
    image, text = out[:, :-text_tokens], out[:, -text_tokens:]
    if getattr(attn, "to_out", None) is not None:
        image = attn.to_out[1](attn.to_out[0](image))
    if getattr(attn, "to_add_out", None) is not None:
        text = attn.to_add_out(text)
    return image, text
