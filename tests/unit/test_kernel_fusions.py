"""The Triton kernels of the fused ops in Triton's interpreter, against plain torch, on a CPU.

The interpreter needs its variable before triton is imported, so that these tests run themselves in
a process of their own. Roundings of bf16 and fp8 are the GPU tests' business.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in its own process")
HALF = torch.float16


@pytest.fixture(autouse=True)
def _same_values_every_run():
    # A share of codes is bounded, and few codes exceed it by chance.
    torch.manual_seed(0)


@pytest.mark.skipif(INTERPRETED, reason="starts the process that this is")
def test_all_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "1 skipped" in done.stdout


def heads(batch: int, tokens: int, count: int, size: int) -> tuple[Tensor, ...]:
    """Return Q, K and V as strided views of one fused projection."""
    return torch.randn(batch, tokens, 3, count, size, dtype=HALF).unbind(2)


def assert_same(found: object, expected: object) -> None:
    found, expected = list(found), list(expected)  # type: ignore[call-overload]
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.is_contiguous()
        assert torch.equal(one, other)


def assert_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2**-9, atol=2**-10)
    assert float((found != expected).float().mean()) < 0.1


@interpreted
@pytest.mark.parametrize(("count", "size"), [(3, 64), (24, 128), (5, 96), (9, 32)])
def test_rope_qkv_pack(count, size):
    from quantpolicy.kernels.rope_qkv_pack import launch_rope_qkv_pack, rope_qkv_pack_reference

    q, k, v = heads(2, 7, count, size)
    cos, sin = torch.randn(7, size), torch.randn(7, size)
    for text in (4, 1, 0):
        args = (q, k, v, *heads(2, text, count, size), cos, sin)
        before = [item.clone() for item in args]
        assert_same(launch_rope_qkv_pack(*args), rope_qkv_pack_reference(*args))
        assert all(torch.equal(one, other) for one, other in zip(args, before, strict=True))
    args = (q, k, None, None, None, None, cos[:5], sin[:5])
    assert_same(launch_rope_qkv_pack(*args), rope_qkv_pack_reference(*args))
    args = (q[:, ::2], k[:, 1:5], v.transpose(0, 1)[:2, :2].expand(2, 2, count, size))
    args = (args[0], args[1], q[:, :4], *heads(2, 3, count, size), cos[:4], sin[:4])
    assert_same(launch_rope_qkv_pack(*args), rope_qkv_pack_reference(*args))


@interpreted
@pytest.mark.parametrize(("count", "size"), [(3, 64), (5, 96)])
def test_qk_norms(count, size):
    from quantpolicy.kernels.qk_norm_rope_pack import (
        launch_qk_norm_rope_pack,
        qk_norm_rope_pack_reference,
    )
    from quantpolicy.kernels.qk_rms_norm import launch_qk_rms_norm, qk_rms_norm_reference

    q, k, v = heads(2, 7, count, size)
    weights = [torch.randn(size, dtype=HALF) for _ in range(4)]
    cos, sin = torch.randn(7, size), torch.randn(7, size)
    args = (q, k, v, *heads(2, 4, count, size), *weights, cos, sin, 1e-6)
    found, expected = launch_qk_norm_rope_pack(*args), qk_norm_rope_pack_reference(*args)
    assert_near(found[0], expected[0])
    assert_near(found[1], expected[1])
    assert torch.equal(found[2], expected[2])
    args = (q, k, None, None, None, None, *weights[:2], None, None, cos[:4], sin[:4], 1e-6)
    found, expected = launch_qk_norm_rope_pack(*args), qk_norm_rope_pack_reference(*args)
    assert len(found) == 2
    assert_near(found[0], expected[0])
    args = (q, k, *weights[:2], 1e-6)
    found, expected = launch_qk_rms_norm(*args), qk_rms_norm_reference(*args)
    assert_near(found[0], expected[0])
    assert_near(found[1], expected[1])


@interpreted
@pytest.mark.parametrize("columns", [64, 96, 192, 3, 1])
def test_rows(columns):
    from quantpolicy.kernels.gated_residual import (
        gated_residual_reference,
        launch_gated_residual,
    )
    from quantpolicy.kernels.layer_norm_modulate import (
        launch_layer_norm_modulate,
        layer_norm_modulate_reference,
    )
    from quantpolicy.kernels.rms_norm import launch_rms_norm, rms_norm_reference
    from quantpolicy.kernels.scale_add_rms_norm import (
        launch_scale_add_rms_norm,
        scale_add_rms_norm_reference,
    )

    x, update = (torch.randn(2, 9, columns, dtype=HALF) for _ in range(2))
    gate, scale, shift, *_ = torch.randn(2, 6 * columns, dtype=HALF).chunk(6, dim=1)
    args = (x[:, 2:], update[:, ::2][:, :4].repeat(1, 2, 1)[:, :7], gate)
    assert torch.equal(launch_gated_residual(*args), gated_residual_reference(*args))
    args = (x[:, 1:], scale, shift, 1e-6)
    if columns > 1:
        assert_near(launch_layer_norm_modulate(*args), layer_norm_modulate_reference(*args))
    vector, weight = torch.randn(columns), torch.randn(columns)
    for stream in (torch.randn(2, 9, columns), x):
        args = (stream, update, vector)
        assert torch.equal(launch_gated_residual(*args), gated_residual_reference(*args))
        args = (stream, weight, 1e-5, HALF)
        assert_near(launch_rms_norm(*args), rms_norm_reference(*args))
        args = (stream, update, vector, weight, 1e-5)
        found, expected = launch_scale_add_rms_norm(*args), scale_add_rms_norm_reference(*args)
        assert torch.equal(found[0], expected[0])
        assert_near(found[1], expected[1])


@interpreted
@pytest.mark.parametrize(("count", "size"), [(3, 64), (5, 96), (24, 32), (1, 128)])
def test_qk_norm_rope_across_heads(count, size):
    from quantpolicy.kernels.qk_norm_rope_across_heads import (
        launch_qk_norm_rope_across_heads,
        qk_norm_rope_across_heads_reference,
    )

    q, k, _ = torch.randn(2, 7, 3 * count * size, dtype=HALF).chunk(3, dim=-1)
    weights = [torch.randn(count * size, dtype=HALF) for _ in range(2)]
    # Values that differ within a pair show which channel is read.
    tables = [torch.randn(1, 7, 1, size) for _ in range(2)]
    args = (q, k, *weights, *tables, 1e-6)
    before = [item.clone() for item in args[:-1]]
    found = launch_qk_norm_rope_across_heads(*args)
    expected = qk_norm_rope_across_heads_reference(*args)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == (2, 7, count, size)
        assert one.is_contiguous()
        # A rounding of the norm moves both values of a pair.
        torch.testing.assert_close(one, other, rtol=2**-8, atol=2**-8)
        assert float((one != other).float().mean()) < 0.1
    assert all(torch.equal(one, other) for one, other in zip(args, before, strict=False))


@interpreted
@pytest.mark.parametrize("columns", [64, 96, 3])
def test_rows_with_fp32_modulation(columns):
    from quantpolicy.kernels.gated_residual import gated_residual_reference, launch_gated_residual
    from quantpolicy.kernels.layer_norm_fp8 import launch_layer_norm_fp8, layer_norm_fp8_reference
    from quantpolicy.kernels.layer_norm_fp32 import (
        launch_layer_norm_fp32,
        layer_norm_fp32_reference,
    )

    x, update = (torch.randn(2, 9, columns, dtype=HALF) for _ in range(2))
    table, weight, bias = (
        torch.randn(6, columns),
        torch.randn(columns, dtype=HALF),
        torch.randn(columns),
    )
    by_token = torch.randn(2, 9, 6, columns, dtype=HALF).unbind(2)
    by_sample = torch.randn(2, 6, columns).unbind(1)
    by_row = torch.randn(2, 6, 1, columns).unbind(1)
    for vectors in (by_token, by_sample, by_row):
        for add in (table, [None] * 6):
            args = (x, update, vectors[2], True, add[2])
            assert torch.equal(launch_gated_residual(*args), gated_residual_reference(*args))
            modulation = (vectors[1], add[1], vectors[0], add[0])
            for affine in ((None, None), (weight, bias)):
                args = (x, *affine, *modulation, 1e-6)
                assert_near(launch_layer_norm_fp32(*args), layer_norm_fp32_reference(*args))
            codes, row_scale = launch_layer_norm_fp8(*args, 1e-12)
            expected, expected_scale = layer_norm_fp8_reference(*args, 1e-12)
            torch.testing.assert_close(row_scale, expected_scale, rtol=2**-9, atol=0)
            # The interpreter's casts to fp8 are not the GPU's.
            assert float((codes.float() != expected.float()).float().mean()) < 0.1
    args = (x[:, 2:], weight, bias, *[None] * 4, 1e-6)
    assert_near(launch_layer_norm_fp32(*args), layer_norm_fp32_reference(*args))


@interpreted
@pytest.mark.parametrize("columns", [600, 96, 3])
def test_add_layer_norm_fp8(columns):
    from quantpolicy.kernels.add_layer_norm_fp8 import (
        add_layer_norm_fp8_reference,
        launch_add_layer_norm_fp8,
    )

    x, update = (torch.randn(2, 9, columns, dtype=HALF)[:, ::2] for _ in range(2))
    affine = (torch.randn(columns), torch.randn(columns))
    by_token = torch.randn(2, 5, 3, columns, dtype=HALF).unbind(2)
    by_sample = torch.randn(2, 3, columns, dtype=HALF).unbind(1)
    tables = torch.randn(3, columns).unbind(0)
    plain = (None, None, None, None)
    for vectors in (by_token, by_sample):
        modulation = (vectors[1], tables[1], vectors[0], tables[0])
        for gate in ((None, None), (vectors[2], tables[2]), (vectors[2].float(), None)):
            for norm in ((*affine, *plain), (None, None, *modulation), (*affine, *modulation)):
                args = (x, update, *gate, *norm, 1e-6, 1e-12)
                stream, codes, scale = launch_add_layer_norm_fp8(*args)
                expected = add_layer_norm_fp8_reference(*args)
                assert torch.equal(stream, expected[0])
                torch.testing.assert_close(scale, expected[2], rtol=2**-9, atol=0)
                # The interpreter's casts to fp8 are not the GPU's.
                assert float((codes.float() != expected[1].float()).float().mean()) < 0.1


@interpreted
@pytest.mark.parametrize("columns", [600, 96, 33])
def test_rms_norm_fp8(columns):
    from quantpolicy.kernels.rms_norm_fp8 import (
        launch_rms_norm_fp8,
        rms_norm_fp8_reference,
        why_not_rms_norm_fp8,
    )

    x = torch.randn(2, 10, columns, dtype=HALF)[:, ::2]
    weight = torch.randn(columns, dtype=HALF)
    by_token = torch.randn(2, 5, 2, columns, dtype=HALF).unbind(2)
    by_sample = torch.randn(2, 2, columns).unbind(1)
    by_row = torch.randn(2, 2, 1, columns).unbind(1)
    tables = torch.randn(6, 3 * columns, dtype=HALF).chunk(3, dim=1)[1:]
    index = torch.tensor([5, 0, 0, 3, 5])
    for given, scale, shift, rows in (
        (weight, None, None, None),
        (weight.float(), *by_token, None),
        (weight, *by_sample, None),
        (None, *by_row, None),
        (weight, tables[0][4], None, None),
        (None, None, by_token[1], None),
        (weight, *tables, index),
        (None, *tables, index.int()),
    ):
        args = (x, given, scale, shift, rows, 1e-5, 1e-12)
        assert why_not_rms_norm_fp8(*args) == ""
        codes, row_scale = launch_rms_norm_fp8(*args)
        expected, expected_scale = rms_norm_fp8_reference(*args)
        assert codes.is_contiguous()
        torch.testing.assert_close(row_scale, expected_scale, rtol=2**-9, atol=0)
        # The interpreter's casts to fp8 are not the GPU's.
        values, expected_values = codes.float(), expected.float()
        assert float((values != expected_values).float().mean()) < 0.1
        assert float((values[:, 1:] != expected_values[:, :-1]).float().mean()) > 0.5


@interpreted
def test_rms_norm_with_a_weight_of_the_rows_dtype():
    from quantpolicy.kernels.rms_norm import launch_rms_norm, rms_norm_reference

    args = (torch.randn(2, 5, 96, dtype=HALF), torch.randn(96, dtype=HALF), 1e-6, HALF)
    assert_near(launch_rms_norm(*args), rms_norm_reference(*args))


@interpreted
def test_swiglu():
    from quantpolicy.kernels.swiglu import launch_swiglu, swiglu_reference

    for columns in (2, 66, 5000):
        x = torch.randn(2, 3, columns, dtype=HALF)
        assert_near(launch_swiglu(x), swiglu_reference(x))


@interpreted
@pytest.mark.parametrize("with_bias", [False, True])
def test_swiglu_linear(with_bias, monkeypatch):
    from quantpolicy.kernels import swiglu_linear as module
    from quantpolicy.kernels.gated_tiles import GatedTiles

    monkeypatch.setattr(module, "processors", lambda _: 3)
    wide = torch.randn(3, 40, 112)
    for x, n, tiles in (
        (torch.randn(2, 50, 96), 80, GatedTiles(32, 32, 32, 4, 3)),
        (wide[:, ::2, 4:76], 88, GatedTiles(32, 64, 32, 4, 3, group_m=2, per_processor=2)),
        (torch.randn(1, 1, 72), 40, GatedTiles(16, 32, 32, 4, 3)),
        (wide[:1].expand(3, 40, 112), 24, GatedTiles(16, 16, 64, 4, 3)),
        (torch.randn(2000)[1:1921].view(20, 96), 24, GatedTiles(16, 16, 64, 4, 3)),
    ):
        weight, bias = torch.randn(2 * n, x.shape[-1]), torch.randn(2 * n)
        args = (x, weight, bias if with_bias else None)
        before = x.clone()
        found = module.launch_swiglu_linear(*args, tiles)
        expected = module.swiglu_linear_reference(*args)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(found, module.swiglu_linear_reference(x, weight, bias + 0.01))
        assert torch.equal(x, before)


@interpreted
def test_qk_rms_norm_rope():
    from quantpolicy.kernels.qk_rms_norm_rope import (
        launch_qk_rms_norm_rope,
        qk_rms_norm_rope_reference,
    )

    q, k, _ = heads(2, 7, 5, 64)
    for batch in (1, 2):
        cos, sin = torch.randn(batch, 7, 1, 48), torch.randn(batch, 7, 1, 48)
        args = (q, k, cos, sin, 1e-5)
        found, expected = launch_qk_rms_norm_rope(*args), qk_rms_norm_rope_reference(*args)
        assert_near(found[0], expected[0])
        assert_near(found[1], expected[1])


def assert_codes(found, rows):
    from quantpolicy.kernels.row_quantise_fp8 import row_quantise_fp8_reference

    codes, scale = found
    expected, expected_scale = row_quantise_fp8_reference(rows, 1e-12)
    torch.testing.assert_close(scale, expected_scale.view(-1, 1), rtol=2**-9, atol=0)
    values, expected_values = codes.float(), expected.view(codes.shape).float()
    # The interpreter's casts to fp8 are not the GPU's.
    assert float((values != expected_values).float().mean()) < 0.1


@interpreted
@pytest.mark.parametrize(("width", "columns"), [(64, 192), (0, 33), (48, 80)])
def test_gelu_quantise(width, columns):
    from quantpolicy.kernels.gelu_fp8_linear import gelu_quantise, gelu_rows

    x = torch.randn(1, 5, columns + 8, dtype=HALF)[..., :columns]
    head = torch.randn(1, 5, width, dtype=HALF) if width else None
    assert_codes(gelu_quantise(x, head, 1e-12), gelu_rows(x, head))


@interpreted
@pytest.mark.parametrize(("width", "columns"), [(64, 192), (0, 33), (48, 80), (0, 1), (3, 128)])
def test_swiglu_quantise(width, columns):
    from quantpolicy.kernels.swiglu_fp8_linear import swiglu_quantise, swiglu_rows

    projected = torch.randn(2, 5, 2 * columns + 6, dtype=HALF)
    first, second = projected[..., 6 : 6 + columns], projected[..., 6 + columns :]
    whole = torch.randn(2, 5, columns, dtype=HALF)
    head = torch.randn(2, 5, width, dtype=HALF) if width else None
    before = projected.clone()
    for value, gate in ((first, second), (second, first), (whole, second), (first[:1], whole[:1])):
        given = None if head is None else head[: len(value)]
        found, rows = swiglu_quantise(value, gate, given, 1e-12), swiglu_rows(value, gate, given)
        assert_codes(found, rows)
        with pytest.raises(AssertionError):
            assert_codes(found, -rows)
    assert torch.equal(projected, before)


@interpreted
def test_a_perturbed_kernel_is_not_near():
    x = torch.randn(3, 64).half()
    with pytest.raises(AssertionError):
        assert_near(x * 1.01, x)
    with pytest.raises(AssertionError):
        assert_same([torch.nextafter(x, x + 1)], [x])
