"""The ``doctor`` command: versions, this machine as a host record, the presets. No policy.

torch is imported only to look at the machine, and only where it is installed.
"""

from __future__ import annotations

import platform
import re

from quantpolicy.cli_options import detect_host
from quantpolicy.console import print_table, print_text
from quantpolicy.errors import RequestError
from quantpolicy.host import Backend, GemmLimit, Host, load_presets
from quantpolicy.versions import installed_version

# Least release, and the first one that is too new ("" when there is none), as in pyproject.toml.
ALLOWED = {
    "torch": ("2.11", ""),
    "torchao": ("0.18", "0.19"),
    "diffusers": ("0.42.1", ""),
    "transformers": ("5.0", ""),
    "accelerate": ("1.10", ""),
    "safetensors": ("0.8", ""),
}
PROBED = (Backend.CUDA, Backend.ROCM)
OTHERS = (
    "quantpolicy",
    "pydantic",
    "pyyaml",
    "rfc8785",
    "typer",
    "rich",
    "numpy",
    "triton",
    "peft",
)


def _release(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 13, 0) for 2.13.0+cpu."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def judge_version(package: str, found: str) -> str:
    """Return "ok", "missing", "too old" or "too new" for a package of the runtime extra."""
    least, too_new = ALLOWED[package]
    if not found:
        return "missing"
    if _release(found) < _release(least):
        return "too old"
    return "too new" if too_new and _release(found) >= _release(too_new) else "ok"


def examine() -> dict[str, object]:
    """Return everything that the command shows, as plain JSON values.

    ``host`` can be saved and given back as ``--host FILE``; it is None when torch is missing.
    """
    try:
        host: Host | None = detect_host()
        host_missing = ""
    except RequestError as error:
        host, host_missing = None, str(error)
    limits = probe_gemm_limits(host) if host is not None else ()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {
            package: {
                "version": installed_version(package),
                "verdict": judge_version(package, installed_version(package)),
            }
            for package in ALLOWED
        },
        "other_packages": {package: installed_version(package) for package in OTHERS},
        "host": host.model_dump(mode="json") if host is not None else None,
        "host_missing": host_missing,
        "presets": list(load_presets()),
        "probed_gemm_limits": [limit.model_dump(mode="json") for limit in limits],
    }


def print_examination(examination: dict[str, object]) -> None:
    """Write the examination as tables for a person."""
    packages = examination["packages"]
    assert isinstance(packages, dict)
    rows = [
        [name, facts["version"] or "-", _range(name), facts["verdict"]]
        for name, facts in packages.items()
    ]
    print_text(f"Python {examination['python']} on {examination['platform']}")
    print_table(["package", "version", "allowed", "verdict"], rows)
    host = examination["host"]
    if isinstance(host, dict):
        print_table(["host", "value"], [[name, str(value)] for name, value in host.items()])
    else:
        print_text(str(examination["host_missing"]))
    presets = examination["presets"]
    assert isinstance(presets, list)
    print_text("presets: " + ", ".join(presets))
    print_text(_limits_line(host, examination["probed_gemm_limits"]))


def _limits_line(host: object, limits: object) -> str:
    """Return what the probe of GEMM limits found, in words."""
    assert isinstance(limits, list)
    if not isinstance(host, dict) or host["backend"] not in PROBED:
        return "GEMM limits: not probed, there is no CUDA or ROCm device"
    found = []
    for limit in limits:
        text = f"{limit['scheme']} needs {limit['min_rows']} rows"
        if limit["min_in_features"]:
            text += f" from {limit['min_in_features']} input features on"
        found.append(text + (" with a bias" if limit["bias_only"] else ""))
    return "GEMM limits probed on this device: " + ("; ".join(found) or "no row count is rejected")


def _range(package: str) -> str:
    least, too_new = ALLOWED[package]
    return f">={least}" + (f",<{too_new}" if too_new else "")


def probe_gemm_limits(host: Host) -> tuple[GemmLimit, ...]:
    """Return which small row counts the int8 and fp8 Linears of this device reject.

    Empty without an accelerator: the CPU runs the schemes' reference paths, which reject nothing.
    """
    if host.backend not in PROBED:
        return ()
    from quantpolicy.measure.gemm_limits import measure_gemm_limits

    return measure_gemm_limits(host)
