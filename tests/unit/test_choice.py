from __future__ import annotations

import pytest
from by_hand import (
    decisions_of,
    plan_of,
    target,
)

from quantpolicy.detect import host_from_facts
from quantpolicy.errors import DeniedError
from quantpolicy.host import Backend
from quantpolicy.schemes import Cause, Confidence, Scheme

GIB = 1 << 30


def test_the_first_sound_candidate_wins_and_every_candidate_leaves_a_decision() -> None:
    plan = plan_of(target(), "b200")
    assert plan.components["transformer"].scheme is Scheme.FP8
    assert decisions_of(plan) == {
        "fp8": (True, "first_accepted", ""),
        "mxfp8": (False, "first_accepted", ""),
        "int8": (False, "first_accepted", ""),
        "dense": (False, "first_accepted", ""),
    }


def test_a_slower_candidate_is_rejected_with_both_times() -> None:
    plan = plan_of(target(family="ruled"), "h200", lift=["int8.fallback"])
    assert decisions_of(plan) == {
        "fp8": (False, "black_frames", "ruled.deny.fp8"),
        "int8": (False, "slower", ""),
        "dense": (True, "first_accepted", ""),
    }
    int8, dense = (d for d in plan.decisions if d.candidate in (Scheme.INT8, Scheme.DENSE))
    assert int8.predicted_ms > dense.predicted_ms
    assert f"{int8.predicted_ms:.1f} ms" in int8.detail


def test_a_slower_candidate_is_taken_when_dense_does_not_fit() -> None:
    need = plan_of(target(family="ruled")).memory.total_bytes
    plan = plan_of(target(family="ruled"), memory_bytes=need - 1)
    assert decisions_of(plan)["int8"] == (True, "memory", "")
    assert decisions_of(plan)["dense"] == (False, "memory", "")
    assert plan.memory.fits
    assert any("for memory; expect slower than dense" in note for note in plan.notes)


def test_the_memory_lever_applies_to_data_centre_hosts_whose_first_pick_is_denied() -> None:
    ruled = target(family="ruled")
    assert decisions_of(plan_of(ruled, "b200"))["int8"] == (
        False, "slower", "int8.fallback",
    )  # fmt: skip
    assert decisions_of(plan_of(ruled, "a100"))["int8"] == (True, "first_accepted", "")
    assert decisions_of(plan_of(ruled, "rtx4090"))["int8"] == (True, "first_accepted", "")
    lifted = plan_of(ruled, "b200", lift=["int8.fallback"])
    assert decisions_of(lifted)["int8"] == (True, "first_accepted", "")
    assert lifted.lifted == ("int8.fallback",)


def test_when_nothing_fits_the_first_candidate_is_taken_and_offloading_is_named() -> None:
    plan = plan_of(target(), "rtx4090", memory_bytes=1)
    assert plan.components["transformer"].scheme is Scheme.INT8
    assert not plan.memory.fits
    assert any("offload" in note for note in plan.notes)


def test_auto_takes_measured_schemes_only_when_told_so() -> None:
    plan = plan_of(target(), "rtx4090", confidence="measured")
    assert decisions_of(plan)["int8"] == (False, "confidence", "")
    assert plan.components["transformer"].scheme is Scheme.FP8
    explicit = plan_of(target(), "rtx4090", confidence="measured", transformer="int8")
    assert explicit.components["transformer"].confidence is Confidence.DERIVED


def test_a_host_without_rates_gets_no_prediction_and_a_note() -> None:
    host = host_from_facts(Backend.CUDA, "sm86", "RTX 6000", 48 * GIB)
    plan = plan_of(target(), host)
    assert {d.predicted_ms for d in plan.decisions} == {None}
    assert plan.components["transformer"].scheme is Scheme.INT8
    assert any("no rates are known for RTX 6000" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("backend", "arch", "name", "auto", "runs"),
    [
        (Backend.CUDA, "sm70", "Tesla V100", "dense", "dense"),
        (Backend.CUDA, "sm75", "Tesla T4", "int8", "dense, int8"),
        (Backend.CUDA, "sm80", "NVIDIA A100", "int8", "dense, int8"),
        (Backend.CUDA, "sm86", "RTX 6000", "int8", "dense, int8"),
        (Backend.CUDA, "sm89", "NVIDIA L40S", "fp8", "dense, int8, fp8"),
        (Backend.CUDA, "sm89", "NVIDIA GeForce RTX 4090", "int8", "dense, int8, fp8"),
        (Backend.CUDA, "sm90", "NVIDIA H200", "fp8", "dense, int8, fp8"),
        (Backend.CUDA, "sm100", "NVIDIA B200", "fp8", "dense, int8, fp8, mxfp8, nvfp4"),
        (Backend.CUDA, "sm120", "GeForce RTX 5090", "int8", "dense, int8, fp8, mxfp8, nvfp4"),
        (Backend.ROCM, "gfx942", "MI300X", "fp8", "dense, int8, fp8"),
        (Backend.MPS, "", "Apple GPU", "dense", "dense"),
        (Backend.CPU, "", "CPU", "dense", "dense, int8"),
    ],
)
def test_capability_decides_what_auto_takes_and_what_runs(
    backend: Backend, arch: str, name: str, auto: str, runs: str
) -> None:
    host = host_from_facts(backend, arch, name, 200 * GIB)
    assert plan_of(target(), host).components["transformer"].scheme == auto
    taken = []
    for scheme in ("dense", "int8", "fp8", "mxfp8", "nvfp4"):
        try:
            taken.append(plan_of(target(), host, transformer=scheme))
        except DeniedError as error:
            denied = error.decisions[[str(d.candidate) for d in error.decisions].index(scheme)]
            refused = (denied.because, error.allowed)
            assert refused == (Cause.CAPABILITY, f"what would run here: {runs}")
    assert ", ".join(plan.components["transformer"].scheme for plan in taken) == runs
