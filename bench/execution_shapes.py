"""The models of the execution benchmark: configurations, inputs, and which Linears are quantised.

On the meta device they cost nothing, so the predictions are held against the same models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Inputs = dict[str, Tensor | list[Tensor] | bool]
# Rows quantised where they are made, and no other fused kernel; and all that Wan has.
PRODUCERS = ("gelu_fp8_linear",)
WAN_KERNELS = (
    "gated_residual",
    "layer_norm_fp8",
    "add_layer_norm_fp8",
    "layer_norm_fp32",
    "qk_norm_rope_across_heads",
    "rms_norm",
    *PRODUCERS,
)


class Shape(NamedTuple):
    """One model of the benchmark.

    Args:
        family: in the rule table, whose groups of projections are joined.
        class_name: of diffusers.
        inputs: arguments of the forward by tokens, on a device.
        image_tokens: by tokens: those of the image stream alone.
        matches: which Linears are quantised, by name.
        kernels: the fusions of the variants ``kernels``.
        without: variants that are left out.
    """

    family: str
    class_name: str
    config: dict[str, int]
    inputs: Callable[[str], dict[int, Inputs]]
    image_tokens: dict[int, int]
    matches: Callable[[str], bool]
    kernels: tuple[str, ...]
    without: tuple[str, ...] = ()


def noise(*shape: int, device: str) -> Tensor:
    """Return random values in bf16."""
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def _wan_inputs(device: str) -> dict[int, Inputs]:
    return {
        tokens: {
            "hidden_states": noise(1, 48, *size, device=device),
            "timestep": torch.tensor([500.0], device=device),
            "encoder_hidden_states": noise(1, 512, 4096, device=device),
            "return_dict": False,
        }
        for tokens, size in {1120: (7, 20, 32), 27280: (31, 44, 80)}.items()
    }


def _hunyuan_inputs(device: str) -> dict[int, Inputs]:
    mask = torch.zeros(1, 256, device=device, dtype=torch.bool)
    mask[:, :40] = True
    return {
        27286: {
            "hidden_states": noise(1, 16, 17, 60, 106, device=device),
            "timestep": torch.tensor([500.0], device=device),
            "encoder_hidden_states": noise(1, 256, 4096, device=device),
            "encoder_attention_mask": mask,
            "pooled_projections": noise(1, 768, device=device),
            "guidance": torch.tensor([6000.0], device=device),
            "return_dict": False,
        }
    }


SHAPES = {
    # Wan 2.2 TI2V 5B at 512x320x25 (1,120 tokens) and 1280x704x121 (27,280 tokens).
    "wan": Shape(
        "wan2.2-ti2v-5b",
        "WanTransformer3DModel",
        {
            "num_attention_heads": 24,
            "attention_head_dim": 128,
            "in_channels": 48,
            "out_channels": 48,
            "ffn_dim": 14336,
            "num_layers": 30,
        },
        _wan_inputs,
        {1120: 1120, 27280: 27280},
        lambda name: name.startswith("blocks."),
        WAN_KERNELS,
        # Its variants `kernels` have all that are planned.
        without=("fused_fp8_all_kernels",),
    ),
    # HunyuanVideo, 4 dual and 8 single blocks, at 848x480x65 (27,030 + 256 tokens).
    "hunyuan": Shape(
        "hunyuanvideo",
        "HunyuanVideoTransformer3DModel",
        {"num_layers": 4, "num_single_layers": 8},
        _hunyuan_inputs,
        {27286: 27030},
        lambda name: "transformer_blocks." in name and ".norm" not in name,
        PRODUCERS,
        without=("fused_fp8_joined", "fused_fp8_joined_kernels"),
    ),
}
