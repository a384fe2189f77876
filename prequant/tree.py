"""The files below a folder, and whether they are those that are listed. Torch-free.

Links are followed, as in the snapshots of a cache; one that leads nowhere, or back, is told.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from prequant.header import FileIdentity
from quantpolicy.errors import Mismatch
from quantpolicy.inventory.weight_files import PICKLE_SUFFIXES
from quantpolicy.paths import list_folder

SMALL_BYTES = 1 << 20
_PIECE_BYTES = 8 << 20
_HARMLESS = re.compile(
    r"(?:readme|licen[cs]e|notice)(?:\.(?:md|txt|rst))?|\.(?:gitattributes|gitignore|git|cache)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Tree:
    """What lies below a folder, by relative name with slashes.

    Args:
        broken: entries that are neither file nor folder, and what they are.
    """

    files: dict[str, Path] = field(default_factory=dict)
    folders: dict[str, Path] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)


def read_tree(folder: Path, *, skip: Collection[str] = (), hidden: bool = True) -> Tree:
    """Walk a folder in the order of names.

    Args:
        skip: relative names that are left out, with all below them.
        hidden: whether names that begin with a dot are listed.
    """
    tree = Tree()
    _walk(folder, "", (folder.resolve(),), tree, skip, hidden)
    return tree


def _walk(
    folder: Path,
    prefix: str,
    above: tuple[Path, ...],
    tree: Tree,
    skip: Collection[str],
    hidden: bool,
) -> None:
    for path in list_folder(folder):
        name = prefix + path.name
        if name in skip or (not hidden and path.name.startswith(".")):
            continue
        if path.is_dir():
            real = path.resolve()
            if real in above:
                tree.broken[name] = "a link to a folder around it"
                continue
            tree.folders[name] = path
            _walk(path, f"{name}/", (*above, real), tree, skip, hidden)
        elif path.is_file():
            tree.files[name] = path
        elif path.is_symlink():
            tree.broken[name] = "a link that leads nowhere"
        else:
            tree.broken[name] = "no regular file"


def unlisted(tree: Tree, listed: Collection[str]) -> list[str]:
    """Return the entries that are not listed; a folder of such stands for all below it."""
    needed = {str(parent) for name in listed for parent in PurePosixPath(name).parents}
    entries = {*tree.files, *tree.broken} - set(listed) | (tree.folders.keys() - needed)
    return sorted(name for name in entries if str(PurePosixPath(name).parent) in {".", *needed})


def stray_faults(tree: Tree, listed: Collection[str]) -> Iterator[Mismatch]:
    """Yield what lies there unlisted; a readme, a licence and git's own files may."""
    for name in unlisted(tree, listed):
        path = PurePosixPath(name)
        if _HARMLESS.fullmatch(path.name):
            continue
        suffix = path.suffix.lower()
        if name in tree.broken:
            yield Mismatch("file_stray", name, "no such file", tree.broken[name])
        elif name in tree.folders:
            yield Mismatch("folder_stray", name, "no such folder", "a folder that is not listed")
        elif suffix == ".safetensors":
            yield Mismatch("shard_stray", name, "no such file", "a shard the header does not list")
        elif suffix in PICKLE_SUFFIXES:
            yield Mismatch("pickle_stray", name, "no such file", "a pickle file")
        else:
            yield Mismatch("file_stray", name, "no such file", "a file that is not listed")


def identity_faults(
    folder: Path, listed: Mapping[str, FileIdentity], *, full: bool
) -> Iterator[Mismatch]:
    """Yield listed files that are missing or differ; large ones are hashed only when ``full``."""
    for name, identity in listed.items():
        path = folder / name
        if not path.is_file():
            yield Mismatch("file_missing", name, "the file as baked", "no such file")
        elif path.stat().st_size != identity.bytes:
            found = str(path.stat().st_size)
            yield Mismatch("file_bytes", name, str(identity.bytes), found)
        elif full or identity.bytes <= SMALL_BYTES:
            digest = hash_file(path)
            if digest != identity.sha256:
                yield Mismatch("file_sha256", name, identity.sha256, digest)


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()
