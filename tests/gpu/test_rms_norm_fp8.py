"""The fp8 RMSNorm on a CUDA device against fp64, and the models that have it, mounted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from quantpolicy.kernels.contract import op_counts, same_bits
from quantpolicy.kernels.linear import FusedLinear
from quantpolicy.kernels.rms_norm_fp8 import (
    launch_rms_norm_fp8,
    rms_norm_fp8,
    rms_norm_fp8_reference,
)
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
    # torch and torchao announce their own changes while they compile.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

HALF = (torch.bfloat16, torch.float16)
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
EPS, FLOOR = 1e-5, 1e-12
OP, Z_IMAGE, H3 = "rms_norm_fp8", "z-image", "minimax-h3"

# Weight, scale, shift and index.
Vectors = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def vectors_of(batch: int, tokens: int, columns: int, dtype: torch.dtype) -> dict[str, Vectors]:
    """Return every kind of modulation: strided where models have it so."""
    weight = noise(columns, dtype=dtype)
    by_sample = noise(batch, 1, 4 * columns, dtype=dtype).chunk(4, dim=2)
    by_token = noise(batch, tokens, 2, columns, dtype=dtype).unbind(2)
    shift, scale, *_ = noise(6, 6 * columns, dtype=dtype).chunk(6, dim=1)
    index = torch.randint(6, (tokens,), device="cuda")
    return {
        "weight": (weight, None, None, None),
        "sample": (weight, by_sample[2], None, None),
        "sample, fp32": (weight.float(), by_sample[1].float(), by_sample[0].float(), None),
        "token": (weight, *by_token, None),
        "one for all": (None, weight, None, None),
        "index": (weight, scale, shift, index),
        "int32 index": (None, scale, shift, index.int()),
    }


def exact_rows(x: Tensor, vectors: Vectors) -> tuple[Tensor, Tensor]:
    """Return the rows in fp64, and the largest magnitude that each sum is made of."""
    weight, scale, shift, index = (None if v is None else v.double() for v in vectors)
    if index is not None:
        scale, shift = (None if v is None else v[index.long()] for v in (scale, shift))
    rows = x.double()
    rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + EPS)
    for factor in (weight, scale):
        rows = rows if factor is None else rows * factor
    terms = rows.abs() if shift is None else rows.abs() + shift.abs()
    return rows if shift is None else rows + shift, terms


def assert_quantised(x: Tensor, vectors: Vectors) -> None:
    """Check codes and scales against fp64: one rounding to half precision, then the codes' own."""
    given = [x, *(vector for vector in vectors if vector is not None)]
    before = [tensor.clone() for tensor in given]
    codes, scale = launch_rms_norm_fp8(x, *vectors, EPS, FLOOR)
    assert all(same_bits(one, other) for one, other in zip(given, before, strict=True))
    assert codes.shape == x.shape
    assert scale.shape == (*x.shape[:-1], 1)
    assert codes.is_contiguous()
    rows, terms = exact_rows(x, vectors)
    step = ROUNDING[x.dtype]
    # Rows and the scale are each rounded to half precision once.
    exact_scale = rows.abs().amax(-1, keepdim=True).clamp(min=FLOOR) / 448
    assert ((scale.double() - exact_scale).abs() <= 2.1 * step * exact_scale).all()
    found = codes.float().double() * scale.double()
    # Half a step of e4m3 or of its subnormals, a rounding to half precision, and fp32's errors.
    slack = 2.0**-18 * terms
    limit = (2.0**-4 + 1.1 * step) * rows.abs() + 2.0**-10 * scale.double() + slack
    # What a scale that was rounded down cannot hold is clamped to the largest code.
    limit += 2 * step * rows.abs()
    assert ((found - rows).abs() <= limit).all()
    # And not another row's, nor the neighbour's channel.
    assert ((found - rows.roll(1, -1)).abs() > limit).double().mean() > 0.3
    assert_near_codes((codes, scale), row_quantise_fp8(rows.to(x.dtype), FLOOR))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("columns", [3840, 5376, 192, 33])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 17), (2, 301)])
