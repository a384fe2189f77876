"""Timing and the JSON envelope shared by the benchmarks.

Calls rotate among input sets larger than the L2. Launch cost on the CPU stays outside (``gpu_ms``:
events behind a spin kernel; ``graph_ms``: replays of a CUDA graph) or inside (``wall_ms``) on
purpose.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import math
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bench.provenance import provenance

L2_MULTIPLE_BYTES = 256 * 2**20
SPIN_CYCLES = 4_000_000


def envelope(**results: object) -> dict[str, object]:
    """Return results wrapped with GPU, versions, date, revision and command."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "driver": _driver(),
        "versions": {name: _version(name) for name in ("torch", "triton", "torchao", "diffusers")},
        "cuda": torch.version.cuda,
        **provenance(),
        **results,
    }


def require_gpu(parser: argparse.ArgumentParser, json_path: str) -> None:
    """Refuse a run that could not be made, or whose results could not be written."""
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed, and torch finds none here")
    require_folder(parser, json_path)


def require_folder(parser: argparse.ArgumentParser, json_path: str) -> None:
    """Refuse a path of results whose folder is not there."""
    if not Path(json_path).parent.is_dir():
        parser.error(f"--json: {Path(json_path).parent} is no folder; make it first")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _driver() -> str:
    done = (
        subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        )
        if torch.cuda.is_available()
        else None
    )
    return done.stdout.strip() if done else "none"


def write_json(path: str | Path, data: dict[str, object]) -> None:
    """Write one result file, whole or not at all."""
    target = Path(path)
    part = target.with_name(f"{target.name}.part")
    part.write_text(json.dumps(data, indent=1) + "\n")
    part.replace(target)


def copies_for(bytes_each: int, most: int = 64) -> int:
    """Return how many input sets of a size exceed the L2 several times."""
    return max(2, min(most, -(-L2_MULTIPLE_BYTES // max(bytes_each, 1))))


def gpu_ms(calls: Sequence[Callable[[], object]], repeats: int = 20) -> float:
    """Return the median GPU time of one call, launches queued ahead of the device."""
    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    torch.cuda._sleep(SPIN_CYCLES)
    return event_ms(calls, repeats)


def event_ms(calls: Sequence[Callable[[], object]], repeats: int) -> float:
    """Return the median time between events behind calls that follow each other."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for index in range(repeats):
        calls[index % len(calls)]()
        marks[index + 1].record()
    torch.cuda.synchronize()
    return statistics.median(
        before.elapsed_time(after) for before, after in itertools.pairwise(marks)
    )


def graph_ms(calls: Sequence[Callable[[], object]], repeats: int = 10) -> float:
    """Return the median GPU time of one call inside a CUDA graph that holds all of them."""
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return gpu_ms([graph.replay], repeats) / len(calls)


def wall_ms(calls: Sequence[Callable[[], object]], repeats: int = 20) -> float:
    """Return the mean time of one call as a caller sees it, device idle at the start."""
    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for index in range(repeats):
        calls[index % len(calls)]()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / repeats


def sustained_ms(calls: Sequence[Callable[[], object]], seconds: float) -> float:
    """Return the mean GPU time of calls that follow each other for some seconds, after a warm-up.

    A GPU at its power limit is slower than in the short bursts of the others.
    """
    rounds = 4
    for _ in range(3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for call in itertools.islice(itertools.cycle(calls), rounds):
            call()
        stop.record()
        stop.synchronize()
        ms: float = start.elapsed_time(stop) / rounds
        rounds = max(rounds, math.ceil(seconds * 1e3 / ms))
    return ms


def copy_ceiling_tb_s(mib: int = 2048) -> float:
    """Return the device copy bandwidth in TB/s, bytes read plus bytes written."""
    source = torch.randint(0, 255, (mib * 2**20,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / gpu_ms([lambda: target.copy_(source)]) / 1e9


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Return ||out - reference|| / ||reference||, NaN when either holds one."""
    difference = (out.double() - reference.double()).norm()
    return float(difference / reference.double().norm())
