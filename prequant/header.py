"""quantpolicy.json: what a baked component says about itself. Torch-free; no clock, no local path.

Every field is required. ``header_digest`` covers all the others, so that any change shows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError

from quantpolicy.errors import CorruptCheckpointError, Mismatch
from quantpolicy.host import Host
from quantpolicy.inventory.weight_files import CONFIG_FILE
from quantpolicy.json_source import parse_json_object
from quantpolicy.plan import SchemeSettings
from quantpolicy.record import Record, sha256_of
from quantpolicy.schemes import Scheme

HEADER_FILE = "quantpolicy.json"
FORMAT = "prequant"
FORMAT_VERSION = 1
WEIGHTS_STEM = "diffusion_pytorch_model"
SHARD_COMPONENT, SHARD_SOURCE = "quantpolicy.component", "quantpolicy.source"
INDEX_FILE = f"{WEIGHTS_STEM}.safetensors.index.json"
REBAKE = "bake the component again with `prequant bake`"


class FileIdentity(Record):
    """One file by content."""

    bytes: int
    sha256: str


class SourceIdentity(Record):
    """The dense component that was baked.

    Args:
        repo: repository id that its config names, "" when it names none.
        class_name: class its config names.
        config_digest: SHA-256 of its config.json as canonical JSON.
        files: its safetensors files.
        digest: SHA-256 over the files and the config.
        fingerprint: SHA-256 over the config and a sample of every tensor; the shards carry it.
    """

    repo: str
    class_name: str
    config_digest: str
    files: dict[str, FileIdentity]
    digest: str
    fingerprint: str

    @staticmethod
    def digest_of(config_digest: str, files: Mapping[str, FileIdentity]) -> str:
        """Return the digest over the config and the files."""
        hashes = {name: file.sha256 for name, file in files.items()}
        return sha256_of({"config": config_digest, "files": hashes})


class ShardIdentity(Record):
    """One baked shard.

    Args:
        header_sha256: of the safetensors header alone, checked without reading the values.
        tensors: entries in its safetensors header.
    """

    bytes: int
    sha256: str
    header_sha256: str
    tensors: int


class Counts(Record):
    """What was written, counted on the files.

    Args:
        tensors: parameters and buffers of the model.
        quantised_layers: Linears stored quantised.
        kept_layers: Linears stored dense.
        quantised_bytes: data of the quantised weights.
        scale_bytes: scales and zero points of the quantised weights.
        dense_bytes: everything else.
        source_bytes: the source's safetensors files.
    """

    tensors: int
    quantised_layers: int
    kept_layers: int
    quantised_bytes: int
    scale_bytes: int
    dense_bytes: int
    source_bytes: int


class Header(Record):
    """The header of one baked component.

    Args:
        plan: the whole plan, digests included.
        weights_digest: of this component.
        config_digest: SHA-256 of the baked config.json as canonical JSON.
        files: what was copied beside the weights, such as a licence.
        versions: of the packages that made the bytes.
    """

    format: str
    format_version: int
    component: str
    class_name: str
    family: str
    scheme: Scheme
    settings: SchemeSettings
    dtype: str
    keep_in_fp32: tuple[str, ...]
    host: Host
    lifted: tuple[str, ...]
    weights_digest: str
    plan_digest: str
    rules_digest: str
    config_digest: str
    plan: dict[str, object]
    source: SourceIdentity
    shards: dict[str, ShardIdentity]
    files: dict[str, FileIdentity]
    counts: Counts
    versions: dict[str, str]
    header_digest: str

    @classmethod
    def sealed(cls, **fields: object) -> Header:
        """Return the header of these fields, digest included."""
        unsealed = cls.model_validate({**fields, "header_digest": ""})
        return unsealed.model_copy(update={"header_digest": unsealed.content_digest})

    @property
    def content_digest(self) -> str:
        """SHA-256 over every field but ``header_digest``."""
        return sha256_of(self.model_dump(mode="json", exclude={"header_digest"}))

    @property
    def file_names(self) -> frozenset[str]:
        """Every file of the component's folder."""
        index = (INDEX_FILE,) if len(self.shards) > 1 else ()
        return frozenset({HEADER_FILE, CONFIG_FILE, *index, *self.shards, *self.files})

    def to_bytes(self) -> bytes:
        """Return the file's content: JSON with sorted keys."""
        text = json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True)
        return text.encode() + b"\n"


def read_baked_header(folder: Path) -> Header:
    """Read the header of a baked component.

    Raises:
        CorruptCheckpointError: there is none, or it does not parse; every fault is listed.
    """
    faults: list[Mismatch] = []
    header = parse_header(folder, faults)
    if header is None:
        raise CorruptCheckpointError(str(folder), faults, remedy=REBAKE)
    return header


def parse_header(folder: Path, faults: list[Mismatch]) -> Header | None:
    """Read the header, or add to ``faults`` why it cannot be and return None."""
    try:
        values = parse_json_object((folder / HEADER_FILE).read_bytes())
    except FileNotFoundError:
        faults.append(Mismatch("header_missing", HEADER_FILE, "a header", "no such file"))
        return None
    except (OSError, ValueError) as error:
        faults.append(Mismatch("header_json", HEADER_FILE, "a JSON object", str(error)))
        return None
    try:
        header = Header.model_validate(values)
        sha256_of(header.model_dump(mode="json"))
        return header
    except ValidationError as error:
        faults.extend(field_faults(error, "header"))
        return None
    except ValueError as error:  # a float that became an integer beyond 2^53
        faults.append(Mismatch("header_field", HEADER_FILE, "exact numbers", str(error)))
        return None


def field_faults(error: ValidationError, what: str) -> Iterator[Mismatch]:
    """Yield the fields that a header or manifest lacks, has too many or has wrong."""
    codes = {"missing": f"{what}_field_missing", "extra_forbidden": f"{what}_field_unknown"}
    for item in error.errors():
        field = ".".join(str(part) for part in item["loc"])
        code = codes.get(item["type"], f"{what}_field")
        yield Mismatch(code, field, "the field as baked", str(item["msg"]))
