"""Numbers of bytes as text for a person, in binary units as memory is sold."""

from __future__ import annotations

GIB = 1 << 30

_UNITS = (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10))


def format_bytes(count: int, digits: int = 2) -> str:
    """Return a number of bytes in the largest unit that it fills.

    Args:
        digits: decimals; whole bytes have none.
    """
    for unit, factor in _UNITS:
        if count >= factor:
            return f"{count / factor:.{digits}f} {unit}"
    return f"{count} B"
