"""The blocks of the MiniMax-H3 denoiser and of its text refiner, with parts as slots.

Each rewrite computes what diffusers' forward computes. What a fused part computes is in
``kernels``.
"""

from __future__ import annotations

from torch import Tensor

from quantpolicy.kernels.quantised_rows import QuantisedRows
from quantpolicy.runtime.mounts.feed_forward import read_codes
from quantpolicy.runtime.mounts.quantised_norm import Readers, quantised_rows
from quantpolicy.runtime.mounts.site import Part, Rewrite, is_unhooked

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
        first, second = readers_of(self)
        stream = hidden_states + self.attn(self._normed(self.norm1, hidden_states, first))
        added: Tensor = stream + self.ff(self._normed(self.norm2, stream, second))
        return added

    def _normed(
        self: Part,
        norm: Part,
        x: Tensor,
        readers: Readers,
        tables: Tables | None = None,
        index: Tensor | None = None,
    ) -> Tensor | QuantisedRows:
        gives_codes = self.quantises and read_codes(readers) and is_unhooked(norm)
        if tables is None or index is None:
            return quantised_rows(norm, x, readers) if gives_codes else norm(x)
        shift, scale = tables
        if gives_codes:
            return quantised_rows(norm, x, readers, 1.0 + scale, shift, index)
        modulated: Tensor = norm(x) * (1.0 + scale.index_select(0, index))
        return modulated + shift.index_select(0, index)


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
        first, second = readers_of(self)
        normed = self._normed(self.norm1, hidden_states, first, (shift, scale), adaln_indices)
        update = self.attn(normed, rotary_emb, attention_mask)
        stream = hidden_states + gate.index_select(0, adaln_indices) * update
        normed = self._normed(self.norm2, stream, second, (mlp_shift, mlp_scale), adaln_indices)
        added: Tensor = stream + mlp_gate.index_select(0, adaln_indices) * self.ff(normed)
        return added


def readers_of(block: Part) -> tuple[Readers, Readers]:
    """Return the Linears that read the norm before attention, and that before feed-forward."""
    attn = block.attn
    linears = (attn.to_qkv,) if attn.fused_projections else (attn.to_q, attn.to_k, attn.to_v)
    return linears, (block.ff.net[0].proj,)
