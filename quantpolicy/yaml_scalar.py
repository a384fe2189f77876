"""What an unquoted YAML scalar means: the core schema of YAML 1.2, narrowed where readers disagree.

- Only ``true`` and ``false`` (``True``, ``TRUE``, ...) are booleans, so ``off``, ``on``, ``no`` and
  ``yes`` stay text, as values and as keys.
- Numbers are decimal: ``1e-12`` is a float; ``010``, ``0x1f``, ``1_000``, ``1:20``, ``.nan``,
  ``.inf``, and integers beyond 2^53 are refused. Dates stay text.
"""

from __future__ import annotations

import re
from typing import TypeAlias

MAX_EXACT_INT = 2**53 - 1

Scalar: TypeAlias = bool | int | float | str | None

_CONSTANTS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_BARE_WORDS = frozenset({"yes", "no", "on", "off", "y", "n"})
_NUMBER_START = frozenset("+-.0123456789")
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_AMBIGUOUS = re.compile(
    r"""[-+]?(?:0[0-9][0-9_.]*(?:[eE][-+]?[0-9]+)?  # octal in YAML 1.1
    |0[xob][0-9a-fA-F_]+                            # hexadecimal, octal, binary
    |[0-9][0-9_]*_[0-9_.]*(?:[eE][-+]?[0-9]+)?      # digit groups
    |[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?    # base 60
    |\.(?:inf|Inf|INF|nan|NaN|NAN))""",
    re.VERBOSE,
)


class ScalarError(ValueError):
    """The scalar is refused: what was found, what is allowed, one remedy."""

    def __init__(self, found: str, remedy: str, allowed: str = "") -> None:
        super().__init__(found)
        self.found = found
        self.allowed = allowed
        self.remedy = remedy


def is_bare_word(text: str) -> bool:
    """Tell whether this is text that YAML 1.1 reads as a boolean."""
    return text.lower() in _BARE_WORDS


def read_scalar(text: str) -> Scalar:
    """Return the value of an unquoted scalar.

    Raises:
        ScalarError: it is a number that readers disagree about, or that is not kept exactly.
    """
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if text[0] not in _NUMBER_START:
        return text
    if _INT.fullmatch(text):
        if len(text) > 17 or abs(int(text)) > MAX_EXACT_INT:
            raise ScalarError(
                f"integer {text[:40]}",
                "write a smaller number, or quote it to make it text",
                f"at most {MAX_EXACT_INT}, which every JSON reader keeps exact",
            )
        return int(text)
    if _FLOAT.fullmatch(text):
        value = float(text)
        if value - value != 0.0:
            raise ScalarError(f"number {text[:40]} is infinite", "write a finite number")
        return value
    if _AMBIGUOUS.fullmatch(text):
        raise ScalarError(
            f"{text[:40]!r} is a number to some YAML readers and text to others",
            "write it in decimal, or quote it to make it text",
            "finite decimal numbers without leading zeros",
        )
    return text
