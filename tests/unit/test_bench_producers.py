"""What the benchmark of producers builds and mounts, on tiny models; nothing is timed here."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bench import producers
from bench.execution_shapes import SHAPES, Shape
from bench.execution_variants import (
    VARIANTS,
    build_dense,
    made_variant,
    planned_kernels,
    quantise,
)
from bench.producers_shapes import PRODUCER_SHAPES
from quantpolicy import load_rules
from quantpolicy.kernels.linear import FusedLinear
from quantpolicy.measure.tiny import build_tiny
from quantpolicy.runtime.joined import JoinedLinear
from quantpolicy.runtime.mount import mounted_ops

PARTS = tuple(PRODUCER_SHAPES)


def tiny_shape(shape: Shape) -> Shape:
    """Return a shape with the configuration and the inputs of the tests."""
    rules = load_rules()
    spec = rules.file.tiny[rules.families[shape.family].tiny]
    return shape._replace(
        config=dict(spec.config), inputs=lambda _: {0: build_tiny(shape.family)[1]}
    )


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("part", PARTS)
def test_released_shapes_fit_their_models(part):
    shape = PRODUCER_SHAPES[part]
    model = build_dense(shape, "meta")
    ((tokens, inputs),) = shape.inputs("meta").items()
    noisy = inputs["x"][0] if "x" in inputs else inputs["hidden_states"]
    assert producers.first_output(model, inputs).shape == noisy.shape
    assert 0 < shape.image_tokens[tokens] < tokens
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    repeated = {type(module).__name__ for module in model.modules()} & set(model._repeated_blocks)
    assert repeated
    assert 0.8 < sum(shape.matches(name) for name in names) / len(names) < 1


@pytest.mark.parametrize("part", PARTS)
def test_each_variant_adds_a_producer_to_all_that_is_planned(part):
    shape = PRODUCER_SHAPES[part]
    lists = producers.kernel_lists(shape)
    assert list(lists) == ["base", *(f"+ {producer}" for producer in shape.kernels)]
    assert not set(lists["base"]) & set(shape.kernels)
    assert lists["base"] == planned_kernels(shape.family, shape.kernels)
    names = list(lists)
    assert [lists[name][-1] for name in names[1:]] == list(shape.kernels)
    assert set(lists[names[-1]]) >= set(planned_kernels(shape.family))


@pytest.mark.parametrize("part", PARTS)
def test_variants_share_tensors_and_mount_what_they_name(part):
    shape = tiny_shape(PRODUCER_SHAPES[part])
    model, inputs = build_tiny(shape.family)
    dense = producers.first_output(model, inputs).clone()
    quantise(model, shape, VARIANTS["fused_fp8_joined"])
    expected = producers.first_output(model, inputs)
    variants = producers.mounted_variants(model, shape)
    assert mounted_ops(model) == {}
    assert torch.equal(producers.first_output(model, inputs), expected)
    held = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for name, ops in producers.kernel_lists(shape).items():
        variant = variants[name]
        assert mounted_ops(variant).keys() == set(ops)
        assert {id(one) for one in (*variant.parameters(), *variant.buffers())} == held
        found = producers.first_output(variant, inputs)
        assert float((found - dense).norm() / dense.norm()) < 0.1


def test_rows_of_a_model(monkeypatch):
    shape = tiny_shape(PRODUCER_SHAPES["hunyuanvideo"])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    rows = list(producers.bench_model(shape, ("eager",), 1, "cpu"))
    assert [(row["mode"], row["variant"]) for row in rows] == [
        ("eager", "base"),
        ("eager", "+ layer_norm_fp8"),
    ]
    assert rows[0]["error"] != rows[1]["error"]
    assert all(0 < row["error"] < 0.1 for row in rows)
    monkeypatch.setattr(producers, "first_output", failing_once(producers.first_output, at=2))
    failed, left = producers.bench_model(shape, ("eager",), 1, "cpu")
    assert failed == {
        "tokens": 0,
        "mode": "eager",
        "variant": "base",
        "failed": "out of memory",
    }
    assert left["variant"] == "+ layer_norm_fp8"


def failing_once(function, at):
    calls = []

    def call(*args):
        calls.append(args)
        if len(calls) == at:
            raise RuntimeError("out of memory")
        return function(*args)

    return call


def test_the_table_holds_each_variant_against_its_own_base():
    common = {"model": "z-image", "first_s": 1.25, "error": 0.01234}
    rows = [
        {**common, "mode": "eager", "variant": "base", "ms": 20.0},
        {**common, "mode": "eager", "variant": "+ rms_norm_fp8", "ms": 19.0},
        {"model": "z-image", "mode": "compile", "variant": "base", "failed": "no memory"},
        {**common, "mode": "compile", "variant": "+ rms_norm_fp8", "ms": 10.0},
    ]
    assert producers.table(rows).splitlines() == [
        "model    mode     variant             ms  of base   error  first s",
        "z-image  eager    base             20.00    1.000  0.0123      1.2",
        "z-image  eager    + rms_norm_fp8   19.00    0.950  0.0123      1.2",
        "z-image  compile  base            failed",
        "z-image  compile  + rms_norm_fp8   10.00           0.0123      1.2",
    ]


@pytest.mark.parametrize(
    ("variant", "joined", "kernels"),
    [
        ("fused_fp8", False, ()),
        ("fused_fp8_joined", True, ()),
        ("fused_fp8_kernels", False, ("gelu_fp8_linear",)),
        ("fused_fp8_all_kernels", False, planned_kernels("hunyuanvideo")),
    ],
)
def test_variants_of_execution(variant, joined, kernels):
    shape = tiny_shape(SHAPES["hunyuan"])
    dense, inputs = build_tiny(shape.family)
    expected = producers.first_output(dense, inputs)
    model = made_variant(dense, shape, VARIANTS[variant])
    assert mounted_ops(model).keys() == set(kernels)
    fused = [module for module in model.modules() if isinstance(module, FusedLinear)]
    assert len(fused) == 34
    assert any(isinstance(module, JoinedLinear) for module in fused) is joined
    found = producers.first_output(model, inputs)
    assert 0 < float((found - expected).norm() / expected.norm()) < 0.1
    assert torch.equal(producers.first_output(dense, inputs), expected)


def test_all_kernels_of_hunyuanvideo_are_those_that_fp8_admits():
    assert set(planned_kernels("hunyuanvideo")) == {
        "rope_qkv_pack",
        "gated_residual",
        "attention_trim",
        "qk_rms_norm",
        "layer_norm_modulate",
        "layer_norm_fp8",
        "gelu_fp8_linear",
    }
