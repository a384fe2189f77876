"""The fusions of Z-Image on a tiny real model: exact but for roundings, and reversible."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.normalization import RMSNorm
from mounted import classes, error, fuse
from torch import Tensor, nn

from quantpolicy import Host, Request, load_rules, resolve
from quantpolicy.errors import KernelMountError
from quantpolicy.kernels.rms_norm_fp8 import rms_norm_fp8
from quantpolicy.kernels.row_quantise_fp8 import row_quantise_fp8
from quantpolicy.measure.tiny import build_tiny
from quantpolicy.runtime import apply_plan
from quantpolicy.runtime.joined import join_linears
from quantpolicy.runtime.mount import mount, mounted_ops, unmount
from quantpolicy.runtime.mounts import quantised_norm
from quantpolicy.runtime.mounts.site import Slot, set_slots
from quantpolicy.runtime.mounts.z_image import Block

FAMILY, OP = "z-image", "rms_norm_fp8"
BF16_STEP = 2.0**-8


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return [*model.noise_refiner, *model.context_refiner, *model.layers]


@pytest.fixture
def fused(settings):
    """Return a function that quantises the Linears of a model's blocks, and joins some."""

    def fuse_blocks(model: nn.Module, join: bool = False) -> None:
        for block in blocks_of(model):
            for part in (block.attention, block.feed_forward):
                for module in list(part.modules()):
                    if type(module) is nn.Linear:
                        fuse(module, settings)
            if join:
                attn = block.attention
                join_linears([attn.to_q, attn.to_k, attn.to_v])

    return fuse_blocks


def output(model: nn.Module, inputs: dict[str, object]) -> Tensor:
    with torch.no_grad():
        outs = model(**inputs)[0]
    return torch.cat([out.flatten() for out in outs])


def stock_rows(x: Tensor, weight: Tensor, scale: Tensor | None, eps: float) -> Tensor:
    """Return what the model computes, rounded after every step."""
    norm = RMSNorm(x.shape[-1], eps)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    rows = norm(x)
    return rows if scale is None else rows * scale


def stock_chain(x: Tensor, weight, scale, shift, index, eps, floor) -> tuple[Tensor, Tensor]:
    assert shift is None
    assert index is None
    return row_quantise_fp8(stock_rows(x, weight, scale, eps), floor)


@pytest.mark.parametrize("join", [False, True])
def test_a_mounted_model_is_the_stock_one_but_for_roundings(join, fused, monkeypatch):
    model, inputs = build_tiny(FAMILY)
    dense = output(model, inputs)
    fused(model, join)
    before, kinds, names = output(model, inputs), classes(model), list(model.state_dict())
    report = mount(model, (OP,))
    count = len(blocks_of(model))
    assert (report.mounted, report.declined) == ({OP: count}, {})
    assert list(model.state_dict()) == names

    # Fewer roundings: other codes here and there, and no more error than the codes have.
    relaxed = output(model, inputs)
    assert not torch.equal(relaxed, before)
    assert error(relaxed, dense) < 1.1 * error(before, dense)
    # With the model's own roundings in the op's place nothing differs.
    monkeypatch.setattr(quantised_norm, OP, stock_chain)
    assert torch.equal(output(model, inputs), before)
    if join:
        assert model.layers[0].attention.to_q.waiting is None

    assert unmount(model).restored == {OP: count}
    assert classes(model) == kinds
    assert torch.equal(output(model, inputs), before)


def test_codes_are_near_the_rows_that_the_model_computes(fused, monkeypatch):
    model, inputs = build_tiny(FAMILY)
    fused(model)
    mount(model, (OP,))
    seen = []

    def watched(x, weight, scale, shift, index, eps, floor):
        codes, row_scale = rms_norm_fp8(x, weight, scale, shift, index, eps, floor)
        rows = stock_rows(x, weight, scale, eps).double()
        error = (codes.float().double() * row_scale - rows).abs()
        # Half a step of e4m3, or of its subnormals, and the roundings: three dropped, one made.
        limit = (2.0**-4 + 5 * BF16_STEP) * rows.abs() + 2.0**-10 * row_scale.double()
        assert (error <= limit).all()
        assert (error > 0.1 * limit).any()
        seen.append(scale is not None)
        return codes, row_scale

    monkeypatch.setattr(quantised_norm, OP, watched)
    output(model, inputs)
    modulated = len(model.noise_refiner) + len(model.layers)
    assert (sum(seen), len(seen)) == (2 * modulated, 2 * len(blocks_of(model)))


@pytest.mark.parametrize("modulation", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_a_rewritten_block_computes_what_the_class_does(modulation, masked):
    model, _ = build_tiny(FAMILY)
    block = (model.layers if modulation else model.context_refiner)[0]
    x, vectors = torch.randn(2, 9, 128).bfloat16(), torch.randn(3, 2, 128).bfloat16()
    freqs = torch.polar(torch.ones(2, 9, 32), torch.rand(2, 9, 32))
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 6:] = False
    args: tuple[Tensor | None, ...] = (x, mask, freqs, vectors[0])
    if masked:
        noise_mask = torch.tensor([[1, 0, 1, 1, 0, 0, 0, 1, 1], [0, 1, 1, 1, 1, 0, 1, 0, 1]])
        args = (x, mask, freqs, None, noise_mask, vectors[1], vectors[2])
    with torch.no_grad():
        expected = block(*args)
        set_slots(block, {"quantises": Slot(Block, OP)})
        assert torch.equal(block(*args), expected)


