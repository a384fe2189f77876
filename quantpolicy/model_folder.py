"""Folders and configuration files of diffusers, read without torch: what they name, no more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from quantpolicy.errors import RequestError
from quantpolicy.inventory.weight_files import CONFIG_FILE, read_json_file
from quantpolicy.paths import is_dir, is_file, unreadable
from quantpolicy.target_parts import kind_of_name

INDEX_FILE = "model_index.json"
MODULAR_INDEX_FILE = "modular_model_index.json"


@dataclass(frozen=True, slots=True)
class PipelineIndex:
    """A model_index.json.

    Args:
        pipeline: class of the pipeline.
        classes: class names by component, in the order of the file; absent components left out.
        settings: plain values beside the components, such as ``boundary_ratio``.
        repo: repository id that it says it came from, "" when it says none.
    """

    pipeline: str
    classes: dict[str, str]
    settings: dict[str, object]
    repo: str = ""


def check_path(path: Path) -> None:
    """Raise a RequestError when the path is not there or cannot be followed."""
    try:
        path.stat()
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def index_file(folder: Path) -> Path | None:
    """Return the file that lists a pipeline's components, None when the folder holds none."""
    paths = (folder / INDEX_FILE, folder / MODULAR_INDEX_FILE)
    return next((path for path in paths if is_file(path)), None)


def read_pipeline_index(path: Path) -> PipelineIndex:
    """Read a pipeline's model_index.json, or the one of a modular pipeline.

    Raises:
        RequestError: it is not JSON, names no class, or a component's entry is malformed.
    """
    values = read_json_file(path)
    classes: dict[str, str] = {}
    settings: dict[str, object] = {}
    for name, value in values.items():
        if name.startswith("_"):
            continue
        if not isinstance(value, list):
            settings[name] = value
        elif class_name := _entry_class(path, name, value):
            _check_name(path, name)
            classes[name] = class_name
    return PipelineIndex(class_name_of(values, path), classes, settings, repo_of(values))


def _check_name(path: Path, name: str) -> None:
    """Refuse a component whose name leads out of the pipeline's folder."""
    if not name.isidentifier():
        raise RequestError(
            f"{path} {name!r}",
            "no name for a component",
            allowed="letters, digits and underscores",
            remedy="restore the file as it was published",
        )


def _entry_class(path: Path, name: str, value: list[object]) -> str:
    """Return the class of a component, "" for an absent one.

    A modular pipeline's entry has a third item, which tells where the component comes from.
    """
    pair = value[:2]
    if len(value) == 3 and isinstance(value[2], dict) and pair == [None, None]:
        pair = value[2].get("type_hint") or pair
    if pair == [None, None] or (kind_of_name(name) is None and len(value) not in (2, 3)):
        return ""
    if len(value) in (2, 3) and all(isinstance(item, str) and item for item in pair):
        return str(pair[1])
    raise RequestError(
        f"{path} {name}",
        f"malformed entry {value!r}",
        allowed="[library, class] or [null, null]",
        remedy="restore the file as it was published",
    )


def class_name_of(values: Mapping[str, object], where: Path | str) -> str:
    """Return ``_class_name`` of a configuration, or the single architecture of a transformers one.

    Raises:
        RequestError: it names no class.
    """
    name = values.get("_class_name")
    architectures = values.get("architectures")
    if name is None and isinstance(architectures, list) and len(architectures) == 1:
        name = architectures[0]
    if not isinstance(name, str) or not name:
        raise RequestError(
            str(where),
            "names no class",
            allowed='"_class_name": a diffusers class, such as WanTransformer3DModel',
            remedy="give the configuration as it was published",
        )
    return name


def repo_of(values: Mapping[str, object]) -> str:
    """Return the repository id that a configuration says it came from, "" when it says none."""
    name = values.get("_name_or_path")
    return name if isinstance(name, str) else ""


def is_repo_id(name: str) -> bool:
    """Tell whether this reads like a repository id, not like a path."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith("/")


def cached_snapshot(repo: str) -> Path | None:
    """Return the snapshot of a repository in the local Hugging Face cache, None without one.

    Nothing is downloaded. Without huggingface_hub there is no cache to look in.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        return None
    try:
        return Path(snapshot_download(repo, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def component_folders(path: Path, names: Iterable[str]) -> dict[str, Path]:
    """Return the folders of a pipeline's components; a modular pipeline may keep some elsewhere.

    Args:
        path: the file that lists the components.

    Raises:
        RequestError: a folder that an ordinary pipeline names is not there.
    """
    folders = {name: path.parent / name for name in names}
    missing = [name for name, folder in folders.items() if not is_dir(folder)]
    if missing and path.name == INDEX_FILE:
        raise RequestError(
            str(path.parent),
            f"{INDEX_FILE} names {missing[0]!r}, but there is no such folder",
            remedy="download the whole pipeline, or give a component's folder",
        )
    return {name: folder for name, folder in folders.items() if name not in missing}


def is_component(folder: Path) -> bool:
    """Tell whether the folder holds one component."""
    return is_file(folder / CONFIG_FILE)
