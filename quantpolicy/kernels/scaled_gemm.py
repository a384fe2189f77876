"""The GEMM behind the quantised Linears, with scales and bias applied to the accumulator.

    out[m, n] = acc[m, n] * x_scale[m] * w_scale[n] + bias[n]      acc = sum_k x[m, k] * w[n, k]

int8 accumulates in int32, e4m3 in fp32. Two Triton kernels: a persistent one that moves tiles with
the tensor memory accelerator, and a plain one for any size, alignment and GPU.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from quantpolicy.kernels.registry import HAS_TRITON

TMA_ALIGNMENT_BYTES = 16


class Tiles(NamedTuple):
    """Block shape and launch of one GEMM kernel.

    Args:
        halves: parts in which a tile is stored; two leave room for another stage.
        flatten: whether the loads of the next tile start before this one is stored.
        per_processor: programs that one multiprocessor holds at a time.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group_m: int = 8
    halves: int = 1
    flatten: bool = False
    per_processor: int = 1


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
def processors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU, each of which runs one persistent program."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU."""
    return torch.cuda.get_device_capability(device)


def fits_tma(x: Tensor, weight: Tensor, out: Tensor) -> bool:
    """Return whether base addresses and row strides suit the tensor memory accelerator."""
    return all(
        tensor.data_ptr() % TMA_ALIGNMENT_BYTES == 0
        and tensor.stride(0) * tensor.element_size() % TMA_ALIGNMENT_BYTES == 0
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
        x: [M, K] int8 or e4m3, contiguous. weight: [N, K] of the same dtype, contiguous.
        x_scale: [M] or [M, 1] fp32. w_scale: [N] or [N, 1] fp32. bias: [N]. Result: [M, N].
    """
    (m, k), n = x.shape, weight.shape[0]
    out = x.new_empty((m, n), dtype=dtype)
    if out.numel() == 0:
        return out
    tma = capability(x.device) >= (9, 0) and fits_tma(x, weight, out)
    tiles = tiles or choose_tiles(
        m, n, k, processors(x.device), tma=tma, wide_output=out.element_size() > 2
    )
    if tma:
        _launch_tma(x, x_scale, weight, w_scale, bias, out, tiles)
    else:
        _launch_plain(x, x_scale, weight, w_scale, bias, out, tiles)
    return out


def choose_tiles(
    m: int, n: int, k: int, programs: int, *, tma: bool, wide_output: bool = False
) -> Tiles:
    """Return the block shape for one GEMM.

    Measured on an H200 (bench/results/execution_tiles.json): large tiles when they fill the
    multiprocessors evenly, small ones with several programs each otherwise.

    Args:
        programs: multiprocessors of the GPU.
        tma: whether the tensor memory accelerator moves the tiles.
        wide_output: whether the output has four bytes a value, which leaves less shared memory.
    """
    if not tma:
        return Tiles(64, 64, 64, warps=4, stages=3) if m > 16 else Tiles(16, 64, 128, 4, 3)
    if m <= 16:
        if k >= 8192 and n <= 4096:
            return Tiles(16, 32, 256, warps=4, stages=4, per_processor=4)
        return Tiles(16, 64, 256, warps=4, stages=4, per_processor=3)
    tiles = -(-m // 128) * -(-n // 256)
    if tiles / (-(-tiles // programs) * programs) >= 0.7:
        return _large_tiles(m, k, wide_output=wide_output)
    small = -(-m // 64) * -(-n // 64)
    if small <= programs and m <= 128:
        return Tiles(64, 32, 256, warps=4, stages=4, per_processor=2)
    if small <= 2 * programs:
        return Tiles(64, 64, 128, warps=4, stages=6, per_processor=2)
    return Tiles(64, 64, 128, warps=4, stages=4, per_processor=3)


def _large_tiles(m: int, k: int, *, wide_output: bool) -> Tiles:
    if wide_output:
        return Tiles(128, 128, 128, warps=8, stages=4, halves=2, flatten=True)
    if k < 8192 and -(-m // 256) * 2 <= -(-m // 128) * 1.05:
        return Tiles(256, 128, 128, warps=8, stages=4, halves=2, flatten=True)
    return Tiles(128, 256, 128, warps=8, stages=4, halves=2, flatten=True)


def _launch_tma(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tiles: Tiles,
) -> None:
    (m, k), n = x.shape, weight.shape[0]
    programs = min(processors(x.device) * tiles.per_processor, -(-m // tiles.m) * -(-n // tiles.n))
    _scaled_gemm_tma_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [tiles.m, tiles.k]),
        TensorDescriptor.from_tensor(weight, [tiles.n, tiles.k]),
        TensorDescriptor.from_tensor(out, [tiles.m, tiles.n // tiles.halves]),
        x_scale,
        w_scale,
        x_scale if bias is None else bias,
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
        tl.int32 if x.dtype is torch.int8 else tl.float32,
        bias is not None,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def _launch_plain(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tiles: Tiles,
) -> None:
    (m, k), n = x.shape, weight.shape[0]
    _scaled_gemm_kernel[(-(-m // tiles.m) * -(-n // tiles.n),)](
        x,
        weight,
        out,
        x_scale,
        w_scale,
        x_scale if bias is None else bias,
        m,
        n,
        k,
        tiles.m,
        tiles.n,
        tiles.k,
        tiles.group_m,
        tl.int32 if x.dtype is torch.int8 else tl.float32,
        bias is not None,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