def test_vectors_by_token_reach_the_op(fused, monkeypatch):
    model, _ = build_tiny(FAMILY)
    fused(model)
    block = model.layers[0]
    x, vectors = torch.randn(2, 9, 128).bfloat16(), torch.randn(2, 2, 128).bfloat16()
    freqs = torch.polar(torch.ones(2, 9, 32), torch.rand(2, 9, 32))
    noise_mask = torch.arange(18).view(2, 9) % 2
    args = (x, torch.ones(2, 9, dtype=torch.bool), freqs, None, noise_mask, *vectors)
    with torch.no_grad():
        expected = block(*args)
        mount(model, (OP,))
        assert error(block(*args), expected) < 0.08
        monkeypatch.setattr(quantised_norm, OP, stock_chain)
        assert torch.equal(block(*args), expected)


def test_a_plan_from_the_table_mounts_it():
    model, inputs = build_tiny(FAMILY)
    request = Request(transformer="fp8", execution="fused", min_features=16, quality="high")
    plan = resolve(model, host=Host.load("h200"), request=request)
    listed = [kernel.op for kernel in load_rules().families[FAMILY].kernels]
    assert [kernel.op for kernel in plan.kernels] == listed
    assert OP in listed
    plain, _ = build_tiny(FAMILY)
    apply_plan(plain, plan.model_copy(update={"kernels": ()}))
    report = apply_plan(model, plan)
    # No fp8 product takes its 341 hidden channels.
    assert report.declined == {"transformer.swiglu_fp8_linear": "the model has no site for it"}
    assert mounted_ops(model)[OP] == len(blocks_of(model))
    assert error(output(model, inputs), output(plain, inputs)) < 0.08


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (
            lambda block: setattr(block.attention, "processor", print),
            "its attention processor is a builtin_function_or_method",
        ),
        (
            lambda block: setattr(block, "ffn_norm1", nn.RMSNorm(128, eps=1e-5)),
            "a norm is no RMSNorm with a weight and an eps",
        ),
        (
            lambda block: setattr(block, "ffn_norm1", RMSNorm(128, 1e-5, False)),
            "a norm is no RMSNorm with a weight and an eps",
        ),
        (
            lambda block: setattr(block, "ffn_norm1", RMSNorm(128, 1e-5, bias=True)),
            "a norm has a bias",
        ),
        (lambda block: block.ffn_norm1.float(), "a norm is kept in float32"),
        (
            lambda block: block.attention_norm1.register_forward_hook(lambda *_: None),
            "a RMSNorm inside it has hooks",
        ),
        (
            lambda block: block.attention.register_forward_pre_hook(lambda *_: None),
            "a Attention inside it has hooks",
        ),
        (
            lambda block: setattr(block.feed_forward, "forward", print),
            "the forward of a FeedForward inside it is replaced",
        ),
        (
            lambda block: block.feed_forward.w3.register_forward_hook(lambda *_: None),
            "a FusedLinear inside it has hooks",
        ),
        (
            lambda block: setattr(block, "forward", print),
            "its forward is replaced on the object (an offloading or caching hook)",
        ),
    ],
)
def test_one_rejected_block_leaves_the_whole_fusion_out(spoil, reason, fused):
    model, _ = build_tiny(FAMILY)
    fused(model)
    spoil(model.layers[1])
    kinds = classes(model)
    report = mount(model, (OP,))
    assert report.mounted == {}
    assert report.declined == {OP: f"layers.1: {reason}"}
    assert classes(model) == kinds


def test_a_norm_that_not_only_fp8_linears_read_gives_rows(settings, monkeypatch):
    model, inputs = build_tiny(FAMILY)
    assert mount(model, (OP,)).declined == {OP: "the model has no site for it"}
    attn, ff = model.layers[0].attention, model.layers[0].feed_forward
    for linear in (attn.to_q, attn.to_k, ff.w1, ff.w3):
        fuse(linear, settings)
    before = output(model, inputs)
    assert mount(model, (OP,)).mounted == {OP: 1}
    floors = []
    monkeypatch.setattr(
        quantised_norm, OP, lambda *args: floors.append(args[-1]) or stock_chain(*args)
    )
    assert torch.equal(output(model, inputs), before)
    assert floors == [1e-12]
    ff.w3.floor = 1e-6
    output(model, inputs)
    assert floors == [1e-12]


def test_a_projection_exchanged_later_gets_rows(fused, monkeypatch):
    model, inputs = build_tiny(FAMILY)
    fused(model)
    mount(model, (OP,))
    monkeypatch.setattr(quantised_norm, OP, stock_chain)
    seen = []

    class Adapted(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base_layer = base

        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.dtype)
            return self.base_layer(x)

    before = output(model, inputs)
    block = model.layers[0]
    block.attention.to_k = Adapted(block.attention.to_k)
    block.feed_forward.w1 = Adapted(block.feed_forward.w1)
    assert torch.equal(output(model, inputs), before)
    assert seen == [torch.bfloat16] * 2


def test_a_gradient_through_codes_is_refused(fused):
    model, inputs = build_tiny(FAMILY)
    fused(model)
    mount(model, (OP,))
    model.layers[0].attention_norm1.weight.requires_grad_()
    with pytest.raises(KernelMountError, match="a gradient is wanted through a quantised Linear"):
        model(**inputs)
    output(model, inputs)


def test_blocks_of_the_same_name_in_another_model_are_no_site():
    class ZImageTransformerBlock(nn.Module):
        pass

    assert mount(nn.ModuleList([ZImageTransformerBlock()]), (OP,)).declined == {
        OP: "the model has no site for it"
    }


def test_compiled_blocks_stay_one_graph(fused):
    model, inputs = build_tiny(FAMILY)
    fused(model, join=True)
    mount(model, (OP,))
    before = output(model, inputs)
    model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    try:
        torch.testing.assert_close(output(model, inputs), before, rtol=0.02, atol=0.02)
    finally:
        torch._dynamo.reset()
