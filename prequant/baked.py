"""A baked component as it lies on disk: its config, its shard headers and the weights they store.

What is read is told as it is; whether it is right belongs to ``damage`` and ``staleness``.
Torch-free.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from prequant.forms import PART_NAME, stored_scheme
from quantpolicy.errors import CorruptCheckpointError, Mismatch, RequestError
from quantpolicy.inventory.headers import FLOAT_DTYPES
from quantpolicy.inventory.shard import ShardHeader, TensorEntry
from quantpolicy.inventory.weight_files import CONFIG_FILE, read_headers, read_json_file
from quantpolicy.json_source import parse_json_object
from quantpolicy.schemes import DTYPE_BYTES, Scheme

_FILE_DTYPES = {dtype: spelt for spelt, dtype in FLOAT_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One quantised weight.

    Args:
        module: name of its Linear.
        scheme: read off the dtypes of its parts; None when no scheme stores such.
        parts: entries by torchao's part names.
        metadata: torchao's metadata of it, empty when it has none that parses.
    """

    module: str
    scheme: Scheme | None
    parts: dict[str, TensorEntry]
    metadata: dict[str, object]

    @property
    def shape(self) -> tuple[int, int]:
        """Its dense shape, (0, 0) when its data is missing or no matrix."""
        data = self.parts.get("qdata")
        if data is None or len(data.shape) != 2:
            return (0, 0)
        rows, features = data.shape
        return (rows, features * 2) if self.scheme is Scheme.NVFP4 else (rows, features)

    @property
    def dtype(self) -> str:
        """Its dense dtype as the metadata says, "" when that says none."""
        data = self.metadata.get("_data")
        entry = (data.get("dtype") or data.get("orig_dtype")) if isinstance(data, dict) else None
        value = entry.get("_data") if isinstance(entry, dict) else None
        return value if isinstance(value, str) else ""


@dataclass(frozen=True, slots=True)
class BakedFiles:
    """What lies in a baked component's folder.

    Args:
        config: its config.json, None when it cannot be read.
        headers: of its safetensors files; empty when they cannot be read.
        weights: quantised weights by module name.
        dense: every other tensor by name.
        metadata: the merged metadata of all shards.
    """

    folder: Path
    config: dict[str, object] | None
    headers: tuple[ShardHeader, ...]
    weights: dict[str, StoredWeight]
    dense: dict[str, TensorEntry]
    metadata: dict[str, str]

    def quantised_bytes(self) -> tuple[int, int]:
        """Return the bytes of the quantised weights' data, and of their scales and zero points."""
        parts = [item for weight in self.weights.values() for item in weight.parts.items()]
        data = sum(entry.end - entry.start for name, entry in parts if name == "qdata")
        return data, sum(entry.end - entry.start for _, entry in parts) - data

    def dense_bytes(self) -> int:
        """Return the bytes of every other tensor."""
        return sum(entry.end - entry.start for entry in self.dense.values())

    def as_dense(self) -> tuple[ShardHeader, ...]:
        """Return headers that describe the dense component this one was made from."""
        tensors = dict(self.dense)
        for weight in self.weights.values():
            nbytes = math.prod(weight.shape) * DTYPE_BYTES.get(weight.dtype, 0)
            dtype = _FILE_DTYPES.get(weight.dtype, "BF16")
            tensors[f"{weight.module}.weight"] = TensorEntry(dtype, weight.shape, 0, nbytes)
        return (ShardHeader(self.folder, tensors, {}, 0, 0),)


def read_baked_files(folder: Path, faults: list[Mismatch]) -> BakedFiles:
    """Read config and shard headers; what cannot be read is added to ``faults``."""
    config: dict[str, object] | None = None
    headers: tuple[ShardHeader, ...] = ()
    try:
        config = read_json_file(folder / CONFIG_FILE)
    except RequestError as error:
        faults.append(Mismatch("config_json", CONFIG_FILE, "a JSON object", error.found))
    try:
        headers = read_headers(folder)
    except CorruptCheckpointError as error:
        faults.extend(error.mismatches)
    except RequestError as error:
        faults.append(Mismatch("shards", "safetensors files", "one set of shards", error.found))
    metadata = {key: value for header in headers for key, value in header.metadata.items()}
    tensors = {name: entry for header in headers for name, entry in header.tensors.items()}
    parts: dict[str, dict[str, TensorEntry]] = {}
    dense = {}
    for name, entry in tensors.items():
        match = PART_NAME.fullmatch(name)
        if match is None:
            dense[name] = entry
        else:
            parts.setdefault(match["module"], {})[match["part"]] = entry
    weights = {
        module: StoredWeight(
            module,
            stored_scheme({part: entry.dtype for part, entry in found.items()}),
            found,
            _parse(metadata.get(f"{module}.weight", "")),
        )
        for module, found in parts.items()
    }
    return BakedFiles(folder, config, headers, weights, dense, metadata)


def _parse(text: str) -> dict[str, object]:
    try:
        return parse_json_object(text)
    except ValueError:
        return {}
