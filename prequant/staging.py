"""The temporary folder of a bake, and how it becomes OUT in one step. Torch-free.

The folder is a sibling of OUT named ``.OUT.baking`` and locked by its maker: what a killed bake
leaves behind is recognised by its name and its missing lock, and the next bake removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prequant.header import find_components
from quantpolicy.errors import RequestError

_SPARE_BYTES = 16 << 20


def check_out(source: Path, out: Path, *, force: bool) -> None:
    """Refuse an OUT that is the source, overlaps it, or would be overwritten unasked.

    Raises:
        RequestError: one of these.
    """
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
    if not find_components(outer):
        raise RequestError(
            str(out),
            "exists and is not a baked checkpoint, so it is never replaced",
            remedy="give a new folder",
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
    folder = outer.parent / f".{outer.name}.baking"
    lock = _claim(folder, out)
    try:
        yield folder
        _flush_folder(folder)
        _replace(folder, outer)
    except OSError as error:
        raise _unwritable(out, error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _claim(folder: Path, out: Path) -> int:
    """Create the folder and lock it; an unlocked one is a leftover and is removed first."""
    try:
        if folder.is_dir():
            leftover = os.open(folder, os.O_RDONLY)
            try:
                _lock(leftover, folder, out)
                shutil.rmtree(folder)
            finally:
                os.close(leftover)
        folder.mkdir()
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise _unwritable(out, error) from error
    _lock(lock, folder, out)
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


def _replace(folder: Path, outer: Path) -> None:
    """Rename the finished folder to OUT; an old one steps aside first and is removed last."""
    if not outer.exists() or not any(outer.iterdir()):
        folder.rename(outer)
        _flush_folder(outer.parent)
        return
    aside = _aside(outer)
    outer.rename(aside)
    try:
        folder.rename(outer)
    except OSError:
        aside.rename(outer)
        raise
    _flush_folder(outer.parent)
    shutil.rmtree(aside)


def _recover(outer: Path) -> None:
    """Undo a replacement that was killed between its two renames, or finish one killed later."""
    aside = _aside(outer)
    if aside.is_dir():
        if outer.exists():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.rename(outer)


def _aside(outer: Path) -> Path:
    return outer.parent / f".{outer.name}.replaced"


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unwritable(out: Path, error: OSError) -> RequestError:
    return RequestError(
        str(out), f"cannot be written: {error.strerror}", remedy="check space and permissions"
    )