def test_rms_norm_fp8(batch: int, tokens: int, columns: int, dtype: torch.dtype) -> None:
    x = noise(batch, tokens, columns, dtype=dtype)
    for vectors in vectors_of(batch, tokens, columns, dtype).values():
        assert_quantised(x, vectors)


@pytest.mark.parametrize("tokens", [65_536, 75_600])
def test_rms_norm_fp8_at_long_sequences(tokens: int) -> None:
    x = noise(1, tokens, 256)
    vectors = vectors_of(1, tokens, 256, x.dtype)
    for kind in ("sample", "index"):
        assert_quantised(x, vectors[kind])


def test_rms_norm_fp8_reads_any_strides() -> None:
    wide = noise(2, 600, 3840)
    for x in (
        wide[:, ::2],
        wide[:, 40:340],
        noise(300, 2, 3840).transpose(0, 1),
        noise(1, 300, 3840).expand(2, 300, 3840),
        noise(2 * 300 * 3840 + 5)[5:].view(2, 300, 3840),
    ):
        for kind in ("sample", "token", "index"):
            assert_quantised(x, vectors_of(2, 300, 3840, x.dtype)[kind])


def test_rows_of_zeros_and_of_no_tokens() -> None:
    x = noise(1, 3, 64)
    x[:, 1] = 0
    codes, scale = launch_rms_norm_fp8(x, noise(64), None, None, None, EPS, FLOOR)
    assert (codes[:, 1].float() == 0).all()
    assert same_bits(scale[:, 1], row_quantise_fp8(x, FLOOR)[1][:, 1])
    assert (scale[:, 0] > scale[:, 1]).all()
    codes, scale = launch_rms_norm_fp8(x[:, :0], *[None] * 4, EPS, FLOOR)
    assert (codes.shape, scale.shape) == ((1, 0, 64), (1, 0, 1))


def test_nan_stays_in_its_row() -> None:
    x, vectors = noise(1, 3, 96), (noise(96), None, None, None)
    clean, clean_scale = launch_rms_norm_fp8(x, *vectors, EPS, FLOOR)
    x[0, 1, 90] = float("nan")
    codes, scale = launch_rms_norm_fp8(x, *vectors, EPS, FLOOR)
    assert scale[0, 1].isnan()
    assert codes[0, 1].float().isnan().all()
    for row in (0, 2):
        assert torch.equal(codes[:, row].view(torch.uint8), clean[:, row].view(torch.uint8))
        assert same_bits(scale[:, row], clean_scale[:, row])


def test_past_two_to_the_31_elements() -> None:
    tokens, columns = 560_000, 3840
    x, weight, scale = noise(1, tokens, columns), noise(columns), noise(1, 1, columns)
    codes, row_scale = launch_rms_norm_fp8(x, weight, scale, None, None, EPS, FLOOR)
    last = slice(tokens - 300, tokens)
    alone = launch_rms_norm_fp8(x[:, last], weight, scale, None, None, EPS, FLOOR)
    found = codes[:, last].contiguous().view(torch.uint8), row_scale[:, last]
    assert same_bits(found[0], alone[0].view(torch.uint8))
    assert same_bits(found[1], alone[1])


def test_unsupported_inputs_take_the_plain_chain() -> None:
    x, weight = noise(1, 5, 64), noise(64, dtype=torch.float64)
    args = (x, weight, None, None, None, EPS, FLOOR)
    for one, other in zip(rms_norm_fp8(*args), rms_norm_fp8_reference(*args), strict=True):
        assert torch.equal(one.float(), other.float())
    reason = "a vector is not bfloat16, float16 or float32"
    assert op_counts()[OP].declines[reason] == 1


def test_opcheck() -> None:
    op = torch.ops.quantpolicy.rms_norm_fp8.default
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for vectors in vectors_of(2, 9, 128, torch.bfloat16).values():
        torch.library.opcheck(op, (noise(2, 9, 128), *vectors, EPS, FLOOR), test_utils=tests)


