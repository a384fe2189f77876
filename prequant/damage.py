"""What shows that a baked component is damaged: its parts contradict each other. Torch-free.

Everything is found from headers alone; values belong to ``scan``, outdated rules to ``staleness``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from prequant.baked import BakedFiles, StoredWeight
from prequant.forms import TENSOR_CLASSES, part_forms
from prequant.header import (
    FORMAT,
    HEADER_FILE,
    SHARD_COMPONENT,
    SHARD_SOURCE,
    Header,
    SourceIdentity,
)
from prequant.tree import identity_faults, read_tree, stray_faults
from quantpolicy.errors import Mismatch, RequestError
from quantpolicy.inventory.shard import ShardHeader
from quantpolicy.inventory.weight_files import CONFIG_FILE, find_weights
from quantpolicy.json_source import parse_json
from quantpolicy.match import natural_key
from quantpolicy.plan import ComponentPlan, QuantPlan
from quantpolicy.record import sha256_of


def header_faults(header: Header) -> Iterator[Mismatch]:
    """Yield what in the header contradicts itself."""
    if header.format != FORMAT:
        yield Mismatch("format", "format", FORMAT, header.format)
    if header.content_digest != header.header_digest:
        found = header.content_digest
        yield Mismatch("header_digest", HEADER_FILE, header.header_digest, found)
    source = header.source
    digest = SourceIdentity.digest_of(source.config_digest, source.files)
    if digest != source.digest:
        yield Mismatch("source_digest", "source.digest", digest, source.digest)
    if source.class_name != header.class_name:
        yield Mismatch("source_class", "source.class_name", header.class_name, source.class_name)
    source_bytes = sum(file.bytes for file in source.files.values())
    if source_bytes != header.counts.source_bytes:
        found = str(header.counts.source_bytes)
        yield Mismatch("counts", "counts.source_bytes", str(source_bytes), found)


def read_plan(header: Header, faults: list[Mismatch]) -> QuantPlan | None:
    """Return the header's plan, or add to ``faults`` why it cannot be read and return None."""
    try:
        plan = QuantPlan.from_dict(header.plan)
    except RequestError as error:
        faults.append(Mismatch("plan", error.where, "the plan as it was resolved", error.found))
        return None
    part = plan.components.get(header.component)
    if part is None:
        known = ", ".join(plan.components)
        faults.append(Mismatch("header_plan", "component", known, header.component))
        return None
    expected: dict[str, object] = {
        "class_name": part.class_name,
        "family": plan.family,
        "scheme": part.scheme,
        "settings": part.settings,
        "dtype": part.dtype,
        "keep_in_fp32": part.keep_in_fp32,
        "host": plan.host,
        "lifted": plan.lifted,
        "weights_digest": part.weights_digest,
        "plan_digest": plan.plan_digest,
        "rules_digest": plan.rules_digest,
    }
    for field, value in expected.items():
        if getattr(header, field) != value:
            faults.append(Mismatch("header_plan", field, str(value), str(getattr(header, field))))
    return plan


def file_faults(files: BakedFiles, header: Header, *, full: bool = False) -> Iterator[Mismatch]:
    """Yield where the files are not those that the header lists.

    Args:
        full: also hash what was copied and is large.
    """
    if files.config is not None and sha256_of(files.config) != header.config_digest:
        found = sha256_of(files.config)
        yield Mismatch("config_digest", CONFIG_FILE, header.config_digest, found)
    if files.config is not None and files.config.get("_class_name") != header.class_name:
        found = str(files.config.get("_class_name"))
        yield Mismatch("class_name", CONFIG_FILE, header.class_name, found)
    yield from _stray_files(files.folder, header)
    yield from identity_faults(files.folder, header.files, full=full)
    for shard in files.headers:
        yield from _origin_faults(shard, header)
        identity = header.shards.get(shard.path.name)
        if identity is None:
            continue
        name = shard.path.name
        if shard.file_bytes != identity.bytes:
            yield Mismatch("shard_bytes", name, str(identity.bytes), str(shard.file_bytes))
        if len(shard.tensors) != identity.tensors:
            yield Mismatch("shard_tensors", name, str(identity.tensors), str(len(shard.tensors)))
        digest = _prefix_digest(shard.path, shard.data_offset)
        if digest != identity.header_sha256:
            yield Mismatch("shard_header", name, identity.header_sha256, digest)
    if files.headers:
        yield from _index_faults(files)
        yield from _count_faults(files, header)


def _stray_files(folder: Path, header: Header) -> Iterator[Mismatch]:
    tree = read_tree(folder)
    for name in sorted(header.shards.keys() - tree.files.keys()):
        yield Mismatch("shard_missing", name, "a shard that the header lists", "no such file")
    yield from stray_faults(tree, header.file_names)


