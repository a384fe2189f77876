import json

import pytest
import torch
from safetensors import safe_open

from quantpolicy.errors import RequestError
from quantpolicy.match import first_matching_token
from quantpolicy.measure.inputs import filled_inputs
from quantpolicy.measure.tiny import (
    build_tiny,
    build_tiny_part,
    build_tiny_pipeline_folder,
    denoiser_of,
)
from quantpolicy.rules import load_rules

RULES = load_rules()
PARTS = [name for name in RULES.file.tiny if name[0].isupper()]


@pytest.mark.parametrize("family", RULES.families)
def test_a_tiny_model_is_of_its_family_and_runs(family):
    part = denoiser_of(RULES.families[family])
    state = torch.get_rng_state()
    model, inputs = build_tiny(family)
    assert torch.equal(torch.get_rng_state(), state)
    assert type(model).__name__ == part.class_name
    assert not model.training
    assert tuple(model._keep_in_fp32_modules or ()) == part.keep_in_fp32
    for name, parameter in model.named_parameters():
        kept = first_matching_token(name, part.keep_in_fp32)
        assert parameter.dtype == (torch.float32 if kept else torch.bfloat16), name
    with torch.no_grad():
        outputs = model(**inputs)
    assert isinstance(outputs, tuple)
    for output in outputs:
        for tensor in output if isinstance(output, list) else [output]:
            assert torch.isfinite(tensor).all()
            assert tensor.float().std() > 0.1


def test_the_seed_decides_every_value():
    first, again, other = (build_tiny("z-image", seed=seed)[0] for seed in (3, 3, 4))
    equal = [torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True)]
    assert all(equal)
    assert not torch.equal(first.x_pad_token, other.x_pad_token)


@pytest.mark.parametrize("family", ["wan2.1-i2v-14b", "z-image", "minimax-h3", "ltx-2.3"])
def test_no_value_is_left_to_uninitialised_memory(family):
    assert torch.utils.deterministic.fill_uninitialized_memory  # with NaN, in deterministic mode
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        model, _ = build_tiny(family)
    finally:
        torch.use_deterministic_algorithms(before)
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all(), name


def test_features_cover_the_alignments():
    shapes = {
        family: [
            linear.weight.shape
            for linear in build_tiny(family)[0].modules()
            if isinstance(linear, torch.nn.Linear) and min(linear.weight.shape) >= 64
        ]
        for family in ("wan2.1-i2v-14b", "hunyuanvideo", "z-image")
    }
    assert any(size % 32 == 16 for shape in shapes["wan2.1-i2v-14b"] for size in shape)
    assert any(size % 16 for shape in shapes["hunyuanvideo"] for size in shape)
    assert any(size == 341 for shape in shapes["z-image"] for size in shape)


@pytest.mark.parametrize("class_name", PARTS)
def test_a_tiny_text_encoder_or_vae_runs(class_name):
    tiny = RULES.file.tiny[class_name]
    dtype = next(iter(tiny.inputs.values())).dtype
    part = build_tiny_part(class_name, dtype=dtype if dtype == "float32" else "bfloat16")
    assert type(part).__name__ == class_name
    with torch.no_grad():
        output = part(**filled_inputs(tiny.inputs, seed=0))[0]
    assert torch.isfinite(output).all()


def test_a_pipeline_folder_holds_every_component(tmp_path):
    import diffusers

    folder = build_tiny_pipeline_folder(tmp_path / "pipe", "wan2.2-t2v-a14b")
    index = json.loads((folder / "model_index.json").read_text())
    assert index["_class_name"] == "WanPipeline"
    assert index["transformer_2"] == ["diffusers", "WanTransformer3DModel"]
    assert index["text_encoder"] == ["transformers", "UMT5EncoderModel"]
    first, second = (
        diffusers.WanTransformer3DModel.from_pretrained(folder / name, torch_dtype=torch.bfloat16)
        for name in ("transformer", "transformer_2")
    )
    assert not torch.equal(first.proj_out.weight, second.proj_out.weight)
    assert torch.equal(first.proj_out.weight, build_tiny("wan2.2-t2v-a14b")[0].proj_out.weight)
    assert first.condition_embedder.time_embedder.linear_1.weight.dtype is torch.float32
    with safe_open(folder / "vae" / "diffusion_pytorch_model.safetensors", "pt") as vae:
        assert {vae.get_tensor(key).dtype for key in vae.keys()} == {torch.float32}  # noqa: SIM118


def test_a_sharded_folder_has_an_index(tmp_path):
    folder = build_tiny_pipeline_folder(tmp_path, "flux.1", sharded=True)
    index = json.loads(
        (folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json").read_text()
    )
    shards = set(index["weight_map"].values())
    assert len(shards) > 3
    assert all((folder / "transformer" / shard).is_file() for shard in shards)


def test_an_unknown_family_or_part_is_refused():
    with pytest.raises(RequestError, match="wan2"):
        build_tiny("wan2")
    with pytest.raises(RequestError, match="generic"):
        build_tiny("generic")
    with pytest.raises(RequestError, match=r"tiny model 'AutoencoderX'.*known: wan-t2v"):
        build_tiny_part("AutoencoderX")
