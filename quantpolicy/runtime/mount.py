"""The one place where fusions go onto a model and come off again.

``MOUNTS`` is the registry: the name of an op, and what puts it on every site of a component. There
is no op yet.
"""

from __future__ import annotations

from quantpolicy.errors import KernelMountError
from quantpolicy.plan import QuantPlan
from quantpolicy.record import Record


class UnmountReport(Record):
    """How many sites were given back their own code, by op."""

    restored: dict[str, int]


def check_mounts(plan: QuantPlan) -> None:
    """Refuse a plan whose kernels this version does not have; changes nothing.

    Raises:
        KernelMountError: there is no such kernel.
    """
    if plan.kernels:
        kernel = plan.kernels[0]
        raise KernelMountError(
            f"{kernel.component}.{kernel.op}",
            "no such kernel",
            allowed="known kernels: none",
            remedy="resolve the plan again with this version",
        )


def unmount(model: object) -> UnmountReport:
    """Give every site of a mounted fusion its own code back; a model without one stays as it is.

    Quantised weights stay: they are no mount.
    """
    del model
    return UnmountReport(restored={})
