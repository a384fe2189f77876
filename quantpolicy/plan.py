"""The plan: one frozen, hashed record of what is quantised, why, and what runs on top.

Nothing is decided here; the resolver fills it and executors obey it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import ValidationError, model_validator

from quantpolicy.errors import RequestError
from quantpolicy.host import Host
from quantpolicy.json_source import parse_json_object
from quantpolicy.record import Record, canonical_json, sha256_of
from quantpolicy.request import Request
from quantpolicy.schemes import (
    Cause,
    ComponentKind,
    Confidence,
    Contract,
    Execution,
    Quality,
    Scheme,
    Tier,
)

SCHEMA_VERSION: Literal[1] = 1


class PlannedLayer(Record):
    """A Linear to quantise.

    Args:
        name: normalised module name.
        shape: (out_features, in_features).
        dtype: dense dtype of its weight.
        pad_rows: rows that fewer activation rows are padded to at run time; 0 for no padding.
    """

    name: str
    scheme: Scheme
    shape: tuple[int, int]
    dtype: str
    pad_rows: int = 0


class KeptLayer(Record):
    """A Linear that stays dense, and why.

    Args:
        rule: id of the rule, or the name of the built-in check (``derived.small_m``) that kept it.
    """

    name: str
    because: Cause
    rule: str
    shape: tuple[int, int]
    dtype: str


class SchemeSettings(Record):
    """What, beside the scheme's name, decides the quantised bytes.

    Args:
        granularity: ``per_row`` for int8 and fp8, ``block_32`` for mxfp8, ``block_16`` for nvfp4,
            "" for dense.
        weight_dtype: storage dtype of the data, such as ``float8_e4m3fn``; "" for dense.
        activation_floor: lower bound of an activation row's absolute maximum before it becomes a
            scale.
    """

    granularity: str = ""
    weight_dtype: str = ""
    activation_floor: float = 0.0


class ComponentPlan(Record):
    """The decision for one component.

    Args:
        dtype: dtype in which the component is loaded before it is quantised.
        keep_in_fp32: tokens of the modules whose tensors stay fp32 whatever ``dtype`` says.
    """

    kind: ComponentKind
    class_name: str
    scheme: Scheme
    confidence: Confidence
    dtype: str
    keep_in_fp32: tuple[str, ...] = ()
    settings: SchemeSettings = SchemeSettings()
    layers: tuple[PlannedLayer, ...] = ()
    kept: tuple[KeptLayer, ...] = ()

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        for layer in self.layers:
            if layer.scheme is Scheme.DENSE:
                raise ValueError(f"layer {layer.name} is dense; a dense Linear is a kept one")
            if layer.scheme is not self.scheme:
                raise ValueError(
                    f"layer {layer.name} has scheme {layer.scheme}, the component {self.scheme}"
                )
        return self

    @property
    def weights_digest(self) -> str:
        """SHA-256 over what decides the baked bytes of this component, and nothing else."""
        return sha256_of(
            {
                "scheme": self.scheme.value,
                "dtype": self.dtype,
                "keep_in_fp32": sorted(self.keep_in_fp32),
                "settings": self.settings.model_dump(mode="json"),
                "layers": [
                    [layer.name, layer.scheme.value, *layer.shape, layer.dtype]
                    for layer in sorted(self.layers, key=lambda layer: layer.name)
                ],
                "kept": [
                    [layer.name, *layer.shape, layer.dtype]
                    for layer in sorted(self.kept, key=lambda layer: layer.name)
                ],
            }
        )


class TimeItem(Record):
    """One part of the predicted time of a step."""

    what: str
    ms: float


class Decision(Record):
    """One candidate, accepted or rejected.

    Args:
        candidate: the scheme considered.
        rule: id of the rule behind it, "" when a host or model fact was.
        detail: one sentence for a person, with the numbers.
        predicted_ms: predicted time of one step, that is one forward, and the sum of ``predicted``;
            None when there is no basis for a prediction.
        predicted: of what the step consists; empty when there is no basis for a prediction.
    """

    component: str
    candidate: Scheme
    accepted: bool
    because: Cause
    rule: str
    detail: str
    predicted_ms: float | None = None
    predicted: tuple[TimeItem, ...] = ()


class PlannedKernel(Record):
    """A fused op to mount, its contract and the component it is mounted on."""

    component: str
    op: str
    contract: Contract


class KernelDecision(Record):
    """A fused op that the family lists for a component, planned or left out.

    Args:
        detail: one sentence for a person: what it promises and the evidence, or why it is left out.
    """

    component: str
    op: str
    contract: Contract
    accepted: bool
    detail: str


class PlannedFusion(Record):
    """Projections to join at run time, so that they quantise their input once and share a GEMM.

    The stored weights are not concerned.

    Args:
        name: id of the fusion in the rule table.
        parts: full module names; the first is called first.
        scheme: of all parts.
    """

    component: str
    name: str
    parts: tuple[str, ...]
    scheme: Scheme


class CompilePlan(Record):
    """How the denoiser is compiled: ``mode`` is ``none`` or ``regional`` (its repeated blocks).

    Args:
        dynamic: sizes stay open from the first call on. One compilation then serves every number
            of tokens and every batch of two or more, another a batch of one, which torch.compile
            always treats apart. Left to itself, it compiles for the first size it meets, too.
    """

    mode: str = "none"
    max_autotune: bool = False
    dynamic: bool = False

    @property
    def options(self) -> dict[str, str | bool | None]:
        """The arguments of torch.compile, or of diffusers' ``compile_repeated_blocks``."""
        return {
            "mode": "max-autotune-no-cudagraphs" if self.max_autotune else "default",
            "dynamic": True if self.dynamic else None,
        }


