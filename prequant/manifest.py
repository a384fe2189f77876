"""quantpolicy.json at the root of a baked pipeline: its baked components and every copied file.

Also decides what a folder is: one baked component, a baked pipeline, or neither. Torch-free.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from prequant.header import (
    FORMAT,
    FORMAT_VERSION,
    HEADER_FILE,
    FileIdentity,
    Header,
    field_faults,
    parse_header,
)
from prequant.tree import hash_file, identity_faults, read_tree, stray_faults, unlisted
from quantpolicy.errors import CorruptCheckpointError, Mismatch, RequestError
from quantpolicy.json_source import parse_json_object
from quantpolicy.paths import is_dir, is_file, list_folder
from quantpolicy.plan import QuantPlan
from quantpolicy.record import Record, sha256_of
from quantpolicy.schemes import ComponentKind

KIND = "pipeline"
_REMEDY = "give a folder that `prequant bake` wrote"


class ComponentIdentity(Record):
    """One baked component by content."""

    weights_digest: str
    header_sha256: str


class Manifest(Record):
    """The manifest of a baked pipeline.

    Args:
        kind: ``pipeline``, which tells it from a component's header.
        components: the baked ones, by the name of their folder.
        files: everything that was copied, by relative name.
        manifest_digest: SHA-256 over all other fields.
    """

    format: str
    format_version: int
    kind: str
    family: str
    plan_digest: str
    components: dict[str, ComponentIdentity]
    files: dict[str, FileIdentity]
    manifest_digest: str

    @classmethod
    def sealed(cls, **fields: object) -> Manifest:
        """Return the manifest of these fields."""
        marks = {"format": FORMAT, "format_version": FORMAT_VERSION, "kind": KIND}
        unsealed = cls.model_validate({**marks, **fields, "manifest_digest": ""})
        return unsealed.model_copy(update={"manifest_digest": unsealed.content_digest})

    @property
    def content_digest(self) -> str:
        """SHA-256 over every field but ``manifest_digest``."""
        return sha256_of(self.model_dump(mode="json", exclude={"manifest_digest"}))

    def to_bytes(self) -> bytes:
        """Return the file's content: JSON with sorted keys."""
        text = json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True)
        return text.encode() + b"\n"


@dataclass(frozen=True, slots=True)
class Baked:
    """A baked folder.

    Args:
        components: folders by component; one component alone stands under "".
        manifest: of a pipeline, None for one component alone.
    """

    folder: Path
    components: dict[str, Path]
    manifest: Manifest | None


def open_baked(folder: str | os.PathLike[str]) -> Baked:
    """Tell what a baked folder is.

    Raises:
        RequestError: there is no such folder.
        CorruptCheckpointError: it was not baked, or its manifest is missing or damaged.
    """
    path = check_folder(folder)
    faults: list[Mismatch] = []
    baked = find_baked(path, faults)
    if baked is None:
        raise CorruptCheckpointError(str(path), faults, remedy=_REMEDY)
    return baked


def check_folder(folder: str | os.PathLike[str]) -> Path:
    """Return the folder that was given.

    Raises:
        RequestError: nothing was given, or there is no such folder.
    """
    if not os.fspath(folder):
        raise RequestError("the folder", "an empty name was given", remedy=_REMEDY)
    path = Path(folder)
    try:
        found = "" if path.is_dir() else "a file" if path.exists() else "no such folder"
        if not found:
            os.scandir(path).close()
    except (OSError, ValueError) as error:
        found = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    if found:
        raise RequestError(str(folder), found, remedy=_REMEDY)
    return path


def find_baked(folder: Path, faults: list[Mismatch]) -> Baked | None:
    """Return what the folder is, or add to ``faults`` why it is nothing that was baked."""
    if not os.path.lexists(folder / HEADER_FILE):
        children = (child for child in list_folder(folder) if is_dir(child))
        if any(is_file(child / HEADER_FILE) for child in children):
            faults.append(Mismatch("manifest_missing", HEADER_FILE, "a manifest", "no such file"))
        else:
            faults.append(Mismatch("header_missing", HEADER_FILE, "a header", "no such file"))
        return None
    if not _is_manifest(folder):
        return Baked(folder, {"": folder}, None)
    manifest = parse_manifest(folder, faults)
    if manifest is None:
        return None
    return Baked(folder, {name: folder / name for name in manifest.components}, manifest)


