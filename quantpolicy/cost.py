"""How large a plan is: the itemised memory estimate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quantpolicy.host import Backend, Host
from quantpolicy.layers import GroupedLinears, LinearGroup, Verdict
from quantpolicy.plan import MemoryItem, MemoryPlan
from quantpolicy.schemes import Scheme, weight_bytes
from quantpolicy.target import TargetComponent

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
