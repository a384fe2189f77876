"""What an op promises, and how the promise is kept at run time: verified, declined and counted.

``lossless`` compares the kernel with the plain torch reference at the first use of every signature
and falls back to the reference for good where they differ by a bit. ``relaxed`` only checks that
the kernel can run. Neither knows what an op computes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantpolicy.kernels.registry import (
    decline,
    declines,
    define_op,
    op_names,
    wants_gradient,
    why_no_triton,
)
from quantpolicy.kernels.replay import Replay, describe, watched
from quantpolicy.ops import OPS
from quantpolicy.schemes import Contract

UNEQUAL = "not bit-exact to the eager chain for this signature"
CAPTURING = "not verified before a graph capture"
ON_CPU = "the tensors are on a CPU"
GRADIENT = "a gradient is wanted"
AUTOCAST = "autocast decides the dtypes"

_LOGGER = logging.getLogger(__name__)
_CALLS: Counter[str] = Counter()
_VERIFIED: Counter[str] = Counter()
_ACCEPTED: dict[str, dict[Hashable, Replay | None]] = {}
_REFUSED: set[tuple[str, Hashable]] = set()
_UNSEEN: Any = object()

Implementation = Callable[..., object]


class OpCounts(NamedTuple):
    """What one op did so far in this process.

    Args:
        calls: calls that ran the kernel.
        verifications: signatures compared with the eager chain.
        refused: signatures that were not bit-exact and stay on the eager chain.
        declines: calls that took the eager chain, by reason.
    """

    calls: int
    verifications: int
    refused: int
    declines: dict[str, int]


def define_fusion(
    schema: str,
    *,
    kernel: Implementation,
    reference: Implementation,
    why_not: Callable[..., str],
    fake: Implementation,
) -> Implementation:
    """Define an op with the contract that ``ops`` says, and return the function that calls it.

    Eager CUDA calls go to the implementation without the dispatcher, whose cost shows at small
    shapes; compiled, fake and CPU calls go through the op.

    Args:
        schema: name and signature, such as ``double(Tensor x) -> Tensor``.
    """
    name = schema.partition("(")[0]
    keep = lossless if OPS[name].contract is Contract.LOSSLESS else relaxed
    implementation = keep(name, kernel, reference, why_not)
    op = define_op(schema, cpu=on_cpu(name, reference), cuda=implementation, fake=fake)

    def call(*args: object) -> object:
        first = args[0]
        if torch.compiler.is_compiling() or type(first) is not Tensor or not first.is_cuda:
            return op(*args)
        if torch.is_grad_enabled() and wants_gradient(args):
            return declined(name, GRADIENT, reference, args)
        if torch.is_autocast_enabled("cuda"):
            return declined(name, AUTOCAST, reference, args)
        return implementation(*args)

    return call


def on_cpu(name: str, reference: Implementation) -> Implementation:
    """Return the CPU implementation of an op: its reference, counted as declined."""

    def implementation(*args: object) -> object:
        return declined(name, ON_CPU, reference, args)

    return implementation


def lossless(
    name: str,
    kernel: Implementation,
    reference: Implementation,
    why_not: Callable[..., str],
) -> Implementation:
    """Return the CUDA implementation of a bit-exact op.

    Args:
        kernel: the launcher; tensors, sequences of tensors or None in, new tensors out.
        reference: the same in plain torch, the chain that is replaced.
        why_not: the predicate: why the kernel cannot take these arguments, "" when it can.
    """
    return _implementation(name, kernel, reference, why_not, verifies=True)


def relaxed(
    name: str,
    kernel: Implementation,
    reference: Implementation,
    why_not: Callable[..., str],
) -> Implementation:
    """Return the CUDA implementation of a numerically relaxed op; see ``lossless``.

    The predicate is asked once a signature that it accepts.
    """
    return _implementation(name, kernel, reference, why_not, verifies=False)


def _implementation(
    name: str,
    kernel: Implementation,
    reference: Implementation,
    why_not: Callable[..., str],
    *,
    verifies: bool,
) -> Implementation:
    accepted: dict[Hashable, Replay | None] = {}
    _ACCEPTED[name] = accepted

    def implementation(*args: object) -> object:
        key, addresses = describe(args)
        replay = accepted.get(key, _UNSEEN)
        if replay is not _UNSEEN:
            _CALLS[name] += 1
            return kernel(*args) if replay is None else replay(addresses)
        reason = UNEQUAL if (name, key) in _REFUSED else why_no_triton(name) or why_not(*args)
        if reason:
            return declined(name, reason, reference, args)
        if not verifies:
            result, accepted[key] = watched(kernel, args)
            _CALLS[name] += 1
            return result
        if is_capturing(args):
            return declined(name, CAPTURING, reference, args)
        expected = reference(*args)
        found, replay = watched(kernel, args)
        _VERIFIED[name] += 1
        if _same_results(found, expected):
            accepted[key] = replay
        else:
            _REFUSED.add((name, key))
            decline(name, UNEQUAL)
            _LOGGER.warning("%s is %s: %s; it stays eager there.", name, UNEQUAL, key)
        return expected

    return implementation


def declined(name: str, reason: str, reference: Implementation, args: tuple[object, ...]) -> object:
    """Count one declined call, and return what the eager chain gives."""
    decline(name, reason)
    return reference(*args)


def count_call(name: str) -> None:
    """Count one call of a fusion that is no op of its own."""
    _CALLS[name] += 1


def is_capturing(args: tuple[object, ...]) -> bool:
    """Return whether a CUDA graph is being captured on the stream of these tensors."""
    on_gpu = any(isinstance(argument, Tensor) and argument.is_cuda for argument in args)
    return on_gpu and torch.cuda.is_current_stream_capturing()


def _same_results(found: object, expected: object) -> bool:
    pairs = zip(_tensors(found), _tensors(expected), strict=True)
    return all(same_bits(one, other) for one, other in pairs)


def _tensors(result: object) -> tuple[Tensor, ...]:
    if isinstance(result, Tensor):
        return (result,)
    assert isinstance(result, (list, tuple))
    return tuple(result)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal bit for bit; a NaN equals the same NaN."""
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    if torch.equal(one, other):
        return True
    bits = _BITS[one.element_size()]
    return torch.equal(one.contiguous().view(bits), other.contiguous().view(bits))


def op_counts() -> dict[str, OpCounts]:
    """Return what every op that was called did so far in this process."""
    turned_down = declines()
    names = {*_CALLS, *_VERIFIED, *(name for name, _ in turned_down)}
    known = (*op_names(), *sorted(names - set(op_names())))
    return {
        name: OpCounts(
            _CALLS[name],
            _VERIFIED[name],
            sum(op == name for op, _ in _REFUSED),
            {reason: count for (op, reason), count in turned_down.items() if op == name},
        )
        for name in known
        if name in names
    }


def forget_verdicts(name: str = "") -> None:
    """Forget the verdicts of one op, or of all: the next use of a signature verifies again."""
    for op, accepted in _ACCEPTED.items():
        if name in ("", op):
            accepted.clear()
    for refused in [each for each in _REFUSED if name in ("", each[0])]:
        _REFUSED.discard(refused)
