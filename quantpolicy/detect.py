"""The facts of a machine: a pure function of what a driver reports, and the probe that asks torch.

The class of a device follows from its capability; its name only tells boards apart that share one.
"""

from __future__ import annotations

import os
import re

from quantpolicy.host import Backend, GemmLimit, Host, HostClass, load_presets
from quantpolicy.schemes import Scheme

DATA_CENTER_ARCHS = frozenset({"sm60", "sm70", "sm80", "sm90", "sm100", "sm103"})
INTEGRATED_ARCHS = frozenset({"sm72", "sm87", "sm101", "sm110"})
DATA_CENTER_BOARDS = frozenset(
    [
        "a2",
        "a10",
        "a10g",
        "a10m",
        "a16",
        "a40",
        "l2",
        "l4",
        "l20",
        "l40",
        "l40g",
        "l40s",
        "p4",
        "p40",
        "t4",
        "t4g",
    ]
)
WORKSTATION_NAMES = re.compile(r"\b(quadro|rtx a\d|rtx pro|rtx \d000\b|gb10\b)")
ROCM_DATA_CENTER = re.compile(r"gfx9(06|08|0a|40|41|42|50)")
ROCM_WORKSTATION = re.compile(r"\b(pro|w\d{4})\b", re.IGNORECASE)
FNUZ_ARCHS = frozenset({"gfx940", "gfx941", "gfx942"})

# torch._int_mm checks the row count on every back end alike.
INT8_ROWS = GemmLimit(scheme=Scheme.INT8, min_rows=17)


def host_from_facts(backend: Backend, arch: str, name: str, memory_bytes: int) -> Host:
    """Return the host record of a device from what its driver reports.

    A device whose architecture and class equal those of a preset has the preset's GEMM limits and
    rates; any other has the row limit of int8 and no rates.

    Args:
        arch: ``sm90`` for CUDA, ``gfx942`` for ROCm, "" elsewhere.
        name: the device name as reported.
    """
    host_class = _host_class(backend, arch, name)
    preset = next(
        (
            preset
            for preset in load_presets().values()
            if (preset.backend, preset.arch, preset.host_class) == (backend, arch, host_class)
        ),
        None,
    )
    rates = preset.rates if preset is not None else None
    if preset is not None and rates is not None:
        rates = rates.model_copy(update={"source": f"of preset {preset.name}: {rates.source}"})
    return Host(
        name=name,
        backend=backend,
        arch=arch,
        host_class=host_class,
        memory_bytes=memory_bytes,
        fp8_dtype=_fp8_dtype(backend, arch),
        gemm_limits=preset.gemm_limits if preset is not None else (INT8_ROWS,),
        rates=rates,
    )


def detect_host() -> Host:
    """Return the facts of this machine, of its first accelerator where it has one."""
    import torch

    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(0)
        if torch.version.hip is not None:
            arch = str(facts.gcnArchName).split(":", 1)[0]
            return host_from_facts(Backend.ROCM, arch, facts.name, facts.total_memory)
        arch = f"sm{facts.major}{facts.minor}"
        return host_from_facts(Backend.CUDA, arch, facts.name, facts.total_memory)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if torch.backends.mps.is_available():
        return host_from_facts(Backend.MPS, "", "Apple GPU", memory_bytes)
    return host_from_facts(Backend.CPU, "", "CPU", memory_bytes)


def _host_class(backend: Backend, arch: str, name: str) -> HostClass:
    if backend is Backend.CPU:
        return HostClass.CPU
    if backend is Backend.MPS:
        return HostClass.INTEGRATED
    if backend is Backend.ROCM:
        return _rocm_class(arch, name)
    return _cuda_class(arch, name)


def _rocm_class(arch: str, name: str) -> HostClass:
    if ROCM_DATA_CENTER.fullmatch(arch):
        return HostClass.DATA_CENTER
    return HostClass.WORKSTATION if ROCM_WORKSTATION.search(name) else HostClass.CONSUMER


def _cuda_class(arch: str, name: str) -> HostClass:
    if arch in DATA_CENTER_ARCHS:
        return HostClass.DATA_CENTER
    if arch in INTEGRATED_ARCHS:
        return HostClass.INTEGRATED
    words = re.findall(r"[a-z0-9]+", name.lower())
    text = " ".join(words)
    is_server_board = "rtx pro" in text and "server" in words
    if is_server_board or (DATA_CENTER_BOARDS & set(words) and "geforce" not in words):
        return HostClass.DATA_CENTER
    if WORKSTATION_NAMES.search(text) and "geforce" not in words:
        return HostClass.WORKSTATION
    return HostClass.CONSUMER


def _fp8_dtype(backend: Backend, arch: str) -> str:
    if backend is Backend.CUDA:
        return "float8_e4m3fn" if int(arch[2:]) >= 89 else ""
    if backend is Backend.ROCM and arch in FNUZ_ARCHS:
        return "float8_e4m3fnuz"
    if backend is Backend.ROCM and (arch == "gfx950" or arch.startswith("gfx12")):
        return "float8_e4m3fn"
    return ""
