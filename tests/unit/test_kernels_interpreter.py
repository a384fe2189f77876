"""The Triton kernels in Triton's interpreter, in a process of its own.

The interpreter must be chosen before Triton is first imported. It truncates where the GPU rounds to
bf16, so inputs are fp32; its cast to e4m3 is off by a step, and by a binade where rounding carries
into the exponent, so such values are left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

SCRIPT = """
import torch
from quantpolicy.kernels import scaled_gemm
from quantpolicy.kernels.gemm_tiles import Tiles
from quantpolicy.kernels.int8_linear import int8_matmul_reference, scaled_reference
from quantpolicy.kernels import row_quantise_fp8 as fp8
from quantpolicy.kernels import row_quantise_int8 as int8
from quantpolicy.kernels.rows import flat_rows

torch.manual_seed(0)
base = torch.randn(3, 10, 96)
inputs = {
    "whole row": torch.randn(3, 3072),
    "power of two": torch.randn(4, 64),
    "odd": torch.randn(2, 17),
    "one column": torch.randn(4, 1),
    "past the registers": torch.randn(2, 33000),
    "no rows": torch.randn(0, 48),
    "no columns": torch.randn(3, 0),
    "slice": base[:, 2:7, 3:60],
    "expanded": base[:1].expand(3, 10, 96).transpose(0, 1),
    "zero row": torch.zeros(2, 48),
}
for name, x in inputs.items():
    codes, scale = fp8.launch_row_quantise_fp8(x, 1e-12)
    expected, expected_scale = map(flat_rows, fp8.row_quantise_fp8_reference(x, 1e-12))
    torch.testing.assert_close(scale, expected_scale, rtol=3e-7, atol=0, msg=f"fp8 scale, {name}")
    error = (codes.float() - expected.float()).abs()
    step = (expected.float().abs() / 8).clamp(min=2.0**-9)
    quotient = (flat_rows(x.contiguous()) / expected_scale).abs().clamp(min=2.0**-9)
    carries = quotient / quotient.log2().floor().exp2() > 1.875
    assert bool(((error <= step) | carries).all()), f"fp8 codes, {name}"
    codes, scale = int8.launch_row_quantise_int8(x)
    expected, expected_scale = map(flat_rows, int8.row_quantise_int8_reference(x))
    torch.testing.assert_close(scale, expected_scale, rtol=3e-7, atol=0, msg=f"int8 scale, {name}")
    assert not codes.numel() or (codes.int() - expected.int()).abs().max() <= 1, name
    print("quantised", name)

scaled_gemm.capability = lambda device: (9, 0)
scaled_gemm.processors = lambda device: 3
gemms = (
    (100, 80, 96, Tiles(32, 32, 32, 4, 3), True),
    (100, 80, 96, Tiles(32, 32, 32, 4, 3, halves=2), True),
    (70, 96, 112, Tiles(32, 64, 32, 4, 3, group_m=2, per_processor=2), False),
    (33, 50, 70, Tiles(16, 32, 32, 4, 3), True),
    (1, 50, 70, Tiles(16, 32, 32, 4, 3), False),
)
for m, n, k, tiles, with_bias in gemms:
    x = torch.randint(-128, 128, (m, k), dtype=torch.int8)
    weight = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    x_scale, w_scale = torch.rand(m, 1) / 100, torch.rand(n, 1) / 100
    bias = torch.randn(n) if with_bias else None
    out = scaled_gemm.scaled_gemm(x, x_scale, weight, w_scale, bias, torch.float32, tiles)
    acc = int8_matmul_reference(x, weight)
    expected = scaled_reference(acc, x_scale, w_scale, bias, out.dtype)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    print("multiplied", m, n, k)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("quantised") == 10
    assert done.stdout.count("multiplied") == 5
