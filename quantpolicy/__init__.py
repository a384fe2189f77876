"""One quantisation plan per diffusion model and machine. Importing this never imports torch.

The public names are loaded at first use, so that the import itself costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quantpolicy.errors import (
        CorruptCheckpointError,
        DeniedError,
        KernelMountError,
        PlanMismatchError,
        QuantPolicyError,
        RequestError,
        RuleTableError,
        StaleCheckpointError,
    )
    from quantpolicy.host import Host
    from quantpolicy.plan import QuantPlan
    from quantpolicy.request import Request
    from quantpolicy.resolver import resolve
    from quantpolicy.rules import load_rules

__all__ = [
    "CorruptCheckpointError",
    "DeniedError",
    "Host",
    "KernelMountError",
    "PlanMismatchError",
    "QuantPlan",
    "QuantPolicyError",
    "Request",
    "RequestError",
    "RuleTableError",
    "StaleCheckpointError",
    "load_rules",
    "resolve",
]

_HOMES = {
    "Host": "host",
    "QuantPlan": "plan",
    "Request": "request",
    "load_rules": "rules",
    "resolve": "resolver",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
