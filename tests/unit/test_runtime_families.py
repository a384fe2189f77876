"""Every family's tiny model in every scheme: close to dense, and nothing else of it changed."""

from __future__ import annotations

import pytest
import torch

from quantpolicy import load_rules
from quantpolicy.measure.tiny import build_tiny
from quantpolicy.runtime import apply_plan
from quantpolicy.schemes import Scheme

# One family of each class and input form; the others of a class share its tiny model's modules.
FAMILIES = (
    "wan2.1-i2v-14b",
    "wan2.2-ti2v-5b",
    "wan2.2-t2v-a14b",
    "hunyuanvideo",
    "hunyuanvideo-1.5",
    "ltx-2",
    "ltx-2.3",
    "qwen-image",
    "flux.1",
    "flux.2-dev",
    "z-image",
    "minimax-h3",
)
LARGEST_ERROR = {Scheme.INT8: 0.05, Scheme.FP8: 0.15, Scheme.MXFP8: 0.15, Scheme.NVFP4: 0.45}


def run(model, inputs) -> list[torch.Tensor]:
    with torch.no_grad():
        outputs = model(**inputs)
    flat = []
    for output in outputs:
        flat += output if isinstance(output, list | tuple) else [output]
    return [output.float() for output in flat if isinstance(output, torch.Tensor)]


def test_every_class_is_covered():
    rules = load_rules()
    classes = {
        family: rules.file.tiny[spec.tiny].class_name for family, spec in rules.families.items()
    }
    assert {classes[family] for family in FAMILIES} == set(classes.values())


@pytest.mark.parametrize("scheme", list(LARGEST_ERROR))
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family, scheme, component_plan, quant_plan):
    model, inputs = build_tiny(family)
    plan = component_plan(model, scheme)
    assert plan.layers
    dense = run(model, inputs)
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict(keep_vars=True).items()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    listed = {f"{layer.name}.weight" for layer in plan.layers}
    others = {name: item for name, item in model.named_parameters() if name not in listed}

    report = apply_plan(model, quant_plan(transformer=plan))

    outputs = run(model, inputs)
    assert len(outputs) == len(dense) > 0
    for output, expected in zip(outputs, dense, strict=True):
        assert output.shape == expected.shape
        assert output.isfinite().all()
        assert 0 < (output - expected).norm() / expected.norm() < LARGEST_ERROR[scheme]
    assert {
        name: tensor.dtype for name, tensor in model.state_dict(keep_vars=True).items()
    } == dtypes
    for name, buffer in model.named_buffers():
        assert buffer.dtype is buffers[name].dtype
        assert torch.equal(buffer, buffers[name])
    now = dict(model.named_parameters())
    assert all(now[name] is parameter for name, parameter in others.items())
    (count,) = report.components["transformer"].schemes
    assert (count.scheme, count.layers) == (scheme, len(plan.layers))


@pytest.mark.parametrize("family", ["wan2.2-t2v-a14b", "hunyuanvideo", "z-image"])
def test_fp32_kept_parameters_stay_fp32(family, component_plan, quant_plan):
    model, _ = build_tiny(family)
    kept = {name for name, item in model.named_parameters() if item.dtype is torch.float32}
    assert bool(kept) is bool(getattr(model, "_keep_in_fp32_modules", None))
    apply_plan(model, quant_plan(transformer=component_plan(model, Scheme.FP8)))
    found = {name for name, item in model.named_parameters() if item.dtype is torch.float32}
    assert found == kept


@pytest.mark.parametrize("batch", [1, 2, 16, 17])
def test_int8_at_any_batch(batch, component_plan, quant_plan):
    model, inputs = build_tiny("flux.1")
    shared = {"img_ids", "txt_ids"}
    inputs = {
        name: item
        if name in shared or not isinstance(item, torch.Tensor)
        else item[:1].expand(batch, *item.shape[1:])
        for name, item in inputs.items()
    }
    (dense,) = run(model, inputs)
    apply_plan(model, quant_plan(transformer=component_plan(model, Scheme.INT8, pad_rows=17)))
    (output,) = run(model, inputs)
    assert output.shape == dense.shape
    assert output.shape[0] == batch
    assert (output - dense).norm() / dense.norm() < LARGEST_ERROR[Scheme.INT8]
