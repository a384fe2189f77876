"""Sizes and tables as plain text for a person."""

from __future__ import annotations

from collections.abc import Sequence

GIB = 1 << 30

_UNITS = (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10))


def format_bytes(count: int, digits: int = 2) -> str:
    """Return a number of bytes in the largest binary unit that it fills.

    Args:
        digits: decimals; whole bytes have none.
    """
    for unit, factor in _UNITS:
        if count >= factor:
            return f"{count / factor:.{digits}f} {unit}"
    return f"{count} B"


def align(
    rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset(), indent: str = ""
) -> list[str]:
    """Return table rows as lines of equal columns.

    Args:
        right: columns to align to the right.
        indent: what each line starts with.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        indent
        + "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
