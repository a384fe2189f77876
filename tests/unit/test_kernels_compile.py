"""Kernels compiled for Hopper without a GPU: they fit, and use what it has for them."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

GEMMS = """
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from quantpolicy.kernels.gemm_tiles import choose_tiles
from quantpolicy.kernels.scaled_gemm import _scaled_gemm_kernel, _scaled_gemm_tma_kernel


def compiled(tiles, data, out, tma):
    kernel = _scaled_gemm_tma_kernel if tma else _scaled_gemm_kernel
    signature = {"x_scale_ptr": "*fp32", "w_scale_ptr": "*fp32", "bias_ptr": "*" + out}
    signature |= {"M": "i32", "N": "i32", "K": "i32"}
    constants = {"BLOCK_M": tiles.m, "BLOCK_N": tiles.n, "BLOCK_K": tiles.k}
    constants |= {"GROUP_M": tiles.group_m, "HAS_BIAS": True}
    constants["ACC"] = tl.int32 if data == "i8" else tl.float32
    if tma:
        constants |= {"HALVES": tiles.halves, "FLATTEN": tiles.flatten}
        signature["x_desc"] = f"tensordesc<{data}[{tiles.m}, {tiles.k}]>"
        signature["w_desc"] = f"tensordesc<{data}[{tiles.n}, {tiles.k}]>"
        signature["out_desc"] = f"tensordesc<{out}[{tiles.m}, {tiles.n // tiles.halves}]>"
        signature["PROGRAMS"] = "i32"
    else:
        signature |= {"x_ptr": "*" + data, "w_ptr": "*" + data, "out_ptr": "*" + out}
    signature |= {name: "constexpr" for name in constants}
    pointers = [name for name in kernel.arg_names if name.endswith("_ptr")]
    aligned = pointers + (["N", "K"] if tma else [])
    attributes = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    return triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": tiles.warps, "num_stages": tiles.stages},
    )


large = choose_tiles(27070, 9216, 3072, 132)
small = choose_tiles(40, 3072, 3072, 132, fp8=True)
plain = choose_tiles(300, 50, 70, 132, tma=False)
for tiles, data, out, tma in (
    (large, "i8", "bf16", True),
    (small, "fp8e4nv", "fp32", True),
    (plain, "i8", "fp16", False),
):
    kernel = compiled(tiles, data, out, tma)
    operands = "s32.s8.s8" if data == "i8" else "f32.e4m3.e4m3"
    instruction = [line for line in kernel.asm["ptx"].splitlines() if "wgmma.mma_async" in line]
    print(kernel.metadata.shared <= 227 * 1024, all(operands in line for line in instruction))
    assert instruction
"""


NORM = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from quantpolicy.kernels.rms_norm_fp8 import _rms_norm_fp8_kernel as kernel
from quantpolicy.kernels.row_tiles import NORMED_CODES, tiles_for

for columns, indexed in ((3840, False), (5376, True)):
    warps, tile, number = tiles_for(columns, NORMED_CODES)
    constants = {"D": columns, "TILE": tile, "TILES": number, "EXACT_DIVISION": False}
    constants |= {"WEIGHTED": True, "SCALED": True, "SHIFTED": indexed, "INDEXED": indexed}
    constants |= {"BY_TOKEN": indexed, "STAGES": 1 if indexed else NORMED_CODES.stages}
    signature = {name: "i32" for name in kernel.arg_names} | {"eps": "fp32", "floor": "fp32"}
    signature |= {name: "*bf16" for name in kernel.arg_names if name.endswith("_ptr")}
    signature |= {"index_ptr": "*i64", "codes_ptr": "*fp8e4nv", "row_scale_ptr": "*fp32"}
    signature |= {name: "constexpr" for name in constants}
    strides = ("x_b", "x_s", "scale_b", "scale_s", "shift_b", "shift_s")
    aligned = [name for name in kernel.arg_names if name.endswith("_ptr") or name in strides]
    attributes = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}
    )
    ptx = compiled.asm["ptx"]
    # Rows on their way beside the one at hand, two codes an instruction, eight codes a store.
    print("cp.async.cg" in ptx, "satfinite.e4m3x2" in ptx, ptx.count("st.global.v2"))
"""


