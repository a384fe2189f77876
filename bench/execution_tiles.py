"""Block shapes of the Triton GEMM, int8 and fp8, against the vendor GEMMs.

    python -m bench.execution_tiles --json OUT

The rule in quantpolicy.kernels.scaled_gemm.choose_tiles and the choice of GEMM for fp8 come from
here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from bench.timing import copies_for, envelope, graph_ms, require_gpu, write_json
from quantpolicy.kernels.gemm_tiles import Tiles, choose_tiles
from quantpolicy.kernels.launch import processors
from quantpolicy.kernels.scaled_gemm import scaled_gemm

SHAPES = ((3072, 3072), (9216, 3072), (14336, 3072), (3072, 12288), (3072, 14336))
ROWS = (1, 16, 17, 40, 64, 128, 256, 512, 1120, 4096, 27070)
FEW = (
    Tiles(16, 32, 256, 4, 4, per_processor=4),
    Tiles(16, 64, 256, 4, 4, per_processor=3),
    Tiles(64, 32, 256, 4, 4, per_processor=2),
    Tiles(64, 64, 128, 4, 6, per_processor=2),
    Tiles(64, 64, 128, 4, 4, per_processor=3),
)
MANY = (
    Tiles(64, 64, 128, 4, 4, per_processor=3),
    Tiles(64, 128, 128, 4, 4, per_processor=2),
    Tiles(128, 256, 128, 8, 3, flatten=True),
    Tiles(128, 256, 128, 8, 4, halves=2, flatten=True),
    Tiles(256, 128, 128, 8, 4, halves=2, flatten=True),
)


def bench_shape(m: int, n: int, k: int) -> dict[str, object]:
    """Time every candidate at one shape."""
    sets = copies_for(m * k + n * k, 16)
    xs = [torch.randint(-127, 128, (m, k), dtype=torch.int8, device="cuda") for _ in range(sets)]
    ws = [torch.randint(-127, 128, (n, k), dtype=torch.int8, device="cuda") for _ in range(sets)]
    x_scale, w_scale = torch.rand(m, device="cuda") / 1000, torch.rand(n, device="cuda") / 1000
    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    row: dict[str, object] = {"m": m, "n": n, "k": k}
    row["chosen"] = list(choose_tiles(m, n, k, processors(xs[0].device)))
    row["bf16"] = _time(
        lambda x, w: torch.nn.functional.linear(x, w, bias),
        [x.to(torch.bfloat16) for x in xs],
        [w.to(torch.bfloat16) for w in ws],
    )
    for name in ("int8", "fp8"):
        if name == "fp8":
            xs = [x.to(torch.bfloat16).div(16).to(torch.float8_e4m3fn) for x in xs]
            ws = [w.to(torch.bfloat16).div(16).to(torch.float8_e4m3fn) for w in ws]
        for tiles in FEW if m <= 128 else MANY:
            row[f"{name} {list(tiles)}"] = _time(
                lambda x, w, tiles=tiles: scaled_gemm(
                    x, x_scale, w, w_scale, bias, torch.bfloat16, tiles
                ),
                xs,
                ws,
            )
    for name, added in (("scaled_mm", bias), ("scaled_mm, bias apart", None)):
        row[name] = _time(
            lambda x, w, added=added: _scaled_mm(x, w, x_scale, w_scale, bias, added), xs, ws
        )
    return row


def _scaled_mm(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor, added: Tensor | None
) -> Tensor:
    out = torch._scaled_mm(
        x,
        w.t(),
        scale_a=x_scale.view(-1, 1),
        scale_b=w_scale.view(1, -1),
        bias=added,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return out if added is not None else out.add_(bias)


def _time(call: Callable[[Tensor, Tensor], Tensor], xs: list[Tensor], ws: list[Tensor]) -> float:
    """Return ms, -1 where the call is refused."""
    try:
        call(xs[0], ws[0])
    except (RuntimeError, OutOfResources):
        return -1.0
    return graph_ms([(lambda x=x, w=w: call(x, w)) for x, w in zip(xs, ws, strict=True)], 5)


def main() -> None:
    """Time all shapes and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", required=True)
    arguments = parser.parse_args()
    require_gpu(parser, arguments.json)
    rows = []
    for n, k in SHAPES:
        for m in ROWS:
            rows.append(bench_shape(m, n, k))
            print({key: round(v, 4) if isinstance(v, float) else v for key, v in rows[-1].items()})
    write_json(arguments.json, envelope(tiles=rows))


if __name__ == "__main__":
    main()
