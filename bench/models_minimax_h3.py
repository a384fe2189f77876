"""The MiniMax-H3 video decoder on one temporal unit of 28 tiles, one tile a call and batched."""

from __future__ import annotations

import copy

import torch
from diffusers import AutoencoderKLMiniMaxH3
from torch import Tensor, nn

from bench.models import compiled, kernel_times, measure, uncompiled
from quantpolicy.runtime.mount import mount, unmount

TILES = 28
OPS = ("rms_norm", "scale_add_rms_norm", "qk_rms_norm_rope", "swiglu", "qkv_linear")
FP32 = ("norm1", "norm2", "norm_out", "scale1", "scale2")


def bench_minimax_h3(quick: bool, repeats: int) -> list[dict[str, object]]:
    """Stock, mounted and compiled, one tile a call and batched, and eager's error to fp32."""
    model = _build()
    decoder = model.decoder
    tiles = torch.randn(TILES, 24, 5, 16, 16, device="cuda", dtype=torch.float16)

    def single() -> Tensor:
        return torch.cat([decoder(tile) for tile in tiles.split(1)])

    def batched() -> Tensor:
        out: Tensor = decoder(tiles)
        return out

    reference = single().clone()
    exact = _exact(decoder, tiles)
    rows = [_against_fp32("stock, one tile", reference, exact)]
    rows.append(measure("stock, one tile", single, reference, repeats))
    rows.append(measure("stock, batched", batched, reference, repeats))
    for number in range(len(OPS)):
        report = mount(model, OPS[: number + 1])
        assert not report.declined, report.declined
        rows.append(measure("+ " + OPS[number], single, reference, repeats))
    rows.append(_against_fp32("mounted, one tile", single(), exact))
    rows.append(measure("mounted, batched", batched, reference, repeats))
    rows[-1]["kernels"] = kernel_times(batched)
    unmount(model)
    if not quick:
        compiled(model)
        rows.append(measure("compile, batched", batched, reference, repeats))
        rows[-1]["kernels"] = kernel_times(batched)
        uncompiled(model)
    return rows


def _against_fp32(name: str, out: Tensor, exact: Tensor) -> dict[str, object]:
    difference = (out.double() - exact.double()).abs()
    row: dict[str, object] = {
        "variant": name + " against fp32",
        "max_abs_error": float(difference.max()),
        "mean_abs_error": float(difference.mean()),
        "output_std": float(exact.std()),
    }
    print(row, flush=True)
    return row


def _exact(decoder: nn.Module, tiles: Tensor) -> Tensor:
    exact = copy.deepcopy(decoder).float()
    return torch.cat([exact(tile.float()) for tile in tiles.split(4)])


def _build() -> nn.Module:
    with torch.device("cuda"):
        model = AutoencoderKLMiniMaxH3(
            block_out_channels=(32, 32),
            layers_per_block=1,
            spatial_downsample_factors=(16, 1),
            temporal_downsample_factors=(4, 1),
        )
    for name, parameter in model.named_parameters():
        if ".scale" in name:
            parameter.data.normal_(std=0.2)
        if not any(part in FP32 for part in name.split(".")):
            parameter.data = parameter.data.half()
    result: nn.Module = model.eval().requires_grad_(False)
    return result
