"""Where the ops of namespace ``quantpolicy::`` are defined, counted and switched off.

An op is defined once with its schema, a CPU implementation (the plain torch reference), a CUDA
implementation and a fake kernel. What an op computes does not belong here.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from typing import TypeVar, cast

import torch
from torch import Tensor

Result = TypeVar("Result")

HAS_TRITON = find_spec("triton") is not None
DISABLE_VARIABLE = "QUANTPOLICY_DISABLE"

_LIBRARY = torch.library.Library("quantpolicy", "FRAGMENT")
_NAMES: list[str] = []
_DECLINES: Counter[tuple[str, str]] = Counter()


def define_op(
    schema: str,
    *,
    cpu: Callable[..., object],
    cuda: Callable[..., object],
    fake: Callable[..., object],
) -> Callable[..., object]:
    """Define one op and return its overload.

    Args:
        schema: name and signature, such as ``double(Tensor x) -> Tensor``.
        cpu: the plain torch reference.
        cuda: the fast implementation, for any input that the reference takes.
        fake: shapes and dtypes of the result, without data.
    """
    name = schema.partition("(")[0]
    _NAMES.append(name)
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, cpu, "CPU")
    _LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"quantpolicy::{name}", fake, lib=_LIBRARY)
    overload: Callable[..., object] = getattr(torch.ops.quantpolicy, name).default
    return overload


def direct(op: Callable[..., object], cuda: Callable[..., Result]) -> Callable[..., Result]:
    """Return a function that calls an op, on CUDA its implementation without the dispatcher.

    The dispatcher's cost shows at small shapes. It stays for compiled and fake calls, for a CPU,
    for tensor subclasses, and where a gradient is wanted. Arguments by position, a tensor first.

    Args:
        op: what ``define_op`` returned.
        cuda: the implementation on CUDA that it was given.
    """

    def call(*args: object) -> Result:
        first = args[0]
        if torch.compiler.is_compiling() or type(first) is not Tensor or not first.is_cuda:
            return cast("Result", op(*args))
        if torch.is_grad_enabled() and wants_gradient(args):
            return cast("Result", op(*args))
        return cuda(*args)

    return call


def wants_gradient(args: tuple[object, ...]) -> bool:
    """Return whether any tensor among the arguments requires a gradient."""
    return any(isinstance(argument, Tensor) and argument.requires_grad for argument in args)


def op_names() -> tuple[str, ...]:
    """Return the names of all defined ops, without the namespace."""
    return tuple(_NAMES)


@functools.cache
def is_disabled(name: str) -> bool:
    """Return whether ``QUANTPOLICY_DISABLE`` (names joined by commas) switches the kernel off.

    The variable is read once a process, at the first call of each op.
    """
    return name in os.environ.get(DISABLE_VARIABLE, "").replace(" ", "").split(",")


def why_no_triton(name: str) -> str:
    """Return why the Triton kernel of an op cannot run in this process, "" when it can."""
    if not HAS_TRITON:
        return "Triton is not installed"
    if is_disabled(name):
        return f"switched off by {DISABLE_VARIABLE}"
    return ""


def decline(name: str, reason: str) -> None:
    """Count one call that took the slower path of an op."""
    _DECLINES[name, reason] += 1


def declines() -> dict[tuple[str, str], int]:
    """Return how often each op took a slower path, by (op, reason)."""
    return dict(_DECLINES)
