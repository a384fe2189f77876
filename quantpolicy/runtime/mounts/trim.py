"""The joint-attention trim of HunyuanVideo 1.0 and 1.5: padding leaves the joint attention.

Text columns that are padding in the whole batch are dropped before the first block; the mask goes
too when no column is left that is padding in one sample only. The text refiner before the blocks
sees all columns, as the stock model does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from quantpolicy.kernels.contract import count_call, is_capturing
from quantpolicy.kernels.registry import decline
from quantpolicy.runtime.mounts.hunyuanvideo_attention import JointAttention
from quantpolicy.runtime.mounts.hunyuanvideo_sites import PROCESSORS, blocks_of
from quantpolicy.runtime.mounts.site import Part, Rewrite, Site, Sites, former_class, why_not_plain

_NAME = "attention_trim"
MODELS = ("HunyuanVideoTransformer3DModel", "HunyuanVideo15Transformer3DModel")


class _Trim:
    """What one forward of a model drops; decided at its first block, with one synchronisation."""

    def __init__(self) -> None:
        self._source: Tensor | None = None
        self._mask: Tensor | None = None
        self._keep = 0

    def apply(self, text: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the text and the mask that a block gets instead of these."""
        if self._source is not mask:
            self._decide(text.shape[1], mask)
        return text[:, : self._keep], self._mask

    def _decide(self, columns: int, mask: Tensor) -> None:
        self._source, self._mask, self._keep = mask, mask, columns
        if is_capturing((mask,)):
            decline(_NAME, "the mask cannot be read during a graph capture")
            return
        count_call(_NAME)
        keep, shared = _valid_columns(mask[..., mask.shape[-1] - columns :])
        # No text at all is a tensor without rows, which neither the blocks nor int8 can take.
        self._keep = max(keep, 1)
        dropped = columns - self._keep
        self._mask = None if shared == self._keep else mask[..., : mask.shape[-1] - dropped]


def _valid_columns(mask: Tensor) -> tuple[int, int]:
    """Return the end of the last column valid in any sample, and how many are valid in all."""
    valid = mask.bool().reshape(-1, mask.shape[-1])
    ends = torch.arange(1, valid.shape[1] + 1, device=valid.device)
    last = (valid.any(0) * ends).max()
    keep, shared = torch.stack((last, valid.all(0).sum())).tolist()
    return keep, shared


_CURRENT: ContextVar[_Trim | None] = ContextVar(_NAME, default=None)


class TrimmedModel(Rewrite):
    """The whole model: opens and closes the scope of one forward."""

    trims = False

    def forward(self: Part, *args: object, **kwargs: object) -> object:
        """Return what the model does."""
        if torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        scope = _CURRENT.set(_Trim())
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            _CURRENT.reset(scope)


class TrimmedBlock(Rewrite):
    """A block: takes less text and no mask, before its own and perhaps compiled call."""

    trims = False

    def __call__(
        self: Part,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        attention_mask: Tensor | None = None,
        *args: object,
        **kwargs: object,
    ) -> object:
        """Return what the block does."""
        trim = None if torch.compiler.is_compiling() else _CURRENT.get()
        if trim is not None and attention_mask is not None:
            encoder_hidden_states, attention_mask = trim.apply(
                encoder_hidden_states, attention_mask
            )
        return super().__call__(  # type: ignore[misc]
            hidden_states, encoder_hidden_states, temb, attention_mask, *args, **kwargs
        )


def find_attention_trim(model: nn.Module) -> Sites:
    """Return the model, its blocks and the processors that must do without a mask."""
    found: list[Site] = []
    rejected: list[tuple[str, str]] = []
    for root_name, root in model.named_modules():
        if former_class(root).__name__ not in MODELS:
            continue
        found.append(Site(root_name, root, TrimmedModel, "trims"))
        for name, block in blocks_of(root):
            found.append(Site(name, block, TrimmedBlock, "trims"))
            processor = block.attn.processor
            kind = former_class(processor).__name__
            if kind in PROCESSORS:
                found.append(Site(f"{name}.attn", processor, JointAttention, "unmasked"))
            else:
                rejected.append((f"{name}.attn", f"its attention processor is a {kind}"))
        rejected += [
            (site.name, reason)
            for site in found
            if isinstance(site.target, nn.Module) and (reason := why_not_plain(site.target))
        ]
    return Sites(tuple(found), tuple(rejected))


FINDERS: dict[str, Callable[[nn.Module], Sites]] = {_NAME: find_attention_trim}
