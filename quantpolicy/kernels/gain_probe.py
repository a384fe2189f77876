"""Whether one fused launch is faster than the launches it replaces, measured once a signature."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from quantpolicy.kernels.contract import is_capturing
from quantpolicy.kernels.replay import signature

NO_GAIN = "the epilogue is no faster for this signature"

_REPEATS = 3
_GAINS: dict[Hashable, bool] = {}


def gains(
    name: str,
    fused: Callable[..., Tensor],
    separate: Callable[..., Tensor],
    args: tuple[Tensor | None, ...],
) -> bool:
    """Return whether ``fused`` is faster for these arguments.

    The first call of a signature times both; inside a graph capture nothing is timed, and what was
    not measured before counts as no gain there.
    """
    key = (name, signature(args))
    if key not in _GAINS:
        if is_capturing(args):
            return False
        _GAINS[key] = _shortest_ms(fused, args) < _shortest_ms(separate, args)
    return _GAINS[key]


def forget_gains() -> None:
    """Forget what was measured: the next call of a signature times again."""
    _GAINS.clear()


def _shortest_ms(call: Callable[..., Tensor], args: tuple[Tensor | None, ...]) -> float:
    """Return the shortest of a few GPU times, after one call that is not timed."""
    call(*args)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call(*args)
        mark.record()
    marks[-1].synchronize()
    times: list[float] = [marks[i].elapsed_time(marks[i + 1]) for i in range(_REPEATS)]
    return min(times)
