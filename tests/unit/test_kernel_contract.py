"""What an op promises: verified once, refused for good, declined with a reason, counted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantpolicy.kernels import contract
from quantpolicy.kernels.contract import (
    UNEQUAL,
    forget_verdicts,
    lossless,
    op_counts,
    relaxed,
    same_bits,
)
from quantpolicy.kernels.registry import DISABLE_VARIABLE, is_disabled
from quantpolicy.kernels.replay import signature


def double(x: Tensor) -> Tensor:
    return x * 2


def nearly_double(x: Tensor) -> Tensor:
    return torch.nextafter(x * 2, torch.full_like(x, float("inf")))


def takes_all(x: Tensor) -> str:
    del x
    return ""


def takes_rows(x: Tensor) -> str:
    return "" if x.dim() == 2 else "not rows"


@pytest.fixture(autouse=True)
def with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantpolicy.kernels.registry.HAS_TRITON", True)


def test_exact_kernel_is_verified_once_per_signature():
    calls: list[Tensor] = []

    def kernel(x: Tensor) -> Tensor:
        calls.append(x)
        return x * 2

    op = lossless("exact", kernel, double, takes_all)
    x = torch.randn(4, 8)
    for _ in range(3):
        assert torch.equal(op(x), x * 2)
    assert op_counts()["exact"] == (2, 1, 0, {})
    op(x.half())
    op(x.t())
    op(x[:, ::2])
    assert op_counts()["exact"].verifications == 4
    assert len(calls) == 6


def test_unequal_kernel_is_refused_for_good_and_says_so_once(caplog):
    op = lossless("unequal", nearly_double, double, takes_all)
    x = torch.randn(4, 8)
    for _ in range(3):
        assert torch.equal(op(x), x * 2)
    assert op_counts()["unequal"] == (0, 1, 1, {UNEQUAL: 3})
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "unequal is not bit-exact" in caplog.text
    forget_verdicts("unequal")
    op(x)
    assert op_counts()["unequal"].verifications == 2


def test_a_refused_signature_does_not_affect_another():
    def kernel(x: Tensor) -> Tensor:
        return nearly_double(x) if x.dtype is torch.float32 else double(x)

    op = lossless("per_dtype", kernel, double, takes_all)
    for dtype in (torch.float32, torch.float64, torch.float32, torch.float64):
        op(torch.ones(3, dtype=dtype))
    assert op_counts()["per_dtype"] == (1, 2, 1, {UNEQUAL: 2})


def test_every_result_of_an_op_is_compared():
    op = lossless(
        "pair", lambda x: (double(x), nearly_double(x)), lambda x: (double(x), double(x)), takes_all
    )
    x = torch.ones(3)
    assert torch.equal(op(x)[1], x * 2)
    assert op_counts()["pair"].refused == 1


@pytest.mark.parametrize("keep", [lossless, relaxed])
def test_predicate_declines_with_its_reason(keep):
    name = f"declining_{keep.__name__}"
    op = keep(name, nearly_double, double, takes_rows)
    x = torch.ones(2, 3, 4)
    assert torch.equal(op(x), x * 2)
    assert op_counts()[name] == (0, 0, 0, {"not rows": 1})


def test_predicate_is_asked_once_a_signature_that_it_accepts():
    asked: list[torch.Size] = []

    def why_not(x: Tensor) -> str:
        asked.append(x.shape)
        return takes_rows(x)

    op = relaxed("asking", double, double, why_not)
    for shape in ((2, 3), (2, 3), (4, 3), (2, 3, 4), (2, 3, 4)):
        op(torch.ones(shape))
    assert asked == [(2, 3), (4, 3), (2, 3, 4), (2, 3, 4)]


def test_relaxed_kernel_is_never_compared():
    op = relaxed("relaxed", nearly_double, double, takes_all)
    x = torch.ones(2, 3)
    assert torch.equal(op(x), nearly_double(x))
    assert op_counts()["relaxed"] == (1, 0, 0, {})


@pytest.mark.parametrize("keep", [lossless, relaxed])
def test_switched_off(keep, monkeypatch):
    name = f"off_{keep.__name__}"
    monkeypatch.setenv(DISABLE_VARIABLE, f"other, {name}")
    is_disabled.cache_clear()
    op = keep(name, nearly_double, double, takes_all)
    x = torch.ones(2, 3)
    assert torch.equal(op(x), x * 2)
    assert op_counts()[name].declines == {f"switched off by {DISABLE_VARIABLE}": 1}
    monkeypatch.undo()
    is_disabled.cache_clear()


def test_unverified_in_a_capture(monkeypatch):
    monkeypatch.setattr(contract, "is_capturing", lambda _: True)
    op = lossless("captured", double, double, takes_all)
    op(torch.ones(3))
    assert op_counts()["captured"] == (0, 0, 0, {contract.CAPTURING: 1})
    monkeypatch.undo()
    op(torch.ones(3))
    op(torch.ones(3))
    assert op_counts()["captured"].calls == 1


def test_same_bits_tells_signed_zeros_and_takes_equal_nans():
    nan = torch.tensor([float("nan"), 1.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.ones(2), torch.ones(2).half())
    assert not same_bits(torch.ones(2), torch.ones(3))
    assert not same_bits(nan, torch.tensor([1.0, float("nan")]))


def test_signature_holds_what_a_verdict_depends_on():
    x = torch.ones(2, 4)
    assert signature((x, None, 1e-6)) == signature((torch.zeros(2, 4), None, 1e-6))
    for other in ((x.t(), None, 1e-6), (x.half(), None, 1e-6), (x, x, 1e-6), (x, None, 1e-5)):
        assert signature(other) != signature((x, None, 1e-6))
    assert signature(([x, x],)) != signature(([x],))
