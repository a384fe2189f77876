"""What lies at a path; one sentence where that cannot be told, such as in an unreadable folder."""

from __future__ import annotations

import stat
from errno import ELOOP, ENOENT, ENOTDIR
from pathlib import Path

from quantpolicy.errors import RequestError

_ABSENT = (ENOENT, ENOTDIR, ELOOP)


def is_file(path: Path) -> bool:
    """Tell whether a file lies there.

    Raises:
        RequestError: it cannot be told.
    """
    return stat.S_ISREG(_mode(path))


def is_dir(path: Path) -> bool:
    """Tell whether a folder lies there; see ``is_file``."""
    return stat.S_ISDIR(_mode(path))


def exists(path: Path) -> bool:
    """Tell whether anything lies there; see ``is_file``."""
    return _mode(path) != 0


def list_folder(folder: Path) -> list[Path]:
    """Return what lies in a folder, sorted by name.

    Raises:
        RequestError: it cannot be read.
    """
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise unreadable(folder, error) from error


def unreadable(path: Path, error: OSError | ValueError) -> RequestError:
    """Return the error of a path that cannot be read."""
    found = getattr(error, "strerror", None) or str(error)
    return RequestError(str(path), f"cannot be read: {found}", remedy="check the path")


def _mode(path: Path) -> int:
    """Return the mode of what lies there, 0 for nothing."""
    try:
        return path.stat().st_mode
    except OSError as error:
        if error.errno in _ABSENT:
            return 0
        raise unreadable(path, error) from error
    except ValueError as error:  # a null byte
        raise unreadable(path, error) from error
