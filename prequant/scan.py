"""The values of a baked component: SHA-256 of every shard, and scales and data that hold NaN.

Reads each file once, front to back. Torch-free.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterator
from typing import BinaryIO

from prequant.baked import BakedFiles
from prequant.forms import NAN_BYTES, PART_NAME
from prequant.header import Header
from quantpolicy.errors import Mismatch
from quantpolicy.inventory.shard import ShardHeader, TensorEntry

_PIECE_BYTES = 8 << 20


def value_faults(files: BakedFiles, header: Header) -> Iterator[Mismatch]:
    """Yield shards whose hash differs, and quantised weights that hold NaN or a scale of zero."""
    for shard in files.headers:
        faults: list[Mismatch] = []
        with shard.path.open("rb") as file:
            digest = _scan_shard(shard, file, faults)
        yield from faults
        identity = header.shards.get(shard.path.name)
        if identity is not None and identity.sha256 != digest:
            yield Mismatch("shard_sha256", shard.path.name, identity.sha256, digest)


def _scan_shard(shard: ShardHeader, file: BinaryIO, faults: list[Mismatch]) -> str:
    sha256 = hashlib.sha256(file.read(shard.data_offset))
    for name, entry in sorted(shard.tensors.items(), key=lambda item: item[1].start):
        match = PART_NAME.fullmatch(name)
        found: set[str] = set()
        left = entry.end - entry.start
        while left:
            piece = file.read(min(_PIECE_BYTES, left))
            if not piece:
                faults.append(Mismatch("truncated", name, f"{left} more bytes", "none"))
                return sha256.hexdigest()
            sha256.update(piece)
            left -= len(piece)
            if match is not None:
                found |= _faults_in(piece, entry, match["part"])
        faults.extend(
            Mismatch(code, name, "finite values, scales above zero", code.replace("_", " "))
            for code in sorted(found)
        )
    return sha256.hexdigest()


def _faults_in(piece: bytes, entry: TensorEntry, part: str) -> set[str]:
    if entry.dtype == "F32":
        values = array("f")
        values.frombytes(piece)
        codes = set()
        if not all(map(math.isfinite, values)):
            codes.add("scale_not_finite")
        elif min(values) <= 0:
            codes.add("scale_not_positive")
        return codes
    is_nan = any(bytes((value,)) in piece for value in NAN_BYTES.get(entry.dtype, ()))
    return {"data_nan" if part == "qdata" else "scale_not_finite"} if is_nan else set()
