"""From the declared inputs of the rule table to tensors, on the meta device or filled."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from quantpolicy.errors import RequestError
from quantpolicy.rule_schema import InputSpec


def meta_inputs(inputs: Mapping[str, InputSpec]) -> dict[str, object]:
    """Return the declared inputs as tensors without values."""
    return {name: _meta(spec) for name, spec in inputs.items()}


def filled_inputs(inputs: Mapping[str, InputSpec], seed: int) -> dict[str, object]:
    """Return the declared inputs with values; the global random state is not touched."""
    generator = torch.Generator().manual_seed(seed)
    return {name: _filled(spec, name, generator) for name, spec in inputs.items()}


def _is_plain(spec: InputSpec) -> bool:
    return spec.shape is None and not spec.shapes and not spec.runs


def _dtype(spec: InputSpec) -> torch.dtype:
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise RequestError(
            "inputs", f"no dtype {spec.dtype!r}", remedy="name a torch dtype, such as bfloat16"
        )
    return dtype


def _meta(spec: InputSpec) -> object:
    if _is_plain(spec):
        return spec.value
    if spec.shapes:
        return [torch.empty(shape, dtype=_dtype(spec), device="meta") for shape in spec.shapes]
    shape = spec.shape or (sum(count for _, count in spec.runs),)
    return torch.empty(shape, dtype=_dtype(spec), device="meta")


def _filled(spec: InputSpec, name: str, generator: torch.Generator) -> object:
    if _is_plain(spec):
        return spec.value
    if spec.shapes:
        return [_values(spec, name, shape, generator) for shape in spec.shapes]
    tensor = _values(spec, name, spec.shape or (), generator)
    for sample, tokens in zip(tensor, spec.valid, strict=bool(spec.valid)):
        sample[tokens:] = 0
    return tensor


def _values(
    spec: InputSpec, name: str, shape: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor:
    dtype = _dtype(spec)
    if spec.runs:
        return torch.cat([torch.full((count,), value, dtype=dtype) for value, count in spec.runs])
    if spec.start is not None:
        return torch.arange(spec.start, spec.start + math.prod(shape), dtype=dtype).reshape(shape)
    if spec.value is not None:
        if not isinstance(spec.value, int | float):
            raise RequestError(
                f"inputs.{name}", "a list as the fill of a tensor", remedy="give a number"
            )
        return torch.full(shape, spec.value, dtype=dtype)
    if not dtype.is_floating_point:
        raise RequestError(
            f"inputs.{name}",
            f"a {spec.dtype} tensor without values",
            allowed="value, start or runs",
            remedy="add one of them",
        )
    return torch.randn(shape, generator=generator).to(dtype)
