"""Tiny dense folders, plans for them, and comparisons: shared by the tests of prequant."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from prequant.header import HEADER_FILE, Header
from quantpolicy.host import Host
from quantpolicy.measure.tiny import build_tiny
from quantpolicy.plan import ComponentPlan, PlannedLayer, QuantPlan
from quantpolicy.request import Request
from quantpolicy.resolver import resolve
from quantpolicy.rule_schema import Effect
from quantpolicy.rules import RuleTable, load_rules
from quantpolicy.runtime.weights import tensor_parts
from quantpolicy.schemes import SchemeChoice

HOST = "b200"
COMPONENT = "transformer"
WAN = "wan2.2-ti2v-5b"
SHARD_SIZE = "300KB"


def save_dense(
    family: str, folder: Path, *, sharded: bool = False
) -> tuple[nn.Module, dict[str, object]]:
    """Save a tiny model of the family and return it with the inputs of one forward."""
    model, inputs = build_tiny(family)
    model.save_pretrained(folder, max_shard_size=SHARD_SIZE if sharded else "1GB")
    return model, inputs


def denying_rules(family: str, rules: RuleTable | None = None) -> tuple[str, ...]:
    """Return the ids of the rules that deny a scheme to the family's denoiser."""
    rules = rules or load_rules()
    return tuple(rule.id for rule in rules.rules_for(family) if rule.effect is Effect.DENY)


def plan_for(
    source: Path, scheme: str, *, family: str = WAN, rules: RuleTable | None = None
) -> QuantPlan:
    """Resolve a plan that quantises a tiny model whatever the rules deny its family."""
    request = Request(
        transformer=SchemeChoice(scheme), min_features=16, lift=denying_rules(family, rules)
    )
    return resolve(source, host=Host.load(HOST), request=request, rules=rules)


def change_component(plan: QuantPlan, **changes: object) -> QuantPlan:
    """Return the plan with fields of its denoiser changed."""
    part = plan.components[COMPONENT].model_copy(update=changes)
    return plan.model_copy(update={"components": {**plan.components, COMPONENT: part}})


def without_exclusions(plan: QuantPlan) -> QuantPlan:
    """Return the plan of a builder that lacks the exclusions."""
    part = plan.components[COMPONENT]
    more = [
        PlannedLayer(name=kept.name, scheme=part.scheme, shape=kept.shape, dtype=kept.dtype)
        for kept in part.kept
        if kept.dtype == part.dtype
    ]
    kept = tuple(kept for kept in part.kept if kept.dtype != part.dtype)
    return change_component(plan, layers=(*part.layers, *more), kept=kept)


def first_layer(part: ComponentPlan) -> PlannedLayer:
    return part.layers[0]


def reseal(folder: Path, **changes: object) -> None:
    """Rewrite a header with some fields changed and its digest made anew, as a forger would."""
    values = json.loads((folder / HEADER_FILE).read_bytes())
    values.pop("header_digest")
    header = Header.sealed(**{**values, **changes})
    (folder / HEADER_FILE).write_bytes(header.to_bytes())


def files_of(folder: Path) -> dict[str, bytes]:
    """Return every file's content by relative name."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a plain tensor, so that NaN equals itself and dtypes do not matter."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same_tensors(left: nn.Module, right: nn.Module) -> None:
    """Hold every parameter, buffer and part of a quantised weight against the other's, bit by bit.

    Buffers that no file holds count too.
    """
    a = {**left.state_dict(), **dict(left.named_buffers())}
    b = {**right.state_dict(), **dict(right.named_buffers())}
    assert a.keys() == b.keys()
    for name in a:
        assert type(a[name]) is type(b[name]), name
        ours, theirs = tensor_parts(a[name]), tensor_parts(b[name])
        assert ours.keys() == theirs.keys(), name
        for part in ours:
            assert ours[part].dtype == theirs[part].dtype, (name, part)
            assert ours[part].shape == theirs[part].shape, (name, part)
            assert torch.equal(bits(ours[part]), bits(theirs[part])), (name, part)


@torch.no_grad()
def forward(model: nn.Module, inputs: dict[str, object]) -> torch.Tensor:
    output = model.eval()(**inputs)[0]
    return output[0] if isinstance(output, list | tuple) else output
