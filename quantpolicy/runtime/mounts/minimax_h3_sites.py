"""Where the fusions of the MiniMax-H3 video decoder go, and why a site cannot be taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from diffusers.models.activations import SwiGLU
from torch import nn

from quantpolicy.kernels.qk_rms_norm_rope import HEAD_SIZE
from quantpolicy.runtime.mounts.minimax_h3 import (
    BatchedTiles,
    DecoderAttention,
    DecoderBlock,
    FusedWeights,
    GatedLinear,
    GatedProjection,
)
from quantpolicy.runtime.mounts.shared_weights import qkv_of
from quantpolicy.runtime.mounts.site import (
    Part,
    Site,
    Sites,
    find_in_each,
    former_class,
    is_dense,
    why_not_bypassed,
    why_not_plain,
)

BLOCK = "MiniMaxH3VideoTransformerBlock"
PROCESSOR = "MiniMaxH3VideoAttnProcessor"
AUTOENCODER = "AutoencoderKLMiniMaxH3"


def _blocks(model: nn.Module) -> Iterator[tuple[str, Part]]:
    for name, module in model.named_modules():
        if former_class(module).__name__ == BLOCK:
            yield name, module


def _rms_norm_site(name: str, block: Part) -> tuple[Site, str]:
    reason = why_not_plain(block) or _why_not_norm(block.norm1)
    return Site(name, block, DecoderBlock, "norms"), reason


def _scale_add_site(name: str, block: Part) -> tuple[Site, str]:
    reason = why_not_plain(block) or _why_not_norm(block.norm2)
    if block.scale1.dtype is not torch.float32 or block.scale2.dtype is not torch.float32:
        reason = reason or "a residual scale is not kept in float32"
    return Site(name, block, DecoderBlock, "adds"), reason


def _rotary_site(name: str, block: Part) -> tuple[Site, str]:
    attn = block.attn
    reason = _why_not_processor(attn)
    if not reason and attn.dim_head != HEAD_SIZE:
        reason = f"the head size is {attn.dim_head}, not {HEAD_SIZE}"
    for norm in (attn.norm_q, attn.norm_k):
        if not reason and (norm.weight is not None or norm.eps != attn.norm_q.eps):
            reason = "the norms of queries and keys have weights, or differ in eps"
        reason = reason or why_not_bypassed(norm)
    return Site(f"{name}.attn", attn.processor, DecoderAttention, "rotates"), reason


def _swiglu_site(name: str, block: Part) -> tuple[Site, str]:
    entry = block.ff.net[0]
    return Site(f"{name}.ff.net.0", entry, GatedProjection, "gates"), _why_not_gated(entry)


def _swiglu_linear_site(name: str, block: Part) -> tuple[Site, str]:
    entry = block.ff.net[0]
    reason = _why_not_gated(entry)
    if not reason and not is_dense(entry.proj):
        reason = "its projection is not a plain Linear"
    reason = reason or why_not_bypassed(entry.proj)
    return Site(f"{name}.ff.net.0", entry, GatedLinear, "gates"), reason


def _why_not_gated(entry: Part) -> str:
    if former_class(entry) is not SwiGLU:
        return f"the feed-forward begins with a {type(entry).__name__}"
    return why_not_plain(entry) or why_not_bypassed(entry.activation)


def _why_not_norm(norm: Part) -> str:
    if type(norm) is not nn.RMSNorm or norm.weight is None or norm.eps is None:
        return "its norm is no RMSNorm with a weight and an eps"
    if norm.weight.dtype is not torch.float32:
        return "its norm is not kept in float32"
    return why_not_bypassed(norm)


def _why_not_processor(attn: Part) -> str:
    kind = former_class(attn.processor).__name__
    if kind != PROCESSOR:
        return f"its attention processor is a {kind}"
    return why_not_plain(attn)


def _why_not_shared(attn: Part) -> str:
    linears = qkv_of(attn)
    for linear in linears:
        if type(linear) is not nn.Linear or type(linear.weight) is not nn.Parameter:
            return "a projection is not a plain Linear"
        if linear.bias is None or linear.weight.shape != linears[0].weight.shape:
            return "the projections differ in shape, or have no bias"
        if linear.weight.device != linears[0].weight.device or linear.weight.is_meta:
            return "the projections are not on one device"
        if reason := why_not_bypassed(linear):
            return reason
    return _why_not_processor(attn)


def find_qkv_linear(model: nn.Module) -> Sites:
    """Return the attentions, whose weights move together, and their processors."""
    found: list[Site] = []
    rejected: list[tuple[str, str]] = []
    for name, block in _blocks(model):
        reason = _why_not_shared(block.attn)
        if reason:
            rejected.append((f"{name}.attn", reason))
        found.append(Site(f"{name}.attn", block.attn, FusedWeights, "shares"))
        found.append(Site(f"{name}.attn", block.attn.processor, DecoderAttention, "fuses"))
    return Sites(tuple(found), tuple(rejected))


def find_batched_tiles(model: nn.Module) -> Sites:
    """Return the autoencoder."""
    found = tuple(
        Site(name, module, BatchedTiles, "batches")
        for name, module in model.named_modules()
        if former_class(module).__name__ == AUTOENCODER
    )
    return Sites(found)


FINDERS: dict[str, Callable[[nn.Module], Sites]] = {
    "rms_norm": lambda model: find_in_each(_blocks(model), _rms_norm_site),
    "scale_add_rms_norm": lambda model: find_in_each(_blocks(model), _scale_add_site),
    "qk_rms_norm_rope": lambda model: find_in_each(_blocks(model), _rotary_site),
    "swiglu": lambda model: find_in_each(_blocks(model), _swiglu_site),
    "swiglu_linear": lambda model: find_in_each(_blocks(model), _swiglu_linear_site),
    "qkv_linear": find_qkv_linear,
    "batched_tiles": find_batched_tiles,
}
