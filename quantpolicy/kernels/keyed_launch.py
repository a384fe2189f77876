"""The key under which a compiled kernel is found again, made from a launch's own arguments.

Plain values count as they are, pointers by dtype and alignment. Integers that a kernel declares as
not specialised are named by the caller and do not count.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quantpolicy.kernels.launch import is_aligned, launch


def keyed_launch(
    kernel: Any,
    grid: tuple[int, int],
    args: tuple[object, ...],
    *,
    free: tuple[int, ...] = (),
    **options: object,
) -> None:
    """Run a kernel on the device of its first argument, a tensor.

    Args:
        kernel: a ``triton.jit`` function.
        args: all its arguments in order, compile-time ones included.
        free: positions of integers that the kernel does not specialise on, each below 2**31.
        options: launch options, those that the other arguments decide included.
    """
    first = args[0]
    assert isinstance(first, Tensor)
    key: list[object] = [kernel, *options.values()]
    for position, argument in enumerate(args):
        if isinstance(argument, Tensor):
            key.append((argument.dtype, is_aligned(argument)))
        elif position not in free:
            key.append((type(argument), argument))
    launch(kernel, (*grid, 1), args, options, device=first.device, key=tuple(key))
