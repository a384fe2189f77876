from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baking import COMPONENT, WAN, plan_for, save_dense
from safetensors.torch import load_file, save_file

from prequant import bake, load
from quantpolicy.errors import PlanMismatchError, RequestError

SHARD = "diffusion_pytorch_model.safetensors"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("names") / COMPONENT
    save_dense(WAN, folder)
    return folder


def changed(dense: Path, tmp_path: Path, change: Callable[[Tensors], object]) -> Path:
    folder = tmp_path / COMPONENT
    folder.mkdir()
    (folder / "config.json").write_bytes((dense / "config.json").read_bytes())
    tensors = load_file(dense / SHARD)
    change(tensors)
    save_file(tensors, folder / SHARD, metadata={"format": "pt"})
    return folder


def test_tensors_too_few_and_too_many_are_named_before_a_byte_is_written(
    dense: Path, tmp_path: Path
) -> None:
    def change(tensors: Tensors) -> None:
        del tensors["proj_out.bias"]
        tensors["extra"] = torch.ones(3)

    folder = changed(dense, tmp_path, change)
    with pytest.raises(PlanMismatchError) as caught:
        bake(folder, tmp_path / "out", plan=plan_for(dense, "int8"))
    assert [(item.code, item.subject) for item in caught.value.mismatches] == [
        ("tensor_missing", "proj_out.bias"),
        ("tensor_unexpected", "extra"),
    ]
    assert [path.name for path in tmp_path.iterdir()] == [COMPONENT]


def test_tensors_that_the_class_leaves_out_are_no_fault(dense: Path, tmp_path: Path) -> None:
    """Released Wan files hold norms that the model does not have."""
    name = "blocks.0.attn2.norm_added_q.weight"
    folder = changed(dense, tmp_path, lambda tensors: tensors.update({name: torch.ones(64)}))
    bake(folder, tmp_path / "out", plan=plan_for(folder, "int8"))
    assert name in load_file(tmp_path / "out" / SHARD)
    assert name not in load(tmp_path / "out").model.state_dict()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("_orig_mod.{}", "is of a compiled model"),
        ("blocks.0.attn1.to_q.base_layer.weight", "is of a LoRA adapter"),
        ("blocks.0.attn1.to_q.lora_A.weight", "is of a LoRA adapter"),
    ],
)
def test_a_checkpoint_of_a_wrapped_model_is_refused(
    dense: Path, tmp_path: Path, name: str, sentence: str
) -> None:
    def change(tensors: Tensors) -> None:
        moved = "blocks.0.attn1.to_q.weight"
        tensors[name.format(moved)] = tensors.pop(moved)

    folder = changed(dense, tmp_path, change)
    with pytest.raises(RequestError, match=sentence):
        bake(folder, tmp_path / "out", plan=plan_for(dense, "int8"))
    assert not (tmp_path / "out").exists()
