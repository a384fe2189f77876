"""The blocks of Z-Image, with parts as slots.

The rewrite computes what diffusers' forward computes. What a fused part computes is in ``kernels``.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_z_image import (
    FeedForward,
    ZSingleStreamAttnProcessor,
)
from torch import Tensor

from quantpolicy.kernels.quantised_rows import QuantisedRows
from quantpolicy.runtime.mounts.feed_forward import take_codes
from quantpolicy.runtime.mounts.quantised_norm import Readers, quantised_rows
from quantpolicy.runtime.mounts.site import (
    Part,
    Rewrite,
    is_still,
    why_not_attended_by,
    why_not_passed_on,
)


class Block(Rewrite):
    """A transformer block; those that refine the text have no modulation.

    Args:
        quantises: the norms before attention and feed-forward, their factor included, with the
            quantisation behind them, where only fp8 Linears read the rows.
    """

    quantises = False

    def forward(
        self: Part,
        x: Tensor,
        attn_mask: Tensor,
        freqs_cis: Tensor,
        adaln_input: Tensor | None = None,
        noise_mask: Tensor | None = None,
        adaln_noisy: Tensor | None = None,
        adaln_clean: Tensor | None = None,
    ) -> Tensor:
        """Return the rows after the block; a ``noise_mask`` [B, S] tells noisy rows from clean."""
        scale = gate = mlp_scale = mlp_gate = None
        if self.modulation:
            scale, gate, mlp_scale, mlp_gate = _modulation(
                self, adaln_input, noise_mask, adaln_noisy, adaln_clean
            )
        normed = self._normed(0, x, scale)
        update = self.attention(normed, attention_mask=attn_mask, freqs_cis=freqs_cis)
        x = _added(x, self.attention_norm2(update), gate)
        normed = self._normed(1, x, mlp_scale)
        return _added(x, self.ffn_norm2(self.feed_forward(normed)), mlp_gate)

    def _normed(self: Part, index: int, x: Tensor, scale: Tensor | None) -> Tensor | QuantisedRows:
        norm = (self.attention_norm1, self.ffn_norm1)[index]
        if self.quantises and is_still(RMSNorm, norm) and not why_not_passed(self, index):
            readers = readers_of(self, index)
            if take_codes(readers):
                return quantised_rows(norm, x, readers, scale)
        normed: Tensor = norm(x)
        return normed if scale is None else normed * scale


def why_not_passed(block: Part, index: int) -> str:
    """Return why the codes of one of a block's two norms reach no Linear, "" when they do."""
    if index == 0:
        return why_not_attended_by(block.attention, Attention, ZSingleStreamAttnProcessor)
    return why_not_passed_on(block.feed_forward, FeedForward)


def readers_of(block: Part, index: int) -> Readers:
    """Return the Linears that read the norm before attention, and that before feed-forward."""
    if index == 1:
        return block.feed_forward.w1, block.feed_forward.w3
    attn = block.attention
    return attn.to_q, attn.to_k, attn.to_v


def _modulation(
    block: Part,
    conditioning: Tensor | None,
    noise_mask: Tensor | None,
    noisy: Tensor | None,
    clean: Tensor | None,
) -> Iterable[Tensor]:
    """Return factor and gate of the attention, factor and gate of the feed-forward.

    Each is [B, 1, D]; with a mask [B, S], it is [B, S, D], and each row's is one of two.
    """
    if noise_mask is None:
        return _vectors(block, conditioning)
    is_noisy = noise_mask.unsqueeze(-1) == 1
    pairs = zip(_vectors(block, noisy), _vectors(block, clean), strict=True)
    return (torch.where(is_noisy, *pair) for pair in pairs)


def _vectors(block: Part, conditioning: Tensor | None) -> Iterable[Tensor]:
    vectors = block.adaLN_modulation(conditioning).unsqueeze(1).chunk(4, dim=2)
    scale, gate, mlp_scale, mlp_gate = vectors
    return 1.0 + scale, gate.tanh(), 1.0 + mlp_scale, mlp_gate.tanh()


def _added(stream: Tensor, update: Tensor, gate: Tensor | None) -> Tensor:
    return stream + (update if gate is None else gate * update)
