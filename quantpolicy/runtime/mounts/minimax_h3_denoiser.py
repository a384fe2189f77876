"""The blocks of the MiniMax-H3 denoiser and of its text refiner, with parts as slots.

Each rewrite computes what diffusers' forward computes. What a fused part computes is in
``kernels``.
"""

from __future__ import annotations

from diffusers.models.transformers.transformer_minimax_h3 import (
    MiniMaxH3Attention,
    MiniMaxH3AttnProcessor,
)
from torch import Tensor, nn

from quantpolicy.kernels.quantised_rows import QuantisedRows
from quantpolicy.runtime.mounts.feed_forward import take_codes, why_not_entered
from quantpolicy.runtime.mounts.quantised_norm import Readers, quantised_rows
from quantpolicy.runtime.mounts.site import Part, Rewrite, is_still, why_not_attended_by

# Tables [R, D] of shift and scale.
Tables = tuple[Tensor, Tensor]


class RefinerBlock(Rewrite):
    """A block of the text refiner, without modulation.

    Args:
        quantises: both norms with the quantisation behind them, where only fp8 Linears read the
            rows.
    """

    quantises = False

    def forward(self: Part, hidden_states: Tensor) -> Tensor:
        """Return the rows after the block."""
        stream = hidden_states + self.attn(self._normed(0, hidden_states))
        added: Tensor = stream + self.ff(self._normed(1, stream))
        return added

    def _normed(
        self: Part,
        which: int,
        x: Tensor,
        tables: Tables | None = None,
        index: Tensor | None = None,
    ) -> Tensor | QuantisedRows:
        norm, readers = (self.norm1, self.norm2)[which], self._free_readers(which)
        gives_codes = take_codes(readers) and is_still(nn.RMSNorm, norm)
        if tables is None or index is None:
            return quantised_rows(norm, x, readers) if gives_codes else norm(x)
        shift, scale = tables
        if gives_codes:
            return quantised_rows(norm, x, readers, 1.0 + scale, shift, index)
        modulated: Tensor = norm(x) * (1.0 + scale.index_select(0, index))
        return modulated + shift.index_select(0, index)

    def _free_readers(self: Part, which: int) -> Readers:
        """Return the Linears that codes of a norm reach now."""
        if not self.quantises or why_not_passed(self, which):
            return ()
        return readers_of(self, which)


class Block(RefinerBlock):
    """A transformer block, whose rows each have one entry of the tables of modulation."""

    def forward(  # type: ignore[override]
        self: Part,
        hidden_states: Tensor,
        temb: Tensor,
        adaln_indices: Tensor,
        rotary_emb: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the rows after the block."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.adaln_proj(temb)
        normed = self._normed(0, hidden_states, (shift, scale), adaln_indices)
        update = self.attn(normed, rotary_emb, attention_mask)
        stream = hidden_states + gate.index_select(0, adaln_indices) * update
        normed = self._normed(1, stream, (mlp_shift, mlp_scale), adaln_indices)
        added: Tensor = stream + mlp_gate.index_select(0, adaln_indices) * self.ff(normed)
        return added


def why_not_passed(block: Part, which: int) -> str:
    """Return why the codes of one of a block's two norms reach no Linear, "" when they do."""
    if which == 1:
        return why_not_entered(block.ff)
    return why_not_attended_by(block.attn, MiniMaxH3Attention, MiniMaxH3AttnProcessor)


def readers_of(block: Part, which: int) -> Readers:
    """Return the Linears that read the norm before attention, and that before feed-forward."""
    if which == 1:
        return (block.ff.net[0].proj,)
    attn = block.attn
    return (attn.to_qkv,) if attn.fused_projections else (attn.to_q, attn.to_k, attn.to_v)
