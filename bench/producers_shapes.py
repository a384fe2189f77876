"""The models of the benchmark of producers: fewer blocks than released, at released widths.

``Shape.kernels`` are the producers under test, in the order in which they are added.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.execution_shapes import SHAPES, Inputs, Shape, noise
from bench.execution_variants import DENOISER, fp8_plan


def _planned(family: str) -> Callable[[str], bool]:
    """Return a test for the names of the Linears that a plan quantises."""
    return lambda name: any(
        name == layer.name for layer in fp8_plan(family).components[DENOISER].layers
    )


def _z_image_inputs(device: str) -> dict[int, Inputs]:
    return {
        4352: {
            "x": [noise(16, 1, 128, 128, device=device)],
            "t": torch.tensor([0.5], device=device, dtype=torch.bfloat16),
            "cap_feats": [noise(256, 2560, device=device)],
            "return_dict": False,
        }
    }


def _flux_2_inputs(device: str) -> dict[int, Inputs]:
    def ids(tokens: int) -> torch.Tensor:
        columns = torch.arange(tokens, device=device)
        return torch.stack([columns * 0, columns // 64, columns % 64, columns * 0], dim=1).float()

    return {
        4608: {
            "hidden_states": noise(1, 4096, 128, device=device),
            "encoder_hidden_states": noise(1, 512, 15360, device=device),
            "timestep": torch.tensor([0.5], device=device, dtype=torch.bfloat16),
            "img_ids": ids(4096),
            "txt_ids": ids(512),
            "guidance": torch.tensor([3.5], device=device, dtype=torch.bfloat16),
            "return_dict": False,
        }
    }


def _minimax_h3_inputs(device: str) -> dict[int, Inputs]:
    text, audio, video = 12, 126, 17600
    rows = torch.arange(text + audio + video, device=device)
    kinds = torch.tensor([1, 2, 0], device=device)
    times = torch.tensor([0, 1, 0], device=device)
    counts = torch.tensor([text, audio, video], device=device)
    frame = 40 * 44
    return {
        text + audio + video: {
            "hidden_states": noise(1, video, 96, device=device),
            "audio_hidden_states": noise(1, audio, 32, device=device),
            "encoder_hidden_states": noise(1, text, 5120, device=device),
            "timestep": torch.tensor([0.5, 0.7], device=device),
            "timestep_indices": times.repeat_interleave(counts, output_size=len(rows)),
            "token_tags": kinds.repeat_interleave(counts, output_size=len(rows)),
            "position_ids": torch.stack(
                [rows // frame, rows % frame // 44, rows % 44], dim=1
            ).float(),
            "video_indices": rows[text + audio :],
            "audio_indices": rows[text : text + audio],
            "text_indices": rows[:text],
            "return_dict": False,
        }
    }


PRODUCER_SHAPES = {
    "z-image": Shape(
        "z-image",
        "ZImageTransformer2DModel",
        {"n_layers": 6},
        _z_image_inputs,
        {4352: 4096},
        _planned("z-image"),
        ("rms_norm_fp8", "swiglu_fp8_linear"),
    ),
    "flux.2-dev": Shape(
        "flux.2-dev",
        "Flux2Transformer2DModel",
        {"num_layers": 2, "num_single_layers": 6},
        _flux_2_inputs,
        {4608: 4096},
        _planned("flux.2-dev"),
        ("swiglu_fp8_linear",),
    ),
    "hunyuanvideo": SHAPES["hunyuan"]._replace(
        config={"num_layers": 2, "num_single_layers": 4},
        matches=_planned("hunyuanvideo"),
        kernels=("layer_norm_fp8",),
    ),
    "minimax-h3": Shape(
        "minimax-h3",
        "MiniMaxH3Transformer3DModel",
        {"num_layers": 3},
        _minimax_h3_inputs,
        {17738: 17600},
        _planned("minimax-h3"),
        ("rms_norm_fp8", "swiglu_fp8_linear"),
    ),
}
