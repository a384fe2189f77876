"""Whole denoisers at released shapes with random weights: dense, torchao and fused execution.

Only the repeated blocks are compiled, as diffusers does it, each variant with empty caches of the
compiler: ``first_s`` of a compiled row is the first call, compilation included. ``graph_ms`` is a
CUDA graph of one whole forward, captured in steady state. ``peak_gib`` is the peak of a variant
alone.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

from bench.execution_shapes import SHAPES, Inputs, Shape
from bench.execution_variants import VARIANTS, build_dense, made_variant
from bench.timing import event_ms, gpu_ms, relative_error
from quantpolicy.ops import OPS

MANY_TOKENS = 10_000
# torchao's eager int8 takes seconds a step here.
SLOW_STEPS = {("torchao_int8", 27280)}


def bench_model(
    shape: Shape, variants: Sequence[str], tokens: Sequence[int] | None = None
) -> Iterator[dict[str, object]]:
    """Yield a row for each variant of a model, mode and number of tokens, all or those given."""
    dense, inputs = build_dense(shape, "cuda"), shape.inputs("cuda")
    inputs = {count: call for count, call in inputs.items() if count in (tokens or inputs)}
    outputs = {count: dense(**call)[0].clone() for count, call in inputs.items()}
    for variant in (name for name in variants if name not in shape.without):
        held = torch.cuda.memory_allocated() if variant != "dense" else 0
        model = made_variant(dense, shape, VARIANTS[variant])
        for mode in ("eager", "compile"):
            try:
                yield from _bench_mode(model, shape, variant, mode, inputs, outputs, held)
            except RuntimeError as error:
                yield {"variant": variant, "mode": mode, "failed": str(error)[:300]}
        for module in model.modules():
            module._compiled_call_impl = None
        del model
        gc.collect()
        torch.cuda.empty_cache()


def _bench_mode(
    model: nn.Module,
    shape: Shape,
    variant: str,
    mode: str,
    inputs: dict[int, Inputs],
    outputs: dict[int, Tensor],
    held: int,
) -> Iterator[dict[str, object]]:
    with fresh_cache():
        if mode == "compile":
            torch._dynamo.reset()
            model.compile_repeated_blocks(fullgraph=True)  # type: ignore[operator]
        for tokens, call in inputs.items():
            if (variant, tokens) in SLOW_STEPS:
                continue
            seconds = _first_call_s(model, call)
            row = {"variant": variant, "tokens": tokens, "mode": mode, "first_s": seconds}
            row |= _measure(model, call, outputs[tokens], tokens=tokens, held=held)
            # At many tokens the host is far ahead of an eager step: a graph of it is no faster.
            if can_be_captured(shape, variant) and (mode == "compile" or tokens < MANY_TOKENS):
                row |= _measure_graph(model, call, tokens)
            yield row


def can_be_captured(shape: Shape, variant: str) -> bool:
    """Tell whether a graph can hold a variant: not torchao's chain, nor an op that reads a mask."""
    one = VARIANTS[variant]
    return not one.is_torchao and not any(OPS[op].drops_mask for op in one.kernels(shape))


def _first_call_s(model: nn.Module, call: Inputs) -> float:
    """Return the seconds of one call, compilation included."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    model(**call)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _rounds(tokens: int) -> tuple[int, int]:
    """Return in how many rounds a step is timed, and the calls of each."""
    return (4, 10) if tokens < MANY_TOKENS else (1, 3)


def _measure(
    model: nn.Module, call: Inputs, reference: Tensor, *, tokens: int, held: int
) -> dict[str, object]:
    torch.cuda.reset_peak_memory_stats()
    out = model(**call)[0]
    return {
        "ms": _paced_ms(lambda: model(**call), *_rounds(tokens)),
        "error": relative_error(out, reference),
        "finite": float(out.isfinite().float().mean()),
        "peak_gib": (torch.cuda.max_memory_allocated() - held) / 2**30,
    }


def _measure_graph(model: nn.Module, call: Inputs, tokens: int) -> dict[str, object]:
    out = model(**call)[0].clone()
    captured, held = captured_step(model, call)
    captured.replay()
    ms = gpu_ms([captured.replay], math.prod(_rounds(tokens)))
    return {"graph_ms": ms, "graph_equal": torch.equal(held, out)}


def captured_step(model: nn.Module, call: Inputs) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Return a CUDA graph of one forward of a model that has run before, and its output."""
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        held: Tensor = model(**call)[0]
    return captured, held


def _paced_ms(call: Callable[[], object], rounds: int, repeats: int) -> float:
    """Return the median time of calls that follow each other, launch cost included.

    Of the rounds the least: what disturbs the host makes a step slower, never faster.
    """
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    return min(event_ms([call], repeats) for _ in range(rounds))


def start_compiler() -> None:
    """Compile something small, so that the compiler's own start counts for no variant."""
    torch.compile(torch.nn.functional.gelu)(torch.ones(64, device="cuda"))


MODELS = {name: partial(bench_model, shape) for name, shape in SHAPES.items()}
