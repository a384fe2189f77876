"""SwiGLU before an fp8 Linear on a CUDA device: its codes, its products, mounted and captured.

The kernel's silu and torch's are fp32 values near the exact one. Where all values so near round to
one half-precision number, both are that number and every code is the same. Elsewhere the product
differs by two units in the last place at most, and a code by one step.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from quantpolicy.kernels.contract import op_counts, same_bits
from quantpolicy.kernels.linear import FusedLinear
from quantpolicy.kernels.row_quantise_fp8 import row_quantise_fp8
from quantpolicy.kernels.swiglu_fp8_linear import (
    launch_swiglu_fp8_linear,
    swiglu_fp8_linear,
    swiglu_fp8_linear_reference,
    swiglu_quantise,
    swiglu_rows,
)
from quantpolicy.measure.tiny import build_tiny
from quantpolicy.runtime.mount import mount, unmount
from quantpolicy.runtime.weights import quantise_weight
from quantpolicy.schemes import Scheme
from tests.gpu.closeness import SAME_ERROR, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # torch announces its own changes while it compiles.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

OP = "swiglu_fp8_linear"
HALF = (torch.bfloat16, torch.float16)
TOKENS = (1, 17, 65_535, 65_536, 75_600)
# Twice a unit in the last place, relative to the value.
TWO_UNITS = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
FLOOR = 1e-12


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def is_certain(gate: Tensor) -> Tensor:
    """Return where every fp32 value that a silu can come out as rounds to one number.

    The argument of the exponential, about |gate| of them, has one rounding more in the kernel; the
    exponential, the sum and the quotient add less than eight units in the last place of fp32.
    """
    wide = gate.double()
    exact, slack = wide / (1 + (-wide).exp()), (wide.abs() + 8) * 2.0**-23
    return (exact * (1 - slack)).to(gate.dtype) == (exact * (1 + slack)).to(gate.dtype)


def steps(one: Tensor, other: Tensor) -> Tensor:
    """Return how many e4m3 numbers codes are apart; zeros of either sign are one."""
    ordinals = []
    for codes in (one, other):
        bits = codes.view(torch.uint8).int()
        ordinals.append(torch.where(bits >= 128, 128 - bits, bits))
    return (ordinals[0] - ordinals[1]).abs()


def assert_codes(value: Tensor, gate: Tensor, head: Tensor | None, last: int = 0) -> None:
    """Compare codes and scales, those of the last rows alone where their number is given."""
    codes, scale = (x[-last:] for x in swiglu_quantise(value, gate, head, FLOOR))
    if last:
        value, gate = value[:, -last:], gate[:, -last:]
        head = None if head is None else head[:, -last:]
    rows = swiglu_rows(value, gate, head)
    expected, expected_scale = row_quantise_fp8(rows.flatten(0, 1), FLOOR)
    certain = is_certain(gate).flatten(0, 1)
    if head is not None:
        certain = torch.cat([torch.ones_like(head.flatten(0, 1), dtype=torch.bool), certain], -1)

    # What may become a row's largest magnitude, or may have been it.
    size = rows.flatten(0, 1).abs().float()
    leading = size >= size.amax(-1, keepdim=True) * (1 - 2 * TWO_UNITS[rows.dtype])
    of_certain = (certain | ~leading).all(-1, keepdim=True)
    same = scale == expected_scale
    assert bool(same[of_certain].all())
    if len(same) > 100:
        assert float(certain.float().mean()) > 0.98
        assert float(of_certain.float().mean()) > 0.5
    torch.testing.assert_close(scale, expected_scale, rtol=2 * TWO_UNITS[rows.dtype], atol=0)

    apart = steps(codes, expected)
    assert int(apart.max()) <= 1
    assert not bool(apart[certain & same].any())
    others = expected.view(torch.uint8).roll(1, 0).view(expected.dtype)
    assert float((steps(codes, others) > 1).float().mean()) > 0.1 or len(codes) == 1


def layouts(
    batch: int, tokens: int, columns: int, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield values and gates: halves of a projection in either order, and two projections."""
    projected = 3 * noise(batch, tokens, 2 * columns, dtype=dtype)
    first, second = projected.chunk(2, dim=-1)
    yield first, second
    yield second, first
    yield noise(batch, tokens, columns, dtype=dtype), second
    # Behind the attention's part of a projection, and as columns of a joined one.
    whole = noise(batch, tokens, 2 * columns + 48, dtype=dtype)[..., 48:]
    yield whole[..., columns:], whole[..., :columns]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("width", "columns"),
    [(6144, 18432), (0, 18432), (0, 14336), (0, 10240), (64, 192), (3, 128), (0, 33), (5, 1)],
)
def test_codes(width: int, columns: int, dtype: torch.dtype) -> None:
    for batch, tokens in ((1, 1), (2, 150), (1, 301)):
        head = noise(batch, tokens, width, dtype=dtype) if width else None
        for value, gate in layouts(batch, tokens, columns, dtype):
            assert_codes(value, gate, head)


