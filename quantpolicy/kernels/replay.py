"""A kernel call made again from what its first call did: allocate the results, launch once.

A launcher computes grid, strides and compile-time values from its arguments at every call, which
costs more than the launch. All of that follows from the arguments' signature, so the first call of
a signature is watched, and a later one takes over the launch as it was, with its own addresses.

Only a call that is nothing but new tensors and one launch over whole arguments and results is
repeated; any other stays with its launcher.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import wraps
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quantpolicy.kernels.launch import ALIGNMENT_BYTES, Launch, launch_compiled, noted_launches
from quantpolicy.kernels.registry import HAS_TRITON

if HAS_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor

Result = TypeVar("Result")

_HARMLESS = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_strided,
    torch.ops.aten.empty_like,
    torch.ops.aten.new_empty,
    torch.ops.aten.promote_types,
}
_UNSEEN: Any = object()


def signature(args: tuple[object, ...]) -> Hashable:
    """Return what a call depends on, the values in tensors aside; see ``describe``."""
    return describe(args)[0]


def describe(args: tuple[object, ...]) -> tuple[Hashable, list[int]]:
    """Return a call's signature, and the addresses of the tensors among its arguments.

    The signature holds shapes, strides, dtypes, devices and alignments of tensors, which of them
    are the same, and other values with their types.
    """
    key: list[Hashable] = []
    addresses: list[int] = []
    for argument in args:
        if isinstance(argument, Tensor):
            address = argument.data_ptr()
            addresses.append(address)
            key.append(
                (
                    argument.shape,
                    argument.stride(),
                    argument.dtype,
                    argument.device,
                    address % ALIGNMENT_BYTES == 0,
                )
            )
        elif isinstance(argument, (list, tuple)):
            key.append(signature(tuple(argument)))
        else:
            key.append((type(argument), argument))
    if len(set(addresses)) < len(addresses):
        key.append(tuple(map(addresses.index, addresses)))
    return tuple(key), addresses


class Spec(NamedTuple):
    """What a result is allocated with."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Replay:
    """One launch that can be made again.

    Args:
        launch: as it was made first.
        pick: orders addresses of arguments, addresses of results, ``constants`` and descriptors as
            the kernel takes them.
        results: how each result is allocated.
        pack: makes of the results what the launcher returned.
        constants: the arguments of the launch that are no tensors.
        descriptors: fields of tensor descriptors, and which address is their base.
    """

    __slots__ = ("constants", "descriptors", "launch", "pack", "pick", "results")

    def __init__(
        self,
        launch: Launch,
        pick: Callable[[list[Any]], tuple[Any, ...]],
        results: list[Spec],
        pack: Callable[[list[Tensor]], object],
        constants: list[Any],
        descriptors: list[tuple[Mapping[str, Any], int]],
    ) -> None:
        self.launch, self.pick, self.results, self.pack = launch, pick, results, pack
        self.constants, self.descriptors = constants, descriptors

    def __call__(self, addresses: list[int]) -> object:
        """Allocate and launch; ``addresses`` of the tensors among the arguments, in order."""
        results = []
        pool: list[Any] = addresses
        for shape, strides, dtype, device in self.results:
            result = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            results.append(result)
            pool.append(result.data_ptr())
        if self.descriptors:
            made = [_descriptor(fields, pool[base]) for fields, base in self.descriptors]
            pool = [*pool, *self.constants, *made]
        else:
            pool += self.constants
        compiled, grid, _, device_index = self.launch
        launch_compiled(compiled, grid, device_index, self.pick(pool))
        return self.pack(results)


def remembered(launcher: Callable[..., Result]) -> Callable[..., Result]:
    """Return a launcher that repeats its own launches; arguments by position."""
    replays: dict[Hashable, Replay | None] = {}

    @wraps(launcher)
    def call(*args: object) -> Result:
        key, addresses = describe(args)
        replay = replays.get(key, _UNSEEN)
        if replay is _UNSEEN:
            result, replays[key] = watched(launcher, args)
            return cast(Result, result)
        return launcher(*args) if replay is None else cast(Result, replay(addresses))

    return call


def watched(launcher: Callable[..., object], args: tuple[object, ...]) -> tuple[Any, Replay | None]:
    """Call a launcher; return its result, and how to repeat the call if it can be repeated."""
    with noted_launches() as launches, _OtherOps() as other_ops:
        result = launcher(*args)
    if other_ops.seen or len(launches) != 1 or launches[0].compiled is None:
        return result, None
    return result, _replay(launches[0], [x for x in args if isinstance(x, Tensor)], result)


class _OtherOps(TorchDispatchMode):
    """Notices ops that do more than allocate: a launch made again would leave them out."""

    seen = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        self.seen |= func.overloadpacket not in _HARMLESS
        return func(*args, **(kwargs or {}))


class _Address:
    """Stands for the tensor in a descriptor, of which a launch reads the address alone."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


def _descriptor(fields: Mapping[str, Any], address: int) -> object:
    """Return a tensor descriptor that was checked before, over another address."""
    descriptor = object.__new__(TensorDescriptor)
    vars(descriptor).update(fields, base=_Address(address))
    return descriptor


def _replay(launch: Launch, inputs: list[Tensor], result: object) -> Replay | None:
    """Return the replay of a launch, None where a tensor in it is none of inputs and results."""
    results = [result] if isinstance(result, Tensor) else list(cast("list[Tensor]", result))
    tensors = [*inputs, *results]
    places = {id(tensor): place for place, tensor in enumerate(tensors)}
    new = {id(each) for each in results} - {id(each) for each in inputs}
    if len(new) < len(results) or not all(_is_own_memory(each) for each in results):
        return None
    constants: list[Any] = []
    descriptors: list[tuple[Mapping[str, Any], int]] = []
    order: list[tuple[str, int]] = []
    for argument in launch.arguments:
        is_descriptor = HAS_TRITON and isinstance(argument, TensorDescriptor)
        base = argument.base if is_descriptor else argument
        if not isinstance(base, Tensor):
            order.append(("constant", len(constants)))
            constants.append(argument)
            continue
        place = places.get(id(base))
        if place is None:
            return None
        if is_descriptor:
            order.append(("descriptor", len(descriptors)))
            fields = {name: value for name, value in vars(argument).items() if name != "base"}
            descriptors.append((fields, place))
        else:
            order.append(("tensor", place))
    first = {
        "tensor": 0,
        "constant": len(tensors),
        "descriptor": len(tensors) + len(constants),
    }
    return Replay(
        launch._replace(arguments=()),
        itemgetter(*(first[kind] + number for kind, number in order)),
        [Spec(each.shape, each.stride(), each.dtype, each.device) for each in results],
        itemgetter(0) if isinstance(result, Tensor) else type(result),
        constants,
        descriptors,
    )


def _is_own_memory(tensor: Tensor) -> bool:
    """Return whether a tensor is all of its memory, without gaps: as newly allocated."""
    bytes_held = tensor.untyped_storage().nbytes()
    return tensor.is_contiguous() and bytes_held == tensor.numel() * tensor.element_size()
