"""The MiniMax-H3 denoiser's fusions on a tiny real model: exact but for roundings, reversible."""

from __future__ import annotations

import pytest
import torch
from mounted import classes, error, fuse
from torch import Tensor, nn

from quantpolicy import Host, Request, resolve
from quantpolicy.kernels.rms_norm_fp8 import rms_norm_fp8
from quantpolicy.kernels.row_quantise_fp8 import row_quantise_fp8
from quantpolicy.measure.tiny import build_tiny
from quantpolicy.runtime import apply_plan
from quantpolicy.runtime.joined import join_linears
from quantpolicy.runtime.mount import mount, mounted_ops, unmount
from quantpolicy.runtime.mounts import quantised_norm
from quantpolicy.runtime.mounts.minimax_h3_denoiser import Block, RefinerBlock
from quantpolicy.runtime.mounts.site import Slot, set_slots

FAMILY, OP = "minimax-h3", "rms_norm_fp8"
BF16_STEP = 2.0**-8


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return [*model.token_refiner.refiner_blocks, *model.transformer_blocks]


@pytest.fixture
def fused(settings):
    """Return a function that quantises the Linears of a model's blocks, and joins some."""

    def fuse_blocks(model: nn.Module, join: bool = False) -> None:
        for block in blocks_of(model):
            for part in (block.attn, block.ff):
                for module in list(part.modules()):
                    if type(module) is nn.Linear:
                        fuse(module, settings)
            if join:
                join_linears([block.attn.to_q, block.attn.to_k, block.attn.to_v])

    return fuse_blocks


def output(model: nn.Module, inputs: dict[str, object]) -> Tensor:
    with torch.no_grad():
        return torch.cat([out.flatten() for out in model(**inputs)])


def stock_rows(x: Tensor, weight: Tensor, scale, shift, index, eps: float) -> Tensor:
    """Return what the model computes, rounded after every step."""
    rows = nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
    if index is None:
        return rows
    return rows * scale.index_select(0, index) + shift.index_select(0, index)


def stock_chain(*args) -> tuple[Tensor, Tensor]:
    *norm, floor = args
    return row_quantise_fp8(stock_rows(*norm), floor)


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
        assert model.transformer_blocks[0].attn.to_q.waiting is None

    assert unmount(model).restored == {OP: count}
    assert classes(model) == kinds
    assert torch.equal(output(model, inputs), before)


def test_a_norm_without_modulation_drops_no_rounding(fused):
    model, _ = build_tiny(FAMILY)
    fused(model)
    refiner, x = model.token_refiner, torch.randn(2, 12, 96).bfloat16()
    with torch.no_grad():
        expected = refiner(x)
        assert mount(refiner, (OP,)).mounted == {OP: 2}
        assert torch.equal(refiner(x), expected)


def test_codes_are_near_the_rows_that_the_model_computes(fused, monkeypatch):
    model, inputs = build_tiny(FAMILY)
    fused(model)
    mount(model, (OP,))
    indices = []

    def watched(*args):
        codes, row_scale = rms_norm_fp8(*args)
        x, weight, scale, shift, index, eps, _ = args
        rows = stock_rows(x, weight, scale, shift, index, eps).double()
        # What a sum cancels still has the roundings of its terms.
        terms = rows.abs()
        if index is not None:
            terms = terms + 2 * shift.index_select(0, index).double().abs()
        error = (codes.float().double() * row_scale - rows).abs()
        # Half a step of e4m3, or of its subnormals, and the roundings: three dropped, one made.
        limit = 2.0**-4 * rows.abs() + 5 * BF16_STEP * terms + 2.0**-10 * row_scale.double()
        assert (error <= limit).all()
        assert (error > 0.1 * limit).any()
        indices.append(index)
        return codes, row_scale

    monkeypatch.setattr(quantised_norm, OP, watched)
    output(model, inputs)
    adaln = inputs["timestep_indices"] * 3 + inputs["token_tags"]
    assert indices[:4] == [None] * 4
    assert len(indices) == 8
    assert all(torch.equal(index, adaln) for index in indices[4:])


