"""Where the fusions of HunyuanVideo 1.0 and 1.5 go, and why a site cannot be taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from diffusers.models.activations import GELU
from diffusers.models.normalization import (
    AdaLayerNormContinuous,
    AdaLayerNormZero,
    AdaLayerNormZeroSingle,
    RMSNorm,
)
from torch import nn

from quantpolicy.runtime.mounts.feed_forward import is_fp8
from quantpolicy.runtime.mounts.hunyuanvideo import (
    ADAPTIVE_NORMS,
    ActivatedLinear,
    ContinuousNorm,
    DualBlock,
    ModulatingNorm,
    SingleBlock,
    readers_of,
    why_not_passed,
)
from quantpolicy.runtime.mounts.hunyuanvideo_attention import JointAttention
from quantpolicy.runtime.mounts.quantised_norm import why_not_read_as_codes
from quantpolicy.runtime.mounts.site import (
    Part,
    Rewrite,
    Site,
    Sites,
    former_class,
    why_not_bypassed,
    why_not_plain,
)

DUAL_BLOCKS = ("HunyuanVideoTransformerBlock", "HunyuanVideo15TransformerBlock")
SINGLE_BLOCKS = ("HunyuanVideoSingleTransformerBlock",)
TOKEN_REPLACE_BLOCKS = (
    "HunyuanVideoTokenReplaceTransformerBlock",
    "HunyuanVideoTokenReplaceSingleTransformerBlock",
)
PROCESSORS = ("HunyuanVideoAttnProcessor2_0", "HunyuanVideo15AttnProcessor2_0")


def _named(model: nn.Module, *names: str) -> Iterator[tuple[str, Part]]:
    for name, module in model.named_modules():
        if former_class(module).__name__ in names:
            yield name, module


def blocks_of(model: nn.Module) -> Iterator[tuple[str, Part]]:
    """Yield the transformer blocks of a model by name, the text refiner's left out."""
    return _named(model, *DUAL_BLOCKS, *SINGLE_BLOCKS, *TOKEN_REPLACE_BLOCKS)


class _Search:
    """Collects sites and rejections."""

    def __init__(self) -> None:
        self.found: list[Site] = []
        self.rejected: list[tuple[str, str]] = []

    def add(self, site: Site, reason: str) -> None:
        if reason:
            self.rejected.append((site.name, reason))
        else:
            self.found.append(site)

    def result(self) -> Sites:
        return Sites(tuple(self.found), tuple(self.rejected))


def _attentions(model: nn.Module, slot: str, why_not: Callable[[Part], str]) -> _Search:
    search = _Search()
    for name, block in blocks_of(model):
        site = Site(f"{name}.attn", block.attn.processor, JointAttention, slot)
        search.add(site, _why_not_attention(block.attn) or why_not(block.attn))
    return search


def _why_not_attention(attn: Part) -> str:
    kind = former_class(attn.processor).__name__
    reason = "" if kind in PROCESSORS else f"its attention processor is a {kind}"
    return reason or why_not_plain(attn)


def find_rope_qkv_pack(model: nn.Module) -> Sites:
    """Return the processors, and the single-stream blocks that no longer split the streams."""
    search = _attentions(model, "packs", lambda _: "")
    for name, block in _named(model, *SINGLE_BLOCKS):
        search.add(Site(name, block, SingleBlock, "joins"), why_not_plain(block))
    return search.result()


def find_qk_rms_norm(model: nn.Module) -> Sites:
    """Return the processors whose attention norms each head by a weight of its own."""
    return _attentions(model, "norms", _why_not_head_norms).result()


def _why_not_head_norms(attn: Part) -> str:
    size = attn.to_q.out_features // attn.heads
    pairs = [(attn.norm_q, attn.norm_k)]
    if attn.add_q_proj is not None:
        pairs.append((attn.norm_added_q, attn.norm_added_k))
    for norm in (norm for pair in pairs for norm in pair):
        if not isinstance(norm, RMSNorm) or norm.weight is None or norm.bias is not None:
            return "queries and keys have no RMSNorm with a weight and without a bias"
        if norm.weight.shape != (size,):
            return f"a norm weight is {tuple(norm.weight.shape)}, not one head's ({size},)"
        if norm.eps != attn.norm_q.eps:
            return "the norms differ in eps"
        if reason := why_not_bypassed(norm):
            return reason
    return ""


def find_gated_residual(model: nn.Module) -> Sites:
    """Return the blocks."""
    search = _Search()
    for name, block in blocks_of(model):
        kind = former_class(block).__name__
        rewrite: type[Rewrite] = SingleBlock if kind in SINGLE_BLOCKS else DualBlock
        search.add(Site(name, block, rewrite, "gates"), _why_not_block(block))
    return search.result()


def find_layer_norm_modulate(model: nn.Module) -> Sites:
    """Return the adaptive norms, and the dual-stream blocks for their second norms."""
    search = _Search()
    for name, block in blocks_of(model):
        if former_class(block).__name__ not in SINGLE_BLOCKS:
            reason = _why_not_block(block)
            if not reason:
                reason = _why_not_norm(block.norm2) or _why_not_norm(block.norm2_context)
            search.add(Site(name, block, DualBlock, "modulates"), reason)
    norms: dict[type, type[Rewrite]] = {
        AdaLayerNormZero: ModulatingNorm,
        AdaLayerNormZeroSingle: ModulatingNorm,
        AdaLayerNormContinuous: ContinuousNorm,
    }
    for name, module in model.named_modules():
        rewrite = norms.get(former_class(module))
        if rewrite is not None and search.found + search.rejected:
            reason = why_not_plain(module) or _why_not_adaptive(module)
            search.add(Site(name, module, rewrite, "modulates"), reason)
    return search.result()


