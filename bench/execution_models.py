"""Whole denoisers at released shapes with random weights: dense, torchao and fused execution.

Only the repeated blocks are compiled, as diffusers does it; a graph is a CUDA graph of one whole
compiled forward.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from diffusers import HunyuanVideoTransformer3DModel, WanTransformer3DModel
from torch import Tensor, nn

from bench.quantised import quantise_matching
from bench.timing import gpu_ms, relative_error
from quantpolicy.kernels.linear import FusedLinear
from quantpolicy.schemes import Scheme

FLOOR = 1e-12
MANY_TOKENS = 10_000
VARIANTS = ("dense", "fused_fp8", "fused_int8", "torchao_fp8", "torchao_int8")
SLOW_COMPILES = {("torchao_fp8", 27280), ("torchao_int8", 1120), ("torchao_int8", 27280)}
Inputs = dict[str, Tensor | bool]


def bench_wan(variants: Sequence[str]) -> Iterator[dict[str, object]]:
    """Wan 2.2 TI2V 5B at 512x320x25 (1,120 tokens) and 1280x704x121 (27,280 tokens)."""
    model = _build(
        WanTransformer3DModel,
        num_attention_heads=24,
        attention_head_dim=128,
        in_channels=48,
        out_channels=48,
        ffn_dim=14336,
        num_layers=30,
    )
    inputs = {1120: _wan_inputs(7, 20, 32), 27280: _wan_inputs(31, 44, 80)}
    return _bench_model(model, inputs, lambda name: name.startswith("blocks."), variants)


def bench_hunyuan(variants: Sequence[str]) -> Iterator[dict[str, object]]:
    """HunyuanVideo, 4 dual and 8 single blocks, at 848x480x65 (27,030 + 256 tokens)."""
    model = _build(HunyuanVideoTransformer3DModel, num_layers=4, num_single_layers=8)
    mask = torch.zeros(1, 256, device="cuda", dtype=torch.bool)
    mask[:, :40] = True
    inputs: dict[int, Inputs] = {
        27286: {
            "hidden_states": _noise(1, 16, 17, 60, 106),
            "timestep": torch.tensor([500.0], device="cuda"),
            "encoder_hidden_states": _noise(1, 256, 4096),
            "encoder_attention_mask": mask,
            "pooled_projections": _noise(1, 768),
            "guidance": torch.tensor([6000.0], device="cuda"),
            "return_dict": False,
        }
    }
    return _bench_model(
        model,
        inputs,
        lambda name: "transformer_blocks." in name and ".norm" not in name,
        variants,
    )


def _build(kind: type[nn.Module], **config: int) -> nn.Module:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = kind(**config)
    finally:
        torch.set_default_dtype(default)
    return model.eval().requires_grad_(False)


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _wan_inputs(frames: int, height: int, width: int) -> Inputs:
    return {
        "hidden_states": _noise(1, 48, frames, height, width),
        "timestep": torch.tensor([500.0], device="cuda"),
        "encoder_hidden_states": _noise(1, 512, 4096),
        "return_dict": False,
    }


def _bench_model(
    dense: nn.Module,
    inputs: dict[int, Inputs],
    matches: Callable[[str], bool],
    variants: Sequence[str],
) -> Iterator[dict[str, object]]:
    outputs = {tokens: dense(**call)[0].clone() for tokens, call in inputs.items()}
    for variant in variants:
        model = _variant(dense, variant, matches)
        for mode in ("eager", "compile"):
            if mode == "compile":
                torch._dynamo.reset()
                model.compile_repeated_blocks(fullgraph=True)  # type: ignore[operator]
            for tokens, call in inputs.items():
                if mode == "compile" and (variant, tokens) in SLOW_COMPILES:
                    continue
                graph = tokens < MANY_TOKENS and not variant.startswith("torchao")
                seconds = _first_call_s(model, call)
                row = {"variant": variant, "tokens": tokens, "mode": mode, "first_s": seconds}
                row.update(_measure(model, call, outputs[tokens], graph=graph))
                yield row
        del model
        gc.collect()
        torch.cuda.empty_cache()


def _variant(dense: nn.Module, variant: str, matches: Callable[[str], bool]) -> nn.Module:
    if variant == "dense":
        return dense
    execution, scheme = variant.split("_")
    model = copy.deepcopy(dense)
    names = quantise_matching(model, Scheme(scheme), FLOOR, matches)
    if execution == "fused":
        for name in names:
            linear = model.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            FusedLinear.adopt(linear, name=name)
    return model


def _first_call_s(model: nn.Module, call: Inputs) -> float:
    """Return the seconds of one call, compilation included."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    model(**call)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _measure(
    model: nn.Module, call: Inputs, reference: Tensor, *, graph: bool
) -> dict[str, object]:
    torch.cuda.reset_peak_memory_stats()
    out = model(**call)[0]
    repeats = 20 if graph else 4
    row: dict[str, object] = {
        "ms": _paced_ms(lambda: model(**call), repeats),
        "error": relative_error(out, reference),
        "finite": float(out.isfinite().float().mean()),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            held = model(**call)[0]
        captured.replay()
        row["graph_ms"] = gpu_ms([captured.replay], repeats)
        row["graph_equal"] = torch.equal(held, out)
    return row


def _paced_ms(call: Callable[[], object], repeats: int) -> float:
    """Return the mean time of calls that follow each other, launch cost included."""
    for _ in range(2):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


MODELS = {"wan": bench_wan, "hunyuan": bench_hunyuan}
