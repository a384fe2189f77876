"""The MiniMax-H3 video decoder's fusions on a tiny autoencoder: exact on a CPU, and reversible."""

from __future__ import annotations

import copy

import pytest
import torch
from mounted import halve
from torch import Tensor, nn

from quantpolicy.kernels.contract import op_counts
from quantpolicy.runtime.mount import mount, mounted_ops, unmount
from quantpolicy.runtime.mounts.minimax_h3 import tiles_at_once
from quantpolicy.runtime.mounts.shared_weights import adjacent

FP32 = ("norm1", "norm2", "norm_out", "scale1", "scale2")
SITES = {
    "rms_norm": 2,
    "scale_add_rms_norm": 2,
    "qk_rms_norm_rope": 2,
    "swiglu": 2,
    "swiglu_linear": 2,
    "qkv_linear": 4,
    "batched_tiles": 1,
}
TOGETHER = tuple(op for op in SITES if op != "swiglu")


@pytest.fixture
def model() -> nn.Module:
    return build(heads=2, size=64)


def build(heads: int, size: int, dtype: torch.dtype = torch.float16) -> nn.Module:
    from diffusers import AutoencoderKLMiniMaxH3

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = AutoencoderKLMiniMaxH3(
            block_out_channels=(32, 32),
            layers_per_block=1,
            spatial_downsample_factors=(16, 1),
            temporal_downsample_factors=(4, 1),
            decoder_num_layers=2,
            decoder_num_attention_heads=heads,
            decoder_attention_head_dim=size,
        )
        for name, parameter in model.named_parameters():
            if ".scale" in name:
                parameter.data.normal_(std=0.3)
            if not any(part in FP32 for part in name.split(".")):
                parameter.data = parameter.data.to(dtype)
    model.enable_tiling(64, 64, 16, 16)
    return model.eval().requires_grad_(False)


def latents() -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(1, 24, 7, 8, 4, generator=generator).half()


def decoded(model: nn.Module) -> Tensor:
    with torch.no_grad():
        out: Tensor = model.decode(latents(), return_dict=False)[0]
    return out


def test_every_fusion_alone_and_all_together(model):
    before, names = decoded(model), list(model.state_dict())
    parameters = [id(parameter) for parameter in model.parameters()]
    for ops in (*((op,) for op in SITES), TOGETHER):
        report = mount(model, ops)
        assert report.declined == {}
        assert report.mounted == {op: SITES[op] for op in ops} == mounted_ops(model)
        assert torch.equal(decoded(model), before)
        assert list(model.state_dict()) == names
        assert unmount(model).restored == report.mounted
        assert torch.equal(decoded(model), before)
        assert [id(parameter) for parameter in model.parameters()] == parameters


def test_fused_projection_reads_weights_behind_each_other(model):
    attn = model.decoder.transformer_blocks[0].attn
    weights = [attn.to_q.weight, attn.to_k.weight, attn.to_v.weight]
    values = [weight.clone() for weight in weights]
    assert adjacent(weights) is None
    mount(model, ("qkv_linear",))
    assert torch.equal(adjacent(weights), torch.cat(values))
    calls = op_counts().get("qkv_linear")
    decoded(model)
    blocks, tiles = 2, 3
    assert op_counts()["qkv_linear"].calls == (calls.calls if calls else 0) + blocks * tiles
    unmount(model)
    assert adjacent(weights) is None
    storages = {weight.untyped_storage().data_ptr() for weight in weights}
    assert len(storages) == 3
    assert all(torch.equal(one, other) for one, other in zip(weights, values, strict=True))


def test_changed_weights_are_seen_and_moved_ones_fall_back(model):
    mount(model, ("qkv_linear",))
    attn = model.decoder.transformer_blocks[0].attn
    attn.to_k.weight.data.mul_(2)
    found = decoded(model)
    unmount(model)
    assert torch.equal(decoded(model), found)
    mount(model, ("qkv_linear",))
    attn.to_k.weight.data = attn.to_k.weight.data.clone()
    assert torch.equal(decoded(model), found)
    assert op_counts()["qkv_linear"].declines["the weights no longer lie one behind the other"]


