"""Every fused op through the dispatcher on a CPU: schema, fake kernel and compiled use agree."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from quantpolicy.kernels.activated_rows import why_not_activated
from quantpolicy.kernels.add_layer_norm_fp8 import add_layer_norm_fp8
from quantpolicy.kernels.fp8_linear import fp8_linear
from quantpolicy.kernels.gated_residual import gated_residual, gated_residual_reference
from quantpolicy.kernels.gelu_fp8_linear import gelu_fp8_linear, gelu_rows
from quantpolicy.kernels.layer_norm_fp8 import layer_norm_fp8
from quantpolicy.kernels.layer_norm_fp32 import layer_norm_fp32, why_not_layer_norm
from quantpolicy.kernels.layer_norm_modulate import layer_norm_modulate
from quantpolicy.kernels.linear_gelu import linear_gelu
from quantpolicy.kernels.qk_norm_rope_across_heads import (
    qk_norm_rope_across_heads,
    why_not_qk_norm_rope_across_heads,
)
from quantpolicy.kernels.qk_norm_rope_pack import qk_norm_rope_pack
from quantpolicy.kernels.qk_rms_norm import qk_rms_norm, why_not_head_norm
from quantpolicy.kernels.qk_rms_norm_rope import qk_rms_norm_rope, why_not_qk_rms_norm_rope
from quantpolicy.kernels.rms_norm import rms_norm
from quantpolicy.kernels.rms_norm_fp8 import rms_norm_fp8, rms_norm_rows, why_not_rms_norm_fp8
from quantpolicy.kernels.rope_qkv_pack import rope_qkv_pack, why_not_rope_qkv_pack
from quantpolicy.kernels.row_quantise_fp8 import row_quantise_fp8
from quantpolicy.kernels.scale_add_rms_norm import scale_add_rms_norm
from quantpolicy.kernels.split_linear import split_linear
from quantpolicy.kernels.swiglu import swiglu
from quantpolicy.kernels.swiglu_fp8_linear import (
    swiglu_fp8_linear,
    swiglu_fp8_linear_reference,
    swiglu_rows,
)
from quantpolicy.kernels.swiglu_linear import swiglu_linear, why_not_swiglu_linear

BF16 = torch.bfloat16
FP8 = ("gelu_fp8_linear", "swiglu_fp8_linear", "fp8_gemm")


def noise(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape).to(dtype)


def packed(tokens: int = 7, text: int = 3, heads: int = 2, size: int = 64) -> tuple[Tensor, ...]:
    image, texts = noise(2, tokens, 3, heads, size), noise(2, text, 3, heads, size)
    return (*image.unbind(2), *texts.unbind(2))


def projected(tokens: int = 7, channels: int = 128) -> tuple[Tensor, ...]:
    return noise(2, tokens, 3 * channels).chunk(3, dim=-1)[:2]


def wan_tables(tokens: int = 7, size: int = 64) -> tuple[Tensor, Tensor]:
    angles = torch.rand(1, tokens, 1, size // 2).repeat_interleave(2, -1) * 6
    return angles.cos(), angles.sin()


def by_token(columns: int = 64) -> list[Tensor]:
    """Return an fp32 modulation, one a token, as strided views."""
    return [part.squeeze(2) for part in torch.randn(2, 5, 6, columns).chunk(6, dim=2)]


def arguments() -> dict[str, tuple[object, ...]]:
    heads, weights = packed(), [noise(64) for _ in range(4)]
    cos, sin = torch.randn(7, 64), torch.randn(7, 64)
    x, update, gates = noise(2, 5, 64), noise(2, 5, 64), noise(2, 6 * 64).chunk(6, dim=1)
    stream, vector = torch.randn(2, 5, 64), torch.randn(64)
    tables = (torch.randn(1, 7, 1, 48), torch.randn(1, 7, 1, 48))
    codes, scale = noise(32, 128).to(torch.float8_e4m3fn), torch.rand(32, 1)
    across = [noise(128) for _ in range(2)]
    return {
        "rope_qkv_pack": (*heads, cos, sin),
        "qk_norm_rope_pack": (*heads, *weights, cos, sin, 1e-6),
        "qk_rms_norm": (*heads[:2], *weights[:2], 1e-6),
        "qk_norm_rope_across_heads": (*projected(), *across, *wan_tables(), 1e-6),
        "gated_residual": (x, update, gates[1], True, vector),
        "layer_norm_fp32": (x, vector, vector, by_token()[0], vector, by_token()[1], vector, 1e-6),
        "layer_norm_modulate": (x[:, 1:], gates[0], gates[1], 1e-6),
        "layer_norm_fp8": (x, None, None, by_token()[0], None, by_token()[1], None, 1e-6, 1e-12),
        "add_layer_norm_fp8": (
            *(x, update, gates[1], vector, vector, vector),
            *(by_token()[0], None, by_token()[1], None, 1e-6, 1e-12),
        ),
        "fp8_gemm": (
            noise(2, 5, 128).to(codes.dtype),
            torch.rand(2, 5, 1),
            codes,
            scale,
            None,
            BF16,
        ),
        "rms_norm": (stream, vector, 1e-5, BF16),
        "rms_norm_fp8": (
            *(x, vector, noise(6, 64), noise(6, 64), torch.tensor([5, 0, 0, 2, 5])),
            *(1e-5, 1e-12),
        ),
        "scale_add_rms_norm": (stream, update, vector, vector, 1e-5),
        "qk_rms_norm_rope": (*heads[:2], *tables, 1e-5),
        "swiglu": (x,),
        "swiglu_linear": (x, noise(128, 64), noise(128)),
        "linear_gelu": (x, noise(128, 64), noise(128)),
        "split_linear": (x, update, noise(32, 128), noise(32)),
        "gelu_fp8_linear": (x, update, codes, scale, noise(32), 1e-12),
        "swiglu_fp8_linear": (x, update, noise(2, 5, 64), codes, scale, noise(32), 1e-12),
    }


@pytest.mark.parametrize("name", list(arguments()))
def test_opcheck(name):
    # The schema check multiplies the inputs, which fp8 tensors cannot be.
    tests = ("test_schema", "test_faketensor")[name in FP8 :]
    op = getattr(torch.ops.quantpolicy, name).default
    torch.library.opcheck(op, arguments()[name], test_utils=tests)


def on_meta(*args: object) -> list[object]:
    return [each.to("meta") if isinstance(each, Tensor) else each for each in args]


def test_fakes_of_mixed_dtypes_are_what_the_references_give():
    codes, scale = noise(32, 128).to(torch.float8_e4m3fn), torch.rand(32, 1)
    x, wide = noise(2, 5, 64), torch.randn(2, 5, 64)
    linear = (codes, scale, None, 1e-12)
    plain = [None] * 6
    for op, args in (
        (gelu_fp8_linear, (x, wide, *linear)),
        (swiglu_fp8_linear, (x, x, wide, *linear)),
        (swiglu_fp8_linear, (x, wide, x, *linear)),
        (add_layer_norm_fp8, (x, wide, None, None, *plain, 1e-6, 1e-12)),
        (add_layer_norm_fp8, (wide, x, None, None, *plain, 1e-6, 1e-12)),
    ):
        found, fake = op(*args), op(*on_meta(*args))
        first, fake_first = (
            each if isinstance(each, Tensor) else each[0] for each in (found, fake)
        )
        assert first.dtype is fake_first.dtype is torch.float32
        assert first.shape == fake_first.shape
    gated = (x, wide, torch.randn(64), None, *plain, 1e-6, 1e-12)
    assert add_layer_norm_fp8(*gated)[0].dtype is BF16
    assert add_layer_norm_fp8(*on_meta(*gated))[0].dtype is BF16


def test_more_samples_than_a_launch_has_are_declined():
    x = torch.zeros(1, 1, 8, dtype=BF16)
    norm = (None, None, None, None, 1e-5, 1e-12)
    assert why_not_rms_norm_fp8(x.expand(65535, 1, 8), *norm) == ""
    reason = "there are more than 65535 samples"
    assert why_not_rms_norm_fp8(x.expand(65536, 1, 8), *norm) == reason
    assert why_not_layer_norm(x.expand(65536, 1, 8), *[None] * 6, 1e-6) == reason


def test_single_stream_variants():
    q, k, *_ = packed()
    cos, sin = torch.randn(5, 64), torch.randn(5, 64)
    found = rope_qkv_pack(q, k, None, None, None, None, cos, sin)
    assert [item.shape for item in found] == [q.shape, k.shape]
    assert torch.equal(found[0][:, 5:], q[:, 5:])
    normed = qk_norm_rope_pack(q, k, *[None] * 4, noise(64), noise(64), None, None, cos, sin, 1e-6)
    assert len(normed) == 2


def test_results_share_no_memory_with_inputs():
    q, k, v, *texts = packed(text=0)
    cos, sin = torch.randn(0, 64), torch.randn(0, 64)
    for found, given in zip(
        rope_qkv_pack(q.contiguous(), k, v.contiguous(), *texts, cos, sin), (q, k, v), strict=True
    ):
        assert torch.equal(found, given)
        assert found.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()


def test_references_are_the_eager_chains():
    args = arguments()
    x, update, gate, *_ = args["gated_residual"]
    assert torch.equal(gated_residual(x, update, gate), x + update * gate.unsqueeze(1))
    x, scale, shift, eps = args["layer_norm_modulate"]
    chain = F.layer_norm(x, (64,), eps=eps) * (1 + scale[:, None]) + shift[:, None]
    assert torch.equal(layer_norm_modulate(x, scale, shift, eps), chain)
    x, weight, bias = args["linear_gelu"]
    chain = F.gelu(F.linear(x, weight, bias), approximate="tanh")
    assert torch.equal(linear_gelu(x, weight, bias), chain)
    head, x, weight, bias = args["split_linear"]
    chain = F.linear(torch.cat([head, x], -1), weight, bias)
    assert torch.equal(split_linear(head, x, weight, bias), chain)
    (x,) = args["swiglu"]
    assert torch.equal(swiglu(x), x[..., :32] * F.silu(x[..., 32:]))
    x, weight, bias = args["swiglu_linear"]
    for given in (bias, None):
        rows = F.linear(x, weight, given)
        assert torch.equal(swiglu_linear(x, weight, given), rows[..., :64] * F.silu(rows[..., 64:]))
    stream, weight, eps, dtype = args["rms_norm"]
    assert torch.equal(
        rms_norm(stream, weight, eps, dtype), F.rms_norm(stream, (64,), weight, eps).to(dtype)
    )
    stream, update, scale, weight, eps = args["scale_add_rms_norm"]
    total, normed = scale_add_rms_norm(stream, update, scale, weight, eps)
    assert torch.equal(total, stream + update * scale)
    assert torch.equal(normed, F.rms_norm(total, (64,), weight, eps).to(BF16))
    x, head, *_ = args["gelu_fp8_linear"]
    assert gelu_fp8_linear(*args["gelu_fp8_linear"]).shape == (2, 5, 32)
    assert torch.equal(gelu_rows(x, head)[..., :64], head)


def test_wan_references_are_the_eager_chains():
    x, update, shift, scale, gate = noise(2, 5, 64), noise(2, 5, 64), *by_token()[:3]
    weight, bias = noise(64), noise(64)
    for vectors in ((shift, scale, gate), [v[:, :1] for v in (shift, scale, gate)]):
        shift, scale, gate = vectors
        chain = (x.float() + update * gate).type_as(x)
        assert torch.equal(gated_residual(x, update, gate, True), chain)
        assert gated_residual(x, update, gate).dtype is torch.float32
        chain = (F.layer_norm(x.float(), (64,), eps=1e-6) * (1 + scale) + shift).type_as(x)
        assert torch.equal(layer_norm_fp32(x, None, None, scale, None, shift, None, 1e-6), chain)
    # The modulation as Wan has it: half-precision parts, by token or sample, and an fp32 table.
    table = torch.randn(6, 64)
    for parts in (noise(2, 5, 6, 64), noise(2, 6, 64)):
        full = (table + parts.float()).chunk(6, dim=-2)
        shift, scale, gate = (part.squeeze(2) if parts.dim() == 4 else part for part in full[:3])
        vectors = parts.unbind(-2)
        chain = (x.float() + update * gate).type_as(x)
        assert torch.equal(gated_residual(x, update, vectors[2], True, table[2]), chain)
        chain = (F.layer_norm(x.float(), (64,), eps=1e-6) * (1 + scale) + shift).type_as(x)
        args = (x, None, None, vectors[1], table[1], vectors[0], table[0], 1e-6)
        assert torch.equal(layer_norm_fp32(*args), chain)
    chain = F.layer_norm(x.float(), (64,), weight.float(), bias.float(), 1e-6).type_as(x)
    assert torch.equal(layer_norm_fp32(x, weight, bias, *[None] * 4, 1e-6), chain)
    assert torch.equal(rms_norm(x, weight, 1e-6, BF16), F.rms_norm(x, (64,), weight, 1e-6))
    norm = (None, None, scale, None, shift, None, 1e-6)
    codes = layer_norm_fp8(x, *norm, 1e-12)
    for one, other in zip(codes, row_quantise_fp8(layer_norm_fp32(x, *norm), 1e-12), strict=True):
        assert torch.equal(one.float(), other.float())
    stream = (x.float() + update * gate).type_as(x)
    found = add_layer_norm_fp8(x, update, gate, None, *norm, 1e-12)
    expected = (stream, *layer_norm_fp8(stream, *norm, 1e-12))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.float(), other.float())


def test_the_rows_of_rms_norm_fp8_are_the_chains_of_their_models():
    from diffusers.models.normalization import RMSNorm

    x, weight, scale = noise(2, 5, 64), noise(64), 1.0 + noise(2, 1, 64)
    chain = F.rms_norm(x, (64,), weight, 1e-5)
    assert torch.equal(rms_norm_rows(x, weight, None, None, None, 1e-5), chain)
    for one, other in zip(
        rms_norm_fp8(x, weight, None, None, None, 1e-5, 1e-12),
        row_quantise_fp8(chain, 1e-12),
        strict=True,
    ):
        assert torch.equal(one.float(), other.float())
    norm = RMSNorm(64, 1e-5)
    norm.weight.data = weight
    with torch.no_grad():
        chain = norm(x) * scale
    # Three roundings in the chain's place of one, each half a step of bf16.
    found = rms_norm_rows(x, weight, scale, None, None, 1e-5)
    assert not torch.equal(found, chain)
    assert ((found - chain).abs() <= 4.1 * 2**-8 * chain.abs()).all()
    assert not ((found * 1.02 - chain).abs() <= 4.1 * 2**-8 * chain.abs()).all()
    # Tables give what their rows give, by token.
    tables, index = noise(6, 2, 64).unbind(1), torch.tensor([5, 0, 0, 2, 5])
    by_row = [table[index].expand(2, 5, 64) for table in tables]
    found = rms_norm_rows(x, None, *tables, index, 1e-5)
    assert torch.equal(found, rms_norm_rows(x, None, *by_row, None, 1e-5))
    exact = F.rms_norm(x.float(), (64,), None, 1e-5) * by_row[0].float() + by_row[1].float()
    assert torch.equal(found, exact.to(BF16))


def test_rms_norm_fp8_says_why_not():
    x, vector, table = noise(2, 5, 64), noise(64), noise(6, 64)
    index = torch.tensor([5, 0, 0, 2, 5])
    assert why_not_rms_norm_fp8(x, vector, table, table, index, 1e-5, 0.0) == ""
    assert why_not_rms_norm_fp8(x, None, noise(2, 1, 64), x, None, 1e-5, 0.0) == ""
    for args, reason in (
        ((x.float(), vector, None, None, None), "not bfloat16"),
        ((x.transpose(1, 2), None, None, None, None), "channels are not contiguous"),
        ((x, vector[:32], None, None, None), "not a contiguous [D]"),
        ((x, vector.double(), None, None, None), "float16 or float32"),
        ((x, vector, None, x.double(), None), "float16 or float32"),
        ((x, vector, table, None, None), "none of [D]"),
        ((x, vector, x, None, index), "is not [R, D]"),
        ((x, vector, None, table[:, :9], index), "is not [R, D]"),
        ((x, vector, noise(64, 6).t(), None, index), "table's channels are not contiguous"),
        ((x, vector, table, None, index.float()), "of int32 or int64"),
        ((x, vector, table, None, index[1:]), "not a contiguous [S]"),
        ((x, vector, table, None, index.expand(2, 5)), "not a contiguous [S]"),
        ((x, vector, table, None, index.repeat(2)[::2]), "not a contiguous [S]"),
    ):
        assert reason in why_not_rms_norm_fp8(*args, 1e-5, 0.0)


def test_head_norms_and_norms_across_heads_are_not_confused():
    q, k, *_ = packed()
    across = noise(128)
    rows, tables, one_head = projected(), wan_tables(), noise(64)
    assert why_not_qk_norm_rope_across_heads(*rows, across, across, *tables, 1e-6) == ""
    assert (
        why_not_qk_norm_rope_across_heads(*rows, across, one_head, *tables, 1e-6)
        == "the norm weights are not [H * D] for [B, S, H * D]"
    )
    with pytest.raises(RuntimeError, match="normalized_shape"):
        qk_norm_rope_across_heads(*rows, one_head, one_head, *tables, 1e-6)
    assert why_not_head_norm(q, across) == "the norm weight is not [D] for [B, S, H, D]"
    with pytest.raises(RuntimeError, match="size of tensor"):
        qk_rms_norm(q, k, across, across, 1e-6)


def test_predicates_say_why():
    q, k, v, *texts = packed()
    cos, sin = torch.randn(7, 64), torch.randn(7, 64)
    assert why_not_rope_qkv_pack(q, k, v, *texts, cos, sin) == ""
    for args, reason in (
        ((q.float(), k, v, *texts, cos, sin), "not both bfloat16 or both float16"),
        ((q, k, v, *texts, cos.half(), sin), "tables are not float32"),
        ((q, k, v, *texts, cos[:, :32], sin[:, :32]), "tables are not [R, D]"),
        ((q[:, :5], k[:, :5], v[:, :5], *texts, cos, sin), "more rows than there are tokens"),
        ((q.transpose(2, 3), k.transpose(2, 3), v, *texts, cos, sin), "not [R, D]"),
        ((q, k, v.half(), *texts, cos, sin), "differ in"),
    ):
        assert reason in why_not_rope_qkv_pack(*args)
    tables = (torch.randn(1, 7, 1, 48), torch.randn(1, 7, 1, 48))
    assert why_not_qk_rms_norm_rope(q, k, *tables) == ""
    wide = noise(2, 7, 2, 96)
    assert "64" in why_not_qk_rms_norm_rope(wide, wide, *tables)
    short = (tables[0][..., :32], tables[1][..., :32])
    assert "48" in why_not_qk_rms_norm_rope(q, k, *short)
    assert "batch or tokens" in why_not_qk_rms_norm_rope(q[:, 1:], k[:, 1:], *tables)


def test_swiglu_fp8_linear_is_the_chain_of_both_orders_of_diffusers():
    from diffusers.models.activations import SwiGLU
    from diffusers.models.transformers.transformer_flux2 import Flux2SwiGLU
    from diffusers.models.transformers.transformer_z_image import FeedForward

    weight, scale, bias, floor = arguments()["swiglu_fp8_linear"][3:]
    with torch.no_grad():
        for dtype in (torch.float16, BF16):
            x, head = noise(2, 7, 48, dtype=dtype), noise(2, 7, 64, dtype=dtype)
            entry = SwiGLU(48, 64).to(dtype)
            first, second = entry.proj(x).chunk(2, dim=-1)
            assert torch.equal(swiglu_rows(first, second, None), entry(x))
            rows = torch.cat([head, Flux2SwiGLU()(entry.proj(x))], dim=-1)
            assert torch.equal(swiglu_rows(second, first, head), rows)
            given = (second, first, head, weight, scale, bias.to(dtype), floor)
            expected = fp8_linear(rows, *given[3:])
            assert torch.equal(swiglu_fp8_linear(*given), expected)
            assert torch.equal(swiglu_fp8_linear_reference(*given), expected)
            gated = FeedForward._forward_silu_gating(None, first, second)
            assert torch.equal(swiglu_rows(second, first, None), gated)


def test_ops_of_activated_rows_say_why_not(monkeypatch):
    monkeypatch.setattr("quantpolicy.kernels.activated_rows.why_no_e4m3", lambda _: "")
    value, gate, head, weight, *others = arguments()["swiglu_fp8_linear"]
    halves = noise(2, 5, 128).chunk(2, dim=-1)
    for args in ((value, gate, head, weight), (*halves, head, weight), (value, head, weight)):
        assert why_not_activated(*args, *others) == ""
    assert why_not_activated(value, gate, None, weight[:, :64], *others) == ""
    wide = weight.repeat(1, 300)
    for args, reason in (
        ((value.float(), gate.float(), head, weight), "not all bfloat16 or all float16"),
        ((value, gate.half(), head, weight), "not all bfloat16 or all float16"),
        ((value, gate, head.half(), weight), "not all bfloat16 or all float16"),
        ((value[0], gate[0], head[0], weight), "rows are not regular"),
        ((noise(2, 9, 64)[:, :5], gate, head, weight), "rows are not regular"),
        ((value, noise(2, 64, 5).transpose(1, 2), head, weight), "rows are not regular"),
        ((value, gate, noise(2, 5, 128)[..., ::2], weight), "rows are not regular"),
        ((value, gate[..., :1], head, weight), "differ in shape"),
        ((value, gate[:1], head, weight), "differ in shape"),
        ((value, gate, head[:1], weight), "the head has other rows"),
        ((value, gate, None, weight), "do not make up the weight's columns"),
        ((value, gate, noise(2, 5, wide.shape[1] - 64), wide), "longer than 32768"),
        ((value[:0], gate[:0], head[:0], weight), "there are no rows"),
    ):
        assert reason in why_not_activated(*args, *others)


def test_swiglu_linear_is_the_chain_of_diffusers():
    from diffusers.models.activations import SwiGLU

    with torch.no_grad():
        for dtype in (torch.float16, BF16, torch.float32):
            for bias in (True, False):
                module = SwiGLU(48, 40, bias=bias).to(dtype)
                x = noise(3, 17, 48, dtype=dtype)[:, ::2]
                found = swiglu_linear(x, module.proj.weight, module.proj.bias)
                assert torch.equal(found, module(x))


def test_swiglu_linear_says_why_not():
    x, weight, bias = arguments()["swiglu_linear"]
    for args, reason in (
        ((x.float(), weight, bias), "not all bfloat16 or all float16"),
        ((x, weight, bias.half()), "not all bfloat16 or all float16"),
        ((x, weight.t().contiguous().t(), bias), "not contiguous"),
        ((x[:0], weight, bias), "no rows"),
        ((x, weight[:120], bias[:120]), "not multiples of 16 bytes"),
        ((x[..., :60], weight[:, :60].contiguous(), bias), "not multiples of 16 bytes"),
    ):
        assert reason in why_not_swiglu_linear(*args)


def test_predicates_of_wan_s_ops_say_why():
    (q, k), weight, (cos, sin) = projected(), noise(128), wan_tables()
    for args, reason in (
        ((q.float(), k, weight, weight, cos, sin), "not all bfloat16"),
        ((q, k, weight.float(), weight, cos, sin), "not all bfloat16"),
        ((q, k[:, 1:], weight, weight, cos, sin), "of one shape"),
        ((q, k, weight, weight, cos.to(BF16), sin), "not float32"),
        ((q, k, weight, weight, cos[:, 1:], sin[:, 1:]), "not [1, S, 1, D]"),
        ((q, k, weight, weight, cos.expand(2, -1, -1, -1), sin), "not [1, S, 1, D]"),
        ((q, k, weight, weight, cos[..., :48], sin[..., :48]), "no divisor"),
        ((q, k, weight, weight, cos.transpose(1, 3).contiguous().transpose(1, 3), sin), "contig"),
    ):
        assert reason in why_not_qk_norm_rope_across_heads(*args, 1e-6)
    x, vector, (shift, scale, *_) = noise(2, 5, 64), noise(64), by_token()
    assert why_not_layer_norm(x, vector, vector, scale, None, shift, None, 1e-6) == ""
    for args, reason in (
        ((x.float(), None, None, scale, None, shift, None), "not bfloat16"),
        ((x, vector, None, scale, None, shift, None), "without a bias"),
        ((x, None, None, scale, None, None, None), "without a shift"),
        ((x, None, None, scale.double(), None, shift, None), "float16 or float32"),
        ((x, None, None, scale[:, 1:], None, shift, None), "none of [D]"),
        ((x, None, None, scale, vector, shift, None), "without one for the shift"),
        ((x, None, None, scale, vector[:9], shift, vector), "table is not a contiguous [D]"),
        ((x, None, None, scale, vector.double(), shift, vector), "table is not bfloat16"),
        ((x, vector[:32], vector, scale, None, shift, None), "not contiguous [D]"),
        ((x.transpose(1, 2), *[None] * 6), "channels are not contiguous"),
    ):
        assert reason in why_not_layer_norm(*args, 1e-6)


def test_a_gradient_flows_through_the_reference_on_a_cpu():
    x, update, gate = (item.float() for item in arguments()["gated_residual"][:3])
    reference = gated_residual_reference(x.requires_grad_(), update, gate)
    reference.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_compiled_use_is_one_graph():
    args = arguments()["qk_rms_norm_rope"]

    def rotate(*given: object) -> Tensor:
        query, key = qk_rms_norm_rope(*given)
        return query + key

    found = torch.compile(rotate, fullgraph=True, backend="aot_eager")(*args)
    assert torch.equal(found, rotate(*args))
    torch._dynamo.reset()