def _is_manifest(folder: Path) -> bool:
    """Tell a manifest from a header; a file that is neither counts as a header."""
    try:
        values = parse_json_object((folder / HEADER_FILE).read_bytes())
    except (OSError, ValueError):
        values = {}
    return "kind" in values


def parse_manifest(folder: Path, faults: list[Mismatch]) -> Manifest | None:
    """Read the manifest, or add to ``faults`` why it cannot be and return None."""
    try:
        values = parse_json_object((folder / HEADER_FILE).read_bytes())
        manifest = Manifest.model_validate(values)
        digest = manifest.content_digest
    except ValidationError as error:
        faults.extend(field_faults(error, "manifest"))
        return None
    except (OSError, ValueError) as error:
        faults.append(Mismatch("manifest_json", HEADER_FILE, "a JSON object", str(error)))
        return None
    for name, expected in (("format", FORMAT), ("kind", KIND)):
        if getattr(manifest, name) != expected:
            found = getattr(manifest, name)
            faults.append(Mismatch("manifest_field", name, expected, found))
    if digest != manifest.manifest_digest:
        expected = manifest.manifest_digest
        faults.append(Mismatch("manifest_digest", HEADER_FILE, expected, digest))
    for name in (*manifest.components, *manifest.files):
        if name.startswith("/") or not name or {"..", "."} & set(name.split("/")):
            faults.append(Mismatch("manifest_field", name, "a name inside the folder", name))
    return None if faults else manifest


def manifest_faults(
    folder: Path, manifest: Manifest, headers: Mapping[str, Header], *, full: bool
) -> Iterator[Mismatch]:
    """Yield where a pipeline's folder is not the one that was baked, its components' files aside.

    Args:
        headers: of the components whose header can be read, by folder.
        full: also hash large files.
    """
    for name in manifest.components:
        if not is_dir(folder / name):
            yield Mismatch("component_missing", name, "a baked component", "no such folder")
    kept = {name.partition("/")[0] for name in manifest.files}
    for name in sorted(_planned(headers) - manifest.components.keys() - kept):
        yield Mismatch("component_missing", name, "a component of the plan", "not in the manifest")
    for name, header in headers.items():
        if header.plan_digest != manifest.plan_digest:
            yield Mismatch("manifest_plan", name, manifest.plan_digest, header.plan_digest)
        if header.weights_digest != manifest.components[name].weights_digest:
            expected = manifest.components[name].weights_digest
            yield Mismatch("manifest_weights", name, expected, header.weights_digest)
    yield from identity_faults(folder, manifest.files, full=full)
    tree = read_tree(folder, skip=manifest.components.keys())
    yield from stray_faults(tree, {HEADER_FILE, *manifest.files})


def _planned(headers: Mapping[str, Header]) -> set[str]:
    """Return the denoisers that the headers' plans quantise."""
    names: set[str] = set()
    for header in headers.values():
        try:
            plan = QuantPlan.from_dict(header.plan)
        except RequestError:  # the component's own check tells it
            continue
        names |= {
            name
            for name, part in plan.components.items()
            if part.kind is ComponentKind.DENOISER and part.layers
        }
    return names


def place_faults(folder: Path, header: Header) -> Iterator[Mismatch]:
    """Yield where a component is not the one that the pipeline around it lists under its name."""
    place = Path(os.path.normpath(folder.absolute()))
    faults: list[Mismatch] = []
    if not _is_manifest(place.parent):
        return
    manifest = parse_manifest(place.parent, faults)
    if manifest is None:
        return
    if place.name != header.component:
        yield Mismatch("component_name", place.name, place.name, header.component)
    listed = manifest.components.get(place.name)
    digest = hash_file(folder / HEADER_FILE)
    if listed is not None and listed.header_sha256 != digest:
        yield Mismatch("component_header", place.name, listed.header_sha256, digest)


def foreign_entries(folder: Path) -> list[str] | None:
    """Return what lies in a baked folder and was not baked; None when the folder was not baked."""
    baked = find_baked(folder, [])
    if baked is None:
        return None
    listed = set() if baked.manifest is None else {HEADER_FILE, *baked.manifest.files}
    for name, child in baked.components.items():
        header = parse_header(child, [])
        if header is not None and header.format == FORMAT:
            listed |= {f"{name}/{file}" if name else file for file in header.file_names}
        elif not name:
            return None
    return unlisted(read_tree(folder), listed)
