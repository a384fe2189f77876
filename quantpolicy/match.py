"""The one home of name matching: wrapper prefixes, tokens and block patterns.

A token names whole dot-separated segments of a module name; ``*`` and ``?`` are globs inside one
segment. A token of
several segments (``attn1.to_q``) matches consecutive segments. A token never matches a part of a
segment.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import lru_cache

WRAPPER_SEGMENTS = frozenset(
    {"_orig_mod", "base_layer", "base_model", "_checkpoint_wrapped_module"}
)
ADAPTER_PATTERN = "lora_*"
OUTPUT_HEAD = "lm_head"


def normalise_name(name: str) -> str:
    """Return the module name without the segments that torch.compile and PEFT insert."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_SEGMENTS)


def is_adapter(name: str) -> bool:
    """Tell whether the module belongs to a LoRA adapter, which is never quantised."""
    return any(fnmatchcase(part, ADAPTER_PATTERN) for part in name.split("."))


def is_output_head(name: str) -> bool:
    """Tell whether the module maps to a vocabulary: often tied to the embedding, never planned."""
    return name.rpartition(".")[2] == OUTPUT_HEAD


@lru_cache(maxsize=4096)
def _compile_token(token: str) -> re.Pattern[str]:
    segments = []
    for segment in token.split("."):
        escaped = re.escape(segment).replace(r"\*", "[^.]*").replace(r"\?", "[^.]")
        segments.append(escaped)
    return re.compile(r"(?:^|\.)" + r"\.".join(segments) + r"(?:\.|$)")


def matches_token(name: str, token: str) -> bool:
    """Tell whether a normalised module name contains the token's segments, consecutively."""
    return _compile_token(token).search(name) is not None


def first_matching_token(name: str, tokens: Sequence[str]) -> str | None:
    """Return the first token that matches the name, None when none does."""
    for token in tokens:
        if matches_token(name, token):
            return token
    return None


def block_pattern(name: str) -> str:
    """Return the name with every numeric segment replaced by ``*``."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that orders ``blocks.2`` before ``blocks.10``."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split("."))
