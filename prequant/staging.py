"""The temporary folder of a bake, and how it becomes OUT in one step. Torch-free.

The folder is a sibling of OUT named ``.OUT.baking``, locked by its maker and told from a user's own
by a marker file; what a killed bake leaves behind has no lock, and the next bake removes it. In it
the new OUT is filled, and the old one waits while the new takes its place.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prequant.manifest import foreign_entries
from quantpolicy.errors import RequestError

_SPARE_BYTES = 16 << 20
_MARKER = ".prequant-bake"
_NEW, _OLD = "new", "old"


def check_out(source: Path, out: Path, *, force: bool) -> None:
    """Refuse an OUT that is the source, overlaps it, or would be overwritten unasked.

    Raises:
        RequestError: one of these.
    """
    if not out.name:
        raise RequestError(str(out), "names no folder to make", remedy="give a new folder")
    try:
        _check_out(source, out, force=force)
    except (OSError, ValueError) as error:
        raise _unwritable(out, error) from error


def _check_out(source: Path, out: Path, *, force: bool) -> None:
    inner, outer = source.resolve(), out.resolve()
    if outer == inner or inner in outer.parents or outer in inner.parents:
        found = "is the source" if outer == inner else f"overlaps the source {source}"
        raise RequestError(
            str(out), found, allowed="baking in place is refused", remedy="give another folder"
        )
    if not outer.parent.is_dir():
        raise RequestError(
            str(out), "its parent folder does not exist", remedy=f"create {outer.parent}"
        )
    _recover(outer)
    if not os.path.lexists(outer):
        return
    if not outer.is_dir():
        raise RequestError(str(out), "is a file", remedy="give a new folder")
    if not any(outer.iterdir()):
        return
    if not force:
        raise RequestError(
            str(out), "exists already", remedy="give --force to replace it, or a new folder"
        )
    foreign = foreign_entries(outer)
    if foreign is None:
        raise RequestError(
            str(out),
            "exists and is not a baked checkpoint, so it is never replaced",
            remedy="give a new folder",
        )
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise RequestError(
            str(out),
            f"holds {foreign[0]!r}{more}, which no bake wrote, so it is never replaced",
            remedy="move what is yours elsewhere, or give a new folder",
        )


def check_space(out: Path, needed_bytes: int) -> None:
    """Refuse when the file system of OUT has too little room.

    Raises:
        RequestError: it has.
    """
    free = shutil.disk_usage(out.resolve().parent).free
    if free < needed_bytes + _SPARE_BYTES:
        raise RequestError(
            str(out),
            f"{free / 1e9:.2f} GB free on its disk",
            allowed=f"{(needed_bytes + _SPARE_BYTES) / 1e9:.2f} GB are needed",
            remedy="make room, or give a folder on another disk",
        )


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """Give a folder to fill, which becomes ``out`` when the block ends without an error.

    Raises:
        RequestError: another bake is writing the same OUT, or the folder cannot be written.
    """
    outer = out.resolve()
    staging = _staging_of(outer)
    lock = _claim(staging, out)
    try:
        folder = staging / _NEW
        folder.mkdir()
        yield folder
        _flush_folder(folder)
        _replace(folder, outer, staging / _OLD)
    except OSError as error:
        raise _unwritable(out, error) from error
    finally:
        if outer.exists() or not (staging / _OLD).exists():
            shutil.rmtree(staging, ignore_errors=True)
        os.close(lock)


def _staging_of(outer: Path) -> Path:
    return outer.parent / f".{outer.name}.baking"


def _is_ours(staging: Path) -> bool:
    """Tell a folder that a bake made from a user's own."""
    if staging.is_symlink() or not staging.is_dir():
        return False
    return (staging / _MARKER).is_file() or not any(staging.iterdir())


def _claim(staging: Path, out: Path) -> int:
    """Create the folder and lock it; an unlocked one is a leftover and is removed first."""
    try:
        if os.path.lexists(staging):
            if not _is_ours(staging):
                raise RequestError(
                    str(staging),
                    "exists and no bake made it, so it is never removed",
                    remedy="move it elsewhere, or give another OUT",
                )
            leftover = os.open(staging, os.O_RDONLY)
            try:
                _lock(leftover, staging, out)
                shutil.rmtree(staging)
            finally:
                os.close(leftover)
        staging.mkdir()
        lock = os.open(staging, os.O_RDONLY)
    except OSError as error:
        raise _unwritable(out, error) from error
    _lock(lock, staging, out)
    (staging / _MARKER).touch()
    return lock


def _lock(descriptor: int, folder: Path, out: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RequestError(
            str(out),
            f"another bake is writing it (in {folder})",
            remedy="wait for it, or give another folder",
        ) from error


def _replace(folder: Path, outer: Path, aside: Path) -> None:
    """Rename the finished folder to OUT; an old one steps aside first and is removed last."""
    if not outer.exists() or not any(outer.iterdir()):
        folder.rename(outer)
        _flush_folder(outer.parent)
        return
    outer.rename(aside)
    try:
        folder.rename(outer)
    except OSError:
        aside.rename(outer)
        raise
    _flush_folder(outer.parent)


def _recover(outer: Path) -> None:
    """Undo a replacement that was killed between its two renames."""
    staging = _staging_of(outer)
    aside = staging / _OLD
    if outer.exists() or not _is_ours(staging) or not aside.is_dir():
        return
    descriptor = os.open(staging, os.O_RDONLY)
    try:
        _lock(descriptor, staging, outer)
        aside.rename(outer)
    finally:
        os.close(descriptor)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unwritable(out: Path, error: OSError | ValueError) -> RequestError:
    reason = getattr(error, "strerror", None) or error
    return RequestError(
        str(out), f"cannot be written: {reason}", remedy="check its name, space and permissions"
    )
