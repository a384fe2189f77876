"""What one benchmark of a fused op is: the op, the chain it replaces, their arguments and bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Case(NamedTuple):
    """One op at one shape: what makes its arguments, and how many bytes it must move."""

    name: str
    tokens: int
    fused: Callable[..., object]
    eager: Callable[..., object]
    make: Callable[[], tuple[object, ...]]
    moved_bytes: int


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return normal values on the GPU."""
    return torch.randn(*shape, device="cuda", dtype=dtype)
