"""The GEMM behind the quantised Linears, with scales and bias applied to the accumulator.

    out[m, n] = acc[m, n] * x_scale[m] * w_scale[n] + bias[n]      acc = sum_k x[m, k] * w[n, k]

int8 accumulates in int32, e4m3 in fp32. Two Triton kernels: a persistent one that moves tiles with
the tensor memory accelerator, and a plain one for any size, alignment and GPU.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from quantpolicy.kernels.gemm_tiles import Tiles, choose_tiles
from quantpolicy.kernels.launch import ALIGNMENT_BYTES, is_aligned, launch, processors
from quantpolicy.kernels.registry import HAS_TRITON
from quantpolicy.kernels.replay import remembered

if HAS_TRITON:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    @triton.jit
    def _tile_origin(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
        """Return (row, column) of a tile in an order that keeps GROUP_M tile rows in the L2."""
        group = tile // (GROUP_M * tiles_n)
        first_m = group * GROUP_M
        rows = min(tiles_m - first_m, GROUP_M)
        inside = tile % (GROUP_M * tiles_n)
        return first_m + inside % rows, inside // rows

    @triton.jit
    def _scaled(acc, x_scale, w_scale_ptr, bias_ptr, cols, N, HAS_BIAS: tl.constexpr):
        """Apply scales and bias to one accumulator tile, in fp32."""
        w_scale = tl.load(w_scale_ptr + cols, mask=cols < N, other=0.0)
        out = acc.to(tl.float32) * x_scale[:, None] * w_scale[None, :]
        if HAS_BIAS:
            bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
            out += bias[None, :]
        return out

    @triton.jit(do_not_specialize=["M", "PROGRAMS"])
    def _scaled_gemm_tma_kernel(
        x_desc,
        w_desc,
        out_desc,
        x_scale_ptr,
        w_scale_ptr,
        bias_ptr,
        M,
        N,
        K,
        PROGRAMS,
        BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr,
        BLOCK_K: tl.constexpr,
        GROUP_M: tl.constexpr,
        HALVES: tl.constexpr,
        FLATTEN: tl.constexpr,
        ACC: tl.constexpr,
        HAS_BIAS: tl.constexpr,
    ):
        tiles_m = tl.cdiv(M, BLOCK_M)
        tiles_n = tl.cdiv(N, BLOCK_N)
        steps = tl.cdiv(K, BLOCK_K)
        for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=FLATTEN):
            tile_m, tile_n = _tile_origin(tile, tiles_m, tiles_n, GROUP_M)
            first_m = tile_m * BLOCK_M
            first_n = tile_n * BLOCK_N
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
            for step in range(steps):
                x = x_desc.load([first_m, step * BLOCK_K])
                w = w_desc.load([first_n, step * BLOCK_K])
                acc = tl.dot(x, w.T, acc, out_dtype=ACC)
            rows = first_m + tl.arange(0, BLOCK_M)
            x_scale = tl.load(x_scale_ptr + rows, mask=rows < M, other=0.0)
            if HALVES == 1:
                cols = first_n + tl.arange(0, BLOCK_N)
                out = _scaled(acc, x_scale, w_scale_ptr, bias_ptr, cols, N, HAS_BIAS)
                out_desc.store([first_m, first_n], out.to(out_desc.dtype))
            else:
                half: tl.constexpr = BLOCK_N // 2
                left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, half)), (0, 2, 1)))
                cols = first_n + tl.arange(0, half)
                out = _scaled(left, x_scale, w_scale_ptr, bias_ptr, cols, N, HAS_BIAS)
                out_desc.store([first_m, first_n], out.to(out_desc.dtype))
                out = _scaled(right, x_scale, w_scale_ptr, bias_ptr, cols + half, N, HAS_BIAS)
                out_desc.store([first_m, first_n + half], out.to(out_desc.dtype))

    @triton.jit(do_not_specialize=["M"])
    def _scaled_gemm_kernel(
        x_ptr,
        w_ptr,
        out_ptr,
        x_scale_ptr,
        w_scale_ptr,
        bias_ptr,
        M,
        N,
        K,
        BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr,
        BLOCK_K: tl.constexpr,
        GROUP_M: tl.constexpr,
        ACC: tl.constexpr,
        HAS_BIAS: tl.constexpr,
    ):
        tiles_m = tl.cdiv(M, BLOCK_M)
        tiles_n = tl.cdiv(N, BLOCK_N)
        tile_m, tile_n = _tile_origin(tl.program_id(0), tiles_m, tiles_n, GROUP_M)
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        inner = tl.arange(0, BLOCK_K)
        x_rows = x_ptr + rows.to(tl.int64)[:, None] * K
        w_rows = w_ptr + cols.to(tl.int64)[:, None] * K
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
        for start in range(0, K, BLOCK_K):
            in_k = (start + inner)[None, :] < K
            x = tl.load(
                x_rows + (start + inner)[None, :], mask=(rows < M)[:, None] & in_k, other=0.0
            )
            w = tl.load(
                w_rows + (start + inner)[None, :], mask=(cols < N)[:, None] & in_k, other=0.0
            )
            acc = tl.dot(x, w.T, acc, out_dtype=ACC)
        x_scale = tl.load(x_scale_ptr + rows, mask=rows < M, other=0.0)
        out = _scaled(acc, x_scale, w_scale_ptr, bias_ptr, cols, N, HAS_BIAS)
        out_at = out_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
        tl.store(
            out_at,
            out.to(out_ptr.dtype.element_ty),
            mask=(rows < M)[:, None] & (cols < N)[None, :],
        )


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU."""
    return torch.cuda.get_device_capability(device)