def find_layer_norm_fp8(model: nn.Module) -> Sites:
    """Return the blocks with a norm that only fp8 Linears read, and their processors."""
    search = _Search()
    for name, block in blocks_of(model):
        is_single = former_class(block).__name__ in SINGLE_BLOCKS
        rewrite: type[Rewrite] = SingleBlock if is_single else DualBlock
        reason = _why_not_block(block) or _why_not_codes(block, is_single)
        search.add(Site(name, block, rewrite, "quantises_norms"), reason)
        if not reason:
            site = Site(f"{name}.attn", block.attn.processor, JointAttention, "takes_codes")
            search.add(site, "")
    return search.result()


def _why_not_codes(block: Part, is_single: bool) -> str:
    """Return why no norm of a block can give codes to its readers, "" when one can."""
    first = ("norm",) if is_single else ("norm1", "norm1_context")
    second = () if is_single else ("norm2", "norm2_context")
    reason = _why_not_attention(block.attn)
    for norm in (block._modules[name] for name in first):
        if former_class(norm) not in ADAPTIVE_NORMS:
            reason = reason or f"a norm is a {type(norm).__name__}"
        reason = reason or why_not_bypassed(norm) or _why_not_adaptive(norm)
    for norm in (block._modules[name] for name in second):
        reason = reason or _why_not_norm(norm)
    for name in (*first, *second):
        reason = reason or why_not_passed(block, name)
    if reason:
        return reason
    return why_not_read_as_codes([readers_of(block, name) for name in (*first, *second)])


def _why_not_adaptive(norm: Part) -> str:
    reason = _why_not_norm(norm.norm)
    if not reason and getattr(norm, "emb", None) is not None:
        reason = "it embeds the timestep itself"
    return reason


def _why_not_block(block: Part) -> str:
    if former_class(block).__name__ in TOKEN_REPLACE_BLOCKS:
        return "its first frame is modulated apart"
    return why_not_plain(block)


def _why_not_norm(norm: Part) -> str:
    if not isinstance(norm, nn.LayerNorm) or norm.weight is not None or norm.bias is not None:
        return "its norm is no LayerNorm without weights"
    return why_not_bypassed(norm)


def find_linear_gelu(model: nn.Module) -> Sites:
    """Return the Linears that a tanh-GELU follows: in feed-forwards, and in single blocks."""
    search = _Search()
    for name, block in blocks_of(model):
        kind = former_class(block).__name__
        if kind in SINGLE_BLOCKS:
            reason = _why_not_activated(block.proj_mlp, getattr(block.act_mlp, "approximate", ""))
            reason = reason or why_not_bypassed(block.act_mlp) or _why_not_block(block)
            search.add(Site(name, block, SingleBlock, "activates"), reason)
            continue
        if kind in TOKEN_REPLACE_BLOCKS and not hasattr(block, "ff"):
            search.rejected.append((name, _why_not_block(block)))
            continue
        for part in ("ff", "ff_context"):
            entry = getattr(block, part).net[0]
            reason = "" if isinstance(entry, GELU) else f"its entry is a {type(entry).__name__}"
            if not reason:
                reason = why_not_plain(entry) or _why_not_activated(entry.proj, entry.approximate)
            site = Site(f"{name}.{part}.net.0", entry, ActivatedLinear, "activates")
            search.add(site, reason)
    return search.result()


def find_split_linear(model: nn.Module) -> Sites:
    """Return the single-stream blocks."""
    search = _Search()
    for name, block in _named(model, *SINGLE_BLOCKS):
        reason = why_not_plain(block) or _why_not_dense(block.proj_out)
        search.add(Site(name, block, SingleBlock, "splits"), reason)
    return search.result()


def find_gelu_fp8_linear(model: nn.Module) -> Sites:
    """Return the single-stream blocks, whose last Linear reads more than a feed-forward's."""
    search = _Search()
    for name, block in _named(model, *SINGLE_BLOCKS):
        reason = _why_not_fp8(block.proj_out, getattr(block.act_mlp, "approximate", ""))
        reason = reason or why_not_plain(block) or why_not_bypassed(block.act_mlp)
        search.add(Site(name, block, SingleBlock, "quantises"), reason)
    return search.result()


def _why_not_fp8(last: Part, approximate: str) -> str:
    if not is_fp8(last):
        return "its last Linear is not an fp8 one in fused execution"
    if approximate != "tanh":
        return "its GELU is not the tanh approximation"
    return why_not_bypassed(last)


def _why_not_activated(linear: Part, approximate: str) -> str:
    if approximate != "tanh":
        return "its GELU is not the tanh approximation"
    return _why_not_dense(linear)


def _why_not_dense(linear: Part) -> str:
    if type(linear) is not nn.Linear:
        return f"its Linear is a {type(linear).__name__}"
    if type(linear.weight) is not nn.Parameter or linear.weight.dtype not in (
        torch.bfloat16,
        torch.float16,
    ):
        return "its weight is not a plain half-precision tensor"
    if linear.bias is None:
        return "its Linear has no bias"
    return why_not_bypassed(linear)


FINDERS: dict[str, Callable[[nn.Module], Sites]] = {
    "rope_qkv_pack": find_rope_qkv_pack,
    "qk_rms_norm": find_qk_rms_norm,
    "gated_residual": find_gated_residual,
    "layer_norm_modulate": find_layer_norm_modulate,
    "layer_norm_fp8": find_layer_norm_fp8,
    "linear_gelu": find_linear_gelu,
    "split_linear": find_split_linear,
    "gelu_fp8_linear": find_gelu_fp8_linear,
}
