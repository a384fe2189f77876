"""Bake, validate and load pre-quantised checkpoints from a plan of quantpolicy.

Importing this package, or validating, never imports torch; baking and loading do.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prequant.bake import bake
    from prequant.load import load
    from prequant.validate import validate

__all__ = ["bake", "load", "validate"]


class _LazyFunction:
    """A function of the package that shares its name with the submodule it lives in.

    Importing the submodule sets the package's attribute to the module; that is ignored here, so the
    name always means the function.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, package: ModuleType | None, owner: type | None = None) -> object:
        return getattr(import_module(f"{__name__}.{self._name}"), self._name)

    def __set__(self, package: ModuleType, value: object) -> None:
        pass


class _Package(ModuleType):
    """The package with its functions as data descriptors, which win over its own attributes."""


for _name in __all__:
    setattr(_Package, _name, _LazyFunction(_name))
sys.modules[__name__].__class__ = _Package
