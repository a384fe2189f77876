"""Plans with fused execution for tiny models, fusions taken from the table by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from quantpolicy import QuantPlan, load_rules
from quantpolicy.fusions import fusion_places
from quantpolicy.plan import ComponentPlan, PlannedFusion
from quantpolicy.runtime.joined import JoinedLinear
from quantpolicy.runtime.weights import tensor_parts
from quantpolicy.schemes import Execution, Scheme


def fused(plan: QuantPlan, *fusions: PlannedFusion) -> QuantPlan:
    return plan.model_copy(update={"execution": Execution.FUSED, "fusions": fusions})


def fusions_of(family: str, part: ComponentPlan, scheme: Scheme) -> tuple[PlannedFusion, ...]:
    """Return every fusion of the family whose parts the plan quantises, measured or not."""
    rules = load_rules()
    layers = {layer.name: layer for layer in part.layers}
    planned = []
    for name in rules.families[family].fusions:
        for parts in fusion_places(rules.file.fusions[name], layers).values():
            assert len({layers[one].shape[1] for one in parts}) == 1
            planned.append(
                PlannedFusion(component="transformer", name=name, parts=parts, scheme=scheme)
            )
    return tuple(planned)


def run(model: nn.Module, inputs: dict[str, object]) -> list[torch.Tensor]:
    with torch.no_grad():
        outputs = model(**inputs)
    flat: list[object] = []
    for output in outputs:
        flat += output if isinstance(output, list | tuple) else [output]
    return [output for output in flat if isinstance(output, torch.Tensor)]


def is_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def leaders(model: nn.Module) -> list[JoinedLinear]:
    return [m for m in model.modules() if isinstance(m, JoinedLinear) and m is m.leader]


def storage_bytes(model: nn.Module) -> int:
    """Return the bytes of all storages that the model's tensors lie in, each counted once."""
    sizes = {}
    for tensor in (*model.parameters(), *model.buffers()):
        for part in tensor_parts(tensor.data).values():
            storage = part.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def assert_same_state(one: nn.Module, other: nn.Module) -> None:
    """Compare two state dicts: the same keys in the same order, the same classes and bytes."""
    left, right = one.state_dict(), other.state_dict()
    assert list(left) == list(right)
    for name, tensor in left.items():
        assert type(tensor) is type(right[name]), name
        parts, expected = tensor_parts(tensor), tensor_parts(right[name])
        assert parts.keys() == expected.keys()
        for key, part in parts.items():
            assert torch.equal(part.float(), expected[key].float()), (name, key)


PlanComponent = Callable[..., ComponentPlan]
MakePlan = Callable[..., QuantPlan]
