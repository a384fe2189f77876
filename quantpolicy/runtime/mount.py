"""The one place where fusions go onto a model and come off again.

All sites of all fusions are collected first; a fusion with a rejected or conflicting site, or with
none, is left out as a whole, with the reason. What a fusion changes where is in ``mounts``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack

from torch import nn

from quantpolicy.errors import KernelMountError
from quantpolicy.kernels.registry import DISABLE_VARIABLE, is_disabled
from quantpolicy.ops import MOUNTABLE
from quantpolicy.plan import PlannedKernel, QuantPlan
from quantpolicy.record import Record
from quantpolicy.runtime.mounts.site import (
    Conflicts,
    Site,
    Sites,
    Slot,
    check_slot,
    mounted_slots,
    set_slots,
)


class UnmountReport(Record):
    """How many sites were given back their own code, by op."""

    restored: dict[str, int]


class MountReport(Record):
    """What was mounted on one component.

    Args:
        mounted: number of sites by op.
        declined: the reason by op, for those left out.
    """

    mounted: dict[str, int]
    declined: dict[str, str]


def check_mounts(plan: QuantPlan) -> None:
    """Refuse a plan whose kernels this version does not have; changes nothing.

    Raises:
        KernelMountError: there is no such kernel.
    """
    for kernel in plan.kernels:
        if kernel.op not in MOUNTABLE:
            raise KernelMountError(
                f"{kernel.component}.{kernel.op}",
                "no such kernel",
                allowed="known kernels: " + ", ".join(MOUNTABLE),
                remedy="resolve the plan again with this version",
            )


def mount_planned(
    roots: Mapping[str, nn.Module], kernels: Iterable[PlannedKernel], undo: ExitStack
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Mount a plan's kernels on its components; ``undo`` takes what gives the classes back.

    Returns:
        What was mounted as ``component.op``, and the reasons for the rest by the same name.
    """
    mounted: list[str] = []
    declined: dict[str, str] = {}
    wanted = tuple(kernels)
    for name, root in roots.items():
        ops = tuple(kernel.op for kernel in wanted if kernel.component == name)
        if not ops:
            continue
        undo.callback(_restore_slots, _snapshot(root))
        report = mount(root, ops)
        mounted += [f"{name}.{op}" for op in report.mounted]
        declined |= {f"{name}.{op}": reason for op, reason in report.declined.items()}
    return tuple(mounted), declined


def mount(model: nn.Module, ops: Iterable[str]) -> MountReport:
    """Mount fusions on every one of their sites in a model; each as a whole, or not at all.

    Mounting one again changes nothing. On a failure half-way every object has the class that it
    had before.

    Args:
        ops: names of fusions; when two want the same site, the first has it.

    Raises:
        KernelMountError: a name is unknown.
    """
    conflicts = Conflicts()
    taken: dict[str, Sites] = {}
    declined: dict[str, str] = {}
    for op in dict.fromkeys(ops):
        sites = _find_sites(op, model)
        reason = _why_not(op, sites) or conflicts.claim(op, sites)
        if reason:
            declined[op] = reason
        else:
            taken[op] = sites
    with ExitStack() as undo:
        undo.callback(_restore_slots, _snapshot(model))
        for op, sites in taken.items():
            for site in sites.found:
                _switch_on(op, site)
        undo.pop_all()
    return MountReport(
        mounted={op: len(sites.found) for op, sites in taken.items()}, declined=declined
    )


def unmount(model: object) -> UnmountReport:
    """Give every site of a mounted fusion its own code back; a model without one stays as it is.

    Quantised weights stay: they are no mount.

    Args:
        model: a module, a pipeline, or a mapping of names to modules.
    """
    restored: dict[str, int] = {}
    for target in _targets(model):
        for slot in mounted_slots(target).values():
            restored[slot.op] = restored.get(slot.op, 0) + 1
        set_slots(target, {})
    return UnmountReport(restored=restored)


def mounted_ops(model: object) -> dict[str, int]:
    """Return the number of sites of every fusion that is mounted on a model."""
    counts: dict[str, int] = {}
    for target in _targets(model):
        for slot in mounted_slots(target).values():
            counts[slot.op] = counts.get(slot.op, 0) + 1
    return counts


def _finders() -> dict[str, list[Callable[[nn.Module], Sites]]]:
    """Return all that find sites of each op; diffusers is imported here and no earlier."""
    from quantpolicy.runtime.mounts import (
        feed_forward,
        gated_feed_forward,
        hunyuanvideo_sites,
        minimax_h3_denoiser_sites,
        minimax_h3_sites,
        trim,
        wan_sites,
        z_image_sites,
    )

    modules = (
        trim,
        hunyuanvideo_sites,
        minimax_h3_sites,
        minimax_h3_denoiser_sites,
        wan_sites,
        z_image_sites,
        feed_forward,
        gated_feed_forward,
    )
    finders: dict[str, list[Callable[[nn.Module], Sites]]] = {}
    for module in modules:
        for op, find in module.FINDERS.items():
            finders.setdefault(op, []).append(find)
    return finders


def _find_sites(op: str, model: nn.Module) -> Sites:
    if op not in MOUNTABLE:
        raise KernelMountError(
            op,
            "no such kernel",
            allowed="known kernels: " + ", ".join(MOUNTABLE),
            remedy="name one of them",
        )
    parts = [find(model) for find in _finders()[op]]
    return Sites(
        tuple(site for sites in parts for site in sites.found),
        tuple(rejection for sites in parts for rejection in sites.rejected),
    )


def _why_not(op: str, sites: Sites) -> str:
    if is_disabled(op):
        return f"switched off by {DISABLE_VARIABLE}"
    if sites.rejected:
        name, reason = sites.rejected[0]
        more = len(sites.rejected) - 1
        return f"{name or 'the model'}: {reason}" + (f" (and {more} more sites)" if more else "")
    return "" if sites.found else "the model has no site for it"


def _switch_on(op: str, site: Site) -> None:
    check_slot(site)
    set_slots(site.target, {**mounted_slots(site.target), site.slot: Slot(site.rewrite, op)})


def _snapshot(model: nn.Module) -> list[tuple[object, Mapping[str, Slot]]]:
    return [(target, mounted_slots(target)) for target in _targets(model)]


def _restore_slots(snapshot: list[tuple[object, Mapping[str, Slot]]]) -> None:
    for target, slots in snapshot:
        set_slots(target, slots)


def _targets(model: object) -> Iterator[object]:
    """Yield every object that a fusion may change: the modules, and their attention processors."""
    seen: set[int] = set()
    for root in _roots(model):
        for module in root.modules():
            for target in (module, vars(module).get("processor")):
                if target is not None and id(target) not in seen:
                    seen.add(id(target))
                    yield target


def _roots(model: object) -> list[nn.Module]:
    if isinstance(model, nn.Module):
        return [model]
    parts = model if isinstance(model, Mapping) else getattr(model, "components", {})
    return [part for part in parts.values() if isinstance(part, nn.Module)]
