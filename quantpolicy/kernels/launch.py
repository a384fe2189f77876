"""Launches of Triton kernels: on the device of the data, and without repeated argument analysis.

Triton inspects every argument at every launch, which costs more than the launch itself. A caller
that knows what decides the compiled kernel passes it as a key, and later launches go straight to
that kernel.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

ALIGNMENT_BYTES = 16

_COMPILED: dict[Hashable, Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    *,
    device: torch.device,
    key: Hashable = None,
) -> None:
    """Run a Triton kernel on a device.

    Args:
        arguments: all arguments of the kernel by position, compile-time ones included.
        options: launch options such as ``num_warps``.
        key: everything that Triton would specialise on: dtypes, compile-time values, options, the
            alignment of pointers, the divisibility and width of integers; None when it is unknown.
    """
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _launch_here(kernel, grid, arguments, options, (key, device.index) if key else None)
    else:
        _launch_here(kernel, grid, arguments, options, (key, device.index) if key else None)


def _launch_here(
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    key: Hashable,
) -> None:
    compiled = _COMPILED.get(key) if key else None
    if compiled is not None:
        compiled[grid](*arguments)
        return
    compiled = kernel[grid](*arguments, **options)
    if key and compiled is not None:
        _COMPILED[key] = compiled


def is_aligned(tensor: torch.Tensor) -> bool:
    """Return whether the data starts at an address that allows the widest accesses."""
    return tensor.data_ptr() % ALIGNMENT_BYTES == 0
