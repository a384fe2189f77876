"""The inventory of a live module, or of a configuration built on the meta device. Imports torch."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import nn

from quantpolicy.errors import RequestError
from quantpolicy.inventory.model import Inventory, LinearFacts
from quantpolicy.match import first_matching_token, is_adapter, is_output_head, normalise_name

PLAIN_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)
WRAPPERS = ("_orig_mod", "base_model", "_checkpoint_wrapped_module")
# What the constructor of a class raises for arguments that it cannot work with.
CONSTRUCTOR_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def inventory_from_module(module: nn.Module) -> Inventory:
    """Return the inventory of a module as it is.

    Wrappers of torch.compile and PEFT are looked through, adapters are left out, and a module or
    tensor that is reached by several names counts once, under the first. An output head counts
    among the other bytes.

    Raises:
        RequestError: a weight is quantised already.
    """
    linears = []
    counted: set[int] = set()
    for name, linear in named_linears(module):
        if id(linear.weight) in counted:
            continue
        counted.add(id(linear.weight))
        linears.append(_facts(name, linear))
    return Inventory(
        class_name=class_name_of(module),
        linears=tuple(linears),
        other_bytes=sum(
            tensor.numel() * tensor.element_size()
            for name, tensor in _base_tensors(module)
            if id(tensor) not in counted
        ),
        source="live",
    )


def named_linears(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the Linears with their normalised names, each once; no adapters, no output heads.

    Raises:
        RequestError: a weight is quantised already.
    """
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        _check_dense(name, tensor)
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear) and not is_adapter(name) and not is_output_head(name):
            yield module_name(module, name), part


def module_name(root: nn.Module, name: str) -> str:
    """Return the normalised name of a submodule, without the wrappers around the root."""
    prefix = ".".join(_wrapper_path(root))
    inner = name.removeprefix(prefix).removeprefix(".") if prefix else name
    return normalise_name(inner)


def unwrap(module: nn.Module) -> nn.Module:
    """Return the model inside torch.compile and PEFT wrappers, or the module itself."""
    path = _wrapper_path(module)
    return module.get_submodule(".".join(path)) if path else module


def _wrapper_path(module: nn.Module) -> list[str]:
    """Return the attribute names that lead from the wrappers to the model."""
    path: list[str] = []
    while True:
        children = dict(module.named_children())
        inner: str | None = next((name for name in WRAPPERS if name in children), None)
        if inner is None and path and path[-1] == "base_model" and "model" in children:
            inner = "model"
        if inner is None:
            return path
        path.append(inner)
        module = children[inner]


def class_name_of(module: nn.Module) -> str:
    """Return the class of the model, wrappers looked through."""
    return type(unwrap(module)).__name__


def dominant_dtype(module: nn.Module) -> str:
    """Return the float dtype of most of the parameters, ``bfloat16`` when there are none."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in module.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] += parameter.numel()
    return _dtype_name(sizes.most_common(1)[0][0]) if sizes else "bfloat16"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _facts(name: str, linear: nn.Linear) -> LinearFacts:
    out_features, in_features = linear.weight.shape
    return LinearFacts(
        name=name,
        out_features=out_features,
        in_features=in_features,
        dtype=_dtype_name(linear.weight.dtype),
        has_bias=linear.bias is not None,
    )


def _check_dense(name: str, tensor: torch.Tensor) -> None:
    """Refuse tensor subclasses (torchao, bitsandbytes, GGUF) and 8-bit storage."""
    kinds = [kind for kind in (type(tensor), type(tensor.data)) if kind not in PLAIN_TENSORS]
    eight_bit = tensor.dtype is torch.int8 or (
        tensor.is_floating_point() and tensor.element_size() == 1
    )
    if kinds or eight_bit:
        stored = " ".join([*(kind.__name__ for kind in kinds[:1]), _dtype_name(tensor.dtype)])
        raise RequestError(
            name,
            f"already quantised ({stored})",
            allowed="a dense model",
            remedy="load the model without quantisation",
        )


def _base_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers, each once, those of adapters left out."""
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if not is_adapter(name):
            yield name, tensor


def inventory_from_config(
    class_name: str,
    config: Mapping[str, object],
    *,
    dtype: str = "bfloat16",
    keep_in_fp32: Sequence[str] = (),
) -> Inventory:
    """Return the inventory that a configuration describes, built on the meta device.

    Args:
        class_name: a diffusers model class.
        config: as in its config.json.
        dtype: float tensors are loaded in this dtype.
        keep_in_fp32: tokens of the modules whose tensors are loaded in fp32.

    Raises:
        RequestError: diffusers has no such model class, or it refuses the configuration.
    """
    module = build_on_meta(class_name, config)
    for name, tensor in _base_tensors(module):
        if tensor.is_floating_point():
            kept = first_matching_token(normalise_name(name), keep_in_fp32)
            tensor.data = tensor.data.to(torch.float32 if kept else getattr(torch, dtype))
    return inventory_from_module(module).model_copy(update={"source": "config"})


def build_on_meta(class_name: str, config: Mapping[str, object]) -> nn.Module:
    """Return a diffusers model without weights; see ``inventory_from_config``."""
    found = model_class(class_name)
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")
            module: nn.Module = found.from_config(dict(config))  # type: ignore[attr-defined]
    except CONSTRUCTOR_ERRORS as error:
        raise RequestError(
            f"{class_name} configuration",
            f"refused by the class: {type(error).__name__}: {error}",
            remedy="give the configuration as it was published",
        ) from error
    empty = next((name for name, part in module.named_parameters() if not part.numel()), None)
    if empty is not None:
        raise RequestError(
            f"{class_name} configuration",
            f"makes {empty} an empty tensor",
            remedy="give the configuration as it was published",
        )
    return module


def model_class(class_name: str) -> type[nn.Module]:
    """Return a model class of diffusers; see ``inventory_from_config``."""
    try:
        import diffusers
    except ImportError as error:
        raise RequestError(
            class_name,
            "needs diffusers to be built from a configuration",
            remedy="install quantpolicy[runtime], or give the folder with the weights",
        ) from error
    found = getattr(diffusers, class_name, None)
    if not (isinstance(found, type) and issubclass(found, diffusers.ModelMixin)):
        raise RequestError(
            class_name,
            f"no model class of diffusers {diffusers.__version__}",
            remedy="give the folder with the weights, or a diffusers release with that class",
        )
    return found
