"""Which way is faster is asked once a signature, and never inside a capture."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantpolicy.kernels import gain_probe
from quantpolicy.kernels.gain_probe import forget_gains, gains


def fused(x: Tensor) -> Tensor:
    return x


def separate(x: Tensor) -> Tensor:
    return x


@pytest.fixture
def timed(monkeypatch):
    """Return the calls that were timed, and the times that they are given."""
    calls: list[object] = []
    ms = {fused: 1.0, separate: 2.0}

    def shortest(call, args):
        del args
        calls.append(call)
        return ms[call]

    monkeypatch.setattr(gain_probe, "_shortest_ms", shortest)
    forget_gains()
    yield calls, ms
    forget_gains()


def test_a_signature_is_timed_once(timed):
    calls, ms = timed
    x = torch.zeros(2, 3)
    assert gains("one", fused, separate, (x,))
    ms[fused] = 3.0
    assert gains("one", fused, separate, (torch.ones(2, 3),))
    assert calls == [fused, separate]
    assert not gains("one", fused, separate, (x.t(),))
    assert not gains("other", fused, separate, (x,))
    assert calls == [fused, separate] * 3
    forget_gains()
    assert not gains("one", fused, separate, (x,))


def test_equal_times_are_no_gain(timed):
    _, ms = timed
    ms[fused] = ms[separate]
    assert not gains("one", fused, separate, (torch.zeros(1),))


def test_inside_a_capture_nothing_is_timed_or_remembered(timed, monkeypatch):
    calls, _ = timed
    x = torch.zeros(2, 3)
    with monkeypatch.context() as patch:
        patch.setattr(gain_probe, "is_capturing", lambda _: True)
        assert not gains("one", fused, separate, (x,))
    assert calls == []
    assert gains("one", fused, separate, (x,))
