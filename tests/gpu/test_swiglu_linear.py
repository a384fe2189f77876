"""The Linear with a SwiGLU in its epilogue on a CUDA device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quantpolicy.kernels import gain_probe
from quantpolicy.kernels import swiglu_linear as module
from quantpolicy.kernels.contract import OpCounts, op_counts, same_bits
from quantpolicy.kernels.gated_tiles import GATED_TILES, GatedTiles
from quantpolicy.kernels.swiglu import launch_swiglu
from quantpolicy.kernels.swiglu_linear import (
    launch_swiglu_linear,
    swiglu_linear,
    swiglu_linear_reference,
)
from quantpolicy.runtime.mount import mount, unmount

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="no CUDA device with a tensor memory accelerator",
    ),
    # torch announces its own changes while it compiles.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

HALF = (torch.float16, torch.bfloat16)
STEP = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
TILES = (
    GATED_TILES,
    GatedTiles(128, 128, 64, 8, 4),
    GatedTiles(256, 64, 64, 8, 4, flatten=True),
    GatedTiles(128, 64, 64, 4, 3, per_processor=2),
    GatedTiles(64, 64, 128, 4, 4),
)
FP32 = ("norm1", "norm2", "norm_out", "scale1", "scale2")


def noise(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def operands(n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return noise(2 * n, k, dtype=dtype) / k**0.5, noise(2 * n, dtype=dtype)


def is_close(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether a result is as near to fp64 as four roundings allow, in all and in each."""
    rows = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    value, gate = rows.chunk(2, dim=-1)
    exact = value * F.silu(gate)
    step, difference = STEP[found.dtype], (found.double() - exact).abs()
    # Half a step of the value, of the gate, of its SiLU and of the product (SiLU's slope is 1.1 at
    # most), and the roundings of the sums.
    limit = step * (2 * exact.abs() + 0.6 * value.abs() * gate.abs())
    limit += 3e-5 * (1 + value.abs() + gate.abs())
    near = exact.numel() < 1000 or float(difference.norm()) < step * float(exact.norm())
    return bool((difference <= limit).all()) and near


def counts() -> OpCounts:
    return op_counts().get("swiglu_linear", OpCounts(0, 0, 0, {}))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize(("n", "k"), [(8192, 2048), (200, 136), (8, 24), (1000, 3080)])
def test_against_fp64(n: int, k: int, tiles: GatedTiles, dtype: torch.dtype) -> None:
    weight, bias = operands(n, k, dtype)
    for rows in (1, 17, 1285):
        x = noise(1, rows, k, dtype=dtype)
        for given in (bias, None):
            found = launch_swiglu_linear(x, weight, given, tiles)
            assert found.shape == (1, rows, n)
            assert is_close(found, x, weight, given)
            assert not is_close(found * 1.05, x, weight, given)
        assert not is_close(found, x, weight.roll(1, 0), None)
        # Halves in the wrong order: the gate is the second.
        assert not is_close(found, x, weight.roll(n, 0), None)


def test_every_row_and_column_of_a_large_product() -> None:
    weight, bias = operands(8192, 2048, torch.float16)
    x = noise(35_980, 2048)
    for tiles in (GATED_TILES, GatedTiles(128, 128, 64, 8, 4)):
        poison = torch.full((35_980, 8192), float("nan"), device="cuda", dtype=torch.float16)
        del poison
        found = launch_swiglu_linear(x, weight, bias, tiles)
        for start in range(0, 35_980, 5000):
            part = slice(start, start + 5000)
            assert is_close(found[part], x[part], weight, bias)


def test_strided_rows_are_read_and_not_altered() -> None:
    weight, bias = operands(264, 128, torch.float16)
    wide = noise(2, 300, 512)
    for x in (
        wide[:, ::2, :128],
        wide[:, 7:90, 64:192],
        wide[..., 3:131],
        wide[:1, :, :128].expand(4, 300, 128),
        wide[:, :1, :128].expand(2, 9, 128),
        noise(300, 2, 128).transpose(0, 1),
        noise(128, 40).t(),
        noise(40 * 128 + 5)[5:].view(40, 128),
        noise(128),
    ):
        before = x.clone()
        found = launch_swiglu_linear(x, weight, bias)
        assert found.shape == (*x.shape[:-1], 264)
        assert is_close(found, x, weight, bias)
        assert torch.equal(x, before)


def test_unaligned_parameters_are_read() -> None:
    x = noise(33, 64)
    weight = noise(2 * 48 * 64 + 3)[3:].view(96, 64) / 8
    bias = noise(97)[1:]
    assert is_close(launch_swiglu_linear(x, weight, bias), x, weight, bias)


def test_past_two_to_the_31_elements() -> None:
    weight, bias = operands(8192, 64, torch.float16)
    x = noise(270_000, 64)
    last = slice(269_500, 270_000)
    found = launch_swiglu_linear(x, weight, bias)[last].clone()
    assert is_close(found, x[last], weight, bias)


