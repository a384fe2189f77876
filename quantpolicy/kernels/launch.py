"""Launches of Triton kernels: on the device of the data, and without repeated argument analysis.

Triton inspects every argument at every launch, which costs more than the launch itself. A caller
that knows what decides the compiled kernel passes it as a key, and later launches go straight to
that kernel. What a launch was made of can be noted, so that it can be repeated; see ``replay``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from quantpolicy.kernels.registry import HAS_TRITON

if HAS_TRITON:
    from triton import knobs

ALIGNMENT_BYTES = 16

_COMPILED: dict[Hashable, Any] = {}

# Missing where torch has no CUDA, and there never called.
current_device = getattr(torch._C, "_cuda_getDevice", None)
raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class Launch(NamedTuple):
    """One launch: the compiled kernel, None in the interpreter, and what it was given."""

    compiled: Any
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    device_index: int | None


class _Notes(threading.local):
    """The launches of one thread that are collected, None when they are not."""

    launches: list[Launch] | None = None


_NOTES = _Notes()


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
    full_key = None if key is None else (key, device.index)
    compiled = None if key is None else _COMPILED.get(full_key)
    if compiled is not None:
        launch_compiled(compiled, grid, device.index, arguments)
    else:
        if device.type == "cuda":
            with torch.cuda.device(device):
                compiled = kernel[grid](*arguments, **options)
        else:
            compiled = kernel[grid](*arguments, **options)
        if key is not None and compiled is not None:
            _COMPILED[full_key] = compiled
        _note(compiled, grid, device.index, arguments)


def launch_compiled(
    compiled: Any, grid: tuple[int, int, int], device_index: int | None, arguments: tuple[Any, ...]
) -> None:
    """Run a compiled kernel on the current stream of a device; pointers may be plain addresses.

    What Triton's own ``compiled[grid](...)`` does, without its look-ups of device and stream.
    Where a profiler has set launch hooks, Triton's own way is taken.
    """
    if device_index != current_device():  # type: ignore[misc]
        with torch.cuda.device(device_index):
            launch_compiled(compiled, grid, device_index, arguments)
        return
    runtime = knobs.runtime
    if _has_hook(runtime.launch_enter_hook) or _has_hook(runtime.launch_exit_hook):
        compiled[grid](*arguments)
    else:
        compiled.run(
            *grid,
            raw_stream(device_index),  # type: ignore[misc]
            compiled.function,
            compiled.packed_metadata,
            None,
            None,
            None,
            *arguments,
        )
    _note(compiled, grid, device_index, arguments)


def _note(
    compiled: Any, grid: tuple[int, int, int], device_index: int | None, arguments: tuple[Any, ...]
) -> None:
    if _NOTES.launches is not None:
        _NOTES.launches.append(Launch(compiled, grid, arguments, device_index))


def _has_hook(hook: Any) -> bool:
    """Return whether a hook, or a chain of hooks as Triton keeps them, does anything."""
    return hook is not None and bool(getattr(hook, "calls", True))


@contextmanager
def noted_launches() -> Iterator[list[Launch]]:
    """Collect every launch that this thread makes, those of an inner collection included."""
    outer, launches = _NOTES.launches, list[Launch]()
    _NOTES.launches = launches
    try:
        yield launches
    finally:
        _NOTES.launches = outer
        if outer is not None:
            outer.extend(launches)


@functools.cache
def processors(device: torch.device) -> int:
    """Return the multiprocessors of a device, one of a CPU, where kernels are interpreted."""
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def is_aligned(tensor: torch.Tensor) -> bool:
    """Return whether the data starts at an address that allows the widest accesses."""
    return tensor.data_ptr() % ALIGNMENT_BYTES == 0
