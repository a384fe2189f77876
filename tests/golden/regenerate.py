"""The golden plans: every family on every host preset, as compact JSON that reviews well.

    python -m tests.golden.regenerate

writes tests/golden/plans/FAMILY.json. Layers are grouped by block pattern, and a set of layers that
several hosts share is written once.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

from quantpolicy import Host, QuantPlan, load_rules, resolve
from quantpolicy.host import load_presets
from quantpolicy.match import block_pattern
from quantpolicy.plan import ComponentPlan

PLANS = Path(__file__).parent / "plans"


def summarise_family(family: str) -> dict[str, object]:
    """Return the plans of a family on all presets."""
    layer_sets: dict[str, object] = {}
    hosts = {
        name: _summarise_plan(resolve(family, host=Host.load(name)), layer_sets)
        for name in load_presets()
    }
    return {"family": family, "hosts": hosts, "layer_sets": dict(sorted(layer_sets.items()))}


def render(summary: dict[str, object]) -> str:
    """Return the text of a golden file."""
    return json.dumps(summary, indent=1, ensure_ascii=False) + "\n"


def _summarise_plan(plan: QuantPlan, layer_sets: dict[str, object]) -> dict[str, object]:
    compiled = plan.compile.mode + (" autotuned" if plan.compile.max_autotune else "")
    fits = "fits" if plan.memory.fits else "does not fit"
    return {
        "tier": f"{plan.tier}, compile {compiled}",
        "components": {
            name: _summarise_component(component, layer_sets)
            for name, component in plan.components.items()
        },
        "decisions": [
            f"{decision.component} {decision.candidate} "
            f"{'accepted' if decision.accepted else 'rejected'} {decision.because} "
            f"{decision.rule or '-'} {decision.predicted_ms or '-'}"
            for decision in plan.decisions
            if plan.components[decision.component].kind == "denoiser"
        ],
        "kernels": [f"{kernel.component} {kernel.op}" for kernel in plan.kernels],
        "memory": f"{plan.memory.total_bytes} {fits}",
        "notes": list(plan.notes),
        "weights_digest": plan.weights_digest[:16],
    }


def _summarise_component(component: ComponentPlan, layer_sets: dict[str, object]) -> str:
    if not component.layers:
        return str(component.scheme)
    content: dict[str, object] = {
        "settings": component.settings.model_dump(mode="json"),
        "layers": _count(
            block_pattern(layer.name) + (f" pad {layer.pad_rows}" if layer.pad_rows else "")
            for layer in component.layers
        ),
        "kept": _count(
            f"{block_pattern(layer.name)} {layer.because} {layer.rule}" for layer in component.kept
        ),
    }
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:8]
    key = f"{component.scheme}-{digest}"
    layer_sets[key] = content
    return f"{key} {component.confidence}"


def _count(keys) -> dict[str, int]:
    return dict(Counter(keys))


def main() -> None:
    """Write every golden file, and remove those of families that are gone."""
    PLANS.mkdir(exist_ok=True)
    families = load_rules().families
    for path in PLANS.glob("*.json"):
        if path.stem not in families:
            path.unlink()
    for family in families:
        (PLANS / f"{family}.json").write_text(render(summarise_family(family)), encoding="utf-8")


if __name__ == "__main__":
    main()