def test_the_faster_way_is_taken_and_the_other_one_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, bias = operands(96, 72, torch.float16)
    for rows, fused in ((21, True), (23, False)):
        ms = {launch_swiglu_linear: 1.0, swiglu_linear_reference: 2.0 if fused else 0.5}
        monkeypatch.setattr(gain_probe, "_shortest_ms", lambda call, _, ms=ms: ms[call])
        x = noise(rows, 72)
        for number in (1, 2):
            before = counts()
            found = swiglu_linear(x, weight, bias)
            assert is_close(found, x, weight, bias)
            assert counts().calls == before.calls + fused, number
            declines = counts().declines.get(gain_probe.NO_GAIN, 0)
            assert declines == before.declines.get(gain_probe.NO_GAIN, 0) + (not fused)


def test_the_probe_times_both_ways() -> None:
    weight, bias = operands(8192, 2048, torch.float16)
    x = noise(1, 1285, 2048)
    before = counts()
    swiglu_linear(x, weight, bias)
    after = counts()
    taken = after.calls - before.calls
    assert taken + sum(after.declines.values()) - sum(before.declines.values()) == 1
    gain_probe.forget_gains()


def test_inside_a_capture_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias = operands(96, 72, torch.float16)
    x = noise(25, 72)
    expected = swiglu_linear_reference(x, weight, bias)
    monkeypatch.setattr(gain_probe, "_shortest_ms", lambda *_: pytest.fail("timed"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = swiglu_linear(x, weight, bias)
    graph.replay()
    assert torch.equal(found, expected)


def test_what_the_kernel_cannot_take_goes_two_ways_round() -> None:
    weight, bias = operands(60, 72, torch.float16)
    x = noise(5, 72)
    reason = "rows of input or result are not multiples of 16 bytes"
    before = counts().declines.get(reason, 0)
    assert torch.equal(swiglu_linear(x, weight, bias), swiglu_linear_reference(x, weight, bias))
    assert counts().declines[reason] == before + 1
    assert swiglu_linear(x[:0], weight, bias).shape == (0, 60)


@pytest.mark.parametrize("dtype", HALF)
def test_swiglu_is_bit_exact(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(dtype)
    for value in (1.0, -3.25, 300.0):
        x = torch.stack([torch.full_like(every, value), every], dim=-1)
        found, (ones, gate) = launch_swiglu(x), x.chunk(2, dim=-1)
        expected = ones * F.silu(gate)
        finite = gate.isfinite() & (gate.float().abs() >= 2.0**-126)
        assert same_bits(found[finite], expected[finite])
    wide = noise(3, 1285, 16384, dtype=dtype) * 4
    value, gate = wide.chunk(2, dim=-1)
    assert same_bits(launch_swiglu(wide), value * F.silu(gate))


def test_opcheck() -> None:
    weight, bias = operands(96, 72, torch.float16)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for given in (bias, None):
        op = torch.ops.quantpolicy.swiglu_linear.default
        torch.library.opcheck(op, (noise(2, 9, 72), weight, given), test_utils=tests)


def decoder() -> nn.Module:
    from diffusers import AutoencoderKLMiniMaxH3

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoencoderKLMiniMaxH3(
            block_out_channels=(32, 32),
            layers_per_block=1,
            spatial_downsample_factors=(16, 1),
            temporal_downsample_factors=(4, 1),
            decoder_num_layers=4,
            decoder_num_attention_heads=4,
        )
    for name, parameter in model.named_parameters():
        if ".scale" in name:
            parameter.data.normal_(std=0.3)
        if not any(part in FP32 for part in name.split(".")):
            parameter.data = parameter.data.half()
    return model.eval().requires_grad_(False)


def test_a_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "gains", lambda *_: True)
    model, z = decoder(), noise(3, 24, 5, 8, 8)
    with torch.no_grad():
        expected = model.decoder(z)
        ops = ("rms_norm", "scale_add_rms_norm", "qk_rms_norm_rope", "swiglu_linear")
        assert mount(model, (*ops, "qkv_linear")).declined == {}
        calls = counts().calls
        for _ in range(2):
            error = (model.decoder(z).float() - expected.float()).norm() / expected.float().norm()
            assert 0 < float(error) < 4e-3
        assert counts().calls == calls + 2 * 4
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held = model.decoder(z)
        graph.replay()
        assert torch.equal(held, model.decoder(z))
        model.compile_repeated_blocks(fullgraph=True)  # type: ignore[operator]
        try:
            error = (model.decoder(z).float() - expected.float()).norm() / expected.float().norm()
            assert float(error) < 4e-3
        finally:
            torch._dynamo.reset()
            for part in model.modules():
                part._compiled_call_impl = None
        unmount(model)
        assert torch.equal(model.decoder(z), expected)
