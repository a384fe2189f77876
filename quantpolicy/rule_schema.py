"""The pydantic schema of families.yaml: what a rule table may say. Nothing is decided here."""

from __future__ import annotations

import datetime
from enum import StrEnum

from pydantic import Field

from quantpolicy.host import Backend, HostClass
from quantpolicy.record import Record
from quantpolicy.schemes import Cause, ComponentKind, Scheme


class Effect(StrEnum):
    """What a rule does under its schemes; ``exclude`` and ``pad_rows`` also name modules.

    deny: the scheme is not available for the component.
    exclude: the matched Linears stay dense under the scheme.
    pad_rows: the matched Linears are quantised, and few activation rows are padded at run time.
    keep_dense_if_resident: when auto arrives at the scheme because a faster one is denied, a
        component that fits memory in full stays dense.
    """

    DENY = "deny"
    EXCLUDE = "exclude"
    PAD_ROWS = "pad_rows"
    KEEP_DENSE_IF_RESIDENT = "keep_dense_if_resident"


class Fact(StrEnum):
    """Facts that can lift a rule."""

    ACTIVATION_FLOOR = "activation_floor"


class EvidenceKind(StrEnum):
    """Where an evidence record comes from."""

    MEASURED = "measured"
    PUBLISHED = "published"
    DERIVED = "derived"


class EvidenceRecord(Record):
    """A measured or published fact.

    Args:
        source: the command or the publication.
        gpu: device measured on, "" for a fact that needs none.
        resolution: ``WIDTHxHEIGHT``; frames, steps and tokens complete the workload.
        min_tokens, max_tokens: the image token counts that the record speaks for.
        versions: package name to version.
        metrics: name with unit to value.
        date: measured on, or read on for a publication.
    """

    kind: EvidenceKind
    source: str
    date: datetime.date
    gpu: str = ""
    resolution: str = ""
    frames: int | None = None
    steps: int | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    metrics: dict[str, float] = Field(default_factory=dict)
    note: str = ""


class Rule(Record):
    """One rule.

    Args:
        component: the kind of component that it speaks of.
        tokens: module tokens of ``exclude`` and ``pad_rows``.
        rows: rows to pad to, for ``pad_rows``.
        unless: facts that lift the rule.
        expect: number of Linears that the tokens match on the released config, one number or one a
            family. Every ``exclude`` and ``pad_rows`` rule of a group or a family has it; rules
            common to all families and the generic ones cannot.
    """

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    component: ComponentKind = ComponentKind.DENOISER
    schemes: tuple[Scheme, ...] = Field(min_length=1)
    effect: Effect
    because: Cause
    tokens: tuple[str, ...] = ()
    rows: int | None = Field(default=None, gt=1)
    unless: tuple[Fact, ...] = ()
    evidence: tuple[str, ...] = ()
    expect: int | dict[str, int] | None = None
    note: str = ""


class WeightDtype(StrEnum):
    """What a scheme's data is stored in; ``host``: the float8 type that the host multiplies."""

    INT8 = "int8"
    FLOAT8 = "float8_e4m3fn"
    FLOAT4 = "float4_e2m1fn_x2"
    HOST_FLOAT8 = "host"


class SchemePolicy(Record):
    """What a scheme requires of hosts and layers, and how its bytes are made.

    Args:
        alignment: in_features and out_features must be multiples of this.
        min_sm: least CUDA compute capability (89 for 8.9); None when CUDA never runs it.
        rocm_archs: ROCm architectures that run it.
        backends: back ends other than CUDA and ROCm that run it.
        dtypes: weight dtypes it can be made from.
        kinds: kinds of components that it is offered for.
        evidence: ids of the evidence records behind these requirements.
    """

    granularity: str
    alignment: int
    min_sm: int | None = None
    rocm_archs: tuple[str, ...] = ()
    backends: tuple[Backend, ...] = ()
    dtypes: tuple[str, ...]
    weight_dtype: WeightDtype
    kinds: tuple[ComponentKind, ...]
    activation_floor: float = 0.0
    evidence: tuple[str, ...] = ()


class Ladder(Record):
    """Candidates for the hosts that match; the first ladder that matches counts."""

    backend: Backend
    host_classes: tuple[HostClass, ...]
    min_sm: int = 0
    archs: tuple[str, ...] = ()
    schemes: tuple[Scheme, ...]


class InputSpec(Record):
    """One forward argument of a probe: a tensor, a list of tensors, or a plain value.

    Args:
        shape: of the tensor; None for a list or a plain value.
        shapes: of each tensor of a list.
        dtype: of the tensor or tensors.
        valid: leading tokens of each sample that hold values; the tokens after them are zero. One
            number a sample; empty for all.
        value: a plain value, or the fill of the tensor; without one, floats are random.
        start: the tensor counts up from this number.
        runs: the tensor is these [value, count] runs, one after another.
    """

    shape: tuple[int, ...] | None = None
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: str = "bfloat16"
    valid: tuple[int, ...] = ()
    value: bool | int | float | list[list[list[int]]] | None = None
    start: int | None = None
    runs: tuple[tuple[int, int], ...] = ()


