"""Projections of one input, joined into one GEMM or apart, at every family's released shapes.

    python -m bench.joined --json OUT

The rule table's groups of projections, at the rows of released input sizes, with random weights.
``_ms`` is GPU time in a CUDA graph: a group ``apart`` quantises its input once a projection,
``shared`` once and multiplies apart, as compiled code does, ``joined`` once, with one GEMM.
``_wall_ms`` is what an eager caller waits. A family's sums count each group as often as the model
has it.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from bench.quantised import quantised_linear
from bench.timing import copies_for, envelope, graph_ms, require_gpu, wall_ms, write_json
from quantpolicy import load_rules
from quantpolicy.fusions import fusion_places
from quantpolicy.inventory.shipped import load_inventory
from quantpolicy.kernels.int8_linear import int8_gemm
from quantpolicy.kernels.linear import FusedLinear
from quantpolicy.kernels.row_quantise_fp8 import row_quantise_fp8
from quantpolicy.kernels.row_quantise_int8 import row_quantise_int8
from quantpolicy.runtime.joined import join_linears
from quantpolicy.schemes import ComponentKind, Scheme

FLOOR = 1e-12

# Rows, input width, output widths, bias.
Shape = tuple[int, int, tuple[int, ...], bool]


def released_groups() -> dict[str, dict[str, Counter[Shape]]]:
    """Return, by family and fusion, how often its denoiser has which group of projections."""
    rules = load_rules()
    groups: dict[str, dict[str, Counter[Shape]]] = {}
    for family, spec in rules.families.items():
        denoiser = next(
            (part for part in spec.components.values() if part.kind is ComponentKind.DENOISER), None
        )
        if denoiser is None or not denoiser.inventory:
            continue
        linears = {linear.name: linear for linear in load_inventory(denoiser.inventory).linears}
        for fusion in spec.fusions:
            counts: Counter[Shape] = Counter()
            for names in fusion_places(rules.file.fusions[fusion], linears).values():
                parts = [linears[name] for name in names]
                first = parts[0]
                if first.rows and all(part.in_features == first.in_features for part in parts):
                    widths = tuple(part.out_features for part in parts)
                    counts[first.rows, first.in_features, widths, first.has_bias] += 1
            groups.setdefault(family, {})[fusion] = counts
    return groups


def bench_shape(shape: Shape, scheme: Scheme) -> dict[str, float]:
    """Time one group apart, quantised once, and joined."""
    rows, columns, widths, bias = shape
    sets = copies_for(2 * rows * columns + columns * sum(widths), 8)
    inputs = [
        torch.randn(1, rows, columns, device="cuda", dtype=torch.bfloat16) for _ in range(sets)
    ]
    apart = [_group(columns, widths, bias, scheme) for _ in range(sets)]
    calls: dict[str, list[Callable[[], object]]] = {
        "apart": [_all_of(group, x) for group, x in zip(apart, inputs, strict=True)],
        "shared": [_shared(group, x, scheme) for group, x in zip(apart, inputs, strict=True)],
    }
    result = _times("apart", calls["apart"]) | {"shared_ms": graph_ms(calls["shared"])}
    for group in apart:
        join_linears(group)
    return result | _times("joined", calls["apart"])


def _times(way: str, calls: list[Callable[[], object]]) -> dict[str, float]:
    return {f"{way}_ms": graph_ms(calls), f"{way}_wall_ms": wall_ms(calls, 16)}


def _group(columns: int, widths: tuple[int, ...], bias: bool, scheme: Scheme) -> list[FusedLinear]:
    dense = [
        nn.Linear(columns, width, bias=bias, device="cuda", dtype=torch.bfloat16)
        for width in widths
    ]
    return [
        FusedLinear.adopt(quantised_linear(linear.requires_grad_(False), scheme, FLOOR))
        for linear in dense
    ]


def _all_of(group: list[FusedLinear], x: Tensor) -> Callable[[], object]:
    return lambda: [part(x) for part in group]


def _shared(group: list[FusedLinear], x: Tensor, scheme: Scheme) -> Callable[[], object]:
    def call() -> list[Tensor]:
        codes, scale = row_quantise_fp8(x, FLOOR) if scheme is Scheme.FP8 else row_quantise_int8(x)
        flat, scales = codes.view(-1, codes.shape[-1]), scale.view(-1)
        return [_multiply(part, flat, scales, x, scheme) for part in group]

    return call


def _multiply(part: FusedLinear, codes: Tensor, scale: Tensor, x: Tensor, scheme: Scheme) -> Tensor:
    if scheme is Scheme.INT8:
        return int8_gemm(codes, scale, part.qdata, part.scale, part.bias, x.dtype)
    out = torch._scaled_mm(
        codes,
        part.qdata.t(),
        scale_a=scale.view(-1, 1),
        scale_b=part.scale.view(1, -1),
        out_dtype=x.dtype,
        use_fast_accum=True,
    )
    return out if part.bias is None else out.add_(part.bias)


def bench_families() -> Iterator[dict[str, object]]:
    """Time every group of every family once a shape, and yield sums by family and fusion."""
    known: dict[tuple[Shape, Scheme], dict[str, float]] = {}
    for family, fusions in released_groups().items():
        for fusion, counts in fusions.items():
            for scheme in (Scheme.FP8, Scheme.INT8):
                sums: Counter[str] = Counter()
                for shape, count in counts.items():
                    if (shape, scheme) not in known:
                        known[shape, scheme] = bench_shape(shape, scheme)
                        torch.cuda.empty_cache()
                    for name, value in known[shape, scheme].items():
                        sums[name] += count * value
                if sums:
                    yield {
                        "family": family,
                        "fusion": fusion,
                        "scheme": scheme.value,
                        "groups": sum(counts.values()),
                        "rows": sorted({shape[0] for shape in counts}),
                        **sums,
                        "joined_of_apart": sums["joined_ms"] / sums["apart_ms"],
                        "joined_of_shared": sums["joined_ms"] / sums["shared_ms"],
                        "joined_of_apart_wall": sums["joined_wall_ms"] / sums["apart_wall_ms"],
                    }


def main() -> None:
    """Time all families and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", required=True)
    arguments = parser.parse_args()
    require_gpu(parser, arguments.json)
    torch.manual_seed(0)
    rows = []
    for row in bench_families():
        rows.append(row)
        shown = [f"{row['family']:18} {row['fusion']:20} {row['scheme']:4} {row['groups']:>4}"]
        shown += [f"{k} {v:.3f}" for k, v in row.items() if isinstance(v, float)]
        print(" ".join(shown), flush=True)
        write_json(arguments.json, envelope(joined=rows))


if __name__ == "__main__":
    with torch.no_grad():
        main()
