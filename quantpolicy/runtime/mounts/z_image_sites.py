"""Where the fusions of Z-Image go, and why a site cannot be taken."""

from __future__ import annotations

from collections.abc import Callable

import torch
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_z_image import ZImageTransformerBlock
from torch import nn

from quantpolicy.runtime.mounts.quantised_norm import find_read_as_codes, why_not_quantised
from quantpolicy.runtime.mounts.site import Part, Site, Sites, why_not_plain
from quantpolicy.runtime.mounts.z_image import Block, readers_of, why_not_passed


def _quantises_site(name: str, block: Part) -> tuple[Site, str]:
    norms = (block.attention_norm1, block.ffn_norm1)
    reason = why_not_plain(block) or why_not_passed(block, 0) or why_not_passed(block, 1)
    reason = reason or why_not_quantised(
        norms, RMSNorm, [readers_of(block, which) for which in (0, 1)]
    )
    if not reason and any(norm.weight.dtype is torch.float32 for norm in norms):
        # What such a norm gives is float32.
        reason = "a norm is kept in float32"
    return Site(name, block, Block, "quantises"), reason


def find_rms_norm_fp8(model: nn.Module) -> Sites:
    """Return the blocks in which fp8 Linears in fused execution read a norm."""
    return find_read_as_codes(
        model, {ZImageTransformerBlock}, why_not_passed, readers_of, _quantises_site
    )


FINDERS: dict[str, Callable[[nn.Module], Sites]] = {"rms_norm_fp8": find_rms_norm_fp8}
