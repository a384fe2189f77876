"""Live inventories: wrappers, adapters, shared and quantised weights, and the meta device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from quantpolicy.errors import RequestError
from quantpolicy.inventory.live import (
    class_name_of,
    dominant_dtype,
    inventory_from_config,
    inventory_from_module,
    named_linears,
    unwrap,
)
from quantpolicy.inventory.model import LinearFacts
from quantpolicy.measure.tiny import build_tiny


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q = nn.Linear(8, 16)
        self.to_out = nn.Linear(16, 8, bias=False)
        self.norm = nn.LayerNorm(8)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.register_buffer("rope", torch.zeros(4, dtype=torch.float32))
        self.to(torch.bfloat16)


NAMES = ["blocks.0.to_q", "blocks.0.to_out", "blocks.1.to_q", "blocks.1.to_out"]


def names_of(module: nn.Module) -> list[str]:
    return [linear.name for linear in inventory_from_module(module).linears]


def test_plain_module() -> None:
    model = Model()
    model.rope = model.rope.float()
    inventory = inventory_from_module(model)
    assert inventory.class_name == "Model"
    assert inventory.source == "live"
    assert inventory.linears[:2] == (
        LinearFacts(
            name="blocks.0.to_q", out_features=16, in_features=8, dtype="bfloat16", has_bias=True
        ),
        LinearFacts(
            name="blocks.0.to_out", out_features=8, in_features=16, dtype="bfloat16", has_bias=False
        ),
    )
    # Two biases of 16, two norms of 8 + 8, all bf16, and four fp32 values.
    assert inventory.other_bytes == 2 * (16 * 2 + 16 * 2) + 16
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    assert inventory.dense_bytes == total + 16


def test_compiled_modules_have_the_names_of_plain_ones() -> None:
    model = Model()
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")  # type: ignore[assignment]
    assert names_of(model) == NAMES
    whole = torch.compile(model, backend="eager")
    assert names_of(whole) == NAMES
    assert class_name_of(whole) == "Model"
    assert unwrap(whole) is model


def test_named_linears_are_the_linears_themselves() -> None:
    model = Model()
    inner = model.blocks[1].to_q
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")  # type: ignore[assignment]
    whole = torch.compile(model, backend="eager")
    actual = dict(named_linears(whole))
    assert list(actual) == NAMES
    assert actual["blocks.1.to_q"] is inner
    assert actual["blocks.0.to_q"] is model.blocks[0].to_q


def test_peft_adapters_are_left_out() -> None:
    from peft import LoraConfig, get_peft_model, inject_adapter_in_model

    dense = inventory_from_module(Model())
    config = LoraConfig(r=2, target_modules=["to_q"])
    injected = inject_adapter_in_model(config, Model())
    wrapped = get_peft_model(Model(), config)
    for model in (injected, wrapped):
        inventory = inventory_from_module(model)
        assert inventory.linears == dense.linears
        assert inventory.other_bytes == dense.other_bytes
        assert inventory.class_name == "Model"
        actual = dict(named_linears(model))
        assert list(actual) == NAMES
        assert type(actual["blocks.0.to_q"]) is nn.Linear


def test_shared_modules_and_weights_count_once() -> None:
    model = Model()
    model.again = model.blocks[0]
    model.tied = nn.Linear(8, 16, bias=False)
    model.tied.weight = model.blocks[0].to_q.weight
    inventory = inventory_from_module(model)
    assert [linear.name for linear in inventory.linears] == NAMES
    assert inventory.dense_bytes == inventory_from_module(Model()).dense_bytes


def test_output_head_counts_as_other_bytes() -> None:
    model = Model()
    model.embed = nn.Embedding(32, 8, dtype=torch.bfloat16)
    model.lm_head = nn.Linear(8, 32, bias=False, dtype=torch.bfloat16)
    untied = inventory_from_module(model)
    assert [linear.name for linear in untied.linears] == NAMES
    assert untied.other_bytes == inventory_from_module(Model()).other_bytes + 2 * 32 * 8 * 2
    model.lm_head.weight = model.embed.weight
    tied = inventory_from_module(model)
    assert tied.other_bytes == untied.other_bytes - 32 * 8 * 2


def test_subclasses_of_linear_count() -> None:
    class Special(nn.Linear):
        pass

    model = Model()
    model.blocks[0].to_q = Special(8, 16)
    inventory = inventory_from_module(model)
    assert [linear.name for linear in inventory.linears] == NAMES
    assert inventory.linears[0].dtype == "float32"


class Params4bit(nn.Parameter):
    """A parameter subclass, as bitsandbytes and GGUF have them."""


def _torchao(model: Model) -> None:
    from torchao.quantization import Int8Tensor

    linear = model.blocks[1].to_q
    quantised = Int8Tensor.from_hp(linear.weight.data, granularity=_per_row())
    linear.weight = nn.Parameter(quantised, requires_grad=False)


def _per_row() -> object:
    from torchao.quantization import PerRow

    return PerRow()


def _parameter_class(model: Model) -> None:
    weight = model.blocks[1].to_q.weight.data
    model.blocks[1].to_q.weight = Params4bit(weight, requires_grad=False)


def _fp8_storage(model: Model) -> None:
    linear = model.blocks[1].to_q
    linear.weight = nn.Parameter(linear.weight.data.to(torch.float8_e4m3fn), requires_grad=False)


def _int8_buffer(model: Model) -> None:
    model.blocks[1].register_buffer("data", torch.zeros(4, dtype=torch.int8))


@pytest.mark.parametrize(
    ("quantise", "found"),
    [
        (_torchao, r"blocks\.1\.to_q\.weight: already quantised \(Int8Tensor"),
        (_parameter_class, r"blocks\.1\.to_q\.weight: already quantised \(Params4bit"),
        (_fp8_storage, r"blocks\.1\.to_q\.weight: already quantised \(float8_e4m3fn\)"),
        (_int8_buffer, r"blocks\.1\.data: already quantised \(int8\)"),
    ],
)
def test_quantised_modules_are_refused(quantise: object, found: str) -> None:
    model = Model()
    quantise(model)  # type: ignore[operator]
    with pytest.raises(RequestError, match=found):
        inventory_from_module(model)


def test_dominant_dtype() -> None:
    model = Model()
    model.blocks[0].norm.float()
    assert dominant_dtype(model) == "bfloat16"
    assert dominant_dtype(model.float()) == "float32"
    assert dominant_dtype(nn.ReLU()) == "bfloat16"


def test_config_gives_what_the_model_has() -> None:
    model, _ = build_tiny("wan2.2-ti2v-5b")
    keep = ("time_embedder", "scale_shift_table", "norm1", "norm2", "norm3", "rope")
    found = inventory_from_config("WanTransformer3DModel", dict(model.config), keep_in_fp32=keep)
    live = inventory_from_module(model)
    assert found.linears == live.linears
    assert found.source == "config"
    dtypes = {linear.name: linear.dtype for linear in found.linears}
    assert dtypes["condition_embedder.time_embedder.linear_1"] == "float32"
    assert dtypes["blocks.1.attn1.to_q"] == "bfloat16"


def test_config_of_an_unknown_class() -> None:
    with pytest.raises(RequestError, match="NoSuchModel: no model class of diffusers"):
        inventory_from_config("NoSuchModel", {})
    with pytest.raises(RequestError, match="WanPipeline: no model class of diffusers"):
        inventory_from_config("WanPipeline", {})


def test_config_that_the_class_refuses() -> None:
    with pytest.raises(RequestError, match="WanTransformer3DModel configuration: refused"):
        inventory_from_config("WanTransformer3DModel", {"num_layers": "many"})


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"num_attention_heads": 0}, "ZeroDivisionError: "),
        ({"num_attention_heads": -1}, "RuntimeError: "),
    ],
)
def test_every_refusal_of_a_constructor_is_one_sentence(
    config: dict[str, object], found: str
) -> None:
    with pytest.raises(RequestError) as caught:
        inventory_from_config("WanTransformer3DModel", config)
    assert caught.value.where == "WanTransformer3DModel configuration"
    assert caught.value.found.startswith(f"refused by the class: {found}")


def test_a_config_that_makes_empty_tensors_is_refused() -> None:
    config = {"num_attention_heads": 0, "num_layers": 1, "num_single_layers": 1}
    with pytest.raises(RequestError) as caught:
        inventory_from_config("FluxTransformer2DModel", config)
    assert (
        caught.value.found
        == "makes time_text_embed.timestep_embedder.linear_1.weight an empty tensor"
    )


def test_class_defaults_are_those_of_the_installed_classes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from quantpolicy.measure.class_defaults import main, read_class_defaults

    assert main(["--check"]) == 0
    assert capsys.readouterr().out == "class defaults are up to date\n"
    assert read_class_defaults("WanTransformer3DModel")["patch_size"] == [1, 2, 2]


def test_outdated_class_defaults_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantpolicy.family_match import DEFAULTS_FILE
    from quantpolicy.measure import class_defaults

    copy = tmp_path / "defaults.json"
    copy.write_text("{}")
    monkeypatch.setattr(class_defaults, "DEFAULTS_FILE", copy)
    assert class_defaults.main(["--check"]) == 1
    assert copy.read_text() == "{}"
    assert class_defaults.main([]) == 0
    assert copy.read_bytes() == DEFAULTS_FILE.read_bytes()
