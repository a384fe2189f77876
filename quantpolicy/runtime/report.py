"""The report of an applied plan: what the model's tensors say afterwards. Torch-free records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from quantpolicy.plan import Decision
from quantpolicy.record import Record
from quantpolicy.schemes import Cause, Execution, Scheme
from quantpolicy.text import format_bytes

if TYPE_CHECKING:
    from quantpolicy.kernels.contract import OpCounts


class SchemeCount(Record):
    """The Linears of one component that are stored in one scheme.

    Args:
        parameters: weights in those Linears, biases left out.
        data_bytes: bytes of their data.
        scale_bytes: bytes of their scales and zero points.
        padded: how many of them pad few activation rows.
        emulated: how many of them are on a device without the scheme's GEMM and multiply
            dequantised operands.
        fused: how many of them run in fused ops.
    """

    scheme: Scheme
    layers: int
    parameters: int
    data_bytes: int
    scale_bytes: int
    padded: int = 0
    emulated: int = 0
    fused: int = 0


class SkippedLayers(Record):
    """Linears that stay dense for one reason; ``names`` are all of them."""

    because: Cause
    rule: str
    layers: int
    parameters: int
    names: tuple[str, ...]


class ComponentReport(Record):
    """One component after the plan was applied, adapters left out.

    Args:
        planned: the scheme of the plan.
        schemes: counts per scheme found, dense left out.
        dense_bytes: bytes of all other parameters and buffers.
        linear_parameters: weights in all Linears.
        total_parameters: all parameters, each shared one counted once.
        compiled: ``regional`` when the repeated blocks were compiled here, else ``none``.
        joined: groups of projections that share one GEMM.
    """

    name: str
    class_name: str
    planned: Scheme
    schemes: tuple[SchemeCount, ...]
    dense_bytes: int
    linear_parameters: int
    total_parameters: int
    skipped: tuple[SkippedLayers, ...]
    compiled: str = "none"
    joined: int = 0

    @property
    def quantised_layers(self) -> int:
        """Number of Linears that are not dense."""
        return sum(count.layers for count in self.schemes)

    @property
    def quantised_parameters(self) -> int:
        """Number of weights in them."""
        return sum(count.parameters for count in self.schemes)

    @property
    def linear_coverage(self) -> float:
        """Fraction of the Linears' weights that is quantised."""
        return self.quantised_parameters / max(self.linear_parameters, 1)

    @property
    def coverage(self) -> float:
        """Fraction of all parameters that is quantised."""
        return self.quantised_parameters / max(self.total_parameters, 1)

    @property
    def total_bytes(self) -> int:
        """Bytes of all parameters and buffers as stored."""
        return self.dense_bytes + sum(
            count.data_bytes + count.scale_bytes for count in self.schemes
        )

    def to_dict(self) -> dict[str, object]:
        """Return the record and its derived figures as plain JSON values."""
        return {
            **self.model_dump(mode="json"),
            "quantised_layers": self.quantised_layers,
            "quantised_parameters": self.quantised_parameters,
            "linear_coverage": self.linear_coverage,
            "coverage": self.coverage,
            "total_bytes": self.total_bytes,
        }


class MountedKernels(Record):
    """The fused ops on a model, and what they did since.

    Args:
        mounted: fused ops mounted, ``component.op``.
        declined: the reason for each planned op that was not mounted.
    """

    mounted: tuple[str, ...] = ()
    declined: dict[str, str] = Field(default_factory=dict)

    def op_counts(self) -> dict[str, OpCounts]:
        """Return what the fused ops did so far in this process, those mounted here first.

        To be asked after a run. An op that was never called has zeros; a call that took the eager
        chain instead of the kernel is in ``declines``, by reason.
        """
        from quantpolicy.kernels.contract import OpCounts, op_counts

        mounted = dict.fromkeys(name.rpartition(".")[2] for name in self.mounted)
        return {op: OpCounts(0, 0, 0, {}) for op in mounted} | op_counts()

    def explain_ops(self) -> str:
        """Return the counts of ``op_counts`` as text for a person."""
        lines = []
        for op, counts in self.op_counts().items():
            lines.append(
                f"{op}: {counts.calls} calls, {counts.verifications} signatures verified"
                + (f", {counts.refused} of them not bit-exact" if counts.refused else "")
            )
            lines += [f"  {count} declined: {why}" for why, count in counts.declines.items()]
        return "\n".join(lines)

    def _explain_mounts(self) -> list[str]:
        return [
            *(f"  mounted: {name}" for name in self.mounted),
            *(f"  not mounted: {name}: {why}" for name, why in self.declined.items()),
        ]


class ApplyReport(MountedKernels):
    """What ``apply_plan`` did, counted on the tensors.

    Args:
        components: by name, those that the call concerned.
        execution: how their quantised Linears are run.
        decisions: candidates given up on this device, such as a text encoder left dense because the
            scheme's GEMM does not run.
    """

    family: str
    weights_digest: str
    plan_digest: str
    components: dict[str, ComponentReport]
    decisions: tuple[Decision, ...] = ()
    execution: Execution = Execution.TORCHAO

    @property
    def quantised_layers(self) -> int:
        """Number of Linears that are not dense, in all components."""
        return sum(part.quantised_layers for part in self.components.values())

    @property
    def total_bytes(self) -> int:
        """Bytes of all parameters and buffers as stored, in all components."""
        return sum(part.total_bytes for part in self.components.values())

    def to_dict(self) -> dict[str, object]:
        """Return the report as plain JSON values."""
        return {
            "family": self.family,
            "weights_digest": self.weights_digest,
            "plan_digest": self.plan_digest,
            "components": {name: part.to_dict() for name, part in self.components.items()},
            "decisions": [decision.model_dump(mode="json") for decision in self.decisions],
            "mounted": list(self.mounted),
            "declined": dict(self.declined),
            "execution": self.execution.value,
            "quantised_layers": self.quantised_layers,
            "total_bytes": self.total_bytes,
        }

    def explain(self) -> str:
        """Return the report as text for a person."""
        lines = [
            f"{self.family}: {format_bytes(self.total_bytes)} of weights after applying, "
            f"execution {self.execution.value}"
        ]
        for part in self.components.values():
            lines += explain_component(part)
        lines += [f"  not applied: {decision.detail}" for decision in self.decisions]
        return "\n".join([*lines, *self._explain_mounts()])


def explain_component(part: ComponentReport) -> list[str]:
    """Return the lines on one component in a report for a person."""
    if not part.schemes:
        return [f"  {part.name} ({part.class_name}): dense, {format_bytes(part.dense_bytes)}"]
    lines = [
        f"  {part.name} ({part.class_name}): {part.linear_coverage:.1%} of the Linears' weights, "
        f"{part.coverage:.1%} of all parameters, {format_bytes(part.total_bytes)}"
    ]
    for count in part.schemes:
        lines.append(
            f"    {count.scheme.value}: {count.layers} layers, "
            f"data {format_bytes(count.data_bytes)}, scales {format_bytes(count.scale_bytes)}"
            + (f", {count.padded} padded" if count.padded else "")
            + (f", {count.emulated} emulated on this device" if count.emulated else "")
            + (f", {count.fused} in fused ops" if count.fused else "")
        )
    lines += [
        f"    dense: {group.layers} layers kept because {group.because.value} ({group.rule})"
        for group in part.skipped
    ]
    if part.joined:
        lines.append(f"    joined: {part.joined} groups of projections")
    if part.compiled != "none":
        lines.append(f"    compiled: {part.compiled}")
    return lines
