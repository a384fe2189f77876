"""What a caller asks for. Every field is a command-line flag of the same name."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from quantpolicy.record import Record
from quantpolicy.schemes import Confidence, Execution, Quality, SchemeChoice, Tier


class Request(Record):
    """One request, independent of the host and of the model.

    Args:
        speed: speed tier; unset means ``auto``.
        quality: ``lossless`` mounts bit-exact kernels only, ``high`` relaxed ones too.
        transformer: scheme of the denoiser (both experts of a dual-expert model), or ``auto``.
        text_encoder: scheme of every text encoder, or ``auto``.
        vae: scheme of the VAE, or ``auto``.
        execution: how the quantised tensors are multiplied at run time.
        memory_bytes: memory budget in bytes; None means all of the host's.
        resolution: ``WIDTHxHEIGHT`` in pixels of the output; None means the family's declared
            inputs.
        frames: number of output frames; None means the family's declared inputs.
        min_features: Linears with fewer input or output features stay dense; None means the table's
            value.
        lift: ids of the rules to lift; the plan records them.
        confidence: the least confidence to accept from ``auto``.

    Raises:
        pydantic.ValidationError: a value is out of range or unknown.
    """

    speed: Tier = Tier.AUTO
    quality: Quality = Quality.LOSSLESS
    transformer: SchemeChoice = SchemeChoice.AUTO
    text_encoder: SchemeChoice = SchemeChoice.AUTO
    vae: SchemeChoice = SchemeChoice.AUTO
    execution: Execution = Execution.TORCHAO
    memory_bytes: int | None = Field(default=None, gt=0)
    resolution: str | None = None
    frames: int | None = Field(default=None, gt=0)
    min_features: int | None = Field(default=None, ge=1)
    lift: tuple[str, ...] = ()
    confidence: Confidence = Confidence.DERIVED

    @field_validator("resolution")
    @classmethod
    def _check_resolution(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[1-9]\d{1,4}x[1-9]\d{1,4}", value):
            raise ValueError(
                f"resolution {value!r} is not WIDTHxHEIGHT in pixels, such as 1280x720"
            )
        return value

    @field_validator("lift")
    @classmethod
    def _sort_lift(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(sorted(set(value)))

    @property
    def width_height(self) -> tuple[int, int] | None:
        """The resolution as (width, height) in pixels, None when unset."""
        if self.resolution is None:
            return None
        width, height = self.resolution.split("x")
        return int(width), int(height)
