"""The blocks of Wan and their attention processors, with parts as slots.

Each rewrite computes what diffusers' forward computes. What a fused part computes is in
``kernels``.
"""

from __future__ import annotations

from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from torch import Tensor, nn

from quantpolicy.kernels.add_layer_norm_fp8 import add_layer_norm_fp8
from quantpolicy.kernels.gated_residual import gated_residual
from quantpolicy.kernels.layer_norm_fp8 import layer_norm_fp8
from quantpolicy.kernels.layer_norm_fp32 import layer_norm_fp32
from quantpolicy.kernels.qk_norm_rope_across_heads import (
    qk_norm_rope_across_heads,
    rotate_heads_reference,
)
from quantpolicy.kernels.quantised_rows import QuantisedRows
from quantpolicy.kernels.rms_norm import rms_norm
from quantpolicy.kernels.token_rows import full_vector
from quantpolicy.runtime.mounts.feed_forward import take_codes, why_not_entered
from quantpolicy.runtime.mounts.site import Part, Rewrite, is_still, why_not_attended_by

Rotary = tuple[Tensor, Tensor]

# A part of the modulation, [B, D] or [B, S, D], and what is added to it, [D].
Vector = tuple[Tensor, Tensor]
NO_VECTOR = (None, None)
_NORMS = ("norm1", "norm2", "norm3")


class Block(Rewrite):
    """A transformer block, whose norms and residual adds are computed in fp32.

    Args:
        norms: each LayerNorm in one op, scale and shift included.
        quantises: the same with the quantisation behind it, where only fp8 Linears read the rows.
        adds: the same with the residual add before it, where there is one in the block.
        gates: gated residual adds in one op.
    """

    norms = False
    quantises = False
    adds = False
    gates = False

    def forward(
        self: Part,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        rotary_emb: Rotary,
    ) -> Tensor:
        """Return the rows after the block; ``temb`` is [B, 6, D], or [B, S, 6, D] by token."""
        if self.norms or self.quantises or self.adds:
            # The patch embedding may put a token's channels far apart, and sums keep them so.
            hidden_states = hidden_states.contiguous()
        # The sum of a vector and its table is an fp32 tensor as large as the stream, or larger:
        # where vectors come by token, the ops are better off with the parts.
        vectors, tables = temb.unbind(-2), self.scale_shift_table[0].unbind(0)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = zip(vectors, tables, strict=True)

        normed = self._normed(0, hidden_states, scale, shift)
        update = self.attn1(normed, None, None, rotary_emb)
        stream, normed = self._added_and_normed(1, hidden_states, update, gate)
        update = self.attn2(normed, encoder_hidden_states, None, None)
        stream, normed = self._added_and_normed(2, stream, update, None, mlp_scale, mlp_shift)
        added: Tensor = self._added(stream, self.ffn(normed), mlp_gate)
        return added

    def _added_and_normed(
        self: Part,
        index: int,
        stream: Tensor,
        update: Tensor,
        gate: Vector | None,
        scale: Vector | None = None,
        shift: Vector | None = None,
    ) -> tuple[Tensor, Tensor | QuantisedRows]:
        norm = self._modules[_NORMS[index]]
        if self.adds and is_still(nn.LayerNorm, norm):
            floor = floor_of_codes(self, index)
            if floor is not None:
                added = (stream, update, *(gate or NO_VECTOR))
                affine = (norm.weight, norm.bias)
                modulation = (*(scale or NO_VECTOR), *(shift or NO_VECTOR))
                stream, codes, row_scale = add_layer_norm_fp8(
                    *added, *affine, *modulation, norm.eps, floor
                )
                return stream, QuantisedRows(codes, row_scale, stream.dtype)
        stream = stream + update if gate is None else self._added(stream, update, gate)
        return stream, self._normed(index, stream, scale, shift)

    def _normed(
        self: Part,
        index: int,
        x: Tensor,
        scale: Vector | None = None,
        shift: Vector | None = None,
    ) -> Tensor | QuantisedRows:
        norm = self._modules[_NORMS[index]]
        if is_still(nn.LayerNorm, norm):
            modulation = (*(scale or NO_VECTOR), *(shift or NO_VECTOR))
            args = (x, norm.weight, norm.bias, *modulation, norm.eps)
            if self.quantises:
                floor = floor_of_codes(self, index)
                if floor is not None:
                    return QuantisedRows(*layer_norm_fp8(*args, floor), x.dtype)
            if self.norms:
                return layer_norm_fp32(*args)
        normed: Tensor = norm(x.float())
        if scale is not None and shift is not None:
            normed = normed * (1 + full_vector(*scale)) + full_vector(*shift)
        return normed.type_as(x)

    def _added(self: Part, stream: Tensor, update: Tensor, gate: Vector) -> Tensor:
        if self.gates:
            return gated_residual(stream, update, gate[0], True, gate[1])
        return (stream.float() + update * full_vector(*gate)).type_as(stream)


