"""Validate a baked component or pipeline: damaged, outdated, or what today's rules would bake.

Torch-free and from headers alone, unless asked for hashes and values. Every finding is collected
before one error is raised; damage wins over staleness.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from prequant.baked import BakedFiles, read_baked_files
from prequant.damage import file_faults, header_faults, read_plan, weight_faults
from prequant.header import Header, parse_header
from prequant.manifest import Baked, manifest_faults, open_baked, place_faults
from prequant.report import ValidatedComponent, ValidateReport
from prequant.scan import value_faults
from prequant.staleness import (
    family_mismatches,
    form_mismatches,
    identity_mismatches,
    plan_today,
    version_mismatches,
    weights_mismatches,
)
from quantpolicy.errors import CorruptCheckpointError, Mismatch, StaleCheckpointError
from quantpolicy.plan import QuantPlan

if TYPE_CHECKING:
    from quantpolicy.host import Host
    from quantpolicy.request import Request
    from quantpolicy.rules import RuleTable

CHECKS = ("header", "files", "weights", "forms", "rules")


@dataclass(frozen=True, slots=True)
class Standard:
    """What a component is held against.

    Args:
        plan: this plan; what ``rules`` resolve when None.
        host: resolve for this host; the header's when None.
        request: resolve this request; the header's when None.
        rules: the shipped table when None.
        full: also check hashes and values.
    """

    plan: QuantPlan | None = None
    host: Host | None = None
    request: Request | None = None
    rules: RuleTable | None = None
    full: bool = False


@dataclass(slots=True)
class Findings:
    """What is wrong with one component, and what was read on the way.

    Args:
        name: "" for a pipeline's own files.
        expected: the plan it was held against, None when none could be resolved.
    """

    name: str
    folder: Path
    corrupt: list[Mismatch] = field(default_factory=list)
    stale: list[Mismatch] = field(default_factory=list)
    header: Header | None = None
    files: BakedFiles | None = None
    expected: QuantPlan | None = None


def validate(
    folder: str | os.PathLike[str],
    *,
    plan: QuantPlan | None = None,
    full: bool = False,
    rules: RuleTable | None = None,
) -> ValidateReport:
    """Check a baked component folder, or every baked component of a pipeline folder.

    Args:
        plan: hold the weights against this plan; against what ``rules`` resolve for the header's
            host and request when None.
        full: also check the hash of every shard and scan the quantised values.
        rules: the shipped table when None.

    Raises:
        RequestError: there is no such folder.
        CorruptCheckpointError: damaged, or not baked at all; ``mismatches`` holds every finding.
        StaleCheckpointError: in order, but not what would be baked today.
    """
    baked = open_baked(folder)
    path = baked.folder
    standard = Standard(plan=plan, rules=rules, full=full)
    children = [child for child in baked.components.values() if child.is_dir()]
    findings = [check_component(child, standard) for child in children]
    raise_findings(path, [*findings, check_pipeline(baked, full=full)])
    checked = (*CHECKS, "hashes", "values") if full else CHECKS
    return ValidateReport(
        folder=str(path),
        full=full,
        against="the given plan" if plan is not None else "today's rules",
        components={item.name: _validated(item, checked) for item in findings},
    )


def check_pipeline(baked: Baked, *, full: bool = False) -> Findings:
    """Return what is wrong with a pipeline, the files of its baked components aside."""
    findings = Findings("", baked.folder)
    if baked.manifest is not None:
        parsed = {name: parse_header(path, []) for name, path in baked.components.items()}
        headers = {name: header for name, header in parsed.items() if header is not None}
        findings.corrupt += manifest_faults(baked.folder, baked.manifest, headers, full=full)
    return findings


def check_component(folder: Path, standard: Standard) -> Findings:
    """Return everything that is wrong with one baked component."""
    findings = Findings(folder.name, folder)
    header = parse_header(folder, findings.corrupt)
    files = read_baked_files(folder, findings.corrupt)
    if header is None:
        return findings
    findings.header, findings.files, findings.name = header, files, header.component
    findings.corrupt += header_faults(header)
    findings.corrupt += file_faults(files, header, full=standard.full)
    findings.corrupt += place_faults(folder, header)
    findings.stale += version_mismatches(header)
    baked = read_plan(header, findings.corrupt)
    if standard.full:
        findings.corrupt += value_faults(files, header)
    if baked is None or not files.headers:
        return findings
    part = baked.components[header.component]
    findings.corrupt += weight_faults(files, part)
    findings.stale += form_mismatches(files, part)
    _hold_against(standard, findings, header, baked, files)
    return findings


def raise_findings(path: Path, findings: list[Findings]) -> None:
    """Raise one error over the findings of all components, if there are any."""
    prefix = sum(bool(item.name) for item in findings) > 1
    corrupt = [_named(item, fault, prefix) for item in findings for fault in item.corrupt]
    stale = [_named(item, fault, prefix) for item in findings for fault in item.stale]
    if corrupt:
        raise CorruptCheckpointError(
            str(path), [*corrupt, *stale], remedy="copy the folder again, or bake it again"
        )
    if stale:
        raise StaleCheckpointError(
            str(path),
            stale,
            remedy="bake it again, or load it with on_stale='requantise' and source=, the dense "
            "component",
        )


def _named(item: Findings, fault: Mismatch, prefix: bool) -> Mismatch:
    if not prefix or not item.name:
        return fault
    return Mismatch(fault.code, f"{item.name}: {fault.subject}", fault.expected, fault.found)


def _hold_against(
    standard: Standard, findings: Findings, header: Header, baked: QuantPlan, files: BakedFiles
) -> None:
    """Add what differs from the given plan, or from what the rules resolve today."""
    expected = standard.plan
    if expected is None:
        expected, mismatches = _resolve_today(standard, header, baked, files)
    else:
        mismatches = list(identity_mismatches(expected, header))
    findings.stale += mismatches
    if expected is not None and header.component in expected.components:
        findings.expected = expected
        wanted = expected.components[header.component]
        findings.stale += weights_mismatches(wanted, header, baked.components[header.component])


def _resolve_today(
    standard: Standard, header: Header, baked: QuantPlan, files: BakedFiles
) -> tuple[QuantPlan | None, list[Mismatch]]:
    from quantpolicy.rules import load_rules

    rules = load_rules() if standard.rules is None else standard.rules
    mismatches = list(family_mismatches(header, rules))
    if mismatches:
        return None, mismatches
    host = standard.host or header.host
    return plan_today(header, baked, files, rules, host, standard.request or baked.request)


def _validated(item: Findings, checked: tuple[str, ...]) -> ValidatedComponent:
    header = item.header
    assert header is not None, "a component without a header has findings"
    return ValidatedComponent(
        name=header.component,
        folder=str(item.folder),
        family=header.family,
        scheme=header.scheme,
        weights_digest=header.weights_digest,
        plan_digest=header.plan_digest,
        source_digest=header.source.digest,
        counts=header.counts,
        checked=checked,
    )
