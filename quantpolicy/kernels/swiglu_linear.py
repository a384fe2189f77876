"""A feed-forward's first Linear with its SwiGLU in the epilogue of the GEMM.

    value = round(x @ weight[:N].T + bias[:N])        x: [..., K], weight: [2 N, K], bias: [2 N]
    gate  = round(x @ weight[N:].T + bias[N:])
    out   = value * round(silu(gate))                 out: [..., N]

Each program multiplies by rows of both halves, so that the projection itself is never stored.
Contract: high; roundings are those of the eager chain, the order of the sums is not, and the
exponential is the GPU's fast one. The first call of a signature times both ways; where the epilogue
gains nothing, that signature stays on two launches for good.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from quantpolicy.kernels.contract import define_fusion
from quantpolicy.kernels.gain_probe import NO_GAIN, gains
from quantpolicy.kernels.gated_tiles import GATED_TILES, GatedTiles
from quantpolicy.kernels.launch import ALIGNMENT_BYTES, is_aligned, launch, processors
from quantpolicy.kernels.registry import HAS_TRITON
from quantpolicy.kernels.rotary import HALF_DTYPES
from quantpolicy.kernels.scaled_gemm import capability
from quantpolicy.kernels.swiglu import swiglu

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = "swiglu_linear"


def swiglu_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply, and gate in one op behind it: what runs where the epilogue does not."""
    return swiglu(F.linear(x, weight, bias))


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    del bias
    return x.new_empty((*x.shape[:-1], weight.shape[0] // 2))


def why_not_swiglu_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> str:
    """Return why the kernel cannot take these tensors, "" when it can."""
    tensors = [x, weight] if bias is None else [x, weight, bias]
    if x.dtype not in HALF_DTYPES or any(tensor.dtype is not x.dtype for tensor in tensors):
        return "activations, weight and bias are not all bfloat16 or all float16"
    if not all(tensor.is_contiguous() for tensor in tensors[1:]):
        return "weight or bias is not contiguous"
    if x.numel() == 0:
        return "there are no rows"
    step = ALIGNMENT_BYTES // x.element_size()
    if weight.shape[0] % (2 * step) or weight.shape[1] % step:
        return f"rows of input or result are not multiples of {ALIGNMENT_BYTES} bytes"
    if capability(x.device) < (9, 0):
        return "the GPU has no tensor memory accelerator"
    return ""


def _why_not(x: Tensor, weight: Tensor, bias: Tensor | None) -> str:
    args = (x, weight, bias)
    if reason := why_not_swiglu_linear(*args):
        return reason
    return "" if gains(_NAME, launch_swiglu_linear, swiglu_linear_reference, args) else NO_GAIN


if HAS_TRITON:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    from quantpolicy.kernels.scaled_gemm import _tile_origin
    from quantpolicy.kernels.token_rows import rounded

    @triton.jit
    def _gated(value, gate, bias_ptr, cols, N, HAS_BIAS: tl.constexpr, DTYPE: tl.constexpr):
        """Add the biases to both accumulators, round them, and gate one with the other."""
        if HAS_BIAS:
            mask = cols < N
            value += tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)[None, :]
            gate += tl.load(bias_ptr + N + cols, mask=mask, other=0.0).to(tl.float32)[None, :]
        gate = rounded(gate, DTYPE)
        return rounded(value, DTYPE) * rounded(gate / (1.0 + tl.exp(-gate)), DTYPE)

    @triton.jit
    def _products(
        x_desc,
        w_desc,
        first_m,
        first_n,
        steps,
        BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr,
        BLOCK_K: tl.constexpr,
    ):
        """Multiply rows by both halves of the weight [2, N, K] in one product twice as wide."""
        acc = tl.zeros((BLOCK_M, 2 * BLOCK_N), dtype=tl.float32)
        for step in range(steps):
            x = x_desc.load([first_m, step * BLOCK_K])
            w = w_desc.load([0, first_n, step * BLOCK_K])
            acc = tl.dot(x, tl.reshape(w, (2 * BLOCK_N, BLOCK_K)).T, acc)
        return tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))

    @triton.jit(do_not_specialize=["M", "PROGRAMS"])
    def _swiglu_linear_kernel(
        x_desc,
        w_desc,
        out_desc,
        bias_ptr,
        M,
        N,
        K,
        PROGRAMS,
        BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr,
        BLOCK_K: tl.constexpr,
        GROUP_M: tl.constexpr,
        FLATTEN: tl.constexpr,
        HAS_BIAS: tl.constexpr,
    ):
        dtype: tl.constexpr = out_desc.dtype
        tiles_m = tl.cdiv(M, BLOCK_M)
        tiles_n = tl.cdiv(N, BLOCK_N)
        steps = tl.cdiv(K, BLOCK_K)
        for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=FLATTEN):
            tile_m, tile_n = _tile_origin(tile, tiles_m, tiles_n, GROUP_M)
            first_m = tile_m * BLOCK_M
            first_n = tile_n * BLOCK_N
            value, gate = _products(
                x_desc, w_desc, first_m, first_n, steps, BLOCK_M, BLOCK_N, BLOCK_K
            )
            cols = first_n + tl.arange(0, BLOCK_N)
            out = _gated(value, gate, bias_ptr, cols, N, HAS_BIAS, dtype)
            out_desc.store([first_m, first_n], out.to(dtype))


def launch_swiglu_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, tiles: GatedTiles = GATED_TILES
) -> Tensor:
    """Run the Triton kernel: persistent programs, tiles moved by the tensor memory accelerator."""
    out = _fake(x, weight, bias)
    rows = _aligned_rows(x.reshape(-1, x.shape[-1]))
    (m, k), n = rows.shape, out.shape[-1]
    weight = weight if is_aligned(weight) else weight.clone()
    vector = weight if bias is None else bias
    blocks = -(-m // tiles.m) * -(-n // tiles.n)
    programs = min(processors(x.device) * tiles.per_processor, blocks)
    arguments = (
        TensorDescriptor(rows, [m, k], [rows.stride(0), 1], [tiles.m, tiles.k]),
        TensorDescriptor(weight, [2, n, k], [n * k, k, 1], [2, tiles.n, tiles.k]),
        TensorDescriptor(out, [m, n], [n, 1], [tiles.m, tiles.n]),
        vector,
        m,
        n,
        k,
        programs,
        tiles.m,
        tiles.n,
        tiles.k,
        tiles.group_m,
        tiles.flatten,
        bias is not None,
    )
    key = (_NAME, x.dtype, n, k, tiles, bias is None, is_aligned(vector))
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    launch(_swiglu_linear_kernel, (programs, 1, 1), arguments, options, device=x.device, key=key)
    return out


def _aligned_rows(rows: Tensor) -> Tensor:
    """Return [M, K] as the tensor memory accelerator can read it, itself where it already can."""
    row_bytes = rows.stride(0) * rows.element_size()
    fits = rows.stride(1) == 1 and row_bytes > 0 and row_bytes % ALIGNMENT_BYTES == 0
    if fits and is_aligned(rows):
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


swiglu_linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = define_fusion(  # type: ignore[assignment]
    f"{_NAME}(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    kernel=launch_swiglu_linear,
    reference=swiglu_linear_reference,
    why_not=_why_not,
    fake=_fake,
)
