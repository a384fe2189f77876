"""torch's attention kernels at the shapes of the MiniMax-H3 decoder, 28 tiles and one.

    python -m bench.attention --json OUT [--seconds 0.5]

Queries and keys are packed and values a view of the joint projection, as the mounted decoder passes
them; figures are those of ``sustained_ms``. "default" is what torch picks by itself.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.timing import envelope, relative_error, require_gpu, sustained_ms, write_json

TOKENS, HEADS, SIZE = 1285, 32, 64
TILES = (28, 1)
BACKENDS = {
    "default": None,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def bench_tiles(tiles: int, seconds: float) -> list[dict[str, object]]:
    """Time every kernel on one number of tiles, and compare one tile with fp64."""
    columns = HEADS * SIZE
    joint = torch.randn(tiles, TOKENS, 3 * columns, device="cuda", dtype=torch.float16)
    query, key, value = (
        part.unflatten(2, (HEADS, SIZE)).transpose(1, 2) for part in joint.chunk(3, dim=-1)
    )
    query, key = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key))
    exact = scaled_dot_product_attention(*(x[:1].double() for x in (query, key, value)))
    flop = 4 * tiles * TOKENS**2 * columns
    rows: list[dict[str, object]] = []

    def call() -> Tensor:
        return scaled_dot_product_attention(query, key, value)

    for name, backend in BACKENDS.items():
        row: dict[str, object] = {"tiles": tiles, "kernel": name}
        rows.append(row)
        with nullcontext() if backend is None else sdpa_kernel(backend):
            try:
                row["error"] = relative_error(call()[:1], exact)
            except RuntimeError as error:
                row["refused"] = str(error).splitlines()[0]
                continue
            ms = sustained_ms([call], seconds)
        row |= {"ms": ms, "tflop_s": flop / ms / 1e9}
    return rows


def main() -> None:
    """Time all kernels and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", required=True)
    parser.add_argument("--seconds", type=float, default=0.5)
    arguments = parser.parse_args()
    require_gpu(parser, arguments.json)
    torch.manual_seed(0)
    rows = [row for tiles in TILES for row in bench_tiles(tiles, arguments.seconds)]
    sizes = {"tokens": TOKENS, "heads": HEADS, "size": SIZE}
    write_json(arguments.json, envelope(**sizes, seconds=arguments.seconds, kernels=rows))
    for row in rows:
        print({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()})


if __name__ == "__main__":
    with torch.no_grad():
        main()
