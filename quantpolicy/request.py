"""What a caller asks for. Every field is a command-line flag of the same name."""

from __future__ import annotations

import re
from typing import Self

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    field_validator,
    model_validator,
)

from quantpolicy.errors import RequestError
from quantpolicy.record import MAX_SAFE_INTEGER, Record
from quantpolicy.schemes import Confidence, Execution, Quality, SchemeChoice, Tier


class Request(Record):
    """One request, independent of the host and of the model.

    Args:
        speed: speed tier; unset means ``auto``.
        quality: ``lossless`` mounts no numerically relaxed kernel, ``high`` does; see ``Contract``.
        transformer: scheme of the denoiser (both experts of a dual-expert model), or ``auto``.
        text_encoder: scheme of every text encoder, or ``auto``.
        vae: scheme of the VAE, or ``auto``.
        execution: how the quantised tensors are multiplied at run time.
        memory_bytes: memory budget in bytes, at most the host's; None means all of the host's.
        resolution: ``WIDTHxHEIGHT`` in pixels of the output; None means the family's declared
            inputs.
        frames: number of output frames; None means the family's declared inputs.
        min_features: Linears with fewer input or output features stay dense; None means the table's
            value.
        lift: ids of the rules to lift; the plan records them.
        confidence: the least confidence to accept from ``auto``.

    Raises:
        RequestError: a value is out of range, or a field is unknown.
    """

    speed: Tier = Tier.AUTO
    quality: Quality = Quality.LOSSLESS
    transformer: SchemeChoice = SchemeChoice.AUTO
    text_encoder: SchemeChoice = SchemeChoice.AUTO
    vae: SchemeChoice = SchemeChoice.AUTO
    execution: Execution = Execution.TORCHAO
    memory_bytes: int | None = Field(default=None, ge=1, le=MAX_SAFE_INTEGER, strict=True)
    resolution: str | None = None
    frames: int | None = Field(default=None, ge=1, le=MAX_SAFE_INTEGER)
    min_features: int | None = Field(default=None, ge=1, le=MAX_SAFE_INTEGER)
    lift: tuple[str, ...] = ()
    confidence: Confidence = Confidence.DERIVED

    @model_validator(mode="wrap")
    @classmethod
    def _explain_faults(cls, values: object, build: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return build(values)
        except ValidationError as error:
            from quantpolicy.rule_errors import describe_fault

            fault = error.errors(include_url=False)[0]
            found, allowed, remedy = describe_fault(cls, fault)
            field = str(fault["loc"][0]) if fault["loc"] else "request"
            raise RequestError(field, found, allowed=allowed, remedy=remedy) from error

    @field_validator("resolution")
    @classmethod
    def _check_resolution(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[1-9]\d{1,4}x[1-9]\d{1,4}", value):
            raise ValueError(f"{value!r} is not WIDTHxHEIGHT in pixels, such as 1280x720")
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
