"""The smoke test of a scheme's GEMM."""

from __future__ import annotations

import pytest
import torch

from quantpolicy.errors import PlanMismatchError
from quantpolicy.runtime.linear import is_emulated_on_cpu
from quantpolicy.runtime.smoke import failed_gemms, smoke_test
from quantpolicy.schemes import Execution, Scheme

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def probed() -> None:
    """Let the question whether a CPU multiplies fp8 be answered before _scaled_mm is replaced."""
    assert not is_emulated_on_cpu(Scheme.FP8)


@pytest.mark.parametrize("scheme", [Scheme.INT8, Scheme.FP8, Scheme.MXFP8, Scheme.NVFP4])
def test_passes_and_draws_no_random_numbers(scheme, settings):
    before = torch.get_rng_state()
    assert smoke_test(scheme, settings[scheme], CPU, torch.bfloat16) == ""
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("error", [RuntimeError, ValueError, NotImplementedError, AssertionError])
def test_names_the_failure(error, settings, monkeypatch):
    def fail(*args: object, **kwargs: object) -> torch.Tensor:
        raise error("no kernel\nfor this device")

    monkeypatch.setattr(torch, "_scaled_mm", fail)
    found = smoke_test(Scheme.FP8, settings[Scheme.FP8], CPU, torch.bfloat16)
    assert found == f"{error.__name__}: no kernel"


@pytest.mark.parametrize("value", [0.0, float("nan"), 3.0])
def test_a_wrong_result_is_a_failure(value, settings, monkeypatch):
    def wrong(a: torch.Tensor, b: torch.Tensor, **_: object) -> torch.Tensor:
        return torch.full((a.shape[0], b.shape[1]), value).bfloat16()

    monkeypatch.setattr(torch, "_scaled_mm", wrong)
    found = smoke_test(Scheme.FP8, settings[Scheme.FP8], CPU, torch.bfloat16)
    assert found.startswith("its result is wrong (relative error ")


def test_a_plan_for_another_dtype_is_no_device_failure(settings):
    with pytest.raises(PlanMismatchError, match="weight_dtype"):
        smoke_test(Scheme.FP8, settings[Scheme.FP8], CPU, torch.float16)


def test_each_different_gemm_is_tried_once_and_a_storage_cast_never(settings, monkeypatch):
    calls = []

    def fail(*args: object, **kwargs: object) -> torch.Tensor:
        calls.append(args)
        raise RuntimeError("no kernel")

    monkeypatch.setattr(torch, "_scaled_mm", fail)
    wanted = [(scheme, CPU, torch.bfloat16) for scheme in (Scheme.FP8, Scheme.LAYERWISE_FP8)]
    found = failed_gemms(2 * wanted, settings[Scheme.FP8], Execution.TORCHAO)
    assert found == [(Scheme.FP8, CPU, "RuntimeError: no kernel")]
    assert len(calls) == 1
