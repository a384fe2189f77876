"""Every fused op on a CUDA device: bit-exact, or within roundings, at odd and huge shapes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantpolicy.kernels.contract import forget_verdicts, op_counts, same_bits
from quantpolicy.kernels.gated_residual import (
    gated_residual,
    gated_residual_reference,
    launch_gated_residual,
)
from quantpolicy.kernels.gelu_fp8_linear import (
    gelu_fp8_linear_reference,
    gelu_quantise,
    gelu_rows,
    launch_gelu_fp8_linear,
)
from quantpolicy.kernels.layer_norm_modulate import (
    launch_layer_norm_modulate,
    layer_norm_modulate_reference,
)
from quantpolicy.kernels.linear_gelu import launch_linear_gelu, linear_gelu, linear_gelu_reference
from quantpolicy.kernels.qk_norm_rope_pack import (
    launch_qk_norm_rope_pack,
    qk_norm_rope_pack_reference,
)
from quantpolicy.kernels.qk_rms_norm import (
    launch_qk_rms_norm,
    qk_rms_norm,
    qk_rms_norm_reference,
)
from quantpolicy.kernels.qk_rms_norm_rope import (
    launch_qk_rms_norm_rope,
    qk_rms_norm_rope_reference,
)
from quantpolicy.kernels.registry import is_disabled
from quantpolicy.kernels.rms_norm import launch_rms_norm, rms_norm, rms_norm_reference
from quantpolicy.kernels.rope_qkv_pack import (
    launch_rope_qkv_pack,
    rope_qkv_pack,
    rope_qkv_pack_reference,
)
from quantpolicy.kernels.row_quantise_fp8 import row_quantise_fp8
from quantpolicy.kernels.scale_add_rms_norm import (
    launch_scale_add_rms_norm,
    scale_add_rms_norm_reference,
)
from quantpolicy.kernels.split_linear import (
    launch_split_linear,
    split_linear,
    split_linear_reference,
)
from quantpolicy.kernels.swiglu import launch_swiglu, swiglu_reference
from tests.gpu.closeness import assert_near_codes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # torch announces its own changes while it compiles.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

HALF = (torch.bfloat16, torch.float16)
TOKENS = (1, 17, 65_535, 65_536, 75_600)
STEP = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-21}


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def listed(result: object) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)  # type: ignore[call-overload]


def assert_exact(found: object, expected: object) -> None:
    for one, other in zip(listed(found), listed(expected), strict=True):
        assert same_bits(one, other)


def is_close(found: Tensor, expected: Tensor, steps: float) -> bool:
    """Return whether elements differ by some roundings at most, and few of them at all."""
    step, scale = STEP[found.dtype], float(expected.float().abs().max())
    difference = (found.float() - expected.float()).abs()
    limit = steps * step * expected.float().abs() + step * scale / 2
    few = float(difference.norm()) <= step / 8 * float(expected.float().norm())
    return bool((difference <= limit).all()) and few


def assert_close(found: object, expected: object, steps: float = 2) -> None:
    for one, other in zip(listed(found), listed(expected), strict=True):
        assert one.dtype is other.dtype
        assert is_close(one, other, steps)
        assert not is_close(one * 1.02, other, steps)


def qkv(batch: int, tokens: int, heads: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    """Return Q, K and V as strided views of one fused projection."""
    fused = noise(batch, tokens, 3 * heads * size, dtype=dtype)
    return [part.unflatten(2, (heads, size)) for part in fused.chunk(3, dim=-1)]


def tables(rows: int, size: int) -> tuple[Tensor, Tensor]:
    angles = torch.rand(rows, size // 2, device="cuda") * 50
    return angles.cos().repeat_interleave(2, 1), angles.sin().repeat_interleave(2, 1)


def pack_arguments(
    batch: int, tokens: int, text: int, heads: int, size: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    image, texts = qkv(batch, tokens, heads, size, dtype), qkv(batch, text, heads, size, dtype)
    return (*image, *texts, *tables(tokens, size))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("heads", "size"), [(24, 128), (3, 64), (5, 96), (1, 128)])
@pytest.mark.parametrize("batch", [1, 2])
def test_rope_qkv_pack_is_bit_exact(batch: int, heads: int, size: int, dtype: torch.dtype) -> None:
    for tokens, text in ((1, 1), (17, 0), (301, 40)):
        args = pack_arguments(batch, tokens, text, heads, size, dtype)
        assert_exact(launch_rope_qkv_pack(*args), rope_qkv_pack_reference(*args))
        single = (args[0], args[1], None, None, None, None)
        table = [x[: max(1, tokens - 5)] for x in args[6:]]
        found = launch_rope_qkv_pack(*single, *table)
        assert_exact(found, rope_qkv_pack_reference(*single, *table))


@pytest.mark.parametrize("tokens", TOKENS)
def test_rope_qkv_pack_at_long_sequences(tokens: int) -> None:
    args = pack_arguments(1, tokens, 3, 4, 128, torch.bfloat16)
    assert_exact(launch_rope_qkv_pack(*args), rope_qkv_pack_reference(*args))


def test_rope_qkv_pack_reads_any_strides_and_alters_nothing() -> None:
    _, k, _, *texts, cos, sin = pack_arguments(2, 64, 8, 24, 128, torch.bfloat16)
    wide = noise(2, 24, 128, 128).transpose(1, 2)
    for x in (
        wide[:, ::2],
        wide[:, 5:69],
        noise(1, 64, 24, 128).expand(2, 64, 24, 128),
        noise(2 * 64 * 24 * 128 + 3)[3:].view(2, 64, 24, 128),
    ):
        args = (x, k, x, *texts, cos, sin)
        before = [item.clone() for item in args]
        assert_exact(launch_rope_qkv_pack(*args), rope_qkv_pack_reference(*args))
        assert_exact(list(args), before)


def test_rope_qkv_pack_is_verified_once_a_signature() -> None:
    forget_verdicts()
    args = pack_arguments(1, 33, 4, 3, 64, torch.float16)
    before = op_counts().get("rope_qkv_pack")
    verified, calls = (before.verifications, before.calls) if before else (0, 0)
    for _ in range(3):
        assert_exact(rope_qkv_pack(*args), rope_qkv_pack_reference(*args))
    counts = op_counts()["rope_qkv_pack"]
    assert (counts.verifications, counts.calls, counts.refused) == (verified + 1, calls + 2, 0)


def test_an_unverified_signature_stays_eager_in_a_capture() -> None:
    forget_verdicts()
    args = pack_arguments(1, 35, 4, 3, 64, torch.float16)
    graph = torch.cuda.CUDAGraph()
    rope_qkv_pack_reference(*args)
    with torch.cuda.graph(graph):
        held = rope_qkv_pack(*args)
    graph.replay()
    assert_exact(held, rope_qkv_pack_reference(*args))
    assert op_counts()["rope_qkv_pack"].declines["not verified before a graph capture"] >= 1
    rope_qkv_pack(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = rope_qkv_pack(*args)
    graph.replay()
    assert_exact(held, rope_qkv_pack_reference(*args))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("heads", "size"), [(24, 128), (3, 64), (5, 96)])
def test_qk_norm_rope_pack(heads: int, size: int, dtype: torch.dtype) -> None:
    for batch, tokens, text in ((1, 1, 1), (2, 301, 40), (1, 17, 0)):
        *heads_of, cos, sin = pack_arguments(batch, tokens, text, heads, size, dtype)
        weights = [noise(size, dtype=dtype) for _ in range(4)]
        args = (*heads_of, *weights, cos, sin, 1e-6)
        assert_close(launch_qk_norm_rope_pack(*args), qk_norm_rope_pack_reference(*args), 6)
        norm = (heads_of[0], heads_of[1], weights[0], weights[1], 1e-6)
        assert_close(launch_qk_rms_norm(*norm), qk_rms_norm_reference(*norm))
        single = (heads_of[0], heads_of[1], None, None, None, None, *weights[:2], None, None)
        args = (*single, cos[: max(1, tokens - 3)], sin[: max(1, tokens - 3)], 1e-6)
        assert_close(launch_qk_norm_rope_pack(*args), qk_norm_rope_pack_reference(*args), 6)


def modulation(batch: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return noise(batch, 6 * columns, dtype=dtype).chunk(6, dim=1)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("columns", [3072, 2048, 5120, 192, 33, 1])
def test_rows(columns: int, dtype: torch.dtype) -> None:
    for batch, tokens in ((1, 1), (2, 17), (1, 1285), (2, 300)):
        x, update = noise(batch, tokens, columns, dtype=dtype), noise(batch, tokens, columns)
        update = update.to(dtype)
        gate, scale, shift, *_ = modulation(batch, columns, dtype)
        args = (x, update, gate)
        assert_exact(launch_gated_residual(*args), gated_residual_reference(*args))
        if columns > 1:
            args = (x, scale, shift, 1e-6)
            assert_close(launch_layer_norm_modulate(*args), layer_norm_modulate_reference(*args), 6)
        vector, weight = (noise(columns, dtype=torch.float32) for _ in range(2))
        for stream in (noise(batch, tokens, columns, dtype=torch.float32) * 3, x):
            args = (stream, update, vector)
            assert_exact(launch_gated_residual(*args), gated_residual_reference(*args))
            args = (stream, weight, 1e-5, dtype)
            assert_close(launch_rms_norm(*args), rms_norm_reference(*args))
            args = (stream, update, vector, weight, 1e-5)
            found = launch_scale_add_rms_norm(*args)
            expected = scale_add_rms_norm_reference(*args)
            assert_exact(found[0], expected[0])
            assert_close(found[1], expected[1])
        if columns % 2 == 0:
            assert_close(launch_swiglu(x), swiglu_reference(x))


@pytest.mark.parametrize("tokens", TOKENS)
def test_rows_at_long_sequences(tokens: int) -> None:
    x, update = noise(1, tokens, 512), noise(1, tokens, 512)
    gate, scale, shift, *_ = modulation(1, 512, torch.bfloat16)
    assert_exact(launch_gated_residual(x, update, gate), gated_residual_reference(x, update, gate))
    args = (x, scale, shift, 1e-6)
    assert_close(launch_layer_norm_modulate(*args), layer_norm_modulate_reference(*args), 6)


def test_rows_read_any_strides_and_alter_nothing() -> None:
    wide = noise(2, 600, 3072)
    gate, scale, shift, *_ = modulation(2, 3072, torch.bfloat16)
    for x in (
        wide[:, ::2],
        wide[:, 40:340],
        noise(300, 2, 3072).transpose(0, 1),
        noise(1, 300, 3072).expand(2, 300, 3072),
        noise(2 * 300 * 3072 + 5)[5:].view(2, 300, 3072),
    ):
        before = x.clone()
        args = (x, x, gate)
        assert_exact(launch_gated_residual(*args), gated_residual_reference(*args))
        args = (x, scale, shift, 1e-6)
        assert_close(launch_layer_norm_modulate(*args), layer_norm_modulate_reference(*args), 6)
        assert_exact(x, before)


@pytest.mark.parametrize("dtype", HALF)
def test_qk_rms_norm_rope(dtype: torch.dtype) -> None:
    for batch, tokens, heads in ((1, 1285, 32), (2, 17, 5), (3, 1, 1)):
        q, k, _ = qkv(batch, tokens, heads, 64, dtype)
        angles = torch.rand(1, tokens, 1, 24, device="cuda").tile(2) * 6
        for cos, sin in (
            (angles.cos(), angles.sin()),
            (angles.cos().expand(batch, -1, -1, -1), angles.sin().expand(batch, -1, -1, -1)),
        ):
            args = (q, k, cos, sin, 1e-5)
            assert_close(launch_qk_rms_norm_rope(*args), qk_rms_norm_rope_reference(*args), 6)


def test_past_two_to_the_31_elements() -> None:
    tokens = 720_000
    x, update = noise(1, tokens, 3072), noise(1, tokens, 3072)
    gate, scale, shift, *_ = modulation(1, 3072, torch.bfloat16)
    last = slice(tokens - 500, tokens)
    found = launch_gated_residual(x, update, gate)[:, last]
    assert_exact(found, gated_residual_reference(x[:, last], update[:, last], gate))
    found = launch_layer_norm_modulate(x, scale, shift, 1e-6)[:, last]
    assert_close(found, layer_norm_modulate_reference(x[:, last], scale, shift, 1e-6), 6)
    q, k = (item.view(1, tokens, 24, 128) for item in (x, update))
    cos, sin = tables(tokens, 128)
    packed = launch_rope_qkv_pack(q, k, None, None, None, None, cos, sin)
    expected = rope_qkv_pack_reference(
        q[:, last], k[:, last], None, None, None, None, cos[last], sin[last]
    )
    assert_exact([item[:, last] for item in packed], expected)
    del packed, found
    wide = x.view(1, tokens // 4, 4 * 3072)
    assert_close(launch_swiglu(wide)[:, -100:], swiglu_reference(wide[:, -100:]))


def test_unsupported_inputs_take_the_eager_chain() -> None:
    x, update = noise(1, 5, 64), noise(1, 5, 64)
    weight = noise(64, dtype=torch.float32)
    q, k, *_ = qkv(1, 5, 2, 64, torch.bfloat16)
    mixed = qk_rms_norm(q, k, weight, weight, 1e-6)
    assert_exact(mixed, qk_rms_norm_reference(q, k, weight, weight, 1e-6))
    assert op_counts()["qk_rms_norm"].calls == 0
    wide = (x.double(), weight, 1e-5, torch.bfloat16)
    assert_exact(rms_norm(*wide), rms_norm_reference(*wide))
    reason = "the stream is of another dtype, or the norm weight neither float32 nor of its dtype"
    assert op_counts()["rms_norm"].declines[reason] == 1
    across = noise(128)
    reason = "the norm weight is not [D] for [B, S, H, D]"
    with pytest.raises(RuntimeError, match="size of tensor"):
        qk_rms_norm(q, k, across, across, 1e-6)
    assert op_counts()["qk_rms_norm"].declines[reason] == 1
    del update


def test_a_switched_off_op_takes_the_eager_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    args = (noise(1, 5, 64), noise(1, 5, 64), noise(1, 64))
    gated_residual(*args)
    before = op_counts()["gated_residual"]
    forget_verdicts("gated_residual")
    monkeypatch.setenv("QUANTPOLICY_DISABLE", "gated_residual")
    is_disabled.cache_clear()
    assert_exact(gated_residual(*args), gated_residual_reference(*args))
    after = op_counts()["gated_residual"]
    assert after.calls == before.calls
    assert sum(after.declines.values()) == sum(before.declines.values()) + 1
    monkeypatch.undo()
    is_disabled.cache_clear()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("rows", [1, 40, 1285, 5000])
def test_linear_gelu(rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = noise(1, rows, 512, dtype=dtype), noise(2048, 512), noise(2048)
    weight, bias = weight.to(dtype) / 20, bias.to(dtype)
    exact = linear_gelu_reference(x.double(), weight.double(), bias.double())
    for found in (launch_linear_gelu(x, weight, bias), linear_gelu(x, weight, bias)):
        error = (found.double() - exact).norm() / exact.norm()
        assert float(error) < STEP[dtype]
        assert found.shape == exact.shape


def fp8_weight(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    return row_quantise_fp8(noise(rows, columns) / columns**0.5, 0.0)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("width", "columns"), [(3072, 12288), (0, 12288), (64, 192), (0, 33)])
def test_gelu_fp8_linear(width: int, columns: int, dtype: torch.dtype) -> None:
    weight, scale = fp8_weight(64, width + columns)
    for rows in (1, 300):
        x = noise(1, rows, columns, dtype=dtype)
        x = noise(1, rows, columns + 8, dtype=dtype)[..., :columns] if rows > 1 else x
        head = noise(1, rows, width, dtype=dtype) if width else None
        expected = row_quantise_fp8(gelu_rows(x, head), 1e-12)
        assert_near_codes(gelu_quantise(x, head, 1e-12), expected, 0.02)
        if columns % 16 == 0:
            args = (x, head, weight, scale, noise(64).to(dtype), 1e-12)
            found, exact = launch_gelu_fp8_linear(*args), gelu_fp8_linear_reference(*args)
            error = (found.float() - exact.float()).norm() / exact.float().norm()
            assert float(error) < 5e-3


@pytest.mark.parametrize("dtype", HALF)
def test_split_linear(dtype: torch.dtype) -> None:
    for rows in (1, 40, 2000):
        head, x = noise(1, rows, 512, dtype=dtype), noise(1, rows, 2048, dtype=dtype)
        weight, bias = noise(512, 2560).to(dtype) / 50, noise(512).to(dtype)
        args = (head, x, weight, bias)
        exact = split_linear_reference(*(item.double() for item in args))
        for found in (launch_split_linear(*args), split_linear(*args)):
            assert float((found.double() - exact).norm() / exact.norm()) < STEP[dtype]


def op_arguments() -> dict[str, tuple[object, ...]]:
    *heads_of, cos, sin = pack_arguments(1, 17, 4, 3, 64, torch.bfloat16)
    weights = [noise(64) for _ in range(4)]
    x, update, stream = noise(1, 9, 64), noise(1, 9, 64), noise(1, 9, 64, dtype=torch.float32)
    gate, scale, shift, *_ = modulation(1, 64, torch.bfloat16)
    vector = noise(64, dtype=torch.float32)
    angles = torch.rand(1, 17, 1, 24, device="cuda").tile(2)
    return {
        "rope_qkv_pack": (*heads_of, cos, sin),
        "qk_norm_rope_pack": (*heads_of, *weights, cos, sin, 1e-6),
        "qk_rms_norm": (*heads_of[:2], *weights[:2], 1e-6),
        "gated_residual": (x, update, gate),
        "layer_norm_modulate": (x, scale, shift, 1e-6),
        "rms_norm": (stream, vector, 1e-5, torch.bfloat16),
        "scale_add_rms_norm": (stream, update, vector, vector, 1e-5),
        "qk_rms_norm_rope": (*heads_of[:2], angles.cos(), angles.sin(), 1e-5),
        "swiglu": (x,),
        "linear_gelu": (x, noise(128, 64), noise(128)),
        "split_linear": (x, update, noise(32, 128), noise(32)),
        "gelu_fp8_linear": (x, update, *fp8_weight(32, 128), noise(32), 1e-12),
    }


def test_opcheck() -> None:
    for name, args in op_arguments().items():
        # The schema check multiplies the inputs, which fp8 tensors cannot be.
        tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        tests = tests[name == "gelu_fp8_linear" :]
        op = getattr(torch.ops.quantpolicy, name).default
        torch.library.opcheck(op, args, test_utils=tests)
