"""A plan as plain text for a person: what runs, what was considered, what stays dense and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from quantpolicy.match import block_pattern
from quantpolicy.plan import ComponentPlan, Decision, QuantPlan
from quantpolicy.schemes import Cause, Scheme, weight_bytes
from quantpolicy.text import align, format_bytes

INDENT = "  "


def explain_plan(plan: QuantPlan) -> str:
    """Return the explanation of a plan, one section after another, without colour."""
    sections = [
        _headline(plan),
        _section("Components", _components(plan)),
        _section("Decisions", _decisions(plan.decisions)),
        _section(
            "Predicted ms of a step, without what fusions save",
            _times(plan.decisions),
        ),
        _section("Kernels", _kernels(plan)),
        _section("Kept dense", _kept(plan)),
        _section("Memory", _memory(plan)),
        _section("Notes", (f"  - {note}" for note in plan.notes)),
    ]
    return "\n".join(section for section in sections if section)


def _headline(plan: QuantPlan) -> str:
    host = plan.host
    arch = f", {host.arch}" if host.arch else ""
    compiled = "no compile"
    if plan.compile.mode != "none":
        autotune = ", max autotune" if plan.compile.max_autotune else ""
        compiled = f"{plan.compile.mode} compile{autotune}"
    lines = [
        f"{plan.family} on {host.name} ({host.backend}{arch}, {host.host_class}, "
        f"{format_bytes(host.memory_bytes, 0)})",
        f"  tier {plan.tier} ({compiled}), quality {plan.quality}, execution {plan.execution}",
    ]
    if plan.workload is not None:
        origin = "declared inputs" if plan.workload.declared else "as requested"
        lines.append(
            f"  {plan.workload.image_tokens} image tokens, batch {plan.workload.batch}, {origin}"
        )
    if plan.fusions:
        counts = Counter((fusion.component, fusion.name) for fusion in plan.fusions)
        joined = ", ".join(f"{name} at {n} places of {part}" for (part, name), n in counts.items())
        lines.append(f"  fusions: {joined}")
    if plan.lifted:
        lines.append(f"  lifted rules: {', '.join(plan.lifted)}")
    lines.append(f"  weights {plan.weights_digest[:16]}, plan {plan.plan_digest[:16]}")
    return "\n".join(lines) + "\n"


def _section(title: str, lines: Iterable[str]) -> str:
    body = "\n".join(lines)
    return f"{title}\n{body}\n" if body else ""


def _components(plan: QuantPlan) -> list[str]:
    rows = []
    for name, component in plan.components.items():
        before, after = _layer_bytes(component)
        counts = bytes_text = settings = ""
        if component.scheme is not Scheme.DENSE:
            counts = f"{len(component.layers)} Linears quantised, {len(component.kept)} kept"
            bytes_text = f"{format_bytes(before)} -> {format_bytes(after)}"
            settings = _settings(component)
        rows.append([name, component.scheme, component.confidence, counts, bytes_text, settings])
    return align(rows, indent=INDENT) if rows else []


def _layer_bytes(component: ComponentPlan) -> tuple[int, int]:
    """Return the bytes of the quantised Linears' weights before and after."""
    before = after = 0
    for layer in component.layers:
        before += weight_bytes(Scheme.DENSE, *layer.shape, layer.dtype)
        after += weight_bytes(layer.scheme, *layer.shape, layer.dtype)
    return before, after


def _settings(component: ComponentPlan) -> str:
    settings = component.settings
    parts = [settings.granularity, settings.weight_dtype]
    if settings.activation_floor:
        parts.append(f"floor {settings.activation_floor:g}")
    padded = sum(layer.pad_rows > 0 for layer in component.layers)
    if padded:
        parts.append(f"{padded} padded")
    return ", ".join(part for part in parts if part)


def _decisions(decisions: Iterable[Decision]) -> list[str]:
    rows = [
        [
            decision.component,
            decision.candidate,
            "accepted" if decision.accepted else "rejected",
            decision.because,
            decision.detail,
        ]
        for decision in decisions
    ]
    return align(rows, indent=INDENT) if rows else []


def _kernels(plan: QuantPlan) -> list[str]:
    rows = [
        [
            decision.component,
            decision.op,
            decision.contract,
            "planned" if decision.accepted else "left out",
            decision.detail,
        ]
        for decision in plan.kernel_decisions
    ]
    return align(rows, indent=INDENT) if rows else []


def _times(decisions: Iterable[Decision]) -> list[str]:
    """Return a row for each candidate with a prediction: its items, and their sum."""
    rows: list[list[str]] = []
    for decision in decisions:
        if decision.predicted_ms is None:
            continue
        if not rows:
            rows.append(["", "", *(item.what for item in decision.predicted), "total"])
        times = [*(item.ms for item in decision.predicted), decision.predicted_ms]
        rows.append([decision.component, decision.candidate, *(f"{time:,.3f}" for time in times)])
    return align(rows, right=frozenset(range(2, 7)), indent=INDENT) if rows else []


def _kept(plan: QuantPlan) -> Iterator[str]:
    rows = []
    for name, component in plan.components.items():
        counts: dict[tuple[str, str, str], int] = {}
        for layer in component.kept:
            is_dense = layer.because is Cause.DENSE_COMPONENT
            pattern = "every Linear" if is_dense else block_pattern(layer.name)
            key = (pattern, layer.because, layer.rule)
            counts[key] = counts.get(key, 0) + 1
        rows += [
            [name, pattern, str(count), because, rule]
            for (pattern, because, rule), count in counts.items()
        ]
    if rows:
        yield from align(rows, right=frozenset({2}), indent=INDENT)


def _memory(plan: QuantPlan) -> list[str]:
    memory = plan.memory
    rows = [[item.component, item.what, f"{item.bytes:,}"] for item in memory.items]
    verdict = "fits" if memory.fits else "does not fit"
    rows.append(["total", f"{verdict} {memory.budget_bytes:,}", f"{memory.total_bytes:,}"])
    return align(rows, right=frozenset({2}), indent=INDENT)