@pytest.mark.parametrize("kind", ["weight", "sample", "sample, fp32", "token", "index"])
def test_compiled_code_launches_it_to_the_same_bits(kind: str) -> None:
    compiled = torch.compile(rms_norm_fp8, fullgraph=True)
    try:
        for tokens in (40, 1120):
            vectors = vectors_of(2, tokens, 3840, torch.bfloat16)[kind]
            args = (noise(2, tokens, 3840), *vectors, EPS, FLOOR)
            for one, other in zip(compiled(*args), rms_norm_fp8(*args), strict=True):
                bits = torch.uint8 if one.element_size() == 1 else torch.int32
                assert torch.equal(one.view(bits), other.view(bits))
    finally:
        torch._dynamo.reset()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    if hasattr(model, "token_refiner"):
        return [*model.token_refiner.refiner_blocks, *model.transformer_blocks]  # type: ignore[union-attr]
    return [*model.noise_refiner, *model.context_refiner, *model.layers]  # type: ignore[union-attr]


Fuse = Callable[[nn.Module, bool], None]


@pytest.fixture
def fuse(settings) -> Fuse:  # type: ignore[no-untyped-def]
    """Return a function that quantises attention and feed-forward of all blocks, and joins some."""

    def fuse_blocks(model: nn.Module, join: bool) -> None:
        for block in blocks_of(model):
            for name, module in list(block.named_modules()):
                if type(module) is nn.Linear and "adaln" not in name.lower():
                    weight = quantise_weight(module.weight, Scheme.FP8, settings[Scheme.FP8])
                    module.weight = nn.Parameter(weight, requires_grad=False)
                    FusedLinear.adopt(module)
            attn = getattr(block, "attention", None) or block.attn
            if join:
                join_linears([attn.to_q, attn.to_k, attn.to_v])

    return fuse_blocks


def on_gpu(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return type(value)(on_gpu(item) for item in value)
    return value.cuda() if isinstance(value, Tensor) else value


def output(model: nn.Module, inputs: dict[str, object]) -> Tensor:
    with torch.no_grad():
        outs = model(**inputs)
    outs = outs[0] if isinstance(outs[0], list) else outs
    return torch.cat([out.flatten().float() for out in outs])


def calls() -> int:
    counts = op_counts()
    return counts[OP].calls if OP in counts else 0


@pytest.mark.parametrize("family", [Z_IMAGE, H3])
@pytest.mark.parametrize("join", [False, True])
def test_mounted_models_are_close_and_run_the_kernel(family: str, join: bool, fuse: Fuse) -> None:
    model, inputs = build_tiny(family)
    model, inputs = model.cuda(), {name: on_gpu(value) for name, value in inputs.items()}
    dense = output(model, inputs)
    fuse(model, join)
    before = output(model, inputs)
    assert mount(model, (OP,)).declined == {}
    called = calls()
    relaxed = output(model, inputs)
    assert calls() - called == 2 * len(blocks_of(model))
    assert not torch.equal(relaxed, before)
    # Other codes here and there, and no more error than the codes have.
    assert relative_error(relaxed, dense) < SAME_ERROR * relative_error(before, dense)
    model.compile_repeated_blocks(fullgraph=True)  # type: ignore[operator]
    try:
        assert relative_error(output(model, inputs), dense) < SAME_ERROR * relative_error(
            before, dense
        )
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize("family", [Z_IMAGE, H3])
def test_a_captured_block_replays(family: str, fuse: Fuse) -> None:
    model, _ = build_tiny(family)
    fuse(model.cuda(), False)
    block = blocks_of(model)[-1]
    assert mount(model, (OP,)).declined == {}
    if family == H3:
        x, index = noise(1, 40, 96), torch.arange(40, device="cuda") % 6
        rotary = noise(40, 48, dtype=torch.float32), noise(40, 48, dtype=torch.float32)
        args: tuple[object, ...] = (x, noise(2, 64, dtype=torch.float32), index, rotary)
    else:
        x = noise(2, 40, 128)
        angles = torch.rand(2, 40, 32, device="cuda")
        freqs = torch.polar(torch.ones_like(angles), angles)
        args = (x, torch.ones(2, 40, dtype=torch.bool, device="cuda"), freqs, noise(2, 128))
    with torch.no_grad():
        for _ in range(3):
            block(*args)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held = block(*args)
        x.copy_(noise(*x.shape))
        expected = block(*args)
        graph.replay()
    assert same_bits(held, expected)
