"""Whole models at released sizes with random weights: stock, mounted and compiled.

    python -m bench.models --family hunyuanvideo|minimax-h3-vae --json OUT [--quick]

HunyuanVideo runs one forward at 848x480x65 (27,030 image tokens, 40 of 256 text tokens valid); the
MiniMax-H3 decoder runs one temporal unit of 28 tiles in fp16. ``--quick`` leaves compilation out.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from bench.timing import envelope, relative_error, require_gpu, write_json

Call = Callable[[], Tensor]


def paced_ms(call: Call, repeats: int) -> float:
    """Return the mean time of calls that follow each other, launch cost included."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / repeats


def interleaved_ms(calls: Mapping[str, Call], turns: int) -> dict[str, float]:
    """Return the median time of each call, taken in turns: what disturbs one disturbs all."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(turns):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def peak_gib(call: Callable[[], object]) -> dict[str, float]:
    """Return the GPU memory held before a call, and the most that is held during it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() / 2**30
    call()
    torch.cuda.synchronize()
    return {"held_gib": held, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def psnr_db(out: Tensor, reference: Tensor) -> float | None:
    """Return the peak signal-to-noise ratio, nothing for equal values.

    The peak is the reference's range.
    """
    mse = float((out.double() - reference.double()).square().mean())
    peak = float(reference.max() - reference.min())
    return None if mse == 0 else 10 * math.log10(peak**2 / mse)


def measure(name: str, call: Call, reference: Tensor | None, repeats: int) -> dict[str, object]:
    """Run, compare and time one variant."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    out = call()
    torch.cuda.synchronize()
    row: dict[str, object] = {"variant": name, "first_s": time.perf_counter() - start}
    if reference is not None:
        row["equal"] = torch.equal(out, reference)
        row["error"] = relative_error(out, reference)
        row["max_abs_error"] = float((out.double() - reference.double()).abs().max())
        row["psnr_db"] = psnr_db(out, reference)
    del out
    row |= peak_gib(lambda: row.update(ms=paced_ms(call, repeats)))
    print_row(row)
    return row


def print_row(row: Mapping[str, object]) -> None:
    """Print one variant with its figures rounded."""
    print({k: round(v, 6) if isinstance(v, float) else v for k, v in row.items()}, flush=True)


def kernel_times(call: Call, most: int = 16) -> list[dict[str, object]]:
    """Return the GPU time of one call by kernel, the longest first."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    rows = [
        {"kernel": event.key[:90], "ms": event.device_time_total / 1e3, "count": event.count}
        for event in profile.key_averages()
    ]
    rows = sorted(rows, key=lambda row: -row["ms"])[:most]
    for row in rows:
        print(f"    {row['ms']:9.2f} ms {row['count']:6} {row['kernel']}", flush=True)
    return rows


def compiled(model: nn.Module) -> None:
    """Compile the repeated blocks, each as one whole graph."""
    torch._dynamo.reset()
    model.compile_repeated_blocks(fullgraph=True)  # type: ignore[operator]


def uncompiled(model: nn.Module) -> None:
    """Take compiled blocks back to eager."""
    for module in model.modules():
        module._compiled_call_impl = None


def main() -> None:
    """Run one family and write one JSON file."""
    from bench.models_hunyuanvideo import bench_hunyuanvideo
    from bench.models_minimax_h3 import bench_minimax_h3

    families = {"hunyuanvideo": bench_hunyuanvideo, "minimax-h3-vae": bench_minimax_h3}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", required=True, choices=tuple(families))
    parser.add_argument("--json", required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    require_gpu(parser, arguments.json)
    torch.manual_seed(0)
    rows = families[arguments.family](arguments.quick, arguments.repeats)
    results: dict[str, object] = {"family": arguments.family, "variants": rows}
    write_json(arguments.json, envelope(**results, ops=counts_by_op()))


def counts_by_op() -> dict[str, object]:
    """Return what each op did in this process: calls that ran its kernel, and declined ones."""
    from quantpolicy.kernels.contract import op_counts

    return {name: counts._asdict() for name, counts in op_counts().items()}


if __name__ == "__main__":
    with torch.no_grad():
        main()