def test_rewritten_blocks_compute_what_the_classes_do():
    model, _ = build_tiny(FAMILY)
    x, temb = torch.randn(2, 9, 96).bfloat16(), torch.randn(2, 64)
    index = torch.tensor([5, 0, 0, 3, 1, 2, 4, 4, 5])
    rotary = torch.randn(9, 48), torch.randn(9, 48)
    for block, rewrite, args in (
        (model.token_refiner.refiner_blocks[0], RefinerBlock, (x,)),
        (model.transformer_blocks[0], Block, (x, temb, index, rotary)),
    ):
        with torch.no_grad():
            expected = block(*args)
            set_slots(block, {"quantises": Slot(rewrite, OP)})
            assert torch.equal(block(*args), expected)


def test_projections_fused_later_get_rows(fused, monkeypatch):
    model, inputs = build_tiny(FAMILY)
    fused(model)
    mount(model, (OP,))
    monkeypatch.setattr(quantised_norm, OP, stock_chain)
    before = output(model, inputs)
    for block in blocks_of(model):
        attn = block.attn
        parts = [nn.Linear(96, 128, bias=False).bfloat16() for _ in range(3)]
        for part, linear in zip(parts, (attn.to_q, attn.to_k, attn.to_v), strict=True):
            part.weight.data = linear.weight.dequantize()
        attn.to_qkv = nn.Linear(96, 384, bias=False).bfloat16()
        attn.to_qkv.weight.data = torch.cat([part.weight.data for part in parts])
        attn.fused_projections = True
    # Rows go to a dense Linear, and so without their quantisation.
    assert error(output(model, inputs), before) < 0.08


def test_a_plan_from_the_table_mounts_it():
    model, inputs = build_tiny(FAMILY)
    request = Request(transformer="fp8", execution="fused", min_features=16, quality="high")
    plan = resolve(model, host=Host.load("h200"), request=request)
    assert OP in [kernel.op for kernel in plan.kernels if kernel.component == "transformer"]
    plain, _ = build_tiny(FAMILY)
    apply_plan(plain, plan.model_copy(update={"kernels": ()}))
    report = apply_plan(model, plan)
    assert report.declined == {}
    assert mounted_ops(model)[OP] == len(blocks_of(model))
    assert error(output(model, inputs), output(plain, inputs)) < 0.08


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (
            lambda block: setattr(block.attn, "processor", print),
            "its attention processor is a builtin_function_or_method",
        ),
        (
            lambda block: setattr(block, "norm2", nn.LayerNorm(96)),
            "a norm is no RMSNorm with a weight and an eps",
        ),
        (
            lambda block: setattr(block.norm1, "eps", None),
            "a norm is no RMSNorm with a weight and an eps",
        ),
        (
            lambda block: block.norm1.register_forward_hook(lambda *_: None),
            "a RMSNorm inside it has hooks",
        ),
        (
            lambda block: block.ff.net[0].register_forward_pre_hook(lambda *_: None),
            "a SwiGLU inside it has hooks",
        ),
        (
            lambda block: block.attn.to_v.register_forward_hook(lambda *_: None),
            "a FusedLinear inside it has hooks",
        ),
        (
            lambda block: setattr(block.attn, "forward", print),
            "the forward of a MiniMaxH3Attention inside it is replaced",
        ),
        (
            lambda block: setattr(block, "forward", print),
            "its forward is replaced on the object (an offloading or caching hook)",
        ),
    ],
)
@pytest.mark.parametrize("refiner", [True, False])
def test_one_rejected_block_leaves_the_whole_fusion_out(spoil, reason, refiner, fused):
    model, _ = build_tiny(FAMILY)
    fused(model)
    name = "token_refiner.refiner_blocks.1" if refiner else "transformer_blocks.1"
    spoil(model.get_submodule(name))
    kinds = classes(model)
    report = mount(model, (OP,))
    assert report.mounted == {}
    assert report.declined == {OP: f"{name}: {reason}"}
    assert classes(model) == kinds


def test_a_dense_refiner_is_no_reason_against_it(fused):
    model, _ = build_tiny(FAMILY)
    assert mount(model, (OP,)).declined == {OP: "the model has no site for it"}
    model.token_refiner.refiner_blocks, refiner = (
        nn.ModuleList(),
        model.token_refiner.refiner_blocks,
    )
    fused(model)
    model.token_refiner.refiner_blocks = refiner
    assert mount(model, (OP,)).mounted == {OP: len(model.transformer_blocks)}


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
