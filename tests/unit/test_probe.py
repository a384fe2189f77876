import pytest
import torch

from quantpolicy.errors import RequestError
from quantpolicy.inventory.live import inventory_from_config
from quantpolicy.inventory.shipped import load_inventory
from quantpolicy.match import block_pattern
from quantpolicy.measure.inputs import filled_inputs, meta_inputs
from quantpolicy.measure.probe import (
    denoiser_of,
    probe_inventory,
    probe_released,
    probe_zero_rows,
)
from quantpolicy.rule_schema import FamilySpec, InputSpec
from quantpolicy.rules import load_rules

RULES = load_rules()

ZERO_ROWS = {
    "wan-t2v": {"condition_embedder.text_embedder.linear_1"},
    "wan-i2v": {"condition_embedder.text_embedder.linear_1"},
    "wan-i2v-latent": {"condition_embedder.text_embedder.linear_1"},
    "wan-per-token": {"condition_embedder.text_embedder.linear_1"},
    "hunyuanvideo": set(),
    "hunyuanvideo-1.5": {
        "context_embedder.token_refiner.refiner_blocks.*.attn.to_out.*",
        "transformer_blocks.*.attn.to_add_out",
        "context_embedder_2.linear_1",
        "image_embedder.linear_1",
    },
    "ltx-2": set(),
    "ltx-2.3": set(),
    "qwen-image": {"txt_in"},
    "flux.1": set(),
    "flux.2": set(),
    "z-image": {
        f"{block}.0.attention.{part}"
        for block in ("context_refiner", "layers")
        for part in ("to_q", "to_k", "to_v")
    },
    "minimax-h3": set(),
}


def tiny_family(family: str) -> FamilySpec:
    """The family as if its tiny model were the released one."""
    spec = RULES.families[family]
    tiny = RULES.file.tiny[spec.tiny]
    part = denoiser_of(spec).model_copy(update={"config": tiny.config})
    return spec.model_copy(update={"components": {"transformer": part}, "inputs": tiny.inputs})


FAMILY_OF_TINY = {spec.tiny: name for name, spec in reversed(RULES.families.items())}


def test_every_tiny_model_has_an_answer():
    assert FAMILY_OF_TINY.keys() == ZERO_ROWS.keys()


@pytest.mark.parametrize("tiny", ZERO_ROWS)
def test_zero_rows_of_padded_prompts(tiny):
    spec = RULES.families[FAMILY_OF_TINY[tiny]]
    assert probe_zero_rows(spec, RULES.file.tiny[tiny]) == ZERO_ROWS[tiny]


@pytest.mark.parametrize("tiny", ZERO_ROWS)
def test_rows_of_the_meta_forward_equal_those_of_a_real_one(tiny):
    spec = tiny_family(FAMILY_OF_TINY[tiny]).model_copy(update={"short_streams": {}})
    from quantpolicy.measure.tiny import build_tiny

    model, inputs = build_tiny(FAMILY_OF_TINY[tiny])
    seen: dict[str, int] = {}
    for name, part in model.named_modules():
        if isinstance(part, torch.nn.Linear):
            part.register_forward_pre_hook(
                lambda _, args, name=name: seen.update(
                    {name: min(seen.get(name, 1 << 60), args[0].numel() // args[0].shape[-1])}
                )
            )
    with torch.no_grad():
        model(**inputs)
    assert probe_released(spec).rows == seen
    assert len(seen) > 20


def test_a_released_model_gives_what_ships():
    spec = RULES.families["z-image"]
    part = denoiser_of(spec)
    inventory = inventory_from_config(part.class_name, part.config, dtype=part.dtype)
    probed = probe_inventory(inventory, spec, RULES.file.tiny[spec.tiny])
    assert probed.linears == load_inventory("z-image").linears


def test_a_side_stream_that_can_be_empty_counts_as_empty():
    spec = tiny_family("hunyuanvideo-1.5")
    rows = probe_released(spec).rows
    assert {rows["context_embedder_2.linear_1"], rows["image_embedder.linear_2"]} == {0}
    full = probe_released(spec.model_copy(update={"short_streams": {}})).rows
    assert (full["context_embedder_2.linear_1"], full["image_embedder.linear_2"]) == (12, 9)
    assert rows["context_embedder.proj_in"] == full["context_embedder.proj_in"] == 20
    shortened = "transformer_blocks.0.attn.add_q_proj"
    assert rows[shortened] == full[shortened] > spec.short_streams["add_q_proj"] == 1


def test_a_pattern_stands_for_every_block_and_a_name_for_one():
    layers = {
        fact.name: fact.zero_rows
        for fact in load_inventory("z-image").linears
        if block_pattern(fact.name) == "layers.*.attention.to_q"
    }
    assert [name for name, zero in layers.items() if zero] == ["layers.0.attention.to_q"]
    blocks = [
        fact.zero_rows
        for fact in load_inventory("hunyuanvideo-1.5").linears
        if block_pattern(fact.name) == "transformer_blocks.*.attn.to_add_out"
    ]
    assert blocks == [True] * 54


def test_inputs_that_do_not_fit_are_refused():
    spec = tiny_family("flux.1")
    inputs = {**spec.inputs, "txt_ids": InputSpec(shape=(31, 3), dtype="float32", value=0)}
    with pytest.raises(RequestError, match="FluxTransformer2DModel inputs: the forward failed"):
        probe_released(spec.model_copy(update={"inputs": inputs}))


def test_filled_inputs_follow_their_declaration():
    state = torch.get_rng_state()
    inputs = filled_inputs(
        {
            "padded": InputSpec(shape=(2, 3, 4), valid=(3, 1)),
            "mask": InputSpec(shape=(1, 4), dtype="int64", value=1, valid=(2,)),
            "counted": InputSpec(shape=(3,), dtype="int64", start=5),
            "runs": InputSpec(dtype="int64", runs=((7, 2), (0, 1))),
            "listed": InputSpec(shapes=((2, 2), (1, 2)), dtype="float32"),
            "plain": InputSpec(value=24.0),
            "grid": InputSpec(value=[[[1, 2, 2]]]),
        },
        seed=0,
    )
    assert torch.equal(torch.get_rng_state(), state)
    rows = (inputs["padded"] == 0).all(dim=-1)
    assert rows.tolist() == [[False, False, False], [False, True, True]]
    assert inputs["mask"].tolist() == [[1, 1, 0, 0]]
    assert inputs["counted"].tolist() == [5, 6, 7]
    assert inputs["runs"].tolist() == [7, 7, 0]
    assert [tuple(item.shape) for item in inputs["listed"]] == [(2, 2), (1, 2)]
    assert (inputs["plain"], inputs["grid"]) == (24.0, [[[1, 2, 2]]])


@pytest.mark.parametrize(
    "spec",
    [
        InputSpec(shape=(2,), dtype="int64"),
        InputSpec(shape=(2,), dtype="float99"),
        InputSpec(shape=(2,), value=[[[1]]]),
        InputSpec(shape=(2,), dtype="tensor"),
    ],
)
def test_an_input_without_a_meaning_is_refused(spec):
    with pytest.raises(RequestError):
        filled_inputs({"x": spec}, seed=0)


def test_meta_inputs_have_the_shapes_only():
    inputs = meta_inputs(RULES.families["minimax-h3"].inputs)
    assert {tensor.device.type for tensor in inputs.values()} == {"meta"}
    assert inputs["token_tags"].shape == (17738,)
    assert meta_inputs({"runs": InputSpec(dtype="int64", runs=((7, 2), (0, 1)))})["runs"].shape == (
        3,
    )
