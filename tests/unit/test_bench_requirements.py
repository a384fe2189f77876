"""Benchmarks say what they need before they begin."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import bench.timing

NEEDS_GPU = sorted(
    path.stem
    for path in Path(bench.timing.__file__).parent.glob("*.py")
    if "require_gpu(parser" in path.read_text(encoding="utf-8") and path.stem != "timing"
)


def test_every_benchmark_that_times_a_gpu_asks_for_one() -> None:
    assert NEEDS_GPU == [
        "attention", "execution", "execution_tiles", "joined", "kernels", "models", "producers",
        "row_tiles", "step_parts", "swiglu_tiles",
    ]  # fmt: skip


@pytest.mark.parametrize("has_gpu", [False, True])
@pytest.mark.parametrize("name", NEEDS_GPU)
def test_what_is_missing_is_told_in_one_line(
    name: str,
    has_gpu: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = importlib.import_module(f"bench.{name}")
    out = tmp_path / "missing" / "out.json"
    family = ["--family", "hunyuanvideo"] if name == "models" else []
    monkeypatch.setattr("sys.argv", [name, "--json", str(out), *family])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    with pytest.raises(SystemExit) as refusal:
        module.main()
    assert refusal.value.code == 2
    *_, last = capsys.readouterr().err.strip().splitlines()
    needed = "a CUDA device is needed, and torch finds none here"
    assert last.endswith(f"--json: {out.parent} is no folder; make it first" if has_gpu else needed)
