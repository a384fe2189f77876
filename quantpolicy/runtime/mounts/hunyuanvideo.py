"""The blocks of HunyuanVideo 1.0 and 1.5, their norms and feed-forwards, with parts as slots.

Each rewrite computes what diffusers' forward computes. What a fused part computes is in
``kernels``.
"""

from __future__ import annotations

import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.normalization import AdaLayerNormZero, AdaLayerNormZeroSingle
from torch import Tensor, nn

from quantpolicy.kernels.gated_residual import gated_residual
from quantpolicy.kernels.gelu_fp8_linear import gelu_fp8_linear
from quantpolicy.kernels.layer_norm_fp8 import layer_norm_fp8
from quantpolicy.kernels.layer_norm_modulate import layer_norm_modulate
from quantpolicy.kernels.linear_gelu import linear_gelu
from quantpolicy.kernels.quantised_rows import QuantisedRows
from quantpolicy.kernels.split_linear import split_linear
from quantpolicy.runtime.mounts.feed_forward import (
    is_free_fp8,
    is_tanh_gelu,
    take_codes,
    why_not_entered,
)
from quantpolicy.runtime.mounts.hunyuanvideo_attention import Rotary
from quantpolicy.runtime.mounts.site import (
    Part,
    Rewrite,
    is_free_dense,
    is_still,
    is_unhooked,
    why_not_passed_on,
)

ADAPTIVE_NORMS = (AdaLayerNormZero, AdaLayerNormZeroSingle)


