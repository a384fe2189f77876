"""The bounds of the tests on a GPU: other roundings are within them, and no wrong kernel is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quantpolicy.kernels.row_quantise_fp8 import row_quantise_fp8_reference
from tests.gpu.closeness import assert_near_codes

FLOOR = 1e-12
Rows = tuple[Tensor, Tensor]


def quantised(rows: int, columns: int, magnitude: float = 1.0) -> tuple[Tensor, Rows]:
    torch.manual_seed(0)
    x = (magnitude * torch.randn(rows, columns)).bfloat16()
    return x, row_quantise_fp8_reference(x, FLOOR)


def as_codes(data: Tensor) -> Tensor:
    return data.view(torch.float8_e4m3fn)


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("rows", [1, 3, 192, 1000])
def test_rows_rounded_otherwise_here_and_there_are_near(rows: int, magnitude: float) -> None:
    x, expected = quantised(rows, 3072, magnitude)
    bits = x.view(torch.int16).clone()
    bits[torch.rand(bits.shape) < 0.003] += 1
    # The largest of a row is what its scale is made of.
    bits[0, x[0].abs().argmax()] += 1
    found = row_quantise_fp8_reference(bits.view(torch.bfloat16), FLOOR)
    assert not torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert_near_codes(found, expected)
    assert_near_codes((found[0].view(1, rows, 3072), found[1].view(1, rows, 1)), expected)


def shifted(codes: Tensor, scale: Tensor) -> Rows:
    return as_codes(codes.roll(1, -1)), scale


def without_the_last_columns(codes: Tensor, scale: Tensor) -> Rows:
    codes[:, -8:] = 0
    return as_codes(codes), scale


def without_the_last_row(codes: Tensor, scale: Tensor) -> Rows:
    codes[-1] = 0
    return as_codes(codes), scale


def negated(codes: Tensor, scale: Tensor) -> Rows:
    codes ^= 128
    return as_codes(codes), scale


def other_codes_beside_another_scale(codes: Tensor, scale: Tensor) -> Rows:
    codes[:1], scale[:1] = codes[:1].flip(-1), scale[:1] * (1 + 2**-8)
    return as_codes(codes), scale


def one_other_code(codes: Tensor, scale: Tensor) -> Rows:
    where = (as_codes(codes).float().abs() > 8).nonzero()[0]
    codes[tuple(where)] ^= 16
    return as_codes(codes), scale


def no_number(codes: Tensor, scale: Tensor) -> Rows:
    codes[0, 0] = 127
    return as_codes(codes), scale


def wrong_scale(codes: Tensor, scale: Tensor) -> Rows:
    scale[-1] *= 1.05
    return as_codes(codes), scale


@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (2, 3072), (192, 128), (1000, 3072)])
@pytest.mark.parametrize(
    "spoil",
    [
        shifted,
        without_the_last_columns,
        without_the_last_row,
        negated,
        other_codes_beside_another_scale,
        one_other_code,
        no_number,
        wrong_scale,
    ],
)
def test_wrong_codes_are_far(
    spoil: Callable[[Tensor, Tensor], Rows], rows: int, columns: int
) -> None:
    _, expected = quantised(rows, columns)
    found = spoil(expected[0].view(torch.uint8).clone(), expected[1].clone())
    with pytest.raises(AssertionError):
        assert_near_codes(found, expected)


def test_a_code_off_by_a_step_is_near_and_one_in_fifty_are_not() -> None:
    x, expected = quantised(192, 128)
    assert x.shape == (192, 128)
    codes = expected[0].view(torch.uint8).clone()
    low = (codes & 127) < 120
    codes[:, ::128] += low[:, ::128].to(torch.uint8)
    assert_near_codes((as_codes(codes), expected[1]), expected)
    codes[:, 1::64] += low[:, 1::64].to(torch.uint8)
    with pytest.raises(AssertionError):
        assert_near_codes((as_codes(codes), expected[1]), expected)
