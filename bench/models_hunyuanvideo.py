"""HunyuanVideo at full depth: what each fusion and the attention trim bring to one forward."""

from __future__ import annotations

import gc

import torch
from diffusers import HunyuanVideoTransformer3DModel
from torch import Tensor, nn

from bench.models import compiled, kernel_times, measure, uncompiled
from bench.quantised import quantise_matching
from quantpolicy.kernels.linear import FusedLinear
from quantpolicy.runtime.mount import mount, unmount
from quantpolicy.schemes import Scheme

FLOOR = 1e-12
LOSSLESS = ("rope_qkv_pack", "gated_residual")
TRIM = ("attention_trim",)
HIGH = (*LOSSLESS, "qk_rms_norm", "layer_norm_modulate", "linear_gelu", "split_linear")
HIGH_FP8 = (*LOSSLESS, "qk_rms_norm", "layer_norm_modulate", "gelu_fp8_linear")


def bench_hunyuanvideo(quick: bool, repeats: int) -> list[dict[str, object]]:
    """Stock, lossless, trimmed, high, compiled with the trim, and fp8 with high.

    Stock and trimmed also for twelve blocks, four dual and eight single.
    """
    call = _inputs()
    rows = _twelve_blocks(call, repeats)
    model = _build()

    def forward() -> Tensor:
        out: Tensor = model(**call)[0]
        return out

    reference = forward().clone()
    rows.append(measure("stock", forward, None, repeats))
    for name, ops in (("lossless", LOSSLESS), ("trim", TRIM), ("high + trim", (*TRIM, *HIGH))):
        _mounted(model, ops)
        rows.append(measure(name, forward, reference, repeats))
        if name == "high + trim":
            rows[-1]["kernels"] = kernel_times(forward)
        unmount(model)
    if not quick:
        _mounted(model, TRIM)
        compiled(model)
        rows.append(measure("compile + trim", forward, reference, repeats))
        rows[-1]["kernels"] = kernel_times(forward)
        uncompiled(model)
        unmount(model)
    _quantise(model)
    _mounted(model, (*TRIM, *HIGH_FP8))
    rows.append(measure("fp8 + high + trim", forward, reference, repeats))
    rows[-1]["kernels"] = kernel_times(forward)
    return rows


def _twelve_blocks(call: dict[str, object], repeats: int) -> list[dict[str, object]]:
    model = _build(num_layers=4, num_single_layers=8)

    def forward() -> Tensor:
        out: Tensor = model(**call)[0]
        return out

    rows = [measure("twelve blocks, stock", forward, None, repeats)]
    reference = forward().clone()
    _mounted(model, TRIM)
    rows.append(measure("twelve blocks, trim", forward, reference, repeats))
    return rows


def _mounted(model: nn.Module, ops: tuple[str, ...]) -> None:
    report = mount(model, ops)
    assert not report.declined, report.declined


def _build(**config: int) -> nn.Module:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = HunyuanVideoTransformer3DModel(**config)
    finally:
        torch.set_default_dtype(default)
    result: nn.Module = model.eval().requires_grad_(False)
    return result


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _inputs() -> dict[str, object]:
    mask = torch.zeros(1, 256, device="cuda", dtype=torch.bool)
    mask[:, :40] = True
    return {
        "hidden_states": _noise(1, 16, 17, 60, 106),
        "timestep": torch.tensor([500.0], device="cuda"),
        "encoder_hidden_states": _noise(1, 256, 4096),
        "encoder_attention_mask": mask,
        "pooled_projections": _noise(1, 768),
        "guidance": torch.tensor([6000.0], device="cuda"),
        "return_dict": False,
    }


def _quantise(model: nn.Module) -> None:
    names = quantise_matching(
        model,
        Scheme.FP8,
        FLOOR,
        lambda name: "transformer_blocks." in name and ".norm" not in name,
    )
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        FusedLinear.adopt(linear, name=name)
    gc.collect()
    torch.cuda.empty_cache()
