"""Load a baked component: validated, memory-mapped, guarded like a model quantised at run time.

A stale one is refused, or made anew from the dense weights when the caller says so.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from prequant.header import Header
from prequant.manifest import open_baked
from prequant.skeleton import build_skeleton, fill_skeleton, model_class
from prequant.tree import hash_file
from prequant.validate import (
    Findings,
    Standard,
    check_component,
    check_pipeline,
    raise_findings,
)
from quantpolicy.errors import Mismatch, PlanMismatchError, RequestError
from quantpolicy.inventory.weight_files import CONFIG_FILE, find_weights, read_json_file
from quantpolicy.paths import is_file
from quantpolicy.plan import ComponentPlan, QuantPlan
from quantpolicy.record import sha256_of
from quantpolicy.resolver import resolve
from quantpolicy.runtime.apply import apply_plan, switch_execution
from quantpolicy.runtime.count import count_component, count_mismatches
from quantpolicy.runtime.execution import refuse_saving
from quantpolicy.runtime.mount import mount_planned
from quantpolicy.runtime.report import ComponentReport, MountedKernels, explain_component
from quantpolicy.runtime.smoke import failed_gemms
from quantpolicy.schemes import ComponentKind

if TYPE_CHECKING:
    from quantpolicy.host import Host
    from quantpolicy.request import Request
    from quantpolicy.rules import RuleTable


class OnStale(StrEnum):
    """What to do with a stale checkpoint."""

    RAISE = "raise"
    REQUANTISE = "requantise"


class LoadReport(MountedKernels):
    """How a model was loaded; the counts are of its tensors afterwards.

    Args:
        used: ``baked`` or ``requantised``.
        source: the folder the weights came from.
        stale: what was outdated about the checkpoint when it was requantised.
    """

    used: str
    source: str
    weights_digest: str
    plan_digest: str
    stale: tuple[str, ...]
    component: ComponentReport

    def explain(self) -> str:
        """Return the report as text for a person."""
        lines = [f"{self.used} weights from {self.source}"]
        lines += [f"  stale: {mismatch}" for mismatch in self.stale]
        return "\n".join([*lines, *explain_component(self.component), *self._explain_mounts()])


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to run, and how it came about."""

    model: nn.Module
    report: LoadReport


def load(
    folder: str | os.PathLike[str],
    *,
    host: Host | None = None,
    request: Request | None = None,
    on_stale: str = "raise",
    source: str | os.PathLike[str] | None = None,
    device: str | torch.device = "cpu",
    component: str | None = None,
    rules: RuleTable | None = None,
) -> Loaded:
    """Load one baked component, in evaluation mode and without gradients, with its kernels.

    Args:
        folder: a baked component, or a pipeline that holds one.
        host: what the weights must suit; the host they were baked for when None.
        request: what the weights must answer, and how they are run; the request they were baked for
            when None.
        on_stale: ``raise``, or ``requantise``: quantise the dense ``source`` by today's rules.
        source: the dense component, for ``requantise``.
        device: where the model goes.
        component: which one of a pipeline with several.
        rules: the shipped table when None.

    Raises:
        RequestError: a folder or an argument is unusable.
        CorruptCheckpointError: the checkpoint is damaged; it is never requantised.
        StaleCheckpointError: it is outdated, and ``on_stale`` is ``raise``.
        PlanMismatchError: the device does not run the scheme's GEMM.
    """
    policy = _on_stale(on_stale)
    target = _device(device)
    path = _component_folder(folder, component)
    standard = Standard(host=host, request=request, rules=rules)
    findings = check_component(path, standard)
    stale = tuple(findings.stale)
    if findings.corrupt or (stale and policy is OnStale.RAISE):
        raise_findings(path, [findings])
    assert findings.header is not None
    if component is not None and findings.header.component != component:
        raise RequestError(
            str(path),
            f"is the component {findings.header.component!r}, not {component!r}",
            remedy="leave component= out, or give the folder of that component",
        )
    if stale:
        return _requantise(findings, findings.header, source, target, standard)
    assert findings.files is not None
    assert findings.files.config is not None
    assert findings.expected is not None
    header, plan = findings.header, findings.expected
    part = plan.components[header.component]
    _check_gemms(part, target, plan)
    dtype = getattr(torch, part.dtype)
    model = build_skeleton(header.class_name, findings.files.config, dtype)
    fill_skeleton(model, findings.files, part, target)
    refuse_saving(header.component, model)
    switch_execution(model, plan, component=header.component)
    mounted, declined = mount_planned({header.component: model}, plan.kernels, ExitStack())
    kernels = MountedKernels(mounted=mounted, declined=declined)
    report = _report(model, header.component, plan, kernels, used="baked", source=path, stale=())
    return Loaded(model, report)


def _on_stale(value: str) -> OnStale:
    try:
        return OnStale(value)
    except ValueError as error:
        raise RequestError(
            "on_stale",
            f"unknown value {value!r}",
            allowed="known: " + ", ".join(OnStale),
            remedy="choose one of these",
        ) from error


def _device(device: str | torch.device) -> torch.device:
    try:
        target = torch.device(device)
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise RequestError(
            "device",
            f"{str(device)!r} cannot be used: {reason}",
            remedy="give a device that this machine has, such as cpu",
        ) from error
    return target


