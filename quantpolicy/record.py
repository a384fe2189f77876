"""The pydantic base of every record (frozen, unknown keys forbidden) and canonical JSON."""

from __future__ import annotations

import hashlib

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """A frozen record that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


def canonical_json(value: object) -> bytes:
    """Return the RFC 8785 canonical JSON of plain JSON values, as UTF-8 bytes."""
    import rfc8785

    return rfc8785.dumps(value)  # type: ignore[arg-type]


def sha256_of(value: object) -> str:
    """Return the hexadecimal SHA-256 of the canonical JSON of plain JSON values."""
    return hashlib.sha256(canonical_json(value)).hexdigest()
