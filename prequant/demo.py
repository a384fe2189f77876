"""The demonstration: a small real model is baked, checked, damaged, refused, loaded and compared.

Everything happens in a temporary folder with generated weights; the network is not used.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from prequant.bake import bake
from prequant.header import HEADER_FILE
from prequant.inspect import size
from prequant.load import load
from prequant.skeleton import model_class
from prequant.validate import validate
from quantpolicy.errors import CorruptCheckpointError, DeniedError, StaleCheckpointError
from quantpolicy.host import Host
from quantpolicy.measure.tiny import build_tiny
from quantpolicy.plan import ComponentPlan, PlannedLayer, QuantPlan
from quantpolicy.record import Record
from quantpolicy.request import Request
from quantpolicy.resolver import resolve
from quantpolicy.runtime.apply import apply_plan
from quantpolicy.schemes import Scheme, SchemeChoice

FAMILY = "wan2.2-ti2v-5b"
COMPONENT = "transformer"
HOST = "h200"
MIN_FEATURES = 16
SCHEMES = (SchemeChoice.INT8, SchemeChoice.FP8)


class Step(Record):
    """One line of the table: what was done, what came out, and whether that is right."""

    what: str
    result: str
    ok: bool


@dataclass(frozen=True, slots=True)
class Scene:
    """The small model on disk, and the arguments of one forward."""

    root: Path
    source: Path
    class_name: str
    inputs: dict[str, object]


def run_demo() -> list[Step]:
    """Run every step and return the lines of the table."""
    with tempfile.TemporaryDirectory(prefix="prequant-demo-") as folder:
        root = Path(folder)
        model, inputs = build_tiny(FAMILY)
        scene = Scene(root, root / "dense" / COMPONENT, type(model).__name__, inputs)
        save = model.save_pretrained
        assert callable(save)
        save(scene.source)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        steps = [Step(what=f"build {FAMILY}", result=f"{parameters:,} parameters", ok=True)]
        steps += _resolve_steps()
        for scheme in SCHEMES:
            steps += _scheme_steps(scene, scheme)
        return steps


def _resolve_steps() -> Iterator[Step]:
    """Resolve the released model, whose sizes decide what is fast, for two machines."""
    here = Host.detect()
    for host, expected in ((here, None), (Host.load(HOST), Scheme.FP8)):
        part = resolve(FAMILY, host=host).components[COMPONENT]
        layers = f"{len(part.layers)} Linears quantised, {len(part.kept)} kept"
        yield Step(
            what=f"resolve the released model for {host.name}",
            result=f"{part.scheme}, {layers}",
            ok=expected is None or part.scheme is expected,
        )


def _scheme_steps(scene: Scene, scheme: SchemeChoice) -> Iterator[Step]:
    out = scene.root / scheme.value
    request = Request(transformer=scheme, min_features=MIN_FEATURES)
    plan = resolve(scene.source, host=Host.load(HOST), request=request)
    baked = bake(scene.source, out, plan=plan).components[COMPONENT]
    counts = baked.counts
    yield Step(
        what=f"{scheme}: bake",
        result=f"{counts.quantised_layers} layers, {size(counts.source_bytes)} to "
        f"{size(counts.quantised_bytes + counts.scale_bytes + counts.dense_bytes)}",
        ok=counts.quantised_layers == len(plan.components[COMPONENT].layers),
    )
    report = validate(out, full=True)
    yield Step(
        what=f"{scheme}: validate --full",
        result="in order",
        ok=report.components[COMPONENT].weights_digest == baked.weights_digest,
    )
    yield from _tamper_steps(scene, scheme, out, plan)
    yield from _load_steps(scene, scheme, out, plan)


def _tamper_steps(scene: Scene, scheme: SchemeChoice, out: Path, plan: QuantPlan) -> Iterator[Step]:
    copy = scene.root / f"{scheme}-copy"
    shutil.copytree(out, copy)
    header = json.loads((copy / HEADER_FILE).read_bytes())
    header["settings"]["activation_floor"] = 1.0
    (copy / HEADER_FILE).write_text(json.dumps(header))
    yield _refused(f"{scheme}: edit the header", copy, "header_digest", full=False)
    shutil.rmtree(copy)
    shutil.copytree(out, copy)
    shard = next(copy.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    yield _refused(f"{scheme}: flip a bit of a weight", copy, "shard_sha256", full=True)
    careless = _without_exclusions(plan)
    more = len(careless.components[COMPONENT].layers) - len(plan.components[COMPONENT].layers)
    if more:
        shutil.rmtree(copy)
        bake(scene.source, copy, plan=careless)
        what = f"{scheme}: bake without the {more} exclusions"
        yield _refused(what, copy, "module_quantised", full=False)


def _refused(what: str, folder: Path, code: str, *, full: bool) -> Step:
    try:
        validate(folder, full=full)
    except (CorruptCheckpointError, StaleCheckpointError) as error:
        codes = sorted({mismatch.code for mismatch in error.mismatches})
        verdict = "stale" if isinstance(error, StaleCheckpointError) else "corrupt"
        result = f"refused as {verdict} (exit {error.exit_code}): {', '.join(codes)}"
        return Step(what=what, result=result, ok=code in codes)
    return Step(what=what, result="accepted", ok=False)


def _without_exclusions(plan: QuantPlan) -> QuantPlan:
    """Return the plan a builder would make that lacks the table's exclusions."""
    part = plan.components[COMPONENT]
    more = [
        PlannedLayer(name=layer.name, scheme=part.scheme, shape=layer.shape, dtype=layer.dtype)
        for layer in part.kept
        if layer.dtype == part.dtype
    ]
    kept = tuple(layer for layer in part.kept if layer.dtype != part.dtype)
    changed: ComponentPlan = part.model_copy(update={"layers": (*part.layers, *more), "kept": kept})
    careless: QuantPlan = plan.model_copy(
        update={"components": {**plan.components, COMPONENT: changed}}
    )
    return careless