def _component_folder(folder: str | os.PathLike[str], component: str | None) -> Path:
    """Return the folder of the component; of a pipeline, the rest is checked too."""
    opened = open_baked(folder)
    baked = opened.components
    if opened.manifest is None:
        return opened.folder
    raise_findings(opened.folder, [check_pipeline(opened)])
    if component is None and len(baked) == 1:
        return next(iter(baked.values()))
    if component not in baked:
        found = f"no baked component {component!r}" if component else "several baked components"
        raise RequestError(
            str(folder),
            found,
            allowed="there are: " + ", ".join(baked),
            remedy="name one with component=",
        )
    return baked[component]


def _check_gemms(part: ComponentPlan, device: torch.device, plan: QuantPlan) -> None:
    """Refuse a device that cannot run what is about to be loaded."""
    gemms = ((layer.scheme, device, getattr(torch, layer.dtype)) for layer in part.layers)
    faults = [
        Mismatch("gemm_fails", scheme, f"a GEMM on {device}", failure)
        for scheme, _, failure in failed_gemms(gemms, part.settings, plan.execution)
    ]
    if faults:
        raise PlanMismatchError(str(device), faults, remedy="load on a device that runs the scheme")


def _requantise(
    findings: Findings,
    header: Header,
    source: str | os.PathLike[str] | None,
    device: torch.device,
    standard: Standard,
) -> Loaded:
    if source is None:
        origin = f" (it was baked from {header.source.repo})" if header.source.repo else ""
        raise RequestError(
            str(findings.folder),
            f"stale, and no dense source was given{origin}",
            remedy="give the dense component with source=",
        )
    folder = _dense_folder(Path(source), header)
    host = standard.host or header.host
    request = standard.request or QuantPlan.from_dict(header.plan).request
    plan = resolve(folder, host=host, request=request, rules=standard.rules)
    name = planned_name(plan, header.component, folder)
    part = plan.components[name]
    dtype = getattr(torch, part.dtype)
    model = model_class(header.class_name).from_pretrained(str(folder), torch_dtype=dtype)
    model = model.requires_grad_(requires_grad=False).eval().to(device)
    kernels = apply_plan(model, plan, component=name)
    stale = tuple(findings.stale)
    report = _report(model, name, plan, kernels, used="requantised", source=folder, stale=stale)
    return Loaded(model, report)


def planned_name(plan: QuantPlan, component: str, folder: Path) -> str:
    """Return the plan's name of the component; a denoiser alone may be planned under another."""
    denoisers = [n for n, part in plan.components.items() if part.kind is ComponentKind.DENOISER]
    if component in plan.components:
        return component
    if len(denoisers) != 1:
        raise RequestError(
            str(folder),
            f"its plan has no {component}",
            allowed="planned are: " + ", ".join(plan.components),
            remedy="give the dense component that was baked, alone or in its pipeline",
        )
    return denoisers[0]


def _dense_folder(source: Path, header: Header) -> Path:
    """Return the dense component's folder; a pipeline's folder leads to it."""
    folder = source / header.component
    if not is_file(folder / CONFIG_FILE):
        folder = source
    config = read_json_file(folder / CONFIG_FILE)
    if config.get("_class_name") != header.class_name:
        raise RequestError(
            str(folder),
            f"holds a {config.get('_class_name')}",
            allowed=f"the checkpoint was baked from a {header.class_name}",
            remedy="give the dense component that it was baked from",
        )
    if sha256_of(config) != header.source.config_digest:
        raise RequestError(
            str(folder),
            "its config.json is not the one that was baked",
            remedy="give the dense component that it was baked from",
        )
    _check_source_files(folder, header)
    return folder


def _check_source_files(folder: Path, header: Header) -> None:
    """Refuse weights that are not those that were baked: by name and size first, then by hash."""
    listed = header.source.files
    paths = {path.name: path for path in find_weights(folder).files}
    found = ""
    if paths.keys() != listed.keys():
        found = f"its weight files are not {', '.join(sorted(listed))}"
    for name in sorted(listed.keys() & paths.keys()):
        found = found or _size_fault(name, paths[name], listed[name].bytes)
    for name in sorted(listed):
        if not found and hash_file(paths[name]) != listed[name].sha256:
            found = f"{name} holds other bytes than were baked"
    if found:
        raise RequestError(
            str(folder), found, remedy="give the dense component that it was baked from"
        )


def _size_fault(name: str, path: Path, expected: int) -> str:
    nbytes = path.stat().st_size if path.is_file() else 0
    return "" if nbytes == expected else f"{name} has {nbytes} bytes, {expected} were baked"


def _report(
    model: nn.Module,
    name: str,
    plan: QuantPlan,
    kernels: MountedKernels,
    *,
    used: str,
    source: Path,
    stale: tuple[Mismatch, ...],
) -> LoadReport:
    part = plan.components[name]
    counted = count_component(name, model, part, planned=part.scheme)
    mismatches = count_mismatches(counted, part)
    if mismatches:
        raise PlanMismatchError(name, mismatches, remedy="report this; the model was not loaded")
    return LoadReport(
        used=used,
        source=str(source),
        weights_digest=part.weights_digest,
        plan_digest=plan.plan_digest,
        stale=tuple(str(mismatch) for mismatch in stale),
        component=counted,
        mounted=kernels.mounted,
        declined=kernels.declined,
    )