LAYER_NORM = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from quantpolicy.kernels.layer_norm_rows import _layer_norm_kernel as kernel
from quantpolicy.kernels.row_tiles import NORMED, NORMED_CODES, SUM_CODES, tiles_for

pointers = [name for name in kernel.arg_names if name.endswith("_ptr")]
strides = [name for name in kernel.arg_names if name.endswith(("_b", "_s"))]
attributes = {
    (kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in (*pointers, *strides)
}
for flags in ("modulated", "added", "gated", "by_token", "gated by_token", "rows"):
    gated, by_token, rows = (flag in flags for flag in ("gated", "by_token", "rows"))
    added = gated or flags == "added"
    kind = NORMED if rows else SUM_CODES if added else NORMED_CODES
    warps, tile, number = tiles_for(3072, kind)
    affine = flags == "gated"
    constants = {"D": 3072, "TILE": tile, "TILES": number, "AFFINE": affine}
    constants |= {"MODULATED": not affine, "TABLES": not affine, "BY_TOKEN": by_token}
    constants |= {"ADDED": added, "GATED": gated, "GATE_TABLE": gated, "QUANTISED": not rows}
    constants |= {"EXACT_DIVISION": False, "STAGES": 1 if by_token else kind.stages}
    signature = {name: "i32" for name in kernel.arg_names} | {"eps": "fp32", "floor": "fp32"}
    signature |= {name: "*fp32" if "table" in name else "*bf16" for name in pointers}
    signature |= {"row_scale_ptr": "*fp32", "out_ptr": "*bf16" if rows else "*fp8e4nv"}
    signature |= {name: "constexpr" for name in constants}
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps},
    )
    ptx = compiled.asm["ptx"]
    # Rows on their way beside the one at hand, and codes two an instruction.
    print("cp.async.cg" in ptx, "satfinite.e4m3x2" in ptx)
"""


ACTIVATED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from quantpolicy.kernels.gelu_fp8_linear import _gelu_quantise_kernel
from quantpolicy.kernels.row_tiles import ACTIVATED, tiles_for
from quantpolicy.kernels.swiglu_fp8_linear import _swiglu_quantise_kernel

for kernel, head, columns in (
    (_gelu_quantise_kernel, 0, 14336),
    (_gelu_quantise_kernel, 3072, 12288),
    (_swiglu_quantise_kernel, 0, 10240),
    (_swiglu_quantise_kernel, 6144, 18432),
):
    warps, tile, number = tiles_for(head + columns, ACTIVATED)
    constants = {"N": head, "K": head + columns, "TILE": tile, "TILES": number}
    constants["EXACT_DIVISION"] = False
    pointers = [name for name in kernel.arg_names if name.endswith("_ptr")]
    strides = [name for name in kernel.arg_names if name.endswith("_stride")]
    signature = dict.fromkeys(strides, "i32") | dict.fromkeys(pointers, "*bf16")
    signature |= {"q_ptr": "*fp8e4nv", "scale_ptr": "*fp32", "floor": "fp32"}
    signature |= {name: "constexpr" for name in constants}
    attributes = {
        (kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in pointers + strides
    }
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps},
    )
    ptx = compiled.asm["ptx"]
    # The exponential in one instruction, eight values a load, codes two an instruction.
    print(*("ex2.approx.ftz" in ptx, "ld.global.v4" in ptx, "satfinite.e4m3x2" in ptx))
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (GEMMS, ["True True"] * 3),
        (NORM, ["True True 8", "False True 6"]),
        (LAYER_NORM, ["True True"] * 3 + ["False True"] * 2 + ["True False"]),
        (ACTIVATED, ["True True True"] * 4),
    ],
    ids=["gemms", "norm", "layer norm", "activated"],
)
def test_compiles_for_hopper(script: str, expected: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if "TRITON" not in name}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == expected
