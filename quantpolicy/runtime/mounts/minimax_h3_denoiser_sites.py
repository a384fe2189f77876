"""Where the fusions of the MiniMax-H3 denoiser go, and why a site cannot be taken."""

from __future__ import annotations

from collections.abc import Callable

from diffusers.models.transformers.transformer_minimax_h3 import (
    MiniMaxH3TokenRefinerBlock,
    MiniMaxH3TransformerBlock,
)
from torch import nn

from quantpolicy.runtime.mounts.minimax_h3_denoiser import (
    Block,
    RefinerBlock,
    readers_of,
    why_not_passed,
)
from quantpolicy.runtime.mounts.quantised_norm import find_read_as_codes, why_not_quantised
from quantpolicy.runtime.mounts.site import (
    Part,
    Rewrite,
    Site,
    Sites,
    former_class,
    why_not_plain,
)

_REWRITES: dict[type, type[Rewrite]] = {
    MiniMaxH3TransformerBlock: Block,
    MiniMaxH3TokenRefinerBlock: RefinerBlock,
}


def _quantises_site(name: str, block: Part) -> tuple[Site, str]:
    reason = why_not_plain(block) or why_not_passed(block, 0) or why_not_passed(block, 1)
    norms = (block.norm1, block.norm2)
    reason = reason or why_not_quantised(
        norms, nn.RMSNorm, [readers_of(block, which) for which in (0, 1)]
    )
    return Site(name, block, _REWRITES[former_class(block)], "quantises"), reason


def find_rms_norm_fp8(model: nn.Module) -> Sites:
    """Return the blocks in which fp8 Linears in fused execution read a norm."""
    return find_read_as_codes(model, _REWRITES, why_not_passed, readers_of, _quantises_site)


FINDERS: dict[str, Callable[[nn.Module], Sites]] = {"rms_norm_fp8": find_rms_norm_fp8}
