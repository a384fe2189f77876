"""Versions of installed packages, without importing them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version(package: str) -> str:
    """Return the version of an installed package, "" when there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def own_version() -> str:
    """Return the version of the installed package, "unknown" in a bare checkout."""
    return installed_version("quantpolicy") or "unknown"
