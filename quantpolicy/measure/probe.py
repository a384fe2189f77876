"""What a forward does: the rows that each Linear sees, which rows are zero, and all other work.

Rows and work come from a forward on the meta device at the declared inputs: shapes only, no
weights. Zero rows come from a tiny model with random weights whose inputs are padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from quantpolicy.errors import RequestError
from quantpolicy.inventory.forward import ForwardWork
from quantpolicy.inventory.live import build_on_meta
from quantpolicy.inventory.model import Inventory
from quantpolicy.match import block_pattern, first_matching_token
from quantpolicy.measure.inputs import filled_inputs, meta_inputs
from quantpolicy.measure.tiny import build_component, cast_parameters, denoiser_of
from quantpolicy.measure.work import WorkRecorder
from quantpolicy.rule_schema import FamilySpec, TinySpec

TINY_SEED = 0


class MaskAnswers(TorchFunctionMode):
    """Answers what a forward asks of a mask without values, so that only shapes matter.

    A mask counts as all true and its inverse as all false: code that selects the valid rows, then
    the others, and joins them again gets each row once.
    """

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Answer item, bool and selection by a mask; pass everything else on."""
        del types
        subject = args[0] if args else None
        if isinstance(subject, torch.Tensor) and subject.is_meta:
            if func in (torch.Tensor.__bool__, torch.Tensor.item):
                return False
            if func is torch.Tensor.__invert__:
                inverse = func(subject)
                inverse.is_inverse = True  # type: ignore[attr-defined]
                return inverse
            if func is torch.Tensor.__getitem__ and _is_mask(args[1]):
                return subject[:0] if getattr(args[1], "is_inverse", False) else subject
        return func(*args, **(kwargs or {}))


def _is_mask(index: object) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype is torch.bool


class ProbedForward(NamedTuple):
    """What one forward of a module shows: the fewest rows of each Linear called, and the rest."""

    rows: dict[str, int]
    work: ForwardWork


def probe_forward(
    module: nn.Module, class_name: str, inputs: Mapping[str, object], image_tokens: int
) -> ProbedForward:
    """Run a module on the meta device and return what its forward does.

    Args:
        image_tokens: rows of the image stream of one sample at these inputs; 0 when not known.

    Raises:
        RequestError: the inputs do not fit the class.
    """
    rows: dict[str, int] = {}

    def record(name: str, activation: torch.Tensor) -> None:
        seen = activation.numel() // activation.shape[-1]
        rows[name] = min(seen, rows.get(name, seen))

    recorder = WorkRecorder(image_tokens)
    with _watched(module, record), MaskAnswers(), recorder.watch(module), torch.no_grad():
        _forward(module, class_name, inputs)
    return ProbedForward(rows, recorder.work)


def probe_released(spec: FamilySpec) -> ProbedForward:
    """Return what a forward of the released denoiser does at the family's declared inputs.

    Linears that the forward does not call are left out; a stream that can be empty counts as empty.

    Raises:
        RequestError: diffusers does not have the class, or the inputs do not fit it.
    """
    part = denoiser_of(spec)
    module = build_on_meta(part.class_name, part.config)
    cast_parameters(module, part)
    tokens = spec.geometry.image_tokens if spec.geometry is not None else 0
    found = probe_forward(module, part.class_name, meta_inputs(spec.inputs), tokens)
    for name in found.rows:
        token = first_matching_token(name, tuple(spec.short_streams))
        if token and spec.short_streams[token] == 0:
            found.rows[name] = 0
    return found


def probe_zero_rows(spec: FamilySpec, tiny: TinySpec) -> frozenset[str]:
    """Return the Linears whose input holds a row of exact zeros, as names and block patterns.

    A block pattern stands for every block; a name with a number speaks of that block only, where
    other blocks of the tiny model see none.

    Raises:
        RequestError: diffusers does not have the class, or the inputs do not fit it.
    """
    module = build_component(denoiser_of(spec), tiny, TINY_SEED)
    zero: dict[str, bool] = {}

    def record(name: str, activation: torch.Tensor) -> None:
        found = bool((activation == 0).all(dim=-1).any())
        zero[name] = found or zero.get(name, False)

    with _watched(module, record), torch.no_grad():
        _forward(module, tiny.class_name, filled_inputs(tiny.inputs, TINY_SEED))
    return _patterns(zero)


def probe_inventory(inventory: Inventory, spec: FamilySpec, tiny: TinySpec) -> Inventory:
    """Return the inventory with the rows and zero rows of each Linear, and the forward's rest."""
    (rows, work), zero = probe_released(spec), probe_zero_rows(spec, tiny)
    linears = tuple(
        linear.model_copy(
            update={
                "rows": rows.get(linear.name),
                "zero_rows": linear.name in zero or block_pattern(linear.name) in zero,
            }
        )
        for linear in inventory.linears
    )
    return inventory.model_copy(update={"linears": linears, "forward": work})


def _patterns(zero: Mapping[str, bool]) -> frozenset[str]:
    clean = {block_pattern(name) for name, found in zero.items() if not found}
    return frozenset(
        name if block_pattern(name) in clean else block_pattern(name)
        for name, found in zero.items()
        if found
    )


def _forward(module: nn.Module, class_name: str, inputs: Mapping[str, object]) -> None:
    try:
        module(**inputs)
    except (RuntimeError, TypeError, ValueError, NotImplementedError, KeyError) as error:
        raise RequestError(
            f"{class_name} inputs",
            f"the forward failed: {error}",
            remedy="give the inputs as the pipeline gives them",
        ) from error


@contextmanager
def _watched(module: nn.Module, record: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
    """Call ``record`` with the name and the input of every Linear that runs."""

    def watch(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        return lambda _, args: record(name, args[0])

    handles = [
        part.register_forward_pre_hook(watch(name))
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