def _origin_faults(shard: ShardHeader, header: Header) -> Iterator[Mismatch]:
    """Yield where a shard was made for another component or from other weights."""
    pairs = {
        "shard_component": (SHARD_COMPONENT, header.component),
        "shard_source": (SHARD_SOURCE, header.source.fingerprint),
    }
    for code, (key, expected) in pairs.items():
        found = shard.metadata.get(key, "")
        if found != expected:
            yield Mismatch(code, shard.path.name, expected, found or "nothing")


def _prefix_digest(path: Path, nbytes: int) -> str:
    with path.open("rb") as file:
        return hashlib.sha256(file.read(nbytes)).hexdigest()


def _index_faults(files: BakedFiles) -> Iterator[Mismatch]:
    weights = find_weights(files.folder)
    total = sum(
        entry.end - entry.start for header in files.headers for entry in header.tensors.values()
    )
    if weights.weight_map is not None and weights.total_size != total:
        yield Mismatch("index_total", "metadata.total_size", str(total), str(weights.total_size))


def _count_faults(files: BakedFiles, header: Header) -> Iterator[Mismatch]:
    data, scales = files.quantised_bytes()
    counted = {
        "tensors": len(files.weights) + len(files.dense),
        "quantised_layers": len(files.weights),
        "quantised_bytes": data,
        "scale_bytes": scales,
        "dense_bytes": files.dense_bytes(),
    }
    for field, value in counted.items():
        listed = getattr(header.counts, field)
        if listed != value:
            yield Mismatch("counts", f"counts.{field}", str(listed), str(value))


def weight_faults(files: BakedFiles, part: ComponentPlan) -> Iterator[Mismatch]:
    """Yield where the stored tensors are not those that the header's plan asks for."""
    planned = {layer.name: layer for layer in part.layers}
    for name, layer in planned.items():
        weight = files.weights.get(name)
        if weight is None:
            dense = f"{name}.weight" in files.dense
            found = "a dense weight" if dense else "no weight"
            yield Mismatch("layer_missing", name, f"stored as {layer.scheme}", found)
        else:
            yield from _stored_faults(weight, layer.scheme, layer.shape, part)
    for name in sorted(files.weights.keys() - planned.keys(), key=natural_key):
        yield Mismatch("layer_extra", name, "a dense weight", "a quantised one")
    for kept in part.kept:
        entry = files.dense.get(f"{kept.name}.weight")
        if entry is None:
            if kept.name not in files.weights:
                yield Mismatch("kept_missing", kept.name, "a dense weight", "no weight")
        elif entry.shape != kept.shape:
            yield Mismatch("kept_shape", kept.name, str(kept.shape), str(entry.shape))
    names = sorted([*files.dense, *(f"{name}.weight" for name in files.weights)])
    for shard in files.headers:
        yield from _metadata_faults(shard.path.name, shard.metadata, names, files)


def _stored_faults(
    weight: StoredWeight, scheme: str, shape: tuple[int, int], part: ComponentPlan
) -> Iterator[Mismatch]:
    name = weight.module
    if weight.scheme is not scheme:
        found = str(weight.scheme or "parts of no scheme")
        yield Mismatch("layer_scheme", name, scheme, found)
        return
    forms = part_forms(weight.scheme, part.settings, shape)
    for part_name, form in forms.items():
        entry = weight.parts.get(part_name)
        if entry is None:
            yield Mismatch("part_missing", f"{name} {part_name}", str(form), "nothing")
        elif (entry.dtype, entry.shape) != form:
            found = f"{entry.dtype} {entry.shape}"
            expected = f"{form.dtype} {form.shape}"
            yield Mismatch("part_form", f"{name} {part_name}", expected, found)
    for part_name in sorted(weight.parts.keys() - forms.keys()):
        yield Mismatch("part_extra", f"{name} {part_name}", "nothing", "a tensor")


def _metadata_faults(
    shard: str, metadata: dict[str, str], names: list[str], files: BakedFiles
) -> Iterator[Mismatch]:
    """Yield what keeps torchao and diffusers from reading the shards as one model."""
    try:
        listed = parse_json(metadata.get("tensor_names", ""))
    except ValueError:
        listed = None
    if listed != names:
        found = f"{len(listed)} others" if isinstance(listed, list) else "no list"
        yield Mismatch("tensor_names", shard, f"the {len(names)} names of the model", found)
    quantised = {f"{name}.weight" for name in files.weights}
    for name in names:
        try:
            entry = parse_json(metadata.get(name, ""))
        except ValueError:
            entry = None
        kind = entry.get("_type") if isinstance(entry, dict) else None
        expected = "a quantised tensor's" if name in quantised else "Tensor's"
        allowed = TENSOR_CLASSES.values() if name in quantised else ("Tensor",)
        if kind not in allowed:
            yield Mismatch("tensor_metadata", f"{shard} {name}", expected, str(kind))
