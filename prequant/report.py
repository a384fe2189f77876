"""What bake and validate report. Torch-free records."""

from __future__ import annotations

from prequant.header import Counts
from quantpolicy.record import Record
from quantpolicy.schemes import Scheme


class BakedComponent(Record):
    """One component that was baked; the counts are of what was written.

    Args:
        folder: where it lies.
        weights_digest: of this component.
        source_digest: of the dense component.
        shards: number of safetensors files.
    """

    name: str
    folder: str
    scheme: Scheme
    weights_digest: str
    source_digest: str
    shards: int
    counts: Counts


class BakeReport(Record):
    """What a bake did.

    Args:
        seconds: wall-clock time; not part of the checkpoint.
        notes: what a person should know about the rest of a pipeline.
    """

    out: str
    family: str
    plan_digest: str
    components: dict[str, BakedComponent]
    written_bytes: int
    seconds: float
    notes: tuple[str, ...]


class ValidatedComponent(Record):
    """One component that passed.

    Args:
        checked: names of the checks that were made.
    """

    name: str
    folder: str
    family: str
    scheme: Scheme
    weights_digest: str
    plan_digest: str
    source_digest: str
    counts: Counts
    checked: tuple[str, ...]


class ValidateReport(Record):
    """What a validation found in order.

    Args:
        full: whether hashes and values were checked too.
        against: what it was held against: ``today's rules`` or ``the given plan``.
    """

    folder: str
    full: bool
    against: str
    components: dict[str, ValidatedComponent]
