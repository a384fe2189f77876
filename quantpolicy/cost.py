"""What a scheme costs: a roofline over the Linears, and the itemised memory estimate.

Predicted times are for the Linears of one forward only: attention, norms and the rest cost the same
under every candidate and are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quantpolicy.host import Backend, Host, Rates
from quantpolicy.layers import GroupedLinears, LinearGroup, Verdict
from quantpolicy.plan import MemoryItem, MemoryPlan
from quantpolicy.schemes import Execution, Scheme, weight_bytes
from quantpolicy.target import TargetComponent

# Launches that one Linear costs the host. A torchao Linear goes through the dispatch of a tensor
# subclass, compiled or not; evidence l.subclass-overhead tells how much.
LAUNCHES = {
    Execution.TORCHAO: {Scheme.INT8: 7, Scheme.FP8: 15, Scheme.MXFP8: 15, Scheme.NVFP4: 15},
    Execution.FUSED: {Scheme.INT8: 2, Scheme.FP8: 2, Scheme.MXFP8: 2, Scheme.NVFP4: 2},
}

# A row is read for its maximum and for the cast, in fused ops once for both, and written once as
# one byte.
QUANTISE_BYTES_PER_VALUE = {Execution.TORCHAO: 5, Execution.FUSED: 3}
ACTIVATION_BYTES = 2
# Input and output of the widest Linear, and as much again for the residual and its neighbours.
LIVE_COPIES = 2
DEVICE_CONTEXT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of a component under a scheme; ``what`` is the item's name in the memory estimate."""

    items: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        """Sum of the items."""
        return sum(size for _, size in self.items)


def predict_ms(
    groups: Sequence[LinearGroup],
    verdicts: Sequence[Verdict],
    scheme: Scheme,
    host: Host,
    execution: Execution,
) -> float | None:
    """Return the predicted milliseconds of all Linears of one forward.

    Args:
        verdicts: of each group; Linears that the scheme does not take cost what dense ones cost.

    Returns:
        None when the host's rates or a Linear's rows are not known.
    """
    rates = host.rates
    if rates is None or any(group.rows is None for group in groups) or not groups:
        return None
    speed, dense_speed = rates.tflops(scheme, execution), rates.tflops(Scheme.DENSE, execution)
    if speed is None or dense_speed is None:
        return None
    device = launches = 0.0
    for group, verdict in zip(groups, verdicts, strict=True):
        own, tflops = (scheme, speed) if verdict.because is None else (Scheme.DENSE, dense_speed)
        # Fused ops take few rows as they are.
        padding = verdict.pad_rows if execution is Execution.TORCHAO else 0
        read = QUANTISE_BYTES_PER_VALUE[execution]
        device += group.count * _linear_seconds(group, padding, own, tflops, rates, read)
        launches += group.count * LAUNCHES[execution].get(own, 1)
    # Launches run ahead of the device, so the longer of the two is what a forward takes.
    return round(max(device * 1e3, launches * rates.launch_us * 1e-3), 3)


def _linear_seconds(
    group: LinearGroup,
    pad_rows: int,
    scheme: Scheme,
    tflops: float,
    rates: Rates,
    quantise_bytes: int,
) -> float:
    """Return the device time of one Linear: of its arithmetic or its bytes, and of quantising."""
    linear = group.sample
    rows = max(group.rows or 0, pad_rows)
    n, k = linear.out_features, linear.in_features
    copy = rates.copy_gb_per_s * 1e9
    arithmetic = 2.0 * rows * n * k / (tflops * 1e12)
    weights = weight_bytes(scheme, n, k, linear.dtype)
    input_bytes = ACTIVATION_BYTES if scheme is Scheme.DENSE else 1
    traffic = (rows * k * input_bytes + weights + rows * n * ACTIVATION_BYTES) / copy
    quantise = 0.0 if scheme is Scheme.DENSE else rows * k * quantise_bytes / copy
    return max(arithmetic, traffic) + quantise


def component_bytes(
    component: TargetComponent,
    grouped: GroupedLinears,
    verdicts: Sequence[Verdict],
    scheme: Scheme,
) -> WeightBytes:
    """Return the resident bytes of a component under a scheme, itemised."""
    if component.inventory is None:
        return WeightBytes((("dense weights, not itemised", component.dense_bytes),))
    taken = kept = 0
    for group, verdict in zip(grouped.groups, verdicts, strict=True):
        linear = group.sample
        if verdict.because is None and scheme is not Scheme.DENSE:
            size = weight_bytes(scheme, linear.out_features, linear.in_features, linear.dtype)
            taken += group.count * size
        else:
            kept += group.count * linear.dense_bytes
    items = (
        (f"{scheme} Linears", taken),
        ("dense Linears", kept),
        ("other parameters and buffers", component.inventory.other_bytes),
    )
    return WeightBytes(tuple(item for item in items if item[1]))


def activation_bytes(groups: Iterable[LinearGroup]) -> int:
    """Return the bytes to reserve for the activations of one forward."""
    widest = max(
        (
            (group.rows or 0) * (group.sample.in_features + group.sample.out_features)
            for group in groups
        ),
        default=0,
    )
    return widest * ACTIVATION_BYTES * LIVE_COPIES


def plan_memory(
    parts: dict[str, WeightBytes], activations: int, host: Host, budget_bytes: int
) -> MemoryPlan:
    """Return the memory estimate of a whole plan.

    Args:
        parts: by component, in the order of the plan.
        activations: the reserve of the largest denoiser; experts run one at a time.
    """
    items = [
        MemoryItem(component=name, what=what, bytes=size)
        for name, part in parts.items()
        for what, size in part.items
    ]
    if activations:
        items.append(MemoryItem(component="runtime", what="activations", bytes=activations))
    if host.backend in (Backend.CUDA, Backend.ROCM):
        item = MemoryItem(
            component="runtime", what="device context and workspaces", bytes=DEVICE_CONTEXT_BYTES
        )
        items.append(item)
    total = sum(item.bytes for item in items)
    return MemoryPlan(
        items=tuple(items),
        total_bytes=total,
        budget_bytes=budget_bytes,
        fits=total <= budget_bytes,
    )
