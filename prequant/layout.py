"""What each baked shard holds, decided before a byte is written: jobs in the order of the source.

One output shard per source shard, so the parts of a weight stay together. Every mismatch between
plan and source is found here. Reading, arithmetic and writing belong to ``stream``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

import torch

from prequant.encode import (
    FILE_DTYPES,
    PLAIN_METADATA,
    TORCH_DTYPES,
    Encoding,
    encode_weight,
    part_name,
)
from prequant.header import SHARD_COMPONENT, SHARD_SOURCE, WEIGHTS_STEM
from prequant.source import SourceComponent
from quantpolicy.errors import Mismatch, PlanMismatchError
from quantpolicy.inventory.headers import FLOAT_DTYPES, QUANTISED_DTYPES, loaded_dtype
from quantpolicy.inventory.shard import LENGTH_BYTES, METADATA_KEY, ShardHeader, TensorEntry
from quantpolicy.match import block_pattern, normalise_name
from quantpolicy.plan import ComponentPlan, KeptLayer, PlannedLayer

_ALIGNMENT = 4


class Mode(Enum):
    """What happens to a tensor."""

    COPY = auto()
    CAST = auto()
    QUANTISE = auto()


class Output(NamedTuple):
    """One tensor of an output shard; ``dtype`` is spelt as in the format."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Job:
    """One source tensor and what becomes of it.

    Args:
        dtype: the dense dtype it has when it is loaded; None for a plain copy.
        layer: its entry in the plan, for ``QUANTISE``.
        encoding: how it is stored, for ``QUANTISE``.
        outputs: what is written for it, in order.
    """

    name: str
    entry: TensorEntry
    mode: Mode
    dtype: torch.dtype | None
    layer: PlannedLayer | None
    encoding: Encoding | None
    outputs: tuple[Output, ...]

    @property
    def is_aligned(self) -> bool:
        """Whether what follows it in the file stays aligned."""
        return all(output.nbytes % _ALIGNMENT == 0 for output in self.outputs)


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """One output shard.

    Args:
        source: the shard it is made from.
        file_name: its name in the output folder.
        jobs: in the order they are written: the source's order, unaligned tensors last.
        prefix: the length and header that open the file.
    """

    source: ShardHeader
    file_name: str
    jobs: tuple[Job, ...]
    prefix: bytes

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(output.nbytes for job in self.jobs for output in job.outputs)

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return len(self.prefix) + self.data_bytes


def lay_out(component: SourceComponent) -> tuple[ShardLayout, ...]:
    """Decide what every output shard holds.

    Raises:
        PlanMismatchError: plan and source differ; every difference is listed.
    """
    faults = list(_plan_faults(component))
    if faults:
        raise PlanMismatchError(
            str(component.folder), faults, remedy="resolve the plan for this very folder"
        )
    planned = {f"{layer.name}.weight": layer for layer in component.plan.layers}
    jobs_by_shard = [
        [_job(name, entry, component.plan, planned) for name, entry in header.tensors.items()]
        for header in component.headers
    ]
    metadata = {
        **_torchao_metadata([job for jobs in jobs_by_shard for job in jobs]),
        SHARD_COMPONENT: component.name,
        SHARD_SOURCE: component.fingerprint,
    }
    count = len(component.headers)
    return tuple(
        _shard(header, _file_name(number, count), jobs, metadata)
        for number, (header, jobs) in enumerate(
            zip(component.headers, jobs_by_shard, strict=True), 1
        )
    )


def _plan_faults(component: SourceComponent) -> Iterator[Mismatch]:
    plan = component.plan
    class_name = component.config.get("_class_name")
    if class_name != plan.class_name:
        yield Mismatch("class_name", "config.json", plan.class_name, str(class_name))
    tensors = {normalise_name(name): entry for name, entry in component.tensors.items()}
    for name, entry in tensors.items():
        if entry.dtype in QUANTISED_DTYPES:
            yield Mismatch("already_quantised", name, "a dense tensor", entry.dtype)
    linears: tuple[PlannedLayer | KeptLayer, ...] = (*plan.layers, *plan.kept)
    for layer in linears:
        yield from _layer_faults(layer, tensors, plan)
    named = {layer.name for layer in linears}
    patterns = {block_pattern(name) for name in named}
    for name, entry in tensors.items():
        module, _, leaf = name.rpartition(".")
        if (
            leaf == "weight"
            and len(entry.shape) == 2
            and module not in named
            and block_pattern(module) in patterns
        ):
            yield Mismatch("layer_extra", module, "a module of the plan", "a Linear without one")


