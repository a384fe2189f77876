"""The fusions of Wan on a CUDA device, against fp64: odd and huge shapes, mounted and compiled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quantpolicy.kernels.add_layer_norm_fp8 import launch_add_layer_norm_fp8
from quantpolicy.kernels.contract import forget_verdicts, op_counts, same_bits
from quantpolicy.kernels.fp8_linear import fp8_gemm, fp8_linear
from quantpolicy.kernels.gated_residual import (
    gated_residual,
    gated_residual_reference,
    launch_gated_residual,
)
from quantpolicy.kernels.layer_norm_fp8 import launch_layer_norm_fp8
from quantpolicy.kernels.layer_norm_fp32 import (
    launch_layer_norm_fp32,
    layer_norm_fp32,
    layer_norm_fp32_reference,
)
from quantpolicy.kernels.linear import FusedLinear
from quantpolicy.kernels.qk_norm_rope_across_heads import (
    launch_qk_norm_rope_across_heads,
    qk_norm_rope_across_heads,
    qk_norm_rope_across_heads_reference,
)
from quantpolicy.kernels.qk_rms_norm import qk_rms_norm
from quantpolicy.kernels.rms_norm import launch_rms_norm
from quantpolicy.kernels.row_quantise_fp8 import row_quantise_fp8
from quantpolicy.measure.tiny import build_tiny
from quantpolicy.runtime.joined import join_linears
from quantpolicy.runtime.mount import mount
from quantpolicy.runtime.weights import quantise_weight
from quantpolicy.schemes import Scheme
from tests.gpu.closeness import SAME_ERROR, assert_near_codes, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # torch announces its own changes while it compiles.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

HALF = (torch.bfloat16, torch.float16)
TOKENS = (1, 17, 65_536, 75_600)
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
EPS, FLOOR = 1e-6, 1e-12
PER_TOKEN, PER_SAMPLE = "wan2.2-ti2v-5b", "wan2.2-t2v-a14b"
DENSE = ("gated_residual", "layer_norm_fp32", "qk_norm_rope_across_heads", "rms_norm")
QUANTISED = ("gelu_fp8_linear", "layer_norm_fp8", "add_layer_norm_fp8")


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def is_near(found: Tensor, exact: Tensor, roundings: int = 1) -> bool:
    """Return whether a half-precision result is fp64's but for some roundings."""
    step = ROUNDING[found.dtype]
    difference = (found.double() - exact).abs()
    scale = float(exact.abs().max())
    # After a second rounding an element may cancel what the first one left in another.
    slack = 2.0**-6 if roundings == 1 else 1.0
    limit = roundings * step * (1.01 * exact.abs() + slack * scale)
    close = float(difference.norm()) <= roundings * step * 0.6 * float(exact.norm())
    return bool((difference <= limit).all()) and close


def assert_near(found: Tensor, exact: Tensor, roundings: int = 1) -> None:
    assert found.shape == exact.shape
    assert found.is_contiguous()
    assert is_near(found, exact, roundings)
    perturbed = found * (1 + 4 * roundings * ROUNDING[found.dtype])
    assert not is_near(perturbed, exact, roundings)