@pytest.mark.parametrize("tokens", TOKENS)
def test_codes_at_long_sequences(tokens: int) -> None:
    gate, value = noise(1, tokens, 2 * 512).chunk(2, dim=-1)
    assert_codes(value, gate, noise(1, tokens, 64))


@pytest.mark.parametrize(("tokens", "columns"), [(75_600, 18_432), (720_000, 3072)])
def test_past_two_to_the_31_elements(tokens: int, columns: int) -> None:
    value, gate = noise(1, tokens, 2 * columns).chunk(2, dim=-1)
    assert_codes(value, gate, None, last=300)


@pytest.mark.parametrize("dtype", HALF)
def test_special_values(dtype: torch.dtype) -> None:
    inf, nan = float("inf"), float("nan")
    value = noise(1, 12, 40, dtype=dtype)
    # Whose silu is a half-precision number itself.
    gate = torch.full_like(value, 32.0)
    gate[0, :, 7] = torch.tensor([inf, -inf, nan, 0, -0.0, -100, -88, 100, 3, 3, 3, 3])
    value[0, 8:, 7] = torch.tensor([inf, -inf, nan, 0])
    codes, scale = swiglu_quantise(value, gate, None, FLOOR)
    expected, expected_scale = row_quantise_fp8(swiglu_rows(value, gate, None)[0], FLOOR)
    certain = is_certain(gate)[0].all(-1) | (scale != scale)[:, 0] | scale.isinf()[:, 0]
    torch.testing.assert_close(
        scale[certain], expected_scale[certain], rtol=0, atol=0, equal_nan=True
    )
    found, expected = codes.float(), expected.float()
    torch.testing.assert_close(found[certain], expected[certain], rtol=0, atol=0, equal_nan=True)
    assert bool(certain[:3].all())


def weight_of(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    return row_quantise_fp8(noise(rows, columns) / columns**0.5, 0.0)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("width", "columns"), [(6144, 18432), (0, 10240), (64, 192)])
def test_products(width: int, columns: int, dtype: torch.dtype) -> None:
    weight, scale = weight_of(256, width + columns)
    for batch, tokens in ((1, 1), (2, 150)):
        head = noise(batch, tokens, width, dtype=dtype) if width else None
        for bias in (None, noise(256, dtype=dtype)):
            for value, gate in layouts(batch, tokens, columns, dtype):
                args = (value, gate, head, weight, scale, bias, FLOOR)
                expected = swiglu_fp8_linear_reference(*args)
                for found in (launch_swiglu_fp8_linear(*args), swiglu_fp8_linear(*args)):
                    assert (found.shape, found.dtype) == (expected.shape, dtype)
                    assert relative_error(found, expected) < 2**-7
                exchanged = swiglu_fp8_linear_reference(gate, value, *args[2:])
                assert relative_error(exchanged, expected) > 2**-7


def test_it_alters_nothing_and_repeats_itself() -> None:
    gate, value = noise(2, 40, 2 * 512).chunk(2, dim=-1)
    head, weight, scale = noise(2, 40, 128), *weight_of(64, 640)
    tensors = (value, gate, head, weight, scale)
    before = [each.clone() for each in tensors]
    found = [swiglu_fp8_linear(*tensors, None, FLOOR) for _ in range(3)]
    assert all(same_bits(one, found[0]) for one in found[1:])
    assert all(same_bits(one, other) for one, other in zip(tensors, before, strict=True))