class MemoryItem(Record):
    """One line of the memory estimate."""

    component: str
    what: str
    bytes: int


class MemoryPlan(Record):
    """The estimate of resident memory; ``total_bytes`` is the exact sum of the items.

    Args:
        budget_bytes: what the request or the host allows.
        fits: whether the total is within the budget.
    """

    items: tuple[MemoryItem, ...]
    total_bytes: int
    budget_bytes: int
    fits: bool


class Workload(Record):
    """The input sizes that predictions are made for.

    Args:
        image_tokens: tokens of the image or video stream in one sample.
        batch: samples in one forward.
        declared: True when these are the family's declared inputs, False when the request gave
            them.
    """

    image_tokens: int
    batch: int
    declared: bool


class QuantPlan(Record):
    """One resolved plan. Equal inputs give equal bytes on any machine."""

    schema_version: Literal[1] = SCHEMA_VERSION
    family: str
    tier: Tier
    quality: Quality
    execution: Execution
    host: Host
    request: Request
    rules_digest: str
    workload: Workload | None
    components: dict[str, ComponentPlan]
    decisions: tuple[Decision, ...]
    kernels: tuple[PlannedKernel, ...]
    compile: CompilePlan
    memory: MemoryPlan
    lifted: tuple[str, ...]
    notes: tuple[str, ...]
    fusions: tuple[PlannedFusion, ...] = ()
    kernel_decisions: tuple[KernelDecision, ...] = ()

    @property
    def weights_digest(self) -> str:
        """SHA-256 over what decides the baked bytes of all components."""
        return sha256_of({name: part.weights_digest for name, part in self.components.items()})

    @property
    def plan_digest(self) -> str:
        """SHA-256 over the whole plan."""
        return sha256_of(self._body())

    def _body(self) -> dict[str, object]:
        return self.model_dump(mode="json")

    def to_dict(self) -> dict[str, object]:
        """Return the plan as plain JSON values, both digests included."""
        body = self._body()
        return {
            **body,
            "weights_digest": self.weights_digest,
            "plan_digest": sha256_of(body),
        }

    def to_json(self) -> str:
        """Return the canonical JSON of the plan (RFC 8785), both digests included."""
        return canonical_json(self.to_dict()).decode()

    @classmethod
    def from_dict(cls, values: dict[str, object], *, where: str = "plan") -> QuantPlan:
        """Read a plan from JSON values and check both digests.

        Raises:
            RequestError: a field is missing, unknown or of the wrong type, or a digest does not
                match.
        """
        body = {"schema_version": None, **values}
        digests = {key: body.pop(key, None) for key in ("weights_digest", "plan_digest")}
        try:
            plan = cls.model_validate(body)
            found = {key: getattr(plan, key) for key in digests}
        except RequestError as error:
            raise RequestError(
                f"{where}.request.{error.where}",
                error.found,
                allowed=error.allowed,
                remedy="resolve the plan again with this version",
            ) from error
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise RequestError(
                f"{where}.{field}",
                str(first["msg"]).removeprefix("Value error, "),
                remedy="resolve the plan again with this version",
            ) from error
        except ValueError as error:
            raise RequestError(
                where,
                f"has no canonical JSON: {error}",
                remedy="resolve the plan again instead of editing it",
            ) from error
        for key, digest in digests.items():
            if digest != found[key]:
                raise RequestError(
                    f"{where}.{key}",
                    f"{digest} does not match the plan's content ({found[key]})",
                    remedy="resolve the plan again instead of editing it",
                )
        return plan

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str = "plan") -> QuantPlan:
        """Read a plan from its JSON text; see ``from_dict``."""
        try:
            values = parse_json_object(text)
        except ValueError as error:
            raise RequestError(
                where, f"not JSON: {error}", remedy="give the output of resolve --json"
            ) from error
        return cls.from_dict(values, where=where)

    @classmethod
    def from_file(cls, path: Path) -> QuantPlan:
        """Read a plan from a JSON file; see ``from_dict``."""
        try:
            text = path.read_bytes()
        except OSError as error:
            raise RequestError(
                str(path), f"cannot be read: {error.strerror}", remedy="check the path"
            ) from error
        return cls.from_json(text, where=str(path))

    def explain(self) -> str:
        """Return the plan as text for a person: each decision and each kept layer, with reasons."""
        from quantpolicy.explain import explain_plan

        text: str = explain_plan(self)
        return text
