"""A model built without weights, then filled from a baked folder's memory-mapped shards.

Everything on the meta device is replaced, aliases of tied weights included; buffers that no file
holds are computed by the model's own constructor in the component's dtype, as diffusers does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn
from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

from prequant.baked import BakedFiles
from prequant.encode import part_name
from quantpolicy.errors import CorruptCheckpointError, Mismatch, RequestError
from quantpolicy.inventory.headers import float_dtype
from quantpolicy.match import natural_key
from quantpolicy.plan import ComponentPlan
from quantpolicy.runtime.linear import guard_linear
from quantpolicy.runtime.locate import linears_by_weight

_REMEDY = "copy the folder again, or bake it again"


class ModelClass(Protocol):
    """What is used of a diffusers model class."""

    @classmethod
    def from_config(cls, config: dict[str, object]) -> nn.Module:
        """Build the model."""

    @classmethod
    def from_pretrained(cls, folder: str, *, torch_dtype: torch.dtype) -> nn.Module:
        """Load the model."""


def model_class(name: str) -> ModelClass:
    """Return the diffusers class of that name.

    Raises:
        RequestError: the installed diffusers has none.
    """
    import diffusers

    found = getattr(diffusers, name, None)
    if found is None:
        raise RequestError(
            name,
            f"not in diffusers {diffusers.__version__}",
            remedy="upgrade diffusers to a version that has this class",
        )
    cls: ModelClass = found
    return cls


def build_skeleton(class_name: str, config: dict[str, object], dtype: torch.dtype) -> nn.Module:
    """Return the model with every parameter on the meta device, in evaluation mode."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    with torch.random.fork_rng(devices=()), _default_dtype(dtype), init_empty_weights():
        model = model_class(class_name).from_config(plain)
    return model.eval()


def fill_skeleton(
    model: nn.Module, files: BakedFiles, plan: ComponentPlan, device: torch.device
) -> None:
    """Give the model every tensor of the folder; quantised Linears get their guards.

    Raises:
        CorruptCheckpointError: a tensor of the model is not in the folder, or the other way round.
    """
    slots = _slots(model)
    faults = []
    for name, tensor in read_tensors(files, plan, device):
        if is_ignored(model, name):
            continue
        if name not in slots:
            faults.append(Mismatch("tensor_unexpected", name, "a tensor of the model", "none"))
            continue
        _fill_slots(slots.pop(name), tensor)
    left = sorted(name for name, tensor in _tensors(model) if tensor.is_meta)
    faults += [Mismatch("tensor_missing", name, "a tensor in the folder", "none") for name in left]
    if faults:
        raise CorruptCheckpointError(str(files.folder), faults, remedy=_REMEDY)
    sharing = linears_by_weight(model)
    for layer in plan.layers:
        weight = model.get_parameter(f"{layer.name}.weight")
        for linear in sharing[id(weight)]:
            guard_linear(linear, layer.pad_rows)
    _move_buffers(model, device)


def read_tensors(
    files: BakedFiles, plan: ComponentPlan, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor by its name in the model, in the dtype it is loaded in."""
    for header in files.headers:
        names = header.tensors.keys()
        weights = [name for name in files.weights if part_name(f"{name}.weight", "qdata") in names]
        with safe_open(header.path, framework="pt", device=str(device)) as shard:
            for name in sorted(names & files.dense.keys(), key=natural_key):
                yield name, _as_loaded(name, shard.get_tensor(name), plan)
            for module in weights:
                weight = f"{module}.weight"
                parts = {
                    part_name(weight, part): shard.get_tensor(part_name(weight, part))
                    for part in files.weights[module].parts
                }
                yield weight, _join(weight, parts, files.metadata, header.path)


def _join(
    weight: str, parts: dict[str, torch.Tensor], metadata: dict[str, str], shard: Path
) -> torch.Tensor:
    own = {"tensor_names": f'["{weight}"]', weight: metadata[weight]}
    joined, _ = unflatten_tensor_state_dict(parts, own)
    if weight not in joined:
        fault = Mismatch("part_missing", weight, "all parts of the weight", ", ".join(parts))
        raise CorruptCheckpointError(str(shard), (fault,), remedy=_REMEDY)
    tensor: torch.Tensor = joined[weight]
    return tensor


def _as_loaded(name: str, tensor: torch.Tensor, plan: ComponentPlan) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.to(getattr(torch, float_dtype(name, plan.dtype, plan.keep_in_fp32)))


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _slots(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Return where each tensor of the state dict goes; tied tensors go to several places."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                places.setdefault(id(tensor), []).append((module, leaf))
    return {name: places[id(tensor)] for name, tensor in _tensors(model)}


def tensor_names(model: nn.Module) -> tuple[set[str], list[set[str]]]:
    """Return the names that a file may hold, and in groups of aliases those that it must hold."""
    groups: dict[int, set[str]] = {}
    for name, tensor in _tensors(model):
        groups.setdefault(id(tensor), set()).add(name)
    needed = [names for names in groups.values() if any(_is_stored(model, name) for name in names)]
    return {name for names in groups.values() for name in names}, needed


def is_ignored(model: nn.Module, name: str) -> bool:
    """Tell a tensor that released files hold and that the class says it leaves out."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)


def _is_stored(model: nn.Module, name: str) -> bool:
    """Tell a tensor without values, which a file must give, from one that is computed."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    return bool(getattr(module, leaf).is_meta)


def _fill_slots(places: list[tuple[nn.Module, str]], tensor: torch.Tensor) -> None:
    """Put one tensor everywhere it belongs; tied parameters stay one object."""
    parameter = nn.Parameter(tensor, requires_grad=False)
    for module, leaf in places:
        if leaf in module._buffers:
            module._buffers[leaf] = tensor
        else:
            module._parameters[leaf] = parameter


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[leaf] = buffer.to(device)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
