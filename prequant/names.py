"""Whether a source is what its class says: by names and by what stays fp32, before any byte."""

from __future__ import annotations

import diffusers
import torch

from prequant.skeleton import build_skeleton, is_ignored, tensor_names
from prequant.source import SourceComponent
from quantpolicy.errors import Mismatch, PlanMismatchError, RequestError
from quantpolicy.rule_checks import GENERIC

_FAILURES = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


def check_class(component: SourceComponent, family: str) -> None:
    """Refuse a class of no family that keeps modules in fp32, which plans of a folder cannot tell.

    Raises:
        RequestError: the class declares such modules.
    """
    name = component.plan.class_name
    kept = getattr(getattr(diffusers, name, None), "_keep_in_fp32_modules", None)
    if family == GENERIC and kept:
        raise RequestError(
            str(component.folder),
            f"{name} keeps {', '.join(kept)} in fp32, and no family of the rule table says so",
            allowed="classes of a family, and those that keep nothing in fp32",
            remedy="name the class in an overlay with these under keep_in_fp32, or apply the plan "
            "of the loaded model at run time",
        )


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
