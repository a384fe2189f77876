"""Views of models with fusions mounted, and their Linears put into fused execution one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from quantpolicy.kernels.linear import FusedLinear
from quantpolicy.runtime.weights import quantise_weight
from quantpolicy.schemes import Scheme


def fuse(linear: nn.Linear, settings: Mapping[Scheme, Any]) -> None:
    """Quantise a Linear to fp8 and fuse it, in place."""
    weight = quantise_weight(linear.weight, Scheme.FP8, settings[Scheme.FP8])
    linear.weight = nn.Parameter(weight, requires_grad=False)
    FusedLinear.adopt(linear)


class Halved(nn.Module):
    """Half of what a module gives, with whatever else the module has."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.calls = 0

    def forward(self, *args: object, **kwargs: object) -> object:
        self.calls += 1
        given = self.inner(*args, **kwargs)
        return tuple(x / 2 for x in given) if isinstance(given, tuple) else given / 2

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["inner"], name)


def halve(model: nn.Module, name: str) -> Halved:
    """Put half of a module in its place."""
    owner, _, last = name.rpartition(".")
    halved = Halved(model.get_submodule(name))
    model.get_submodule(owner)._modules[last] = halved
    return halved


def classes(model: nn.Module) -> list[type]:
    """Return the classes of all modules, then of their attention processors."""
    found = [type(module) for module in model.modules()]
    return found + [type(m.processor) for m in model.modules() if hasattr(m, "processor")]


def error(found: Tensor, expected: Tensor) -> float:
    """Return the distance to a result, relative to its length."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())
