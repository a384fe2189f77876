"""The sweep of tiles: what it tries, that a choice reaches the launch, and its table."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch

from bench import row_tiles as sweep
from quantpolicy.kernels import activated_rows, layer_norm_rows, row_tiles


def test_ways_hold_a_row_and_start_with_the_choice() -> None:
    norm = list(sweep.ways(sweep.KERNELS["layer_norm_fp8"]))
    assert norm[0] == (None, None, None)
    assert sorted({warps for warps, _, _ in norm[1:]}) == [1, 2, 4, 8]
    assert len(norm) == 1 + 4 * len(sweep.PROGRAMS) * len(sweep.STAGES)
    activation = list(sweep.ways(sweep.KERNELS["gelu_fp8_linear"]))
    assert activation == [(None, None, None), (4, None, None), (8, None, None), (16, None, None)]


@pytest.mark.parametrize("name", sweep.KERNELS)
def test_every_way_reaches_the_launch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[int, int, int]] = []

    def keyed_launch(kernel, grid, args, *, num_warps, **_) -> None:
        names = kernel.arg_names
        stages = args[names.index("STAGES")] if "STAGES" in names else 0
        launched.append((num_warps, args[names.index("TILE")], stages))

    def timed(calls, repeats) -> float:
        assert repeats == 20
        calls[0]()
        return 0.5

    def noise(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype)

    for module in (activated_rows, layer_norm_rows):
        monkeypatch.setattr(module, "keyed_launch", keyed_launch)
    monkeypatch.setattr(sweep, "gpu_ms", timed)
    monkeypatch.setattr(sweep, "noise", noise)
    monkeypatch.setattr(sweep, "copies_for", lambda *_: 1)
    rows = sweep.bench_kernel(name, 40, 4.0)
    ways = list(sweep.ways(sweep.KERNELS[name]))
    assert len(launched) == len(rows) == len(ways)
    for (warps, _, stages), launch in zip(ways[1:], launched[1:], strict=True):
        assert launch == (warps, warps * 256, stages or 0)
    assert layer_norm_rows.turns_for is row_tiles.turns_for
    assert layer_norm_rows.tiles_for is activated_rows.tiles_for is row_tiles.tiles_for
    assert [row["chosen"] for row in rows] == [True] + [False] * (len(rows) - 1)
    moved = 40 * sweep.KERNELS[name].columns * sweep.KERNELS[name].bytes_a_value
    assert rows[0]["of_copy"] == moved / 0.5 / 1e9 / 4.0


def test_the_table_names_the_choice_and_the_fastest() -> None:
    row = {"op": "one", "tokens": 7, "chosen": False, "warps": 2, "programs": 4, "stages": 3}
    rows = [
        {**row, "chosen": True, "warps": None, "programs": None, "ms": 0.5, "of_copy": 0.25},
        {**row, "ms": 0.25, "of_copy": 0.5},
        {**row, "warps": 8, "programs": None, "ms": 0.4, "of_copy": 0.3},
        {**row, "warps": 16, "failed": "out of registers"},
    ]
    lines = [line.split() for line in sweep.table(rows, best=1).splitlines()]
    assert [" ".join(line) for line in lines] == [
        "one 7 chosen 0.5000 ms, 0.250 of copy",
        "one 7 2 warps, 4 programs, 3 stages 0.2500 ms, 0.500 of copy",
    ]
    failed = {**rows[0], "tokens": 8, "failed": "out of {registers}"}
    del failed["ms"], failed["of_copy"]
    assert " ".join(sweep.table([failed]).split()) == "one 8 chosen failed: out of {registers}"
