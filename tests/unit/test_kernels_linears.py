"""The fp8 and int8 Linear ops on a CPU, against torchao and in higher precision."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torchao.float8.inference import Float8MMConfig
from torchao.quantization import Float8Tensor, Int8Tensor, PerRow
from torchao.quantization.quantize_.workflows.float8.float8_tensor import (
    QuantizeTensorToFloat8Kwargs,
)
from torchao.quantization.quantize_.workflows.int8.int8_tensor import QuantizeTensorToInt8Kwargs

from quantpolicy.kernels.fp8_linear import fp8_linear, fp8_linear_reference
from quantpolicy.kernels.int8_linear import (
    _int_mm,
    int8_linear,
    int8_linear_reference,
    int8_matmul_reference,
)

FLOOR = 1e-12
SHAPES = ((48,), (1, 48), (16, 48), (17, 48), (2, 3, 48), (1, 2, 5, 48))


def fp8_weight(n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Float8Tensor:
    return Float8Tensor.from_hp(
        torch.randn(n, k).to(dtype),
        torch.float8_e4m3fn,
        PerRow(),
        mm_config=Float8MMConfig(use_fast_accum=True),
        act_quant_kwargs=QuantizeTensorToFloat8Kwargs(
            torch.float8_e4m3fn, PerRow(), hp_value_lb=FLOOR
        ),
    )


def int8_weight(n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Int8Tensor:
    return Int8Tensor.from_hp(
        torch.randn(n, k).to(dtype),
        PerRow(),
        act_quant_kwargs=QuantizeTensorToInt8Kwargs(PerRow()),
    )


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_equals_torchao(shape: tuple[int, ...], with_bias: bool) -> None:
    weight = fp8_weight(64, 48)
    bias = torch.randn(64).bfloat16() if with_bias else None
    x = torch.randn(shape).bfloat16()
    out = fp8_linear(x, weight.qdata, weight.scale, bias, FLOOR)
    assert torch.equal(out, F.linear(x, weight, bias))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_int8_is_within_one_rounding_of_torchao(
    shape: tuple[int, ...], with_bias: bool, dtype: torch.dtype
) -> None:
    weight = int8_weight(64, 48, dtype)
    bias = torch.randn(64).to(dtype) if with_bias else None
    x = torch.randn(shape).to(dtype)
    out = int8_linear(x, weight.qdata, weight.scale, bias)
    stock = F.linear(x, weight, bias)
    assert out.dtype is dtype
    if dtype is torch.float32:
        torch.testing.assert_close(out, stock, rtol=1e-6, atol=1e-6)
    else:
        step = torch.finfo(dtype).eps * stock.abs().amax()
        assert (out - stock).abs().max() <= step


def test_int8_rounds_once() -> None:
    weight = int8_weight(64, 48)
    bias = torch.randn(64).bfloat16()
    x = torch.randn(9, 48).bfloat16()
    exact = int8_linear(x.float(), weight.qdata, weight.scale, bias)
    codes = int8_linear(x, weight.qdata, weight.scale, bias)
    # The scale of a bf16 row is rounded to bf16; both use the codes of their own dtype.
    torch.testing.assert_close(codes.float(), exact, rtol=2e-2, atol=0.15)
    acc = int8_linear_reference(x, weight.qdata, weight.scale, None)
    assert acc.dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fp8_takes_every_activation_dtype(dtype: torch.dtype) -> None:
    weight = fp8_weight(64, 48)
    bias = torch.randn(64).bfloat16()
    x = torch.randn(5, 48).to(dtype)
    out = fp8_linear(x, weight.qdata, weight.scale, bias, FLOOR)
    expected = fp8_linear_reference(x, weight.qdata, weight.scale, bias, FLOOR)
    assert out.dtype is dtype
    torch.testing.assert_close(out, expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-2)


@pytest.mark.parametrize("shape", [(0, 48), (2, 0, 48)])
def test_no_rows_give_no_rows(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, dtype=torch.bfloat16)
    fp8, int8 = fp8_weight(64, 48), int8_weight(64, 48)
    bias = torch.zeros(64, dtype=torch.bfloat16)
    for out in (
        fp8_linear(x, fp8.qdata, fp8.scale, bias, FLOOR),
        int8_linear(x, int8.qdata, int8.scale, bias),
    ):
        assert out.shape == (*shape[:-1], 64)
        assert out.dtype is torch.bfloat16


@pytest.mark.parametrize(("n", "k"), [(50, 48), (64, 50), (33, 17)])
def test_unaligned_sizes(n: int, k: int) -> None:
    x = torch.randn(7, k).bfloat16()
    fp8, int8 = fp8_weight(n, k), int8_weight(n, k)
    dense = x.float() @ fp8.dequantize().float().t()
    out = fp8_linear(x, fp8.qdata, fp8.scale, None, FLOOR)
    assert torch.linalg.norm(out.float() - dense) < 0.05 * torch.linalg.norm(dense)
    dense = x.float() @ int8.dequantize().float().t()
    out = int8_linear(x, int8.qdata, int8.scale, None)
    assert torch.linalg.norm(out.float() - dense) < 0.02 * torch.linalg.norm(dense)


def test_strided_and_expanded_inputs() -> None:
    fp8, int8 = fp8_weight(64, 48), int8_weight(64, 48)
    base = torch.randn(4, 6, 96).bfloat16()
    for x in (base[..., :48], base[:, 1:4, 48:], base[:1, :, :48].expand(3, 6, 48)):
        assert torch.equal(
            fp8_linear(x, fp8.qdata, fp8.scale, None, FLOOR),
            fp8_linear(x.contiguous(), fp8.qdata, fp8.scale, None, FLOOR),
        )
        assert torch.equal(
            int8_linear(x, int8.qdata, int8.scale, None),
            int8_linear(x.contiguous(), int8.qdata, int8.scale, None),
        )


@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 48), (17, 50, 48), (40, 64, 33), (3, 7, 5)])
def test_padding_for_the_vendor_gemm_changes_nothing(m: int, n: int, k: int) -> None:
    codes = torch.randint(-128, 128, (m, k), dtype=torch.int8)
    weight = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    exact = codes.long() @ weight.long().t()
    assert torch.equal(_int_mm(codes, weight).long(), exact)
    assert torch.equal(int8_matmul_reference(codes, weight).long(), exact)


@pytest.mark.parametrize("shape", [(5, 48), (0, 48), (2, 3, 48)])
def test_opcheck(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).bfloat16()
    bias = torch.randn(64).bfloat16()
    fp8, int8 = fp8_weight(64, 48), int8_weight(64, 48)
    for added in (None, bias):
        # torch cannot look for mutation of e4m3 arguments.
        torch.library.opcheck(
            torch.ops.quantpolicy.fp8_linear.default,
            (x, fp8.qdata, fp8.scale, added, FLOOR),
            test_utils=(
                "test_autograd_registration",
                "test_faketensor",
                "test_aot_dispatch_dynamic",
            ),
        )
        torch.library.opcheck(
            torch.ops.quantpolicy.int8_linear.default, (x, int8.qdata, int8.scale, added)
        )