def tables(tokens: int, size: int) -> tuple[Tensor, Tensor]:
    """Return rotary tables as Wan makes them: [1, S, 1, D] fp32, every value twice."""
    angles = torch.rand(1, tokens, 1, size // 2, device="cuda").repeat_interleave(2, -1) * 50
    return angles.cos(), angles.sin()


def norm_rope_exact(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x, weight, cos, sin = (item.double() for item in (x, weight, cos, sin))
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight
    even, odd = normed.unflatten(2, (-1, cos.shape[-1])).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def layer_norm_exact(x: Tensor, *vectors: Tensor | None) -> Tensor:
    weight, bias, *modulation = (None if item is None else item.double() for item in vectors)
    normed = F.layer_norm(x.double(), x.shape[-1:], weight, bias, EPS)
    scale, scale_table, shift, shift_table = modulation
    if scale is None or shift is None:
        return normed
    scale, shift = (item.unsqueeze(1) if item.dim() == 2 else item for item in (scale, shift))
    if scale_table is not None and shift_table is not None:
        scale, shift = scale + scale_table, shift + shift_table
    return normed * (1 + scale) + shift


def rms_norm_exact(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double()


Vectors = tuple[Tensor | None, ...]
Modulation = tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]


def by_token(batch: int, tokens: int, columns: int) -> Modulation:
    """Return six vectors a token, as Wan's strided views, and what is added to each."""
    vectors = noise(batch, tokens, 6, columns).unbind(2)
    return vectors, noise(6, columns, dtype=torch.float32).unbind(0)


def by_sample(batch: int, columns: int) -> Modulation:
    """Return six fp32 vectors a sample, with nothing to add."""
    return noise(batch, 6, columns, dtype=torch.float32).unbind(1), (None,) * 6


def modulation_of(vectors: tuple[Tensor, ...], tables: tuple[Tensor | None, ...]) -> Vectors:
    return (vectors[1], tables[1], vectors[0], tables[0])


def assert_rotated(q: Tensor, k: Tensor, size: int) -> None:
    weights = [noise(q.shape[2], dtype=q.dtype) for _ in range(2)]
    cos, sin = tables(q.shape[1], size)
    given = (q, k, *weights, cos, sin)
    before = [item.clone() for item in given]
    found = launch_qk_norm_rope_across_heads(*given, EPS)
    for one, x, weight in zip(found, (q, k), weights, strict=True):
        exact = norm_rope_exact(x, weight, cos, sin)
        assert_near(one, exact, 2)
        assert not is_near(one, norm_rope_exact(x, weight, cos, -sin), 2)
        assert not is_near(one, norm_rope_exact(x, weight.flip(0), cos, sin), 2)
    assert all(same_bits(one, other) for one, other in zip(given, before, strict=True))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("heads", "size"), [(24, 128), (40, 128), (3, 64), (5, 96), (1, 128)])
def test_qk_norm_rope_across_heads(heads: int, size: int, dtype: torch.dtype) -> None:
    for batch, tokens in ((1, 17), (2, 301)):
        q, k, _ = noise(batch, tokens, 3 * heads * size, dtype=dtype).chunk(3, dim=-1)
        assert_rotated(q, k, size)


@pytest.mark.parametrize("tokens", TOKENS)
def test_qk_norm_rope_across_heads_at_long_sequences(tokens: int) -> None:
    assert_rotated(noise(1, tokens, 384), noise(1, tokens, 384), 128)


def test_qk_norm_rope_across_heads_reads_any_strides() -> None:
    wide = noise(2, 600, 384)
    k = noise(2, 300, 384)
    for q in (
        wide[:, ::2],
        wide[:, 40:340],
        noise(300, 2, 384).transpose(0, 1),
        noise(1, 300, 384).expand(2, 300, 384),
        noise(2 * 300 * 384 + 5)[5:].view(2, 300, 384),
    ):
        assert_rotated(q, k, 128)


def test_qk_norm_rope_across_heads_is_the_eager_chain_but_for_few_roundings() -> None:
    q, k, _ = noise(1, 1120, 3 * 3072).chunk(3, dim=-1)
    args = (q, k, noise(3072), noise(3072), *tables(1120, 128), EPS)
    expected = qk_norm_rope_across_heads_reference(*args)
    for one, other in zip(launch_qk_norm_rope_across_heads(*args), expected, strict=True):
        assert float((one != other).float().mean()) < 0.02


def test_norms_of_a_head_and_across_heads_are_not_confused() -> None:
    q, k = noise(1, 5, 256), noise(1, 5, 256)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        qk_norm_rope_across_heads(q, k, noise(128), noise(128), *tables(5, 128), EPS)
    reason = "the norm weights are not [H * D] for [B, S, H * D]"
    assert op_counts()["qk_norm_rope_across_heads"].declines[reason] == 1
    heads = (q.view(1, 5, 2, 128), k.view(1, 5, 2, 128))
    with pytest.raises(RuntimeError, match="size of tensor"):
        qk_rms_norm(*heads, noise(256), noise(256), EPS)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("columns", [3072, 5120, 1536, 192, 33])
def test_rows(columns: int, dtype: torch.dtype) -> None:
    for batch, tokens in ((1, 1), (2, 17), (1, 1120)):
        x, update = (noise(batch, tokens, columns, dtype=dtype) for _ in range(2))
        weight, bias = noise(columns, dtype=dtype), noise(columns, dtype=torch.float32)
        assert_near(launch_rms_norm(x, weight, EPS, dtype), rms_norm_exact(x, weight))
        assert_rows(x, update, weight, bias)


def assert_rows(x: Tensor, update: Tensor, weight: Tensor, bias: Tensor) -> None:
    """Check the norm with and without quantisation, and the gated residual, by token and sample."""
    batch, tokens, columns = x.shape
    before = x.clone()
    calls: list[Vectors] = [(weight, bias, *[None] * 4)]
    for vectors, tables in (by_token(batch, tokens, columns), by_sample(batch, columns)):
        calls.append((None, None, *modulation_of(vectors, tables)))
        found = launch_gated_residual(x, update, vectors[2], True, tables[2])
        full = vectors[2].float() if tables[2] is None else tables[2] + vectors[2].float()
        full = full.unsqueeze(1) if full.dim() == 2 else full
        assert same_bits(found, (x.float() + update * full).type_as(x))
        assert not same_bits(found, (x.float() + update * full * 1.1).type_as(x))
        gate = (vectors[2].float() if tables[2] is None else vectors[2], tables[2])
        assert_added(x, update, gate, found, (None, None, *modulation_of(vectors, tables)))
        assert_added(x, update, gate, found, (weight, bias, *[None] * 4))
    assert_added(x, update, (None, None), x + update, calls[-1])
    for given in calls:
        rows = launch_layer_norm_fp32(x, *given, EPS)
        assert_near(rows, layer_norm_exact(x, *given))
        assert_quantised(x, given, rows)
    assert same_bits(x, before)


def assert_quantised(x: Tensor, vectors: Vectors, rows: Tensor) -> None:
    """Check codes and scales against those of the rows that the norm alone gives."""
    codes, scale = launch_layer_norm_fp8(x, *vectors, EPS, FLOOR)
    expected, expected_scale = row_quantise_fp8(rows, FLOOR)
    assert_near_codes((codes, scale), (expected, expected_scale))
    assert codes.is_contiguous()
    assert differing(codes[..., 1:], expected[..., :-1]) > 0.5
    back = codes.float().double() * scale
    error = float((back - rows.double()).norm() / rows.double().norm())
    assert error < 2**-4


def assert_added(
    x: Tensor,
    update: Tensor,
    gate: tuple[Tensor | None, Tensor | None],
    sums: Tensor,
    norm: Vectors,
) -> None:
    """Check stream, codes and scales against the norm of sums that were added before."""
    stream, codes, scale = launch_add_layer_norm_fp8(x, update, *gate, *norm, EPS, FLOOR)
    assert same_bits(stream, sums.contiguous())
    assert_near_codes((codes, scale), launch_layer_norm_fp8(stream, *norm, EPS, FLOOR))


def differing(one: Tensor, other: Tensor) -> float:
    return float((one.view(torch.uint8) != other.view(torch.uint8)).float().mean())


@pytest.mark.parametrize("tokens", TOKENS)
def test_rows_at_long_sequences(tokens: int) -> None:
    x, update = noise(1, tokens, 256), noise(1, tokens, 256)
    assert_rows(x, update, noise(256, dtype=torch.float32), noise(256, dtype=torch.float32))


def test_rows_read_any_strides() -> None:
    wide = noise(2, 600, 3072)
    for x in (
        wide[:, ::2],
        wide[:, 40:340],
        noise(300, 2, 3072).transpose(0, 1),
        noise(1, 300, 3072).expand(2, 300, 3072),
        noise(2 * 300 * 3072 + 5)[5:].view(2, 300, 3072),
    ):
        assert_rows(x, x, noise(3072), noise(3072))


def test_past_two_to_the_31_elements() -> None:
    tokens = 720_000
    q, k = noise(1, tokens, 3072), noise(1, tokens, 3072)
    weights, (cos, sin) = [noise(3072), noise(3072)], tables(tokens, 128)
    last = slice(tokens - 300, tokens)
    rotated = launch_qk_norm_rope_across_heads(q, k, *weights, cos, sin, EPS)
    for found, x, weight in zip(rotated, (q, k), weights, strict=True):
        exact = norm_rope_exact(x[:, last], weight, cos[:, last], sin[:, last])
        assert_near(found[:, last].contiguous(), exact, 2)
    del rotated, found
    parts, tables_of = by_sample(1, 3072)
    gate, vectors = parts[2], (None, None, *modulation_of(parts, tables_of))
    rows = launch_layer_norm_fp32(q, *vectors, EPS)
    assert_near(rows[:, last].contiguous(), layer_norm_exact(q[:, last], *vectors))
    codes, scale = launch_layer_norm_fp8(q, *vectors, EPS, FLOOR)
    expected = row_quantise_fp8(rows[:, last], FLOOR)
    assert_near_codes((codes[:, last], scale[:, last]), expected)
    del codes, rows
    found = launch_gated_residual(q, k, gate, True)[:, last]
    assert same_bits(found, gated_residual_reference(q[:, last], k[:, last], gate, True))


def test_no_rows_at_all() -> None:
    empty, vector = noise(1, 0, 64), noise(64)
    assert launch_layer_norm_fp32(empty, vector, vector, *[None] * 4, EPS).shape == (1, 0, 64)
    codes, scale = launch_layer_norm_fp8(empty, *[None] * 6, EPS, FLOOR)
    assert (codes.shape, scale.shape) == ((1, 0, 64), (1, 0, 1))
    rotated = launch_qk_norm_rope_across_heads(empty, empty, vector, vector, *tables(0, 32), EPS)
    assert rotated[0].shape == (1, 0, 2, 32)


def test_the_gated_residual_is_verified_once_a_signature() -> None:
    forget_verdicts("gated_residual")
    before = op_counts().get("gated_residual")
    verified, calls = (before.verifications, before.calls) if before else (0, 0)
    vectors, adds = by_token(1, 33, 3072)
    args = (noise(1, 33, 3072), noise(1, 33, 3072), vectors[2], True, adds[2])
    for _ in range(3):
        assert same_bits(gated_residual(*args), gated_residual_reference(*args))
    counts = op_counts()["gated_residual"]
    assert (counts.verifications, counts.calls) == (verified + 1, calls + 2)
    assert counts.refused == 0


def test_unsupported_inputs_take_the_eager_chain() -> None:
    x, vector = noise(1, 5, 64), noise(64)
    wide = (x, vector.double(), vector, *[None] * 4, EPS)
    assert same_bits(layer_norm_fp32(*wide), layer_norm_fp32_reference(*wide))
    reason = "a vector is not bfloat16, float16 or float32"
    assert op_counts()["layer_norm_fp32"].declines[reason] == 1
    rounded = [table.bfloat16() for table in tables(5, 32)]
    args = (x, x, noise(64), noise(64), *rounded, EPS)
    found, expected = qk_norm_rope_across_heads(*args), qk_norm_rope_across_heads_reference(*args)
    assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("rows", [1, 40, 300])
def test_fp8_gemm_is_the_second_half_of_the_linear(rows: int) -> None:
    weight, weight_scale = row_quantise_fp8(noise(96, 128) / 11, 0.0)
    x, bias = noise(1, rows, 128), noise(96)
    codes, scale = row_quantise_fp8(x, FLOOR)
    for added in (bias, None):
        found = fp8_gemm(codes, scale, weight, weight_scale, added, x.dtype)
        assert same_bits(found, fp8_linear(x, weight, weight_scale, added, FLOOR))
    codes, scale = codes[:, :0], scale[:, :0]
    assert fp8_gemm(codes, scale, weight, weight_scale, bias, x.dtype).shape == (1, 0, 96)


def test_opcheck() -> None:
    x, vector = noise(1, 9, 128), noise(128)
    vectors, adds = by_token(1, 9, 128)
    modulation = modulation_of(vectors, adds)
    weight, weight_scale = row_quantise_fp8(noise(64, 128), 0.0)
    codes, row_scale = row_quantise_fp8(x, FLOOR)
    arguments: dict[str, tuple[object, ...]] = {
        "qk_norm_rope_across_heads": (x, x, vector, vector, *tables(9, 64), EPS),
        "gated_residual": (x, x, vectors[2], True, adds[2]),
        "layer_norm_fp32": (x, vector, vector, *modulation, EPS),
        "layer_norm_fp8": (x, None, None, *modulation, EPS, FLOOR),
        "rms_norm": (x, vector, EPS, torch.bfloat16),
        "fp8_gemm": (codes, row_scale, weight, weight_scale, noise(64), torch.bfloat16),
    }
    for name, args in arguments.items():
        # The schema check multiplies the inputs, which fp8 tensors cannot be.
        tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        tests = tests[name == "fp8_gemm" :]
        op = getattr(torch.ops.quantpolicy, name).default
        torch.library.opcheck(op, args, test_utils=tests)


Fuse = Callable[[nn.Module, bool], None]


@pytest.fixture
def fuse(settings) -> Fuse:  # type: ignore[no-untyped-def]
    """Return a function that quantises every Linear of a model's blocks, and joins some."""

    def fuse_blocks(model: nn.Module, join: bool) -> None:
        for block in model.blocks:
            for module in list(block.modules()):
                if type(module) is nn.Linear:
                    weight = quantise_weight(module.weight, Scheme.FP8, settings[Scheme.FP8])
                    module.weight = nn.Parameter(weight, requires_grad=False)
                    FusedLinear.adopt(module)
            if join:
                join_linears([block.attn1.to_q, block.attn1.to_k, block.attn1.to_v])

    return fuse_blocks


def tiny(family: str) -> tuple[nn.Module, dict[str, object]]:
    """Return a tiny model; what it keeps in fp32, the rotary tables included, stays so."""
    model, inputs = build_tiny(family)
    moved = {
        name: value.cuda() if isinstance(value, Tensor) else value for name, value in inputs.items()
    }
    return model.cuda(), moved


def output(model: nn.Module, inputs: dict[str, object]) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(**inputs)[0]
    return out


def calls_of(*ops: str) -> dict[str, int]:
    counts = op_counts()
    return {op: counts[op].calls if op in counts else 0 for op in ops}


@pytest.mark.parametrize("family", [PER_TOKEN, PER_SAMPLE])
@pytest.mark.parametrize("kind", ["dense", "fused", "joined"])
def test_mounted_models_are_close_and_run_the_kernels(family: str, kind: str, fuse: Fuse) -> None:
    model, inputs = tiny(family)
    ops = DENSE
    exact = output(model, inputs)
    if kind != "dense":
        fuse(model, kind == "joined")
        ops = (*DENSE, *QUANTISED)
    expected = output(model, inputs)
    allowed = 0.03 if kind == "dense" else SAME_ERROR * relative_error(expected, exact)
    assert mount(model, ("gated_residual",)).declined == {}
    for _ in range(2):
        assert same_bits(output(model, inputs), expected)
    assert mount(model, ops).declined == {}
    # Every norm of a fused model is one that is quantised.
    counted = [op for op in ops if kind == "dense" or op != "layer_norm_fp32"]
    before = calls_of(*counted)
    assert relative_error(output(model, inputs), exact) < allowed
    after = calls_of(*counted)
    assert all(after[op] > before[op] for op in counted)
    model.compile_repeated_blocks(fullgraph=True)  # type: ignore[operator]
    try:
        assert relative_error(output(model, inputs), exact) < allowed
    finally:
        torch._dynamo.reset()


def test_a_captured_forward_replays(fuse: Fuse) -> None:
    model, inputs = tiny(PER_SAMPLE)
    fuse(model, False)
    mount(model, (*DENSE, *QUANTISED))
    for _ in range(3):
        expected = output(model, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = output(model, inputs)
    graph.replay()
    assert same_bits(held, expected)
