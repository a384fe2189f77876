"""Rows quantised where they are made, inside whole denoisers: what each producer brings to a step.

    python -m bench.producers --json OUT [--part NAME] [--mode eager] [--turns N]

Each model has random weights at released widths, fewer blocks than released, fp8 in fused execution
with its projections joined, and all that is planned for it but the producers under test; these are
added one after another. The variants of a model share their tensors and are timed in turns, in
eager mode and with their repeated blocks compiled; ``ms`` is the median of what a caller waits for
a step. ``first_s`` is the first call, compilation included, which later variants of a model find
half done. ``error`` is relative to the dense output in bf16.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from bench.execution_models import start_compiler
from bench.execution_shapes import Inputs, Shape
from bench.execution_variants import VARIANTS, build_dense, mount_all, planned_kernels, quantise
from bench.models import Call, counts_by_op, interleaved_ms, uncompiled
from bench.producers_shapes import PRODUCER_SHAPES
from bench.timing import envelope, relative_error, require_gpu, write_json
from quantpolicy.text import align

BASE = "base"
MODES = ("eager", "compile")
TURNS = 9
# One code object serves the blocks of all variants of a model.
RECOMPILES = 64

Row = dict[str, object]


def kernel_lists(shape: Shape) -> dict[str, tuple[str, ...]]:
    """Return the ops of each variant: all that is planned without producers, then one more each."""
    ops = planned_kernels(shape.family, shape.kernels)
    lists = {BASE: ops}
    for producer in shape.kernels:
        ops = (*ops, producer)
        lists[f"+ {producer}"] = ops
    return lists


def mounted_variants(model: nn.Module, shape: Shape) -> dict[str, nn.Module]:
    """Return copies of a quantised model over its tensors, each with the ops of one variant."""
    tensors: dict[int, Tensor] = {id(one): one for one in (*model.parameters(), *model.buffers())}
    variants = {}
    for name, ops in kernel_lists(shape).items():
        variants[name] = copy.deepcopy(model, dict(tensors))
        mount_all(variants[name], ops)
    return variants


def first_output(model: nn.Module, inputs: Inputs) -> Tensor:
    """Return the first tensor that a denoiser gives; some give one an image."""
    out: Tensor | list[Tensor] = model(**inputs)[0]
    return out[0] if isinstance(out, list) else out


def bench_model(
    shape: Shape, modes: Sequence[str], turns: int, device: str = "cuda"
) -> Iterator[Row]:
    """Yield a row for each mode and variant of a model."""
    model = build_dense(shape, device)
    ((tokens, inputs),) = shape.inputs(device).items()
    reference = first_output(model, inputs).clone()
    quantise(model, shape, VARIANTS["fused_fp8_joined"])
    variants = mounted_variants(model, shape)
    for mode in modes:
        if mode == "compile":
            torch._dynamo.reset()
            for variant in variants.values():
                variant.compile_repeated_blocks(fullgraph=True)  # type: ignore[operator]
        yield from _bench_mode(variants, inputs, reference, turns, tokens=tokens, mode=mode)
    for variant in variants.values():
        uncompiled(variant)


def _bench_mode(
    variants: Mapping[str, nn.Module],
    inputs: Inputs,
    reference: Tensor,
    turns: int,
    **where: object,
) -> Iterator[Row]:
    rows: dict[str, Row] = {}
    calls: dict[str, Call] = {}
    for name, model in variants.items():
        call = functools.partial(first_output, model, inputs)
        row: Row = {**where, "variant": name}
        torch.cuda.synchronize()
        start = time.perf_counter()
        try:
            out = call()
        except RuntimeError as error:
            yield {**row, "failed": str(error)[:300]}
            continue
        torch.cuda.synchronize()
        row["first_s"] = time.perf_counter() - start
        rows[name], calls[name] = row | {"error": relative_error(out, reference)}, call
    for name, ms in interleaved_ms(calls, turns).items():
        yield {**rows[name], "ms": ms, "turns": turns}


def table(rows: Sequence[Row]) -> str:
    """Return rows as text, with the share of the time of each model's and mode's base."""
    bases = {(row["model"], row["mode"]): row.get("ms") for row in rows if row["variant"] == BASE}
    lines = [["model", "mode", "variant", "ms", "of base", "error", "first s"]]
    for row in rows:
        cells = [str(row[name]) for name in ("model", "mode", "variant")]
        base = bases.get((row["model"], row["mode"]))
        if "failed" in row:
            cells += ["failed", "", "", ""]
        else:
            share = f"{row['ms'] / base:.3f}" if base else ""  # type: ignore[operator]
            cells += [f"{row['ms']:.2f}", share, f"{row['error']:.4f}", f"{row['first_s']:.1f}"]
        lines.append(cells)
    return "\n".join(align(lines, right=frozenset(range(3, 7))))


def main() -> None:
    """Run the chosen models; the JSON file is complete after every row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", required=True)
    parser.add_argument("--part", action="append", choices=tuple(PRODUCER_SHAPES))
    parser.add_argument("--mode", action="append", choices=MODES)
    parser.add_argument("--turns", type=int, default=TURNS)
    arguments = parser.parse_args()
    require_gpu(parser, arguments.json)
    torch.manual_seed(0)
    start_compiler()
    rows: list[Row] = []
    for part in dict.fromkeys(arguments.part or PRODUCER_SHAPES):
        shape = PRODUCER_SHAPES[part]
        for row in bench_model(
            shape, tuple(dict.fromkeys(arguments.mode or MODES)), arguments.turns
        ):
            rows.append({"model": part, "config": shape.config, **row})
            print(rows[-1], flush=True)
            write_json(arguments.json, envelope(producers=rows, ops=counts_by_op()))
        gc.collect()
        torch.cuda.empty_cache()
    print(table(rows))


if __name__ == "__main__":
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=RECOMPILES):
        main()
