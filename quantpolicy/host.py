"""A host: the facts of one machine, as data. Presets ship; detect() reads this machine.

Which scheme a host prefers is policy and lives in families.yaml.
"""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Self

import yaml
from pydantic import Field, field_validator, model_validator

from quantpolicy.errors import RequestError, RuleTableError
from quantpolicy.paths import is_file
from quantpolicy.record import MAX_SAFE_INTEGER, Record
from quantpolicy.schemes import Execution, Scheme

PRESETS_FILE = Path(__file__).parent / "data" / "hosts.yaml"
FP8_DTYPES = ("float8_e4m3fn", "float8_e4m3fnuz")


Speed = Annotated[float, Field(gt=0)]


class Backend(StrEnum):
    """What runs the model."""

    CUDA = "cuda"
    ROCM = "rocm"
    MPS = "mps"
    CPU = "cpu"


GPU_BACKENDS = (Backend.CUDA, Backend.ROCM)


class HostClass(StrEnum):
    """The market segment of the accelerator, which decides the order of the candidates."""

    DATA_CENTER = "data_center"
    WORKSTATION = "workstation"
    CONSUMER = "consumer"
    INTEGRATED = "integrated"
    CPU = "cpu"


class GemmLimit(Record):
    """Shapes that the GEMM of a scheme rejects: fewer rows than ``min_rows``.

    Args:
        min_rows: fewest activation rows that work.
        min_in_features: the limit applies to Linears with at least this many input features.
        bias_only: the limit applies to Linears with a bias only.
    """

    scheme: Scheme
    min_rows: int = Field(ge=1, le=MAX_SAFE_INTEGER)
    min_in_features: int = Field(default=0, ge=0, le=MAX_SAFE_INTEGER)
    bias_only: bool = False

    def applies(self, scheme: Scheme, in_features: int, has_bias: bool) -> bool:
        """Tell whether the limit concerns a Linear of these properties."""
        return (
            scheme is self.scheme
            and in_features >= self.min_in_features
            and (has_bias or not self.bias_only)
        )


class Rates(Record):
    """Measured or published speeds of the host.

    Args:
        gemm_tflops: effective TFLOP/s of a large Linear per scheme, ``dense`` being bf16.
        fused_gemm_tflops: the same under fused execution, for the schemes where it differs.
        attention_tflops: effective TFLOP/s of bf16 attention at many rows, softmax not counted.
        masked_attention_tflops: the same with a mask given.
        copy_gb_per_s: device-to-device copy, bytes read plus bytes written, GB/s (10^9).
        launch_us: host-side cost of one eager op, with the Python around it, microseconds.
        source: where the numbers come from.
        measured_tokens: fewest and most image tokens of the measured steps that the rates
            reproduce; None when no step was measured.
    """

    gemm_tflops: dict[Scheme, Speed]
    attention_tflops: Speed
    masked_attention_tflops: Speed
    copy_gb_per_s: Speed
    launch_us: float = Field(ge=0)
    source: str
    fused_gemm_tflops: dict[Scheme, Speed] = Field(default_factory=dict)
    measured_tokens: tuple[int, int] | None = None

    def tflops(self, scheme: Scheme, execution: Execution) -> float | None:
        """Return the rate of a scheme's GEMM under an execution, None when not known."""
        own = self.fused_gemm_tflops if execution is Execution.FUSED else {}
        return own.get(scheme, self.gemm_tflops.get(scheme))


class Host(Record):
    """One machine.

    Args:
        name: preset name, or the device name as reported.
        arch: ``sm90`` for CUDA, ``gfx942`` for ROCm, "" elsewhere.
        memory_bytes: memory of one device (of the machine, for MPS and CPU).
        fp8_dtype: the fp8 type that its matrix units multiply; "" when they multiply none.
        gemm_limits: shapes its GEMMs reject.
        rates: None when nothing is known; no time is predicted then.
    """

    name: str
    backend: Backend
    arch: str
    host_class: HostClass
    memory_bytes: int = Field(ge=1, le=MAX_SAFE_INTEGER, strict=True)
    fp8_dtype: str
    gemm_limits: tuple[GemmLimit, ...] = ()
    rates: Rates | None = None

    @field_validator("fp8_dtype")
    @classmethod
    def _check_fp8_dtype(cls, value: str) -> str:
        if value not in ("", *FP8_DTYPES):
            raise ValueError(f"{value!r} is no fp8 type; known: {', '.join(FP8_DTYPES)}, or empty")
        return value

    @model_validator(mode="after")
    def _check_arch(self) -> Self:
        form = {Backend.CUDA: r"sm\d{2,3}", Backend.ROCM: r"gfx[0-9a-f]{3,4}"}.get(self.backend, "")
        if not re.fullmatch(form, self.arch):
            wanted = "such as sm90" if self.backend is Backend.CUDA else "such as gfx942"
            wanted = wanted if form else "empty"
            raise ValueError(f"arch {self.arch!r} of a {self.backend} host must be {wanted}")
        return self

    @property
    def sm(self) -> int:
        """CUDA compute capability as one number (90 for 9.0), 0 for other back ends."""
        return int(self.arch[2:]) if self.backend is Backend.CUDA else 0

    def min_rows(self, scheme: Scheme, in_features: int, has_bias: bool) -> int:
        """Return the fewest activation rows that such a Linear accepts, at least 1."""
        limits = [
            limit.min_rows
            for limit in self.gemm_limits
            if limit.applies(scheme, in_features, has_bias)
        ]
        return max(limits, default=1)

    @classmethod
    def load(cls, preset_or_file: str | Path) -> Host:
        """Return a preset by name, or a host read from a YAML or JSON file.

        Raises:
            RequestError: there is no such preset or file, or the file is malformed.
        """
        name = str(preset_or_file)
        presets = load_presets()
        if name in presets:
            return presets[name]
        path = Path(preset_or_file)
        if not is_file(path):
            raise RequestError(
                f"host {name!r}",
                "no such preset or file",
                allowed="known presets: " + ", ".join(presets),
                remedy="choose one, or give a YAML file with a host record",
            )
        return _read_host(path)

    @classmethod
    def detect(cls) -> Host:
        """Return the facts of this machine. Imports torch.

        A device like no preset gets no rates: its plans carry no predicted times.
        """
        from quantpolicy.detect import detect_host

        return detect_host()


def _read_host(path: Path) -> Host:
    from quantpolicy.rule_errors import validate_source
    from quantpolicy.yaml_source import read_yaml

    try:
        return validate_source(Host, read_yaml(path))
    except RuleTableError as error:
        further = [
            f"{other.where.removeprefix(f'{path}:')}: {other.found}" for other in error.others
        ]
        raise RequestError(
            error.where,
            "; line ".join([error.found, *further]),
            allowed="" if further else error.allowed,
            remedy="give a host record such as the one in `quantpolicy doctor --json`",
        ) from error


@lru_cache(maxsize=1)
def load_presets() -> dict[str, Host]:
    """Return the shipped hosts by name, in the order of the file."""
    from quantpolicy.yaml_source import LOADER

    hosts = yaml.load(PRESETS_FILE.read_bytes(), Loader=LOADER).items()
    return {name: Host.model_validate({"name": name, **fields}) for name, fields in hosts}
