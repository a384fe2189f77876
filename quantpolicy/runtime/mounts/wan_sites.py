"""Where the fusions of Wan go, and why a site cannot be taken.

Classes are told by identity: other models of diffusers have blocks of the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from diffusers.models.normalization import FP32LayerNorm
from diffusers.models.transformers.transformer_wan import WanAttnProcessor, WanTransformerBlock
from torch import nn

from quantpolicy.runtime.mounts.quantised_norm import why_not_read_as_codes
from quantpolicy.runtime.mounts.site import (
    Part,
    Site,
    Sites,
    find_in_each,
    former_class,
    why_not_bypassed,
    why_not_plain,
    why_not_processor,
)
from quantpolicy.runtime.mounts.wan import Attention, Block, readers_of, why_not_passed


def _blocks(model: nn.Module) -> Iterator[tuple[str, Part]]:
    for name, module in model.named_modules():
        if former_class(module) is WanTransformerBlock:
            yield name, module


def _gates_site(name: str, block: Part) -> tuple[Site, str]:
    return Site(name, block, Block, "gates"), why_not_plain(block)


def _norms_site(name: str, block: Part) -> tuple[Site, str]:
    reason = why_not_plain(block)
    for norm in (block.norm1, block.norm2, block.norm3):
        reason = reason or _why_not_layer_norm(norm)
    return Site(name, block, Block, "norms"), reason


def _why_not_layer_norm(norm: Part) -> str:
    if former_class(norm) not in (FP32LayerNorm, nn.Identity):
        return f"a norm is a {type(norm).__name__}"
    return why_not_bypassed(norm)


def _codes_site(name: str, block: Part, slot: str, norms: tuple[int, ...]) -> tuple[Site, str]:
    """Return the block, if the readers of one of the norms at least are fp8 Linears."""
    site, reason = Site(name, block, Block, slot), _norms_site(name, block)[1]
    for index in norms:
        reason = reason or why_not_passed(block, index)
    return site, reason or why_not_read_as_codes([readers_of(block, index) for index in norms])


def _quantises_site(name: str, block: Part) -> tuple[Site, str]:
    return _codes_site(name, block, "quantises", (0, 1, 2))


def _adds_site(name: str, block: Part) -> tuple[Site, str]:
    """Return the block; what is added before its first norm is another block's."""
    return _codes_site(name, block, "adds", (1, 2))


def _rotates_site(name: str, block: Part) -> tuple[Site, str]:
    attn = block.attn1
    reason = _why_not_attention(attn)
    if not reason and attn.norm_q.eps != attn.norm_k.eps:
        reason = "the norms of queries and keys differ in eps"
    return Site(f"{name}.attn1", attn.processor, Attention, "rotates"), reason


def _cross_norms_site(name: str, block: Part) -> tuple[Site, str]:
    attn = block.attn2
    reason = _why_not_attention(attn)
    if not reason and attn.add_k_proj is not None:
        reason = "it attends to an image apart"
    return Site(f"{name}.attn2", attn.processor, Attention, "norms"), reason


def _why_not_attention(attn: Part) -> str:
    if reason := why_not_processor(attn, WanAttnProcessor):
        return reason
    for norm, size in ((attn.norm_q, attn.inner_dim), (attn.norm_k, attn.kv_inner_dim)):
        if type(norm) is not nn.RMSNorm or norm.weight is None or norm.eps is None:
            return "queries and keys have no RMSNorm with a weight and an eps"
        if norm.weight.shape != (size,):
            return f"a norm weight is {tuple(norm.weight.shape)}, not all heads' {(size,)}"
        if reason := why_not_bypassed(norm):
            return reason
    return why_not_plain(attn)


FINDERS: dict[str, Callable[[nn.Module], Sites]] = {
    "gated_residual": lambda model: find_in_each(_blocks(model), _gates_site),
    "layer_norm_fp32": lambda model: find_in_each(_blocks(model), _norms_site),
    "layer_norm_fp8": lambda model: find_in_each(_blocks(model), _quantises_site),
    "add_layer_norm_fp8": lambda model: find_in_each(_blocks(model), _adds_site),
    "qk_norm_rope_across_heads": lambda model: find_in_each(_blocks(model), _rotates_site),
    "rms_norm": lambda model: find_in_each(_blocks(model), _cross_norms_site),
}
