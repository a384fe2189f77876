from __future__ import annotations

import sys

import pytest

from quantpolicy.detect import detect_host, host_from_facts
from quantpolicy.host import Backend, Host, HostClass, load_presets
from quantpolicy.schemes import Scheme

GIB = 1 << 30
CENTER, STATION, CONSUMER = HostClass.DATA_CENTER, HostClass.WORKSTATION, HostClass.CONSUMER


@pytest.mark.parametrize(
    ("arch", "name", "host_class", "fp8"),
    [
        ("sm70", "Tesla V100-SXM2-16GB", CENTER, ""),
        ("sm75", "Tesla T4", CENTER, ""),
        ("sm75", "Quadro RTX 6000", STATION, ""),
        ("sm75", "NVIDIA GeForce RTX 2080 Ti", CONSUMER, ""),
        ("sm80", "NVIDIA A100-SXM4-80GB", CENTER, ""),
        ("sm86", "RTX 6000", STATION, ""),
        ("sm86", "NVIDIA RTX A6000", STATION, ""),
        ("sm86", "NVIDIA A10", CENTER, ""),
        ("sm86", "NVIDIA A40", CENTER, ""),
        ("sm86", "NVIDIA GeForce RTX 3090", CONSUMER, ""),
        ("sm87", "Orin", HostClass.INTEGRATED, ""),
        ("sm89", "NVIDIA L4", CENTER, "float8_e4m3fn"),
        ("sm89", "NVIDIA L40S", CENTER, "float8_e4m3fn"),
        ("sm89", "NVIDIA RTX 6000 Ada Generation", STATION, "float8_e4m3fn"),
        ("sm89", "NVIDIA GeForce RTX 4090", CONSUMER, "float8_e4m3fn"),
        ("sm90", "NVIDIA H200", CENTER, "float8_e4m3fn"),
        ("sm90", "GeForce by name only", CENTER, "float8_e4m3fn"),
        ("sm100", "NVIDIA B200", CENTER, "float8_e4m3fn"),
        ("sm103", "NVIDIA B300", CENTER, "float8_e4m3fn"),
        ("sm120", "NVIDIA GeForce RTX 5090", CONSUMER, "float8_e4m3fn"),
        ("sm120", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", STATION, "float8_e4m3fn"),
        ("sm120", "NVIDIA RTX PRO 6000 Blackwell Server Edition", CENTER, "float8_e4m3fn"),
        ("sm121", "NVIDIA GB10", STATION, "float8_e4m3fn"),
    ],
)
def test_cuda_class_and_fp8_type(arch: str, name: str, host_class: HostClass, fp8: str) -> None:
    host = host_from_facts(Backend.CUDA, arch, name, 24 * GIB)
    assert (host.host_class, host.fp8_dtype) == (host_class, fp8)
    assert host.min_rows(Scheme.INT8, 512, has_bias=True) == 17


@pytest.mark.parametrize(
    ("arch", "name", "host_class", "fp8"),
    [
        ("gfx942", "AMD Instinct MI300X", CENTER, "float8_e4m3fnuz"),
        ("gfx950", "AMD Instinct MI355X", CENTER, "float8_e4m3fn"),
        ("gfx90a", "AMD Instinct MI250X", CENTER, ""),
        ("gfx1100", "AMD Radeon PRO W7900", STATION, ""),
        ("gfx1100", "AMD Radeon RX 7900 XTX", CONSUMER, ""),
        ("gfx1201", "AMD Radeon RX 9070 XT", CONSUMER, "float8_e4m3fn"),
    ],
)
def test_rocm_class_and_fp8_type(arch: str, name: str, host_class: HostClass, fp8: str) -> None:
    host = host_from_facts(Backend.ROCM, arch, name, 64 * GIB)
    assert (host.host_class, host.fp8_dtype) == (host_class, fp8)


def test_mps_and_no_accelerator_have_no_fp8() -> None:
    mps = host_from_facts(Backend.MPS, "", "Apple GPU", 16 * GIB)
    none = host_from_facts(Backend.CPU, "", "CPU", 16 * GIB)
    assert (mps.host_class, mps.fp8_dtype) == (HostClass.INTEGRATED, "")
    assert (none.host_class, none.fp8_dtype) == (HostClass.CPU, "")


def test_rates_are_those_of_the_like_preset_and_say_so() -> None:
    host = host_from_facts(Backend.CUDA, "sm90", "NVIDIA H200", 139 * GIB)
    assert host.rates is not None
    assert host.rates.source.startswith("of preset h200: measured")
    assert host.min_rows(Scheme.FP8, 12288, has_bias=True) == 42


def test_a_device_like_no_preset_has_no_rates() -> None:
    assert host_from_facts(Backend.CUDA, "sm86", "RTX 6000", 48 * GIB).rates is None
    assert host_from_facts(Backend.CUDA, "sm103", "NVIDIA B300", 270 * GIB).rates is None


@pytest.mark.parametrize("preset", load_presets().values(), ids=lambda preset: preset.name)
def test_every_preset_is_what_its_own_facts_give(preset: Host) -> None:
    names = {"l40s": "NVIDIA L40S"}
    name = names.get(preset.name, preset.name)
    host = host_from_facts(preset.backend, preset.arch, name, preset.memory_bytes)
    assert host.host_class is preset.host_class
    assert host.fp8_dtype == preset.fp8_dtype
    assert host.gemm_limits[0] == preset.gemm_limits[0]


def test_this_machine_is_detected() -> None:
    host = detect_host()
    torch = sys.modules["torch"]
    assert (host.backend is Backend.CUDA) == (torch.cuda.is_available() and not torch.version.hip)
    assert host.memory_bytes > GIB
    assert Host.detect() == host
