"""The parts of a step: which kernels are products or attention, and what is summed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench import step_parts
from bench.step_parts import Row


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_ovscale_bias_TNT", "products"),
        ("void cutlass::device_kernel<GemmUniversal>", "products"),
        ("_scaled_gemm_tma_kernel", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>", "attention"),
        ("_layer_norm_kernel", "rows"),
        ("_row_quantise_fp8_kernel", "rows"),
    ],
)
def test_kinds_by_the_names_of_kernels(kernel: str, kind: str) -> None:
    assert step_parts.kind_of(kernel) == kind


def test_parts_are_those_of_one_replay() -> None:
    launches = [("nvjet_a", 40.0), ("nvjet_b", 20.0), ("_layer_norm_kernel", 8.0)] * 2
    parts = step_parts.parts_of([*launches, ("sdpa", 30.0), ("sdpa", 50.0)], 2)
    assert parts["ms"] == {"products": 0.06, "attention": 0.04, "rows": 0.008}
    assert parts["launches"] == {"products": 2.0, "attention": 1.0, "rows": 1.0}
    assert parts["longest_ms"] == {
        "nvjet_a": 0.04,
        "sdpa": 0.04,
        "nvjet_b": 0.02,
        "_layer_norm_kernel": 0.008,
    }


def test_the_table_has_a_line_for_each_variant() -> None:
    parts = step_parts.parts_of([("nvjet", 6000.0), ("sdpa", 2000.0), ("norm", 500.0)], 1)
    row = {"model": "wan", "variant": "dense", "tokens": 7, "graph_ms": 9.0, **parts}
    head, line = step_parts.table([row]).splitlines()
    assert head.split() == [
        "model",
        "variant",
        "tokens",
        "graph",
        "ms",
        "products",
        "attention",
        "rows",
        "launches",
    ]
    assert line.split() == ["wan", "dense", "7", "9.00", "6.00", "2.00", "0.50", "3"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--tokens 7", "--tokens: wan is measured at 1120 or 27280, not at 7"),
        (
            "--part hunyuan --variant dense --variant fused_fp8_all_kernels",
            "--variant: no graph holds fused_fp8_all_kernels of hunyuan, but dense, fused_fp8,"
            " fused_fp8_joined, fused_fp8_kernels, fused_fp8_joined_kernels, fused_int8\n",
        ),
        (
            "--variant torchao_fp8",
            "--variant: no graph holds torchao_fp8 of wan, but dense, fused_fp8, fused_fp8_joined,"
            " fused_fp8_kernels, fused_fp8_joined_kernels, fused_fp8_all_kernels, fused_int8\n",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(
    options: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["step_parts", "--json", "none", *options.split()])
    with pytest.raises(SystemExit) as refusal:
        step_parts.main()
    assert refusal.value.code == 2
    assert told in capsys.readouterr().err


def test_rows_before_a_failure_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def failing(part: str, tokens: tuple[int, ...], variants: tuple[str, ...]) -> Iterator[Row]:
        asked.append((part, tokens, variants))
        yield {"variant": "dense"}
        raise torch.OutOfMemoryError

    monkeypatch.setattr(step_parts, "require_gpu", lambda *_: None)
    monkeypatch.setattr(step_parts, "bench", failing)
    out = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["step_parts", "--json", str(out), "--part", "hunyuan"])
    with pytest.raises(torch.OutOfMemoryError):
        step_parts.main()
    assert json.loads(out.read_text())["rows"] == [{"variant": "dense"}]
    assert asked == [("hunyuan", (27286,), step_parts.CHOSEN)]
