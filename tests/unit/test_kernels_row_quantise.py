"""Row quantisation on a CPU: the references, against torchao and through the dispatcher."""

from __future__ import annotations

import pytest
import torch
from torchao.quantization import Float8Tensor, Int8Tensor, PerRow

from quantpolicy.kernels.row_launch import row_warps, split_columns
from quantpolicy.kernels.row_quantise_fp8 import (
    rounded_floor,
    row_quantise_fp8,
)
from quantpolicy.kernels.row_quantise_int8 import row_quantise_int8

FLOOR = 1e-12
DTYPES = (torch.bfloat16, torch.float32)
SHAPES = ((5, 48), (1, 1), (3, 17), (0, 48), (2, 3, 32), (2, 2, 3, 16), (7,))


def rows(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)
    if x.dim() > 1 and x.shape[0] > 1:
        x[0] = 0.0
    return x


def torchao_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tensor = Float8Tensor.from_hp(x, torch.float8_e4m3fn, PerRow(), hp_value_lb=FLOOR)
    return tensor.qdata, tensor.scale


def torchao_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tensor = Int8Tensor.from_hp(x, PerRow())
    return tensor.qdata, tensor.scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_equals_torchao(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = rows(shape, dtype)
    codes, scale = row_quantise_fp8(x, FLOOR)
    assert codes.shape == x.shape
    assert scale.shape == (*x.shape[:-1], 1)
    assert scale.dtype is torch.float32
    if x.numel():
        expected, expected_scale = torchao_fp8(x)
        assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(scale.flatten(), expected_scale.flatten())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_equals_torchao(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = rows(shape, dtype)
    codes, scale = row_quantise_int8(x)
    assert codes.shape == x.shape
    assert scale.shape == (*x.shape[:-1], 1)
    if x.numel():
        expected, expected_scale = torchao_int8(x)
        assert torch.equal(codes, expected)
        assert torch.equal(scale.flatten(), expected_scale.flatten())


def test_fp8_of_an_fp16_row_that_torchao_divides_by_zero() -> None:
    x = torch.tensor([[0.0, 0.0], [3e-6, -1.5e-6], [8.0, 1.0]], dtype=torch.float16)
    codes, scale = row_quantise_fp8(x, FLOOR)
    assert torch.equal(codes[0].float(), torch.zeros(2))
    assert codes[1].float().tolist() == [448.0, -224.0]
    torch.testing.assert_close(codes.float() * scale, x.float(), rtol=0.04, atol=1e-8)
    assert torch.equal(codes[2].view(torch.uint8), torchao_fp8(x)[0][2].view(torch.uint8))
    assert torchao_fp8(x)[0][0].float().isnan().all()


def test_fp8_of_a_zero_row_is_zero_only_with_a_floor() -> None:
    x = torch.zeros(1, 16, dtype=torch.bfloat16)
    codes, scale = row_quantise_fp8(x, FLOOR)
    assert torch.equal(codes.float(), torch.zeros(1, 16))
    assert scale.item() == float((torch.tensor(FLOOR, dtype=torch.bfloat16) / 448).float())
    assert row_quantise_fp8(x, 0.0)[0].float().isnan().all()


def test_int8_of_a_zero_row_has_the_smallest_scale() -> None:
    codes, scale = row_quantise_int8(torch.zeros(2, 16, dtype=torch.bfloat16))
    assert torch.equal(codes, torch.zeros(2, 16, dtype=torch.int8))
    assert scale.flatten().tolist() == [2.0**-23, 2.0**-23]


def test_known_codes() -> None:
    x = torch.tensor([[448.0, -224.0, 1.0, 0.0]])
    codes, scale = row_quantise_fp8(x, FLOOR)
    assert codes.float().tolist() == [[448.0, -224.0, 1.0, 0.0]]
    assert scale.item() == 1.0
    codes, scale = row_quantise_int8(torch.tensor([[127.5, -127.5, 2.5, 1.5, 0.5]]))
    assert codes.tolist() == [[127, -128, 2, 2, 0]]
    assert scale.item() == 1.0


def test_a_row_without_columns() -> None:
    codes, scale = row_quantise_fp8(torch.empty(3, 0), FLOOR)
    assert codes.shape == (3, 0)
    assert scale.shape == (3, 1)
    assert row_quantise_int8(torch.empty(3, 0))[1].shape == (3, 1)


def test_results_are_contiguous_and_new() -> None:
    x = torch.randn(4, 6, 16).transpose(0, 1)
    codes, scale = row_quantise_fp8(x, FLOOR)
    assert codes.is_contiguous()
    assert torch.equal(codes.float()[2, 1], row_quantise_fp8(x[2, 1], FLOOR)[0].float())
    assert scale.shape == (6, 4, 1)
    assert row_quantise_int8(x)[0].is_contiguous()


@pytest.mark.parametrize("shape", [(5, 48), (0, 48), (2, 3, 32)])
def test_opcheck(shape: tuple[int, ...]) -> None:
    x = rows(shape, torch.bfloat16)
    torch.library.opcheck(torch.ops.quantpolicy.row_quantise_fp8.default, (x, FLOOR))
    torch.library.opcheck(torch.ops.quantpolicy.row_quantise_int8.default, (x,))


def test_compiled_code_keeps_the_number_of_rows_open() -> None:
    compiled = torch.compile(
        lambda x: row_quantise_fp8(x * 2, FLOOR), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for m in (3, 5, 8):
        x = rows((m, 32), torch.bfloat16)
        codes, scale = compiled(x)
        expected, expected_scale = row_quantise_fp8(x * 2, FLOOR)
        assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(scale, expected_scale)


def test_columns_are_covered_by_two_powers_of_two() -> None:
    assert split_columns(1) == (1, 0)
    assert split_columns(3072) == (2048, 1024)
    assert split_columns(4096) == (4096, 0)
    assert split_columns(14336) == (8192, 8192)
    for columns in range(1, 3000):
        first, rest = split_columns(columns)
        assert first <= columns <= first + rest


def test_warps_are_a_power_of_two() -> None:
    assert [row_warps(k) for k in (1, 2048, 3072, 5120, 14336, 32768)] == [1, 1, 2, 2, 4, 8]


def test_floor_is_rounded_as_the_activation_holds_it() -> None:
    assert rounded_floor(FLOOR, torch.float32) == float(torch.tensor(FLOOR))
    assert rounded_floor(FLOOR, torch.bfloat16) == float(torch.tensor(FLOOR, dtype=torch.bfloat16))
    assert rounded_floor(FLOOR, torch.float16) == FLOOR
