"""Whether a source holds the tensors of its own class, told before a byte is written."""

from __future__ import annotations

import diffusers
import torch

from prequant.skeleton import build_skeleton, is_ignored, tensor_names
from prequant.source import SourceComponent
from quantpolicy.errors import Mismatch, PlanMismatchError, RequestError

_FAILURES = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


def check_names(component: SourceComponent) -> None:
    """Hold the tensors of a source against those of the model that its config builds.

    A class that diffusers does not have is left to the plan.

    Raises:
        RequestError: diffusers cannot build the model of the config.
        PlanMismatchError: names differ; every one is listed.
    """
    name = component.plan.class_name
    if not hasattr(diffusers, name):
        return
    try:
        model = build_skeleton(name, component.config, getattr(torch, component.plan.dtype))
    except _FAILURES as error:
        raise RequestError(
            str(component.folder / "config.json"),
            f"diffusers {diffusers.__version__} builds no {name} of it ({error})",
            remedy="restore the file as it was published",
        ) from error
    known, needed = tensor_names(model)
    names = component.tensors.keys()
    faults = [
        Mismatch("tensor_missing", min(group), "a tensor in the source", "none")
        for group in needed
        if not group & names
    ]
    faults += [
        Mismatch("tensor_unexpected", name, f"a tensor of {component.plan.class_name}", "none")
        for name in sorted(names - known)
        if not is_ignored(model, name)
    ]
    if faults:
        raise PlanMismatchError(
            str(component.folder),
            faults,
            remedy="give the dense checkpoint of this very class, without adapters",
        )