def fits_tma(x: Tensor, weight: Tensor, out: Tensor) -> bool:
    """Return whether base addresses and row strides suit the tensor memory accelerator."""
    return all(
        is_aligned(tensor)
        and tensor.shape[1] * tensor.element_size() % ALIGNMENT_BYTES == 0
        and tensor.is_contiguous()
        for tensor in (x, weight, out)
    )


def scaled_gemm(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    tiles: Tiles | None = None,
) -> Tensor:
    """Multiply quantised rows by a quantised weight, and apply scales and bias.

    Shapes:
        x: [M, K] int8 or e4m3. weight: [N, K] of the same dtype.
        x_scale: [M] or [M, 1] fp32. w_scale: [N] or [N, 1] fp32. bias: [N]. Result: [M, N].
    """
    return _multiply(x, x_scale, weight, w_scale, bias, dtype, tiles)


@remembered
def _multiply(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    tiles: Tiles | None,
) -> Tensor:
    x, weight, x_scale, w_scale = (t.contiguous() for t in (x, weight, x_scale, w_scale))
    bias = None if bias is None else bias.contiguous()
    (m, k), n = x.shape, weight.shape[0]
    out = torch.empty((m, n), dtype=dtype, device=x.device)
    if m == 0 or n == 0:
        return out
    tma = capability(x.device) >= (9, 0) and fits_tma(x, weight, out)
    tiles = tiles or choose_tiles(
        m, n, k, processors(x.device), tma=tma, fp8=x.dtype is not torch.int8, dtype=dtype
    )
    operands = (x, weight, out, x_scale, w_scale, x_scale if bias is None else bias)
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    acc = tl.int32 if x.dtype is torch.int8 else tl.float32
    blocks = -(-m // tiles.m) * -(-n // tiles.n)
    key = None
    if all(is_aligned(tensor) for tensor in operands) and m * k < 2**31:
        key = (tma, x.dtype, dtype, n, k, tiles, None if bias is None else bias.dtype)
    if tma:
        programs = min(processors(x.device) * tiles.per_processor, blocks)
        arguments = _tma_arguments(operands, tiles, (m, n, k), programs, acc, bias is not None)
        grid = (programs, 1, 1)
        launch(_scaled_gemm_tma_kernel, grid, arguments, options, device=x.device, key=key)
    else:
        shape = (tiles.m, tiles.n, tiles.k, tiles.group_m)
        arguments = (*operands, m, n, k, *shape, acc, bias is not None)
        launch(_scaled_gemm_kernel, (blocks, 1, 1), arguments, options, device=x.device, key=key)
    return out


def _tma_arguments(
    operands: tuple[Tensor, ...],
    tiles: Tiles,
    sizes: tuple[int, int, int],
    programs: int,
    acc: object,
    has_bias: bool,
) -> tuple[object, ...]:
    x, weight, out, *vectors = operands
    m, n, k = sizes
    return (
        TensorDescriptor(x, [m, k], [k, 1], [tiles.m, tiles.k]),
        TensorDescriptor(weight, [n, k], [k, 1], [tiles.n, tiles.k]),
        TensorDescriptor(out, [m, n], [n, 1], [tiles.m, tiles.n // tiles.halves]),
        *vectors,
        m,
        n,
        k,
        programs,
        tiles.m,
        tiles.n,
        tiles.k,
        tiles.group_m,
        tiles.halves,
        tiles.flatten,
        acc,
        has_bias,
    )
