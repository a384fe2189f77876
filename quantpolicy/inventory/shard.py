"""One safetensors file read by its header: names, dtypes, shapes and byte ranges, no values.

Everything that the format demands is checked here, so that callers may trust a ``ShardHeader``.
Which files make up a component belongs to ``weight_files``. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from quantpolicy.errors import CorruptCheckpointError, Mismatch, RequestError
from quantpolicy.json_source import parse_json_object

MAX_HEADER_BYTES = 100_000_000
LENGTH_BYTES = 8
METADATA_KEY = "__metadata__"

BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


class TensorEntry(NamedTuple):
    """One tensor of a file.

    Args:
        dtype: as the format spells it, such as ``BF16``.
        shape: dimensions, empty for a scalar.
        start: first byte, counted from the data offset.
        end: one past the last byte, counted from the data offset.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """The checked header of one safetensors file.

    Args:
        path: the file.
        tensors: entries by name, in the order of the header.
        metadata: the file's own metadata, empty when it has none.
        data_offset: where the tensors' bytes begin in the file.
        file_bytes: size of the file.
    """

    path: Path
    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]
    data_offset: int
    file_bytes: int


def read_header(path: Path) -> ShardHeader:
    """Read and check the header of one safetensors file.

    Raises:
        RequestError: the file cannot be opened.
        CorruptCheckpointError: the file breaks the format; every fault found is listed.
    """
    try:
        with path.open("rb") as file:
            file_bytes = file.seek(0, 2)
            file.seek(0)
            length = _header_length(path, file.read(LENGTH_BYTES), file_bytes)
            text = file.read(length)
    except OSError as error:
        raise RequestError(
            str(path), f"cannot be read: {error.strerror}", remedy="check the path"
        ) from error
    values = _header_values(path, text)
    data_offset = LENGTH_BYTES + length
    faults: list[Mismatch] = []
    metadata = _metadata(values.pop(METADATA_KEY, {}), faults)
    tensors = _entries(values, faults)
    if not faults:
        faults += _range_faults(tensors, file_bytes - data_offset)
    if faults:
        raise _corrupt(path, *faults)
    return ShardHeader(path, tensors, metadata, data_offset, file_bytes)


def _corrupt(path: Path, *faults: Mismatch) -> CorruptCheckpointError:
    return CorruptCheckpointError(str(path), faults, remedy="download or write the file again")


def _header_length(path: Path, prefix: bytes, file_bytes: int) -> int:
    if len(prefix) < LENGTH_BYTES:
        fault = Mismatch("truncated", "header length", "8 bytes", f"{len(prefix)} bytes")
        raise _corrupt(path, fault)
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        fault = Mismatch(
            "header_length", "header", f"at most {MAX_HEADER_BYTES} bytes", f"{length} bytes"
        )
        raise _corrupt(path, fault)
    if length > file_bytes - LENGTH_BYTES:
        left = file_bytes - LENGTH_BYTES
        raise _corrupt(path, Mismatch("truncated", "header", f"{length} bytes", f"{left} bytes"))
    return length


def _header_values(path: Path, text: bytes) -> dict[str, object]:
    if not text.startswith(b"{"):
        fault = Mismatch("header_json", "header", "a JSON object", repr(text[:16]))
        raise _corrupt(path, fault)
    try:
        return parse_json_object(text)
    except ValueError as error:
        fault = Mismatch("header_json", "header", "a JSON object", str(error))
        raise _corrupt(path, fault) from error


def _metadata(values: object, faults: list[Mismatch]) -> dict[str, str]:
    if not isinstance(values, dict):
        found = type(values).__name__
        faults.append(Mismatch("metadata", METADATA_KEY, "an object of strings", found))
        return {}
    for key, value in values.items():
        if not isinstance(value, str):
            subject = f"{METADATA_KEY}.{key}"
            faults.append(Mismatch("metadata", subject, "a string", type(value).__name__))
    return values


def _entries(values: dict[str, object], faults: list[Mismatch]) -> dict[str, TensorEntry]:
    tensors = {}
    for name, value in values.items():
        entry = _entry(value)
        if entry is None:
            expected = "dtype, shape and data_offsets of a tensor"
            faults.append(Mismatch("entry", name, expected, str(value)[:80]))
            continue
        bits = math.prod(entry.shape) * BITS[entry.dtype]
        if (entry.end - entry.start) * 8 != bits:
            found = f"{entry.end - entry.start} bytes"
            faults.append(Mismatch("tensor_size", name, f"{bits // 8} bytes", found))
        tensors[name] = entry
    return tensors


def _entry(value: object) -> TensorEntry | None:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        return None
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        return None
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        return None
    return TensorEntry(dtype, tuple(shape), offsets[0], offsets[1])


def _are_sizes(values: object) -> bool:
    """Tell whether this is a list of whole numbers, none negative and none a boolean."""
    return isinstance(values, list) and all(type(item) is int and item >= 0 for item in values)


def _range_faults(tensors: dict[str, TensorEntry], data_bytes: int) -> Iterator[Mismatch]:
    """Yield where the byte ranges overlap, leave a hole, or do not end with the file."""
    position = 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != position:
            code = "overlap" if entry.start < position else "hole"
            found = f"byte {entry.start}"
            yield Mismatch(code, name, f"its data at byte {position}", found)
        position = max(position, entry.end)
    if position > data_bytes:
        yield Mismatch("truncated", "data", f"{position} bytes", f"{data_bytes} bytes")
    elif position < data_bytes:
        yield Mismatch("trailing_bytes", "data", f"{position} bytes", f"{data_bytes} bytes")
