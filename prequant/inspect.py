"""What a baked folder says about itself, for a person or as JSON. Torch-free.

Only headers are read and nothing is judged: whether it is true belongs to ``validate``.
"""

from __future__ import annotations

import os
from pathlib import Path

from prequant.header import Counts, Header, read_baked_header
from prequant.manifest import open_baked
from quantpolicy.plan import SchemeSettings
from quantpolicy.record import Record
from quantpolicy.schemes import Scheme

GB = 10**9


class InspectedComponent(Record):
    """One baked component by its header.

    Args:
        file_bytes: the safetensors files as listed.
    """

    name: str
    folder: str
    family: str
    class_name: str
    scheme: Scheme
    settings: SchemeSettings
    host: str
    lifted: tuple[str, ...]
    weights_digest: str
    plan_digest: str
    source_repo: str
    source_digest: str
    shards: int
    file_bytes: int
    counts: Counts
    versions: dict[str, str]


def inspect(folder: str | os.PathLike[str]) -> dict[str, InspectedComponent]:
    """Return what every baked component of a folder says about itself, by name.

    Raises:
        RequestError: there is no such folder.
        CorruptCheckpointError: it holds no header, or one that does not parse.
    """
    components = open_baked(folder).components.values()
    headers = [(child, read_baked_header(child)) for child in components]
    return {header.component: _inspected(child, header) for child, header in headers}


def _inspected(folder: Path, header: Header) -> InspectedComponent:
    return InspectedComponent(
        name=header.component,
        folder=str(folder),
        family=header.family,
        class_name=header.class_name,
        scheme=header.scheme,
        settings=header.settings,
        host=header.host.name,
        lifted=header.lifted,
        weights_digest=header.weights_digest,
        plan_digest=header.plan_digest,
        source_repo=header.source.repo,
        source_digest=header.source.digest,
        shards=len(header.shards),
        file_bytes=sum(shard.bytes for shard in header.shards.values()),
        counts=header.counts,
        versions=header.versions,
    )


def describe(part: InspectedComponent) -> list[tuple[str, str]]:
    """Return the rows of a table about one component."""
    counts, settings = part.counts, part.settings
    floor = f", activation floor {settings.activation_floor:g}" if settings.activation_floor else ""
    return [
        ("component", f"{part.name} ({part.class_name}, {part.family})"),
        ("scheme", f"{part.scheme}, {settings.granularity}, {settings.weight_dtype}{floor}"),
        ("resolved for", part.host + (f", lifted {', '.join(part.lifted)}" if part.lifted else "")),
        ("layers", f"{counts.quantised_layers} quantised, {counts.kept_layers} Linears kept dense"),
        ("data", size(counts.quantised_bytes)),
        ("scales", size(counts.scale_bytes)),
        ("dense", size(counts.dense_bytes)),
        ("files", f"{part.shards}, {size(part.file_bytes)} (source {size(counts.source_bytes)})"),
        ("weights digest", part.weights_digest),
        ("plan digest", part.plan_digest),
        ("source", " ".join(filter(None, (part.source_repo, part.source_digest)))),
        ("versions", ", ".join(f"{name} {value}" for name, value in part.versions.items())),
    ]


def size(count: int) -> str:
    """Return a number of bytes for a person, in decimal units as disks are sold."""
    for unit, factor in (("GB", GB), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count} B"