def _load_steps(scene: Scene, scheme: SchemeChoice, out: Path, plan: QuantPlan) -> Iterator[Step]:
    model = _from_pretrained(scene, scene.source)
    dense = _run(model, scene)
    apply_plan(model, plan, component=COMPONENT)
    at_run_time = _run(model, scene)
    loaded = load(out)
    ours = _run(loaded.model, scene)
    plain = _run(_from_pretrained(scene, out), scene)
    error = (ours - dense).norm() / dense.norm()
    yield Step(
        what=f"{scheme}: load with prequant",
        result=f"{loaded.report.component.quantised_layers} layers, output equal to run time: "
        f"{torch.equal(ours, at_run_time)}, {error:.3f} from dense",
        ok=torch.equal(ours, at_run_time) and bool(ours.isfinite().all()),
    )
    yield Step(
        what=f"{scheme}: load with plain diffusers",
        result=f"output equal: {torch.equal(plain, ours)}",
        ok=torch.equal(plain, ours),
    )
    try:
        load(out, host=Host.load("a100"))
        refused = "accepted on a100"
    except StaleCheckpointError as stale:
        refused = "refused for a100: " + stale.mismatches[0].found
    except DeniedError as denied:
        refused = f"refused for a100: {denied.found}"
    is_right = (scheme is SchemeChoice.INT8) == refused.startswith("accepted")
    yield Step(what=f"{scheme}: load for another host", result=refused, ok=is_right)


def _from_pretrained(scene: Scene, folder: Path) -> nn.Module:
    return model_class(scene.class_name).from_pretrained(str(folder), torch_dtype=torch.bfloat16)


@torch.no_grad()
def _run(model: nn.Module, scene: Scene) -> torch.Tensor:
    output: torch.Tensor = model.eval()(**scene.inputs)[0]
    return output.float()
