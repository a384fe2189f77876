"""Projections of one input, joined into one GEMM over one storage, and taken apart again.

The first part multiplies for all of them when it is called, and keeps the others' results until
each is called with the very same input; a part called with another input multiplies its own rows
of the storage. So the model's code stays as it is, and a call out of order is slower, not wrong.
Which projections are joined is decided by a plan, not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quantpolicy.errors import KernelMountError
from quantpolicy.kernels.linear import FusedLinear
from quantpolicy.kernels.quantised_rows import QuantisedRows
from quantpolicy.object_class import exchange_class, follows_class

_OWN = ("leader", "index", "start", "stop", "_bias_wants_grad")
_LEADING = ("parts", "waiting", "_whole")
_STORED = ("joined_qdata", "joined_scale", "joined_bias")

# An input, its version, and the results not yet asked for.
Waiting = tuple[Tensor, int, tuple[Tensor | None, ...]]


class JoinedLinear(FusedLinear):
    """A fused Linear whose data, scales and bias are rows of the first part's buffers.

    It counts on inputs not being written to between the parts' calls; a write in eager mode is
    noticed, except on tensors of ``torch.inference_mode``, which have no version.

    Args:
        leader: the first part, which holds the buffers.
        index: position among the parts.
        start, stop: own rows.
        parts: of the leader: all parts, itself included.
        waiting: of the leader: results not yet asked for, None when there are none.
    """

    leader: JoinedLinear
    index: int
    start: int
    stop: int
    parts: tuple[JoinedLinear, ...]
    waiting: Waiting | None
    joined_qdata: Tensor
    joined_scale: Tensor
    joined_bias: Tensor | None
    _whole: _Whole

    @property
    def qdata(self) -> Tensor:  # type: ignore[override]
        """Own rows of the data."""
        return self.leader.joined_qdata[self.start : self.stop]

    @property
    def scale(self) -> Tensor:  # type: ignore[override]
        """Own rows of the scales."""
        return self.leader.joined_scale[self.start : self.stop]

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """Own rows of the bias."""
        joined = self.leader.joined_bias
        return None if joined is None else joined[self.start : self.stop]

    def _operands(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.qdata, self.scale, self.bias

    @follows_class
    def forward(self, x: Tensor | QuantisedRows) -> Tensor:
        """Return ``x @ weight.T + bias``; see ``FusedLinear``."""
        if not isinstance(self, JoinedLinear):
            return type(self).forward(self, x)
        leader = self.leader
        waiting = leader.waiting
        source = x.codes if isinstance(x, QuantisedRows) else x
        if waiting is not None and waiting[0] is source and waiting[1] == _version(source):
            own = waiting[2][self.index]
            if own is not None:
                leader.waiting = _without(waiting, self.index)
                return own
        if self is not leader:
            return self.multiply(x)
        whole = self._whole(x)
        rest = (whole[..., part.start : part.stop] for part in self.parts[1:])
        leader.waiting = (source, _version(source), (None, *rest))
        return whole[..., : self.stop]

    def release(self) -> nn.Linear:
        """Refuse: one part alone cannot be taken out of the storage."""
        raise KernelMountError(
            self.name or "JoinedLinear",
            "joined with other projections",
            allowed="all parts are taken apart at once",
            remedy="call quantpolicy.runtime.unmount on the model",
        )

    def extra_repr(self) -> str:
        """Return the sizes, the scheme and the place among the parts."""
        return f"{super().extra_repr()}, part={self.index + 1} of {len(self.leader.parts)}"

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        state_dict = dict(state_dict)
        given, own = state_dict.pop(prefix + "bias", None), self.bias
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        _, _, missing_keys, unexpected_keys, error_msgs = arguments
        if own is None and given is not None:
            unexpected_keys.append(prefix + "bias")
        elif own is not None and given is None:
            missing_keys.append(prefix + "bias")
        elif own is not None and given is not None:
            if given.shape != own.shape:
                error_msgs.append(f"{prefix}bias: found {given.shape}; allowed is {own.shape}.")
            else:
                own.copy_(given.detach())


class _Whole:
    """What ``FusedLinear.multiply`` reads of a Linear, for all parts at once."""

    def __init__(self, leader: JoinedLinear) -> None:
        self.leader = leader
        self.name = leader.name
        self.scheme = leader.scheme
        self.floor = leader.floor

    @property
    def qdata(self) -> Tensor:
        return self.leader.joined_qdata

    @property
    def scale(self) -> Tensor:
        return self.leader.joined_scale

    @property
    def bias(self) -> Tensor | None:
        return self.leader.joined_bias

    def _operands(self) -> tuple[Tensor, Tensor, Tensor | None]:
        buffers: Any = self.leader._buffers
        return tuple(buffers[name] for name in _STORED)

    def _of_codes(self, x: QuantisedRows) -> Tensor:
        return FusedLinear._of_codes(self, x)  # type: ignore[arg-type]

    def __call__(self, x: Tensor | QuantisedRows) -> Tensor:
        return FusedLinear.multiply(self, x)  # type: ignore[arg-type]


def join_linears(linears: Sequence[FusedLinear]) -> JoinedLinear:
    """Join fused Linears of one input width, scheme and floor, in place; return the leader.

    The new buffers are the concatenation of the old ones, which are dropped: the most that is held
    twice meanwhile is one group.
    """
    qdata, scale = _stack([part.qdata for part in linears]), _stack([p.scale for p in linears])
    biases = [part.bias for part in linears]
    bias = None if biases[0] is None else torch.cat([b.detach() for b in biases if b is not None])
    start = 0
    for index, part in enumerate(linears):
        wants_grad = part.bias is not None and part.bias.requires_grad
        del part.qdata, part.scale
        del part._parameters["bias"]
        exchange_class(part, JoinedLinear)
        stop = start + part.out_features
        # Not through setattr, which would register the leader as a child of every part.
        vars(part).update(zip(_OWN, (linears[0], index, start, stop, wants_grad), strict=True))
        start = stop
    leader = linears[0]
    assert isinstance(leader, JoinedLinear)
    for name, tensor in zip(_STORED, (qdata, scale, bias), strict=True):
        leader.register_buffer(name, tensor, persistent=False)
    vars(leader).update(zip(_LEADING, (tuple(linears), None, _Whole(leader)), strict=True))
    return leader


def separate_linears(leader: JoinedLinear) -> tuple[FusedLinear, ...]:
    """Give every part its own tensors again, in place; equal to those it had."""
    parts: tuple[FusedLinear, ...] = leader.parts
    own = [
        (part.qdata.clone(), part.scale.clone(), None if part.bias is None else part.bias.clone())
        for part in parts
    ]
    for name in _STORED:
        delattr(leader, name)
    for part, (qdata, scale, bias) in zip(parts, own, strict=True):
        wants_grad = vars(part)["_bias_wants_grad"]
        for name in (*_OWN, *_LEADING):
            vars(part).pop(name, None)
        exchange_class(part, FusedLinear)
        part.register_buffer("qdata", qdata, persistent=False)
        part.register_buffer("scale", scale, persistent=False)
        held = None if bias is None else nn.Parameter(bias, requires_grad=wants_grad)
        part.register_parameter("bias", held)
    return parts


def _without(waiting: Waiting, index: int) -> Waiting | None:
    """Return what waits once one result is taken; nothing holds the tensors after the last."""
    left = tuple(None if place == index else one for place, one in enumerate(waiting[2]))
    return (waiting[0], waiting[1], left) if any(one is not None for one in left) else None


def _version(x: Tensor) -> int:
    """Return a number that a write to the tensor changes; a compiler sees the writes itself."""
    return 0 if torch.compiler.is_compiling() or x.is_inference() else x._version


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate rows byte by byte: not every device concatenates every dtype."""
    if tensors[0].element_size() > 1:
        return torch.cat(list(tensors))
    return torch.cat([tensor.view(torch.uint8) for tensor in tensors]).view(tensors[0].dtype)
