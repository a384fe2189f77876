"""Bake a dense component or pipeline into a pre-quantised folder, tensor by tensor.

Everything is checked before a byte is written. Shard contents belong to ``layout``, threads to
``stream``, the temporary folder to ``staging``.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from prequant.baked import read_baked_files
from prequant.damage import weight_faults
from prequant.encode import quantization_config
from prequant.header import (
    FORMAT,
    FORMAT_VERSION,
    HEADER_FILE,
    INDEX_FILE,
    Counts,
    FileIdentity,
    Header,
    ShardIdentity,
    SourceIdentity,
)
from prequant.layout import ShardLayout, index_json, lay_out
from prequant.manifest import ComponentIdentity, Manifest
from prequant.names import check_class, check_names
from prequant.report import BakedComponent, BakeReport
from prequant.source import Source, SourceComponent, find_model, open_source
from prequant.staging import check_out, check_space, staged
from prequant.stream import WrittenShard, stream_shards
from prequant.tree import hash_file, read_tree
from quantpolicy.errors import Mismatch, PlanMismatchError, RequestError
from quantpolicy.inventory.weight_files import CONFIG_FILE, PICKLE_SUFFIXES
from quantpolicy.model_folder import is_repo_id, repo_of
from quantpolicy.plan import QuantPlan
from quantpolicy.record import sha256_of
from quantpolicy.versions import installed_version

PACKAGES = ("quantpolicy", "torch", "torchao", "diffusers")
_WEIGHT_SUFFIXES = PICKLE_SUFFIXES | {".safetensors", ".gguf", ".onnx", ".msgpack", ".h5"}
_COPY_BYTES = 8 << 20

Progress = Callable[[int, int], None]


def bake(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    plan: QuantPlan,
    force: bool = False,
    component: str | None = None,
    progress: Progress | None = None,
) -> BakeReport:
    """Write ``out`` with every weight that ``plan`` lists quantised, and all else bit for bit.

    Args:
        source: a dense component folder, a pipeline folder, or a repository id in the local cache.
        out: the folder to make; its parent must exist.
        force: replace a baked ``out``, once the new one is complete.
        component: bake only this component of the plan.
        progress: called with the bytes done and the bytes in all.

    Raises:
        RequestError: a folder is unusable, or there is nothing to bake.
        PlanMismatchError: the plan does not fit the source, or a weight is not finite.
        CorruptCheckpointError: a source file is damaged.
    """
    started = time.monotonic()
    source_path, out_path = find_model(os.fspath(source)), Path(out)
    check_out(source_path, out_path, force=force)
    opened = open_source(source_path, plan, component)
    copies = dict(_pipeline_files(opened)) if opened.is_pipeline else {}
    layouts = [(part, lay_out(part)) for part in opened.components]
    for part in opened.components:
        check_class(part, plan.family)
        check_names(part)
    shard_bytes = sum(shard.file_bytes for _, shards in layouts for shard in shards)
    copy_bytes = sum(path.stat().st_size for path in copies.values())
    check_space(out_path, shard_bytes + copy_bytes)
    total = sum(shard.source.file_bytes for _, shards in layouts for shard in shards) + copy_bytes
    tell = _Progress(progress, total)
    components = {}
    with staged(out_path) as folder:
        for part, shards in layouts:
            target = folder / part.name if opened.is_pipeline else folder
            target.mkdir(exist_ok=True)
            baked = _bake_component(part, shards, target, plan, tell.add)
            final = out_path / part.name if opened.is_pipeline else out_path
            components[part.name] = baked.model_copy(update={"folder": str(final)})
        files = {name: _copy(path, folder / name, tell.add) for name, path in copies.items()}
        if opened.is_pipeline:
            _write(folder / HEADER_FILE, _manifest(folder, plan, components, files).to_bytes())
        written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    tell.finish()
    return BakeReport(
        out=str(out_path),
        family=plan.family,
        plan_digest=plan.plan_digest,
        components=components,
        written_bytes=written,
        seconds=time.monotonic() - started,
        notes=opened.notes,
    )


def _manifest(
    folder: Path,
    plan: QuantPlan,
    components: dict[str, BakedComponent],
    files: dict[str, FileIdentity],
) -> Manifest:
    identities = {
        name: ComponentIdentity(
            weights_digest=part.weights_digest,
            header_sha256=hash_file(folder / name / HEADER_FILE),
        )
        for name, part in components.items()
    }
    return Manifest.sealed(
        family=plan.family, plan_digest=plan.plan_digest, components=identities, files=files
    )


class _Progress:
    def __init__(self, callback: Progress | None, total: int) -> None:
        self._callback, self._total, self._done = callback, total, 0

    def add(self, nbytes: int) -> None:
        self._done = min(self._done + nbytes, self._total)
        if self._callback is not None:
            self._callback(self._done, self._total)

    def finish(self) -> None:
        self.add(self._total)


def _bake_component(
    part: SourceComponent,
    shards: tuple[ShardLayout, ...],
    folder: Path,
    plan: QuantPlan,
    progress: Callable[[int], None],
) -> BakedComponent:
    try:
        written = stream_shards(shards, folder, part.plan.settings, progress)
    except PlanMismatchError as error:
        raise PlanMismatchError(
            str(part.folder),
            error.mismatches,
            remedy="repair or download the dense checkpoint again",
        ) from error
    config = {**part.config, "quantization_config": quantization_config(part.plan)}
    _write(folder / CONFIG_FILE, json.dumps(config, indent=2).encode() + b"\n")
    if len(shards) > 1:
        _write(folder / INDEX_FILE, index_json(shards))
    files = {
        path.name: _copy(path, folder / path.name, progress)
        for path in sorted(part.folder.iterdir())
        if _is_companion(path)
    }
    counts = _count(part, shards, folder)
    header = _header(part, shards, written, plan, config, files, counts)
    _write(folder / HEADER_FILE, header.to_bytes())
    return BakedComponent(
        name=part.name,
        folder=str(folder),
        scheme=part.plan.scheme,
        weights_digest=header.weights_digest,
        source_digest=header.source.digest,
        shards=len(shards),
        counts=header.counts,
    )


def _header(
    part: SourceComponent,
    shards: tuple[ShardLayout, ...],
    written: list[WrittenShard],
    plan: QuantPlan,
    config: dict[str, object],
    companions: dict[str, FileIdentity],
    counts: Counts,
) -> Header:
    files = {
        shard.source_name: FileIdentity(bytes=shard.source_bytes, sha256=shard.source_sha256)
        for shard in written
    }
    repo, config_digest = repo_of(part.config), sha256_of(part.config)
    return Header.sealed(
        format=FORMAT,
        format_version=FORMAT_VERSION,
        component=part.name,
        class_name=part.plan.class_name,
        family=plan.family,
        scheme=part.plan.scheme,
        settings=part.plan.settings,
        dtype=part.plan.dtype,
        keep_in_fp32=part.plan.keep_in_fp32,
        host=plan.host,
        lifted=plan.lifted,
        weights_digest=part.plan.weights_digest,
        plan_digest=plan.plan_digest,
        rules_digest=plan.rules_digest,
        config_digest=sha256_of(config),
        plan=plan.to_dict(),
        source=SourceIdentity(
            repo=repo if is_repo_id(repo) else "",
            class_name=str(part.config.get("_class_name")),
            config_digest=config_digest,
            files=files,
            digest=SourceIdentity.digest_of(config_digest, files),
            fingerprint=part.fingerprint,
        ),
        shards={
            done.file_name: ShardIdentity(
                bytes=done.nbytes,
                sha256=done.sha256,
                header_sha256=hashlib.sha256(shard.prefix).hexdigest(),
                tensors=sum(len(job.outputs) for job in shard.jobs),
            )
            for shard, done in zip(shards, written, strict=True)
        },
        files=companions,
        counts=counts,
        versions={name: installed_version(name) for name in PACKAGES},
    )


def _count(part: SourceComponent, shards: tuple[ShardLayout, ...], folder: Path) -> Counts:
    """Count what lies in the folder now; anything but what was planned is an error."""
    faults: list[Mismatch] = []
    files = read_baked_files(folder, faults)
    faults += weight_faults(files, part.plan)
    if faults:
        raise PlanMismatchError(
            part.name, faults, remedy="check the disk and bake again; nothing was left behind"
        )
    data, scales = files.quantised_bytes()
    return Counts(
        tensors=len(files.weights) + len(files.dense),
        quantised_layers=len(files.weights),
        kept_layers=sum(f"{kept.name}.weight" in files.dense for kept in part.plan.kept),
        quantised_bytes=data,
        scale_bytes=scales,
        dense_bytes=files.dense_bytes(),
        source_bytes=sum(shard.source.file_bytes for shard in shards),
    )


def _is_companion(path: Path) -> bool:
    """Tell whether a file beside the weights (a licence, a readme) goes along."""
    return (
        path.is_file()
        and path.suffix.lower() not in _WEIGHT_SUFFIXES
        and path.name not in (CONFIG_FILE, HEADER_FILE)
        and not path.name.endswith(".index.json")
        and not path.name.startswith(".")
    )


def _pipeline_files(source: Source) -> Iterator[tuple[str, Path]]:
    """Yield the files of a pipeline that are copied as they are, by relative name.

    Links are followed, so that the copy stands alone.
    """
    baked = {part.name for part in source.components}
    tree = read_tree(source.folder, skip=baked, hidden=False)
    for name, found in tree.broken.items():
        raise RequestError(
            str(source.folder / name),
            f"is {found}",
            remedy="complete the download, or remove it from the pipeline folder",
        )
    for name, path in tree.files.items():
        if path.suffix.lower() not in PICKLE_SUFFIXES:
            yield name, path
        elif not any(path.parent.glob("*.safetensors")):
            raise RequestError(
                str(path),
                "is a pickle file, which is neither read nor written",
                remedy="save this component as safetensors first",
            )


def _copy(path: Path, target: Path, progress: Callable[[int], None]) -> FileIdentity:
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    nbytes = 0
    with path.open("rb") as reader, target.open("wb") as writer:
        while piece := reader.read(_COPY_BYTES):
            digest.update(piece)
            writer.write(piece)
            nbytes += len(piece)
        writer.flush()
        os.fsync(writer.fileno())
    progress(nbytes)
    return FileIdentity(bytes=nbytes, sha256=digest.hexdigest())


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
