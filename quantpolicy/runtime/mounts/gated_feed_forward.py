"""SwiGLU before an fp8 Linear, in the feed-forwards of diffusers that have one.

Each rewrite computes what diffusers' forward computes; its projections run as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from diffusers.models.activations import SwiGLU
from diffusers.models.attention import FeedForward
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux2 import (
    Flux2FeedForward,
    Flux2ParallelSelfAttention,
    Flux2ParallelSelfAttnProcessor,
    Flux2SwiGLU,
)
from diffusers.models.transformers.transformer_z_image import FeedForward as ZImageFeedForward
from torch import Tensor, nn

from quantpolicy.kernels.swiglu_fp8_linear import swiglu_fp8_linear
from quantpolicy.runtime.mounts.feed_forward import has_idle_dropouts, is_fp8, is_free_fp8
from quantpolicy.runtime.mounts.site import (
    Part,
    Rewrite,
    Site,
    Sites,
    find_in_each,
    former_class,
    is_unhooked,
    why_not_bypassed,
    why_not_plain,
    why_not_processor,
)


class Gated(Rewrite):
    """A feed-forward whose last Linear is fp8.

    Args:
        quantises: its gate and the quantisation behind it in one pass.
    """

    quantises = False


class GatedFeedForward(Gated):
    """diffusers' feed-forward, whose projection gives the value and the gate behind it."""

    def forward(self: Part, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Return the rows after the last Linear."""
        entry, last = self.net[0], self.net[2]
        is_free = is_swiglu(entry) and is_free_fp8(last) and has_idle_dropouts(self)
        if not (self.quantises and is_free):
            plain: Tensor = super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
            return plain
        value, gate = entry.proj(hidden_states).chunk(2, dim=-1)
        return _multiplied(last, value, gate)


class Flux2GatedFeedForward(Gated):
    """FLUX.2's feed-forward, whose projection gives the gate and the value behind it."""

    def forward(self: Part, x: Tensor) -> Tensor:
        """Return the rows after the last Linear."""
        if not (self.quantises and is_swiglu(self.act_fn) and is_free_fp8(self.linear_out)):
            plain: Tensor = super().forward(x)  # type: ignore[misc]
            return plain
        gate, value = _halves(self.linear_in(x))
        return _multiplied(self.linear_out, value, gate)


class ZImageGatedFeedForward(Gated):
    """Z-Image's feed-forward, with two projections."""

    def forward(self: Part, x: Tensor) -> Tensor:
        """Return the rows after the last Linear."""
        if not (self.quantises and is_free_fp8(self.w2)):
            plain: Tensor = super().forward(x)  # type: ignore[misc]
            return plain
        gate, value = self.w1(x), self.w3(x)
        return _multiplied(self.w2, value, gate)


class Flux2ParallelProcessor(Gated):
    """FLUX.2's processor of attention and feed-forward side by side, with one Linear behind."""

    def __call__(
        self: Part,
        attn: Part,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Return the rows after the last Linear."""
        is_free = is_swiglu(attn.mlp_act_fn) and is_free_fp8(attn.to_out)
        if not (self.quantises and is_free):
            plain: Tensor = super().__call__(  # type: ignore[misc]
                attn, hidden_states, attention_mask, image_rotary_emb
            )
            return plain
        projected = attn.to_qkv_mlp_proj(hidden_states)
        of_attention, of_mlp = 3 * attn.inner_dim, attn.mlp_hidden_dim * attn.mlp_mult_factor
        # In proportion: under tensor parallelism each rank has its share of both.
        width = projected.shape[-1] * of_attention // (of_attention + of_mlp)
        query, key, value = (
            x.unflatten(-1, (-1, attn.head_dim)) for x in projected[..., :width].chunk(3, dim=-1)
        )
        query, key = attn.norm_q(query), attn.norm_k(key)
        if image_rotary_emb is not None:
            query = apply_rotary_emb(query, image_rotary_emb, sequence_dim=1)
            key = apply_rotary_emb(key, image_rotary_emb, sequence_dim=1)
        out = dispatch_attention_fn(
            query,
            key,
            value,
            attn_mask=attention_mask,
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        )
        head = out.flatten(2, 3).to(query.dtype)
        gate, value = _halves(projected[..., width:])
        return _multiplied(attn.to_out, value, gate, head)


def _halves(rows: Tensor) -> tuple[Tensor, Tensor]:
    half = rows.shape[-1] // 2
    return rows[..., :half], rows[..., half:]


def _multiplied(last: Part, value: Tensor, gate: Tensor, head: Tensor | None = None) -> Tensor:
    return swiglu_fp8_linear(value, gate, head, *last.operands_for(value, gate, head))


# Each class with a gate before its last Linear: its rewrite, and what holds the gate (None: the
# class itself) beside that Linear.
KINDS: dict[type, tuple[type[Gated], Callable[[Part], tuple[Part, Part]]]] = {
    FeedForward: (GatedFeedForward, lambda ff: (ff.net[0], ff.net[2])),
    Flux2FeedForward: (Flux2GatedFeedForward, lambda ff: (ff.act_fn, ff.linear_out)),
    Flux2ParallelSelfAttention: (
        Flux2ParallelProcessor,
        lambda attn: (attn.mlp_act_fn, attn.to_out),
    ),
    ZImageFeedForward: (ZImageGatedFeedForward, lambda ff: (None, ff.w2)),
}


def find_swiglu_fp8_linear(model: nn.Module) -> Sites:
    """Return the feed-forwards with a SwiGLU whose last Linear is fp8."""
    return find_in_each(_candidates(model), _site)


def _candidates(model: nn.Module) -> Iterator[tuple[str, Part]]:
    for name, module in model.named_modules():
        if former_class(module) in KINDS:
            entry, last = KINDS[former_class(module)][1](module)
            if is_fp8(last) and (entry is None or type(_silu_of(entry)) is nn.SiLU):
                yield name, module


def _site(name: str, module: Part) -> tuple[Site, str]:
    rewrite, parts = KINDS[former_class(module)]
    entry, last = parts(module)
    target, reason = module, why_not_plain(module)
    if rewrite is Flux2ParallelProcessor:
        target = module.processor
        reason = reason or why_not_processor(module, Flux2ParallelSelfAttnProcessor)
    passed = tuple(module.net) if rewrite is GatedFeedForward else (last,)
    for part in passed if entry is None else (entry, _silu_of(entry), *passed):
        reason = reason or why_not_bypassed(part)
    return Site(name, target, rewrite, "quantises"), reason


def _silu_of(entry: Part) -> Part:
    """Return what a SwiGLU gates with, None for another activation."""
    if former_class(entry) is SwiGLU:
        return entry.activation
    return entry.gate_fn if former_class(entry) is Flux2SwiGLU else None


def is_swiglu(entry: Part) -> bool:
    """Return whether an activation still is a SwiGLU that can be computed without its call.

    Asked at every call: what is hooked or exchanged after a mount is called itself.
    """
    silu = _silu_of(entry)
    return type(silu) is nn.SiLU and is_unhooked(entry, silu)


FINDERS: dict[str, Callable[[nn.Module], Sites]] = {"swiglu_fp8_linear": find_swiglu_fp8_linear}