@pytest.mark.parametrize("ops", [TOGETHER, ("swiglu",)])
def test_what_is_exchanged_after_a_mount_is_called(ops, model):
    block = "decoder.transformer_blocks.0"
    parts = ("norm1", "norm2", "attn.norm_q", "attn.norm_k", "attn.to_q", "attn.to_v", "attn")
    for part in (*parts, "ff.net.0", "ff.net.0.proj", "ff.net.0.activation", "ff.net.2", "ff"):
        stock, mounted = copy.deepcopy(model), copy.deepcopy(model)
        mount(mounted, ops)
        for one in (stock, mounted):
            halve(one, f"{block}.{part}")
        assert torch.equal(decoded(mounted), decoded(stock)), part


def test_tiles_go_to_the_decoder_together(model):
    shapes: list[int] = []
    model.decoder.register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape[0]))
    before = decoded(model)
    assert shapes == [1] * 3
    shapes.clear()
    mount(model, ("batched_tiles",))
    assert torch.equal(decoded(model), before)
    assert shapes == [2, 1]
    shapes.clear()
    model.use_tiling = False
    decoded(model)
    assert shapes == [1]


def test_tiles_at_once_on_a_cpu(model):
    assert tiles_at_once(model.decoder, torch.zeros(1, 24, 5, 4, 4), 28) == 2
    assert tiles_at_once(model.decoder, torch.zeros(1, 24, 5, 4, 4), 1) == 1


def test_another_head_size_stays_eager_and_says_so():
    model = build(heads=2, size=96)
    report = mount(model, ("qk_rms_norm_rope", "rms_norm"))
    assert report.mounted == {"rms_norm": 2}
    assert report.declined == {
        "qk_rms_norm_rope": "decoder.transformer_blocks.0.attn: the head size is 96, not 64"
        " (and 1 more sites)"
    }


def test_norms_cast_to_half_stay_eager_and_say_so(model):
    model.half()
    report = mount(model, ("rms_norm", "scale_add_rms_norm", "swiglu"))
    assert report.mounted == {"swiglu": 2}
    assert report.declined["rms_norm"].startswith(
        "decoder.transformer_blocks.0: its norm is not kept in float32"
    )
    assert "float32" in report.declined["scale_add_rms_norm"]


def test_the_gate_goes_to_the_first_op_that_wants_it(model):
    where = "decoder.transformer_blocks.0.ff.net.0"
    for first, second in (("swiglu", "swiglu_linear"), ("swiglu_linear", "swiglu")):
        report = mount(model, (first, second))
        assert report.mounted == {first: 2}
        assert report.declined == {second: f"{where}: {first} has this part of the forward"}
        unmount(model)


def test_swiglu_linear_leaves_other_linears_alone(model):
    entry = model.decoder.transformer_blocks[1].ff.net[0]
    expected = decoded(model)
    mount(model, ("swiglu_linear",))
    seen: list[str] = []
    plain, entry.proj = entry.proj, nn.Sequential(entry.proj)
    entry.proj.register_forward_hook(lambda *_: seen.append("wrapped"))
    assert torch.equal(decoded(model), expected)
    assert seen == ["wrapped"] * 3
    unmount(model)
    report = mount(model, ("swiglu_linear",))
    reason = "decoder.transformer_blocks.1.ff.net.0: its projection is not a plain Linear"
    assert report.declined == {"swiglu_linear": reason}
    entry.proj = plain
    assert mount(model, ("swiglu_linear",)).mounted == {"swiglu_linear": 2}


def test_compiled_blocks_stay_one_graph(model):
    mount(model, TOGETHER)
    before = decoded(model)
    model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    try:
        torch.testing.assert_close(decoded(model), before, rtol=1e-2, atol=1e-2)
    finally:
        torch._dynamo.reset()