def test_unsupported_inputs_take_the_eager_chain() -> None:
    weight, scale = weight_of(64, 128)
    value = noise(2, 128, 40).transpose(1, 2)
    args = (value, noise(2, 40, 128), None, weight, scale, None, FLOOR)
    reason = "rows are not regular, or their channels not contiguous"
    counts = op_counts().get(OP)
    before = (counts.calls, counts.declines.get(reason, 0)) if counts else (0, 0)
    assert same_bits(swiglu_fp8_linear(*args), swiglu_fp8_linear_reference(*args))
    counts = op_counts()[OP]
    assert (counts.calls, counts.declines[reason]) == (before[0], before[1] + 1)


def test_in_a_cuda_graph() -> None:
    projected, head = noise(1, 300, 2 * 512), noise(1, 300, 128)
    gate, value = projected.chunk(2, dim=-1)
    weight, scale = weight_of(64, 640)
    args = (value, gate, head, weight, scale, noise(64), FLOOR)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        swiglu_fp8_linear(*args)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = swiglu_fp8_linear(*args)
    projected.copy_(noise(1, 300, 2 * 512))
    head.copy_(noise(1, 300, 128))
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(found, swiglu_fp8_linear(*args))
    assert relative_error(found, swiglu_fp8_linear_reference(*args)) < 2**-7


def test_opcheck() -> None:
    gate, value = noise(1, 9, 2 * 64).chunk(2, dim=-1)
    args = (value, gate, noise(1, 9, 64), *weight_of(32, 128), noise(32), FLOOR)
    # The schema check multiplies the inputs, which fp8 tensors cannot be.
    tests = ("test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.quantpolicy.swiglu_fp8_linear.default, args, test_utils=tests)


def moved(value: object) -> object:
    if isinstance(value, Tensor):
        return value.cuda()
    return [moved(each) for each in value] if isinstance(value, list) else value


def output(model: nn.Module, inputs: dict[str, object]) -> Tensor:
    with torch.no_grad():
        out = model(**inputs)[0]
    found: Tensor = out[0] if isinstance(out, list) else out
    return found


def fused_model(family: str, settings: dict[Scheme, object]) -> tuple[nn.Module, dict[str, object]]:
    """Return a tiny model on the GPU, every bf16 Linear of its blocks fp8, and its inputs."""
    model, inputs = build_tiny(family)
    model = model.cuda()
    for name, module in list(model.named_modules()):
        is_block = any(part.isdecimal() for part in name.split("."))
        if is_block and type(module) is nn.Linear and module.weight.dtype is torch.bfloat16:
            weight = quantise_weight(module.weight, Scheme.FP8, settings[Scheme.FP8])  # type: ignore[arg-type]
            module.weight = nn.Parameter(weight, requires_grad=False)
            FusedLinear.adopt(module)
    return model, {name: moved(value) for name, value in inputs.items()}


@pytest.mark.parametrize(
    ("family", "sites"), [("flux.2-dev", 6), ("z-image", 6), ("minimax-h3", 4)]
)
def test_mounted_models_are_close_and_run_the_kernel(
    family: str, sites: int, settings: dict[Scheme, object]
) -> None:
    dense, inputs = build_tiny(family)
    inputs = {name: moved(value) for name, value in inputs.items()}
    exact = output(dense.cuda(), inputs)
    model, inputs = fused_model(family, settings)
    expected = output(model, inputs)
    allowed = SAME_ERROR * relative_error(expected, exact)
    before = op_counts()[OP].calls if OP in op_counts() else 0
    assert mount(model, (OP,)).mounted == {OP: sites}
    assert relative_error(output(model, inputs), exact) < allowed
    assert op_counts()[OP].calls == before + sites
    model.compile_repeated_blocks(fullgraph=True)  # type: ignore[operator]
    try:
        assert relative_error(output(model, inputs), exact) < allowed
    finally:
        torch._dynamo.reset()
    model, inputs = fused_model(family, settings)
    mount(model, (OP,))
    unmount(model)
    assert same_bits(output(model, inputs), expected)


def test_a_captured_forward_replays(settings: dict[Scheme, object]) -> None:
    model, inputs = fused_model("flux.2-dev", settings)
    mount(model, (OP,))
    for _ in range(3):
        expected = output(model, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = output(model, inputs)
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(found, expected)