def floor_of_codes(block: Part, index: int) -> float | None:
    """Return the activation floor of what reads a norm's codes, None where it is to give rows.

    Asked at every call: what is hooked or exchanged after a mount gets rows.
    """
    if why_not_passed(block, index):
        return None
    readers = readers_of(block, index)
    floor: float | None = readers[0].floor if take_codes(readers) else None
    return floor


def why_not_passed(block: Part, index: int) -> str:
    """Return why the codes of one of a block's three norms reach no Linear, "" when they do."""
    if index == len(_NORMS) - 1:
        return why_not_entered(block.ffn)
    attn = block.attn1 if index == 0 else block.attn2
    return why_not_attended_by(attn, WanAttention, WanAttnProcessor)


def readers_of(block: Part, index: int) -> tuple[Part, ...]:
    """Return the Linears that read the result of one of a block's three norms."""
    if index == 0:
        attn = block.attn1
        return (attn.to_qkv,) if attn.fused_projections else (attn.to_q, attn.to_k, attn.to_v)
    return (block.attn2.to_q if index == 1 else block.ffn.net[0].proj,)


class Attention(Rewrite):
    """The attention processor, in self-attention and cross-attention.

    Args:
        rotates: norm and rotation of queries and keys in one op, where there are rotary tables.
        norms: each norm in one op, where there are none.
    """

    rotates = False
    norms = False

    def __call__(
        self: Part,
        attn: Part,
        hidden_states: Tensor | QuantisedRows,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Rotary | None = None,
    ) -> Tensor:
        """Return the projected attention, as the stock processor does."""
        if attn.add_k_proj is not None or attn.fused_projections:
            stock: Tensor = super().__call__(  # type: ignore[misc]
                attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb
            )
            return stock
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query, key, value = attn.to_q(hidden_states), attn.to_k(context), attn.to_v(context)
        query, key = self._prepare(attn, query, key, rotary_emb)
        out = dispatch_attention_fn(
            query,
            key,
            _heads(value, attn),
            attn_mask=attention_mask,
            dropout_p=0.0,
            is_causal=False,
            backend=self._attention_backend,
            parallel_config=self._parallel_config if encoder_hidden_states is None else None,
        )
        out = out.flatten(2, 3).type_as(query)
        projected: Tensor = attn.to_out[1](attn.to_out[0](out))
        return projected

    def _prepare(
        self: Part, attn: Part, query: Tensor, key: Tensor, rotary: Rotary | None
    ) -> tuple[Tensor, Tensor]:
        """Norm queries and keys over all heads and rotate them; return [B, S, H, D]."""
        norm_q, norm_k = attn.norm_q, attn.norm_k
        is_free = is_still(nn.RMSNorm, norm_q, norm_k)
        if rotary is not None and self.rotates and is_free:
            return qk_norm_rope_across_heads(
                query, key, norm_q.weight, norm_k.weight, *rotary, norm_q.eps
            )
        if rotary is None and self.norms and is_free:
            query = rms_norm(query, norm_q.weight, norm_q.eps, query.dtype)
            key = rms_norm(key, norm_k.weight, norm_k.eps, key.dtype)
        else:
            query, key = norm_q(query), norm_k(key)
        query, key = _heads(query, attn), _heads(key, attn)
        if rotary is None:
            return query, key
        return rotate_heads_reference(query, *rotary), rotate_heads_reference(key, *rotary)


def _heads(x: Tensor, attn: Part) -> Tensor:
    return x.view(*x.shape[:2], attn.heads, x.shape[2] // attn.heads)
