"""Execution of quantised Linears: dense, fused and torchao, alone and inside whole denoisers.

    python -m bench.execution --json OUT [--part rows] [--part linear] [--part wan] [--part hunyuan]
        [--variant NAME ...] [--tokens N ...]

``ms`` is GPU time in a CUDA graph, ``wall_ms`` what an eager caller waits; torchao's eager chain is
not captured, its ``ms`` is GPU time with launches queued ahead. Errors are relative: to the dense
product in fp64 (bf16 at many rows) for single Linears, to the dense eager output for models.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from bench.execution_models import MODELS, start_compiler
from bench.execution_shapes import SHAPES as MODEL_SHAPES
from bench.execution_variants import VARIANTS
from bench.quantised import quantised_linear
from bench.timing import (
    copies_for,
    copy_ceiling_tb_s,
    envelope,
    gpu_ms,
    graph_ms,
    relative_error,
    require_gpu,
    wall_ms,
    write_json,
)
from quantpolicy.kernels.linear import FusedLinear
from quantpolicy.kernels.row_quantise_fp8 import row_quantise_fp8
from quantpolicy.kernels.row_quantise_int8 import row_quantise_int8
from quantpolicy.kernels.scaled_mm_probe import Route, routes
from quantpolicy.schemes import Scheme

FLOOR = 1e-12
ROWS = (1, 40, 256, 1120, 27070)
SHAPES = {
    "wan attention": (3072, 3072),
    "wan ffn in": (14336, 3072),
    "wan ffn out": (3072, 14336),
    "hunyuan qkv": (9216, 3072),
    "hunyuan mlp in": (12288, 3072),
    "hunyuan mlp out": (3072, 12288),
}


def bench_rows() -> Iterator[dict[str, object]]:
    """Row quantisation alone: time, bandwidth and share of the copy bandwidth."""
    ceiling = copy_ceiling_tb_s()
    for m in (1120, 27070, 118800):
        for k in (3072, 12288, 14336):
            inputs = [
                torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
                for _ in range(copies_for(3 * m * k, 16))
            ]
            row: dict[str, object] = {"m": m, "k": k, "copy_tb_s": ceiling}
            for scheme, quantise in (
                ("fp8", lambda x: row_quantise_fp8(x, FLOOR)),
                ("int8", row_quantise_int8),
            ):
                ms = gpu_ms(_each(quantise, inputs), 30)
                row[f"{scheme}_ms"] = ms
                row[f"{scheme}_tb_s"] = 3 * m * k / ms / 1e9
                row[f"{scheme}_of_copy"] = 3 * m * k / ms / 1e9 / ceiling
            yield row
            del inputs


def bench_linears() -> Iterator[dict[str, object]]:
    """Single Linears with a bias at the row counts and weight shapes of released models."""
    for shape, (n, k) in SHAPES.items():
        for m in ROWS:
            yield {"shape": shape, "m": m, "n": n, "k": k, **_bench_linear(m, n, k)}


def _bench_linear(m: int, n: int, k: int) -> dict[str, object]:
    sets = copies_for(2 * (m * k + n * k), 16)
    dense = [nn.Linear(k, n, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
    dense = [linear.eval().requires_grad_(False) for linear in dense]
    inputs = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
    exact = dense[0](inputs[0]) if m > 2000 else _exact(dense[0], inputs[0])
    result: dict[str, object] = {"reference": "bf16" if m > 2000 else "fp64"}
    result["dense"] = _measure(dense, inputs, exact)
    for scheme in (Scheme.FP8, Scheme.INT8):
        linears = [quantised_linear(linear, scheme, FLOOR) for linear in dense]
        stock = _measure(linears, inputs, exact, captured=False)
        result[f"torchao_{scheme.value}"] = stock
        fused = [FusedLinear.adopt(linear) for linear in linears]
        result[f"fused_{scheme.value}"] = _measure(fused, inputs, exact, stock.pop("out", None))
    for value in result.values():
        if isinstance(value, dict):
            value.pop("out", None)
    return result


def _measure(
    linears: list[nn.Linear],
    inputs: list[Tensor],
    exact: Tensor,
    stock: Tensor | None = None,
    *,
    captured: bool = True,
) -> dict[str, object]:
    try:
        out = linears[0](inputs[0])
    except RuntimeError as error:
        return {"failed": str(error).splitlines()[0][:120]}
    calls = [
        (lambda linear=linear, x=x: linear(x)) for linear, x in zip(linears, inputs, strict=True)
    ]
    result: dict[str, object] = {
        "ms": graph_ms(calls) if captured else gpu_ms(calls, 12),
        "wall_ms": wall_ms(calls, 16),
        "error": relative_error(out, exact),
        "out": out,
    }
    if stock is not None:
        result["to_torchao"] = relative_error(out, stock)
    return result


def _exact(linear: nn.Linear, x: Tensor) -> Tensor:
    assert linear.bias is not None
    return nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())


def _each(function: Callable[[Tensor], object], inputs: list[Tensor]) -> list[Callable[[], object]]:
    return [(lambda x=x: function(x)) for x in inputs]


def _short(row: dict[str, object]) -> str:
    cells = []
    for name, value in row.items():
        if isinstance(value, dict):
            text = value.get("failed") or f"{value['ms']:.4f} e{value['error']:.4f}"
            cells.append(f"{name} {str(text)[:24]}")
        else:
            shown = round(value, 4) if isinstance(value, float) else value
            cells.append(f"{name} {shown}")
    return " | ".join(cells)


def rejected_shapes() -> list[dict[str, object]]:
    """Return the GEMM signatures that this run's library did not take with a bias."""
    return [
        {**key._asdict(), "dtype": str(key.dtype), "route": route.value}
        for key, route in routes().items()
        if route is not Route.EPILOGUE
    ]


def _check_tokens(
    parser: argparse.ArgumentParser, parts: Iterable[str], tokens: Sequence[int] | None
) -> None:
    """Refuse tokens that a chosen model is not measured at, which would leave no row."""
    for part in (part for part in parts if part in MODELS):
        allowed = MODEL_SHAPES[part].image_tokens
        if tokens and not set(tokens) & set(allowed):
            measured = " or ".join(map(str, allowed))
            parser.error(f"--tokens: {part} is measured at {measured}; leave it out with --part")


def main() -> None:
    """Run the chosen parts; the JSON file is complete after every row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", required=True)
    parser.add_argument("--part", action="append", choices=("rows", "linear", *MODELS))
    parser.add_argument("--variant", action="append", choices=VARIANTS)
    parser.add_argument("--tokens", action="append", type=int, help="of models; all by default")
    arguments = parser.parse_args()
    _check_tokens(parser, arguments.part or MODELS, arguments.tokens)
    require_gpu(parser, arguments.json)
    torch.manual_seed(0)
    variants = tuple(dict.fromkeys(arguments.variant or VARIANTS))
    start_compiler()
    results: dict[str, object] = {"copy_tb_s": copy_ceiling_tb_s()}
    for part in dict.fromkeys(arguments.part or ("rows", "linear", *MODELS)):
        rows: list[dict[str, object]] = []
        results[part] = rows
        bench = {"rows": bench_rows, "linear": bench_linears}.get(part)
        for row in bench() if bench else MODELS[part](variants, arguments.tokens):
            print(_short(row), flush=True)
            rows.append(row)
            results["rejected"] = rejected_shapes()
            write_json(arguments.json, envelope(**results))


if __name__ == "__main__":
    with torch.no_grad():
        main()