class DualBlock(Rewrite):
    """A dual-stream block.

    Args:
        modulates: the second norm of both streams with its scale and shift in one op.
        quantises_norms: all four norms with their scale, shift and the quantisation behind them,
            where only fp8 Linears read the rows; needs a processor that takes codes.
        gates: gated residual adds in one op.
    """

    modulates = False
    quantises_norms = False
    gates = False

    def forward(
        self: Part,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        attention_mask: Tensor | None = None,
        freqs_cis: Rotary | None = None,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Return both streams after the block."""
        del args, kwargs
        if self.quantises_norms:
            # The patch embedding may put a token's channels far apart, and sums keep them so.
            hidden_states = hidden_states.contiguous()
        normed, image = adapted(self, "norm1", hidden_states, temb)
        normed_text, text = adapted(self, "norm1_context", encoder_hidden_states, temb)
        update, text_update = self.attn(
            hidden_states=normed,
            encoder_hidden_states=normed_text,
            attention_mask=attention_mask,
            image_rotary_emb=freqs_cis,
        )
        return (
            self._second_half(hidden_states, update, image, "norm2", self.ff),
            self._second_half(
                encoder_hidden_states, text_update, text, "norm2_context", self.ff_context
            ),
        )

    def _second_half(
        self: Part,
        stream: Tensor,
        update: Tensor,
        modulation: tuple[Tensor, ...],
        name: str,
        ff: Part,
    ) -> Tensor:
        """Add the attention's update, then the feed-forward's; modulation as the norm gives it."""
        gate_msa, shift, scale, gate_mlp = modulation
        add = gated_residual if self.gates else gated_residual_eager
        stream = add(stream, update, gate_msa)
        norm, floor = self._modules[name], floor_of_codes(self, name)
        if floor is not None:
            update = ff(quantised(norm, stream, scale, shift, floor))
        else:
            update = ff(modulated(norm, stream, scale, shift, self.modulates))
        return add(stream, update, gate_mlp)


class SingleBlock(Rewrite):
    """A single-stream block.

    Args:
        joins: text and image stay one tensor through the attention; needs a packing processor.
        gates: the gated residual add in one op.
        activates: the MLP's first Linear with its GELU in one op.
        splits: the last Linear over attention and MLP without their concatenation.
        quantises: GELU, concatenation and quantisation before an fp8 last Linear in one pass.
        quantises_norms: the norm with its scale, shift and the quantisation behind it, where only
            fp8 Linears read the rows; needs a processor that takes codes.
    """

    joins = False
    gates = False
    activates = False
    splits = False
    quantises = False
    quantises_norms = False

    def forward(
        self: Part,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Return both streams after the block."""
        del args, kwargs
        text = encoder_hidden_states.shape[1]
        residual = joined(hidden_states, encoder_hidden_states)
        normed, (gate,) = adapted(self, "norm", residual, temb)
        update = self._attend(normed, text, attention_mask, image_rotary_emb)
        update = self._project(normed, update)
        add = gated_residual if self.gates else gated_residual_eager
        stream = add(residual, update, gate)
        return stream[:, :-text, :], stream[:, -text:, :]

    def _project(self: Part, normed: Tensor | QuantisedRows, attended: Tensor) -> Tensor:
        last = self.proj_out
        if self.quantises and is_tanh_gelu(self.act_mlp) and is_free_fp8(last, self.act_mlp):
            rows = self.proj_mlp(normed)
            return gelu_fp8_linear(rows, attended, *last.operands_for(rows, attended))
        mlp = self._mlp(normed)
        if self.splits and is_free_dense(last):
            return split_linear(attended, mlp, last.weight, last.bias)
        projected: Tensor = last(torch.cat([attended, mlp], dim=2))
        return projected

    def _mlp(self: Part, normed: Tensor | QuantisedRows) -> Tensor:
        activates = self.activates and is_tanh_gelu(self.act_mlp) and is_unhooked(self.act_mlp)
        if activates and isinstance(normed, Tensor) and is_free_dense(self.proj_mlp):
            return linear_gelu(normed, self.proj_mlp.weight, self.proj_mlp.bias)
        activated: Tensor = self.act_mlp(self.proj_mlp(normed))
        return activated

    def _attend(
        self: Part,
        normed: Tensor | QuantisedRows,
        text: int,
        mask: Tensor | None,
        rotary: Rotary | None,
    ) -> Tensor:
        joins = self.joins and rotary is not None and _does(self.attn.processor, "packs")
        if isinstance(normed, QuantisedRows) or joins:
            # The tables have a row for each image token: those behind them are text.
            update: Tensor = self.attn(
                hidden_states=normed, attention_mask=mask, image_rotary_emb=rotary
            )[0]
            return update
        parts = self.attn(
            hidden_states=normed[:, :-text, :],
            encoder_hidden_states=normed[:, -text:, :],
            attention_mask=mask,
            image_rotary_emb=rotary,
        )
        return torch.cat(parts, dim=1)


class ModulatingNorm(Rewrite):
    """AdaLayerNormZero and AdaLayerNormZeroSingle: norm, scale and shift in one op."""

    modulates = False

    def forward(self: Part, x: Tensor, emb: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the modulated rows and the rest of the modulation."""
        shift, scale, gate, *others = modulation_of(self, x, emb)
        normed = modulated(self.norm, x, scale, shift, self.modulates)
        return (normed, gate, *others)


class ContinuousNorm(Rewrite):
    """AdaLayerNormContinuous: norm, scale and shift in one op."""

    modulates = False

    def forward(self: Part, x: Tensor, conditioning_embedding: Tensor) -> Tensor:
        """Return the modulated rows."""
        emb = self.linear(self.silu(conditioning_embedding).to(x.dtype))
        scale, shift = emb.chunk(2, dim=1)
        return modulated(self.norm, x, scale, shift, self.modulates)


class ActivatedLinear(Rewrite):
    """A feed-forward's first Linear and its tanh-GELU in one op."""

    activates = False

    def forward(self: Part, hidden_states: Tensor) -> Tensor:
        """Return the activated rows."""
        if self.activates and is_free_dense(self.proj):
            return linear_gelu(hidden_states, self.proj.weight, self.proj.bias)
        activated: Tensor = super().forward(hidden_states)  # type: ignore[misc]
        return activated


def readers_of(block: Part, name: str) -> tuple[Part, ...]:
    """Return the Linears that read the result of a block's norm."""
    attn = block.attn
    if name == "norm1_context":
        return attn.add_q_proj, attn.add_k_proj, attn.add_v_proj
    if name in ("norm2", "norm2_context"):
        return ((block.ff if name == "norm2" else block.ff_context).net[0].proj,)
    projections = (attn.to_q, attn.to_k, attn.to_v)
    return (*projections, block.proj_mlp) if name == "norm" else projections


def floor_of_codes(block: Part, name: str) -> float | None:
    """Return the activation floor of what reads a norm's codes, None where it is to give rows.

    Asked at every call: what is hooked or exchanged after a mount gets rows.
    """
    if not block.quantises_norms or why_not_passed(block, name):
        return None
    is_adaptive = not name.startswith("norm2")
    if is_adaptive and not _does(block.attn.processor, "takes_codes"):
        return None
    norm = block._modules[name]
    if is_adaptive and not is_still(ADAPTIVE_NORMS, norm):
        return None
    if not is_still(nn.LayerNorm, norm.norm if is_adaptive else norm):
        return None
    readers = readers_of(block, name)
    floor: float | None = readers[0].floor if take_codes(readers) else None
    return floor


def why_not_passed(block: Part, name: str) -> str:
    """Return why the codes of a block's norm reach no Linear, "" when they do."""
    if name.startswith("norm2"):
        return why_not_entered(block.ff if name == "norm2" else block.ff_context)
    return why_not_passed_on(block.attn, Attention)


def _does(processor: Part, slot: str) -> bool:
    """Return whether a processor has a slot in use: one that was exchanged later has none."""
    return getattr(processor, slot, False) is True


def adapted(
    block: Part, name: str, x: Tensor, emb: Tensor
) -> tuple[Tensor | QuantisedRows, tuple[Tensor, ...]]:
    """Return the rows of a block's adaptive norm, or their codes; and what it does not use."""
    norm, floor = block._modules[name], floor_of_codes(block, name)
    if floor is not None:
        shift, scale, *others = modulation_of(norm, x, emb)
        return quantised(norm.norm, x, scale, shift, floor), tuple(others)
    normed, *others = norm(x, emb=emb)
    return normed, tuple(others)


def modulation_of(norm: Part, x: Tensor, emb: Tensor | None) -> tuple[Tensor, ...]:
    """Return what an adaptive norm makes of the conditioning: shift, scale and gates, [B, D]."""
    vectors = norm.linear(norm.silu(emb))
    parts: tuple[Tensor, ...] = vectors.chunk(vectors.shape[1] // x.shape[-1], dim=1)
    return parts


def quantised(norm: Part, x: Tensor, scale: Tensor, shift: Tensor, floor: float) -> QuantisedRows:
    """Norm, scale, shift and quantise in one op."""
    codes = layer_norm_fp8(x, None, None, scale, None, shift, None, norm.eps, floor)
    return QuantisedRows(*codes, x.dtype)


def modulated(norm: Part, x: Tensor, scale: Tensor, shift: Tensor, fused: bool) -> Tensor:
    """Norm, scale and shift, in one op or as diffusers does."""
    if fused and is_still(nn.LayerNorm, norm):
        return layer_norm_modulate(x, scale, shift, norm.eps)
    result: Tensor = norm(x) * (1 + scale[:, None]) + shift[:, None]
    return result


def gated_residual_eager(residual: Tensor, update: Tensor, gate: Tensor) -> Tensor:
    """Multiply and add as diffusers does; the gate is [B, D]."""
    return residual + update * gate.unsqueeze(1)


def joined(image: Tensor, text: Tensor) -> Tensor:
    """Return both along the tokens: the tensor that they are slices of, when there is one."""
    if (
        not torch.compiler.is_compiling()
        and image._base is not None
        and image._base is text._base
        and image.stride() == text.stride()
        and text.storage_offset() == image.storage_offset() + image.shape[1] * image.stride(1)
        and (image.shape[0], image.shape[2]) == (text.shape[0], text.shape[2])
    ):
        tokens = image.shape[1] + text.shape[1]
        return image.as_strided((image.shape[0], tokens, image.shape[2]), image.stride())
    return torch.cat([image, text], dim=1)
