"""The report against sums made by hand, and its text."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from quantpolicy.errors import PlanMismatchError
from quantpolicy.plan import PlannedLayer
from quantpolicy.runtime import ApplyReport, apply_plan
from quantpolicy.runtime.count import count_component, count_mismatches
from quantpolicy.schemes import Scheme


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 128)
        self.second = nn.Linear(128, 64, bias=False)
        self.kept = nn.Linear(64, 15)
        self.norm = nn.LayerNorm(64)
        self.register_buffer("table", torch.zeros(10, dtype=torch.float32))


@pytest.fixture
def block() -> Block:
    model = Block().bfloat16()
    model.table = model.table.float()
    return model


EXPECTED = {
    Scheme.INT8: (128 * 64 * 2, 128 * 5 + 64 * 5, 0),
    Scheme.FP8: (128 * 64 * 2, 128 * 4 + 64 * 4, 0),
    Scheme.MXFP8: (128 * 64 * 2, 128 * 4 + 128 * 4, 2),
    Scheme.NVFP4: (128 * 64, 128 * 4 + 128 * 8 + 8, 2),
    Scheme.LAYERWISE_FP8: (128 * 64 * 2, 8, 0),
}


@pytest.mark.parametrize("scheme", list(EXPECTED))
def test_counts(scheme, block, component_plan, quant_plan):
    plan = quant_plan(transformer=component_plan(block, scheme, pad_rows=17))
    report = apply_plan(block, plan)
    part = report.components["transformer"]
    (count,) = part.schemes
    data, scales, emulated = EXPECTED[scheme]
    assert (count.layers, count.parameters, count.padded) == (2, 2 * 128 * 64, 2)
    assert (count.data_bytes, count.scale_bytes, count.emulated) == (data, scales, emulated)
    rest = 128 + 15 * 64 + 15 + 2 * 64
    assert part.dense_bytes == 2 * rest + 4 * 10
    assert part.total_bytes == report.total_bytes == part.dense_bytes + data + scales
    assert part.linear_parameters == 2 * 128 * 64 + 15 * 64
    assert part.total_parameters == 2 * 128 * 64 + rest
    assert part.linear_coverage == 16384 / 17344
    assert part.coverage == 16384 / (16384 + rest)
    (group,) = part.skipped
    assert (group.because.value, group.rule) == ("alignment", "derived.alignment")
    assert (group.layers, group.parameters, group.names) == (1, 960, ("kept",))
    assert report.weights_digest == plan.weights_digest
    assert report.plan_digest == plan.plan_digest


def test_adapters_are_not_counted(block, component_plan, quant_plan):
    block.first.lora_A = nn.Linear(64, 4, bias=False)
    part = apply_plan(block, quant_plan(transformer=component_plan(block, Scheme.INT8))).components[
        "transformer"
    ]
    assert part.linear_parameters == 17344
    assert part.total_parameters == 16384 + 128 + 15 * 64 + 15 + 2 * 64


def test_json_and_text(block, component_plan, quant_plan):
    plan = quant_plan(transformer=component_plan(block, Scheme.INT8, pad_rows=17))
    report = apply_plan(block, plan)
    values = json.loads(json.dumps(report.to_dict()))
    part = values["components"]["transformer"]
    assert part["quantised_layers"] == values["quantised_layers"] == 2
    assert part["schemes"][0]["scheme"] == "int8"
    assert part["linear_coverage"] == 16384 / 17344
    assert values["mounted"] == values["decisions"] == []
    assert report.explain().splitlines() == [
        "by-hand: 19.38 KiB of weights after applying, execution torchao",
        "  transformer (Block): 94.5% of the Linears' weights, 93.0% of all parameters, 19.38 KiB",
        "    int8: 2 layers, data 16.00 KiB, scales 960 B, 2 padded",
        "    dense: 1 layers kept because alignment (derived.alignment)",
    ]
    assert ApplyReport.model_validate_json(report.model_dump_json()) == report


def test_text_of_a_dense_component(block, component_plan, quant_plan):
    report = apply_plan(block, quant_plan(transformer=component_plan(block, Scheme.DENSE)))
    assert report.explain().splitlines()[1] == "  transformer (Block): dense, 34.44 KiB"


def test_text_says_what_is_emulated(block, component_plan, quant_plan):
    report = apply_plan(block, quant_plan(transformer=component_plan(block, Scheme.NVFP4)))
    assert "nvfp4: 2 layers, data 8.00 KiB, scales 1.51 KiB, 2 emulated" in report.explain()


def test_nothing_quantised_is_an_error(block, component_plan, quant_plan):
    plan = component_plan(block, Scheme.INT8, keep=lambda _: True)
    classes = [type(module) for module in block.modules()]
    with pytest.raises(PlanMismatchError) as caught:
        apply_plan(block, quant_plan(transformer=plan))
    assert [item.code for item in caught.value.mismatches] == ["nothing_quantised"]
    assert [type(module) for module in block.modules()] == classes


def test_count_differs_from_plan(block, component_plan, quant_plan):
    plan = component_plan(block, Scheme.INT8)
    apply_plan(block, quant_plan(transformer=plan))
    more = PlannedLayer(name="third", scheme=Scheme.FP8, shape=(64, 64), dtype="bfloat16")
    longer = plan.model_copy(update={"layers": (*plan.layers, more)})
    report = count_component("transformer", block, longer, planned=Scheme.INT8)
    assert [str(item) for item in count_mismatches(report, longer)] == [
        "[layer_count] transformer fp8: expected 1 layers, found 0"
    ]
    assert count_mismatches(report, plan) == []