def _layer_faults(
    layer: PlannedLayer | KeptLayer, tensors: dict[str, TensorEntry], plan: ComponentPlan
) -> Iterator[Mismatch]:
    name = f"{layer.name}.weight"
    entry = tensors.get(name)
    if entry is None:
        yield Mismatch("layer_missing", layer.name, "a weight in the source", "none")
        return
    if entry.shape != layer.shape:
        yield Mismatch("layer_shape", layer.name, str(layer.shape), str(entry.shape))
    loaded = loaded_dtype(name, entry, plan.dtype, plan.keep_in_fp32)
    if loaded != layer.dtype:
        yield Mismatch("layer_dtype", layer.name, layer.dtype, loaded or entry.dtype)


def _job(
    name: str, entry: TensorEntry, plan: ComponentPlan, planned: dict[str, PlannedLayer]
) -> Job:
    normalised = normalise_name(name)
    layer = planned.get(normalised)
    loaded = loaded_dtype(normalised, entry, plan.dtype, plan.keep_in_fp32)
    if layer is not None:
        dtype = getattr(torch, layer.dtype)
        encoding = encode_weight(layer.scheme, plan.settings, layer.shape, dtype)
        outputs = tuple(
            Output(part_name(name, part.name), FILE_DTYPES[part.dtype], part.shape, part.nbytes)
            for part in encoding.parts
        )
        return Job(name, entry, Mode.QUANTISE, dtype, layer, encoding, outputs)
    stored = FLOAT_DTYPES.get(entry.dtype, "")
    if loaded in ("", stored) or loaded == "float32":
        copied = Output(name, entry.dtype, entry.shape, entry.end - entry.start)
        return Job(name, entry, Mode.COPY, None, None, None, (copied,))
    dtype = getattr(torch, loaded)
    values = (entry.end - entry.start) // TORCH_DTYPES[entry.dtype].itemsize
    cast = Output(name, FILE_DTYPES[dtype], entry.shape, values * dtype.itemsize)
    return Job(name, entry, Mode.CAST, dtype, None, None, (cast,))


def _torchao_metadata(jobs: list[Job]) -> dict[str, str]:
    """Return the metadata of every shard: torchao wants all names in each."""
    entries = {job.name: job.encoding.metadata if job.encoding else PLAIN_METADATA for job in jobs}
    names = sorted(entries)
    return {
        "format": "pt",
        **{name: entries[name] for name in names},
        "tensor_names": json.dumps(names),
    }


def _shard(
    source: ShardHeader, file_name: str, jobs: list[Job], metadata: dict[str, str]
) -> ShardLayout:
    ordered = sorted(jobs, key=lambda job: (not job.is_aligned, job.entry.start, job.name))
    entries: dict[str, object] = {METADATA_KEY: metadata}
    position = 0
    for job in ordered:
        for name, dtype, shape, nbytes in job.outputs:
            entries[name] = {
                "dtype": dtype,
                "shape": list(shape),
                "data_offsets": [position, position + nbytes],
            }
            position += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    prefix = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return ShardLayout(source, file_name, tuple(ordered), prefix)


def _file_name(number: int, count: int) -> str:
    if count == 1:
        return f"{WEIGHTS_STEM}.safetensors"
    return f"{WEIGHTS_STEM}-{number:05d}-of-{count:05d}.safetensors"


def index_json(shards: tuple[ShardLayout, ...]) -> bytes:
    """Return the index of a sharded component."""
    weight_map = {
        output.name: shard.file_name
        for shard in shards
        for job in shard.jobs
        for output in job.outputs
    }
    index = {
        "metadata": {"total_size": sum(shard.data_bytes for shard in shards)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return json.dumps(index, indent=2).encode() + b"\n"