class TinySpec(Record):
    """A small model of a class, with inputs that pad every stream which can be padded.

    Args:
        class_name: diffusers class.
        config: constructor arguments, on top of the class defaults.
        inputs: forward arguments.
    """

    class_name: str
    config: dict[str, object]
    inputs: dict[str, InputSpec]


class Geometry(Record):
    """How pixels become tokens: strides of the VAE, patch sizes, and the batch of one forward.

    Args:
        image_tokens: tokens of one sample at the declared inputs.
        batch: samples of one forward at the declared inputs.
    """

    spatial_stride: int
    temporal_stride: int = 1
    spatial_patch: int = 1
    temporal_patch: int = 1
    image_tokens: int
    batch: int = 1


class ComponentSpec(Record):
    """A component of a family.

    Args:
        config: constructor arguments of the released model, on top of the class defaults.
        inventory: name of the shipped inventory, "" when none ships.
        size_bytes: size of the released component when dense.
        keep_in_fp32: tokens of the modules whose tensors stay fp32.
    """

    kind: ComponentKind
    class_name: str = ""
    config: dict[str, object] = Field(default_factory=dict)
    inventory: str = ""
    size_bytes: int
    dtype: str = "bfloat16"
    keep_in_fp32: tuple[str, ...] = ()


class Recognition(Record):
    """How a family is told from the others.

    Args:
        class_name: class of its denoiser.
        config: config values of the denoiser that must be equal.
        pipelines: pipeline classes; empty for any.
        repos: known repository ids.
    """

    class_name: str
    config: dict[str, object] = Field(default_factory=dict)
    pipelines: tuple[str, ...] = ()
    repos: tuple[str, ...] = ()


class KernelSpec(Record):
    """A fused op that the family may mount; what it promises and needs is in ``ops``.

    Args:
        op: name of the op.
        component: the kind of component that it is mounted on.
        evidence: what was measured of it, empty for nothing yet.
    """

    op: str
    component: ComponentKind = ComponentKind.DENOISER
    evidence: tuple[str, ...] = ()


class Pays(StrEnum):
    """Whether joining projections makes a family faster; only ``measured`` enters a plan."""

    MEASURED = "measured"
    REFUTED = "refuted"
    UNKNOWN = "unknown"


class FusionSpec(Record):
    """Projections of one module that read the same input, and can share one GEMM.

    Args:
        within: tokens of the modules that hold them.
        parts: names of the projections in the module. The first one called computes for all, so it
            is the one that the model calls first.
    """

    within: tuple[str, ...] = Field(min_length=1)
    parts: tuple[str, ...] = Field(min_length=2)
    note: str = ""


class FusionUse(Record):
    """What is known of a fusion on a family.

    Args:
        expect: number of modules of the released model that hold its parts.
        evidence: required unless ``pays`` is ``unknown``.
    """

    pays: Pays
    expect: int
    evidence: tuple[str, ...] = ()


class FamilySpec(Record):
    """One family.

    Args:
        groups: names of the rule groups that apply, in order, before its own rules.
        measured: schemes for which there is evidence on this family, with the evidence ids.
        inputs: forward arguments of the shape-only probe at the released input sizes.
        short_streams: token to the fewest rows that its Linears can see, for side streams that are
            short or empty in some requests.
        kernels: fused ops that its components may mount; the first has a site that two want.
        fusions: by id, those that its denoisers can have under fused execution.
        tiny: name of the small model of its class.
    """

    title: str
    recognise: Recognition
    components: dict[str, ComponentSpec]
    groups: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    measured: dict[Scheme, tuple[str, ...]] = Field(default_factory=dict)
    geometry: Geometry | None = None
    inputs: dict[str, InputSpec] = Field(default_factory=dict)
    short_streams: dict[str, int] = Field(default_factory=dict)
    tiny: str = ""
    kernels: tuple[KernelSpec, ...] = ()
    fusions: dict[str, FusionUse] = Field(default_factory=dict)
    note: str = ""


class RuleFile(Record):
    """The whole of families.yaml.

    Args:
        min_features: Linears with fewer input or output features stay dense.
        rules: apply to every family, the generic one included.
        groups: rules that several families share.
        generic: rules of a denoiser whose class no family names.
        fusions: projections that can share one GEMM; which family has which is said there.
        tiny: small models of the denoiser classes, for zero rows and for tests.
    """

    version: int
    min_features: int
    schemes: dict[Scheme, SchemePolicy]
    ladders: tuple[Ladder, ...]
    evidence: dict[str, EvidenceRecord]
    rules: tuple[Rule, ...] = ()
    groups: dict[str, tuple[Rule, ...]] = Field(default_factory=dict)
    generic: tuple[Rule, ...] = ()
    fusions: dict[str, FusionSpec] = Field(default_factory=dict)
    tiny: dict[str, TinySpec] = Field(default_factory=dict)
    families: dict[str, FamilySpec]
