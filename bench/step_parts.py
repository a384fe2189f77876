"""Where the GPU time of a step goes: products, attention, and the passes over rows between them.

    python -m bench.step_parts --json OUT [--part wan] [--tokens N ...] [--variant NAME ...]

One whole forward of a model of ``bench.execution`` is captured in a CUDA graph, timed, and replayed
under the profiler. ``graph_ms`` is the time of a replay, gaps between kernels included. The others
are sums over kernels, in ms: products and attention are the least that a step of these GEMMs takes,
whatever is fused around them.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.profiler import ProfilerActivity, profile

from bench.execution_models import can_be_captured, captured_step
from bench.execution_shapes import SHAPES
from bench.execution_variants import VARIANTS, build_dense, made_variant
from bench.timing import envelope, gpu_ms, require_gpu, write_json
from quantpolicy.text import align

CHOSEN = ("dense", "fused_fp8", "fused_fp8_joined_kernels")
WARM_UP, REPLAYS, REPEATS = 3, 5, 40
# What kernels of a kind are called by the libraries that torch asks; the rest are passes over rows.
NAMES = {"products": ("nvjet", "gemm", "cutlass", "splitk"), "attention": ("sdpa", "flash", "fmha")}

Row = dict[str, object]


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel by its name."""
    name = kernel.lower()
    # Kernels of attention are built with CUTLASS too.
    for kind in ("attention", "products"):
        if any(part in name for part in NAMES[kind]):
            return kind
    return "rows"


def parts_of(kernels: Iterable[tuple[str, float]], replays: int) -> Row:
    """Return ms and launches of one replay by kind, and the kernels that take longest.

    Args:
        kernels: name and microseconds of each launch.
    """
    kinds = (*NAMES, "rows")
    totals: dict[str, float] = defaultdict(float)
    by_name: dict[str, float] = defaultdict(float)
    launches = Counter[str]()
    for name, microseconds in kernels:
        totals[kind_of(name)] += microseconds
        launches[kind_of(name)] += 1
        by_name[name[:80]] += microseconds
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:10]
    return {
        "ms": {kind: totals[kind] / replays / 1e3 for kind in kinds},
        "launches": {kind: launches[kind] / replays for kind in kinds},
        "longest_ms": {name: us / replays / 1e3 for name, us in longest},
    }


def profiled(replay: Callable[[], object]) -> Row:
    """Return the parts of a graph's replay."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPLAYS):
            replay()
        torch.cuda.synchronize()
    on_gpu = (e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA)
    return parts_of(((e.name, e.time_range.elapsed_us()) for e in on_gpu), REPLAYS)


def bench(part: str, tokens: Sequence[int], variants: Sequence[str]) -> Iterator[Row]:
    """Yield a row for each variant and number of tokens of a model."""
    shape = SHAPES[part]
    dense, inputs = build_dense(shape, "cuda"), shape.inputs("cuda")
    for variant in variants:
        model = made_variant(dense, shape, VARIANTS[variant])
        for count in tokens:
            for _ in range(WARM_UP):
                model(**inputs[count])
            graph, _ = captured_step(model, inputs[count])
            row: Row = {"model": part, "variant": variant, "tokens": count}
            row["graph_ms"] = gpu_ms([graph.replay], REPEATS)
            yield row | profiled(graph.replay)


def table(rows: Sequence[Row]) -> str:
    """Return rows as text."""
    lines = [["model", "variant", "tokens", "graph ms", *NAMES, "rows", "launches"]]
    for row in rows:
        ms: dict[str, float] = row["ms"]
        launches: dict[str, float] = row["launches"]  # type: ignore[assignment]
        times = [f"{one:.2f}" for one in (row["graph_ms"], *ms.values())]
        where = [str(row[name]) for name in ("model", "variant", "tokens")]
        lines.append([*where, *times, f"{sum(launches.values()):.0f}"])
    return "\n".join(align(lines, right=frozenset(range(2, 8))))


def main() -> None:
    """Run the chosen variants; the JSON file is complete after every row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", required=True)
    parser.add_argument("--part", choices=tuple(SHAPES), default="wan")
    parser.add_argument("--tokens", action="append", type=int)
    parser.add_argument("--variant", action="append", choices=tuple(VARIANTS))
    arguments = parser.parse_args()
    shape = SHAPES[arguments.part]
    tokens = tuple(dict.fromkeys(arguments.tokens or [min(shape.image_tokens)]))
    if unknown := set(tokens) - set(shape.image_tokens):
        allowed = " or ".join(map(str, shape.image_tokens))
        parser.error(f"--tokens: {arguments.part} is measured at {allowed}, not at {min(unknown)}")
    variants = tuple(dict.fromkeys(arguments.variant or CHOSEN))
    for variant in variants:
        if not can_be_captured(shape, variant):
            allowed = ", ".join(name for name in VARIANTS if can_be_captured(shape, name))
            parser.error(f"--variant: no graph holds {variant} of {arguments.part}, but {allowed}")
    require_gpu(parser, arguments.json)
    torch.manual_seed(0)
    rows: list[Row] = []
    for row in bench(arguments.part, tokens, variants):
        rows.append(row)
        write_json(arguments.json, envelope(rows=rows))
    print(table(rows))


if __name__ == "__main__":
    with torch.no_grad():
        main()
