"""Objects that get another class in place, and the forward that hooks keep of them.

A hook puts a forward on the object itself, which hides the class's, and when it is removed leaves
there the forward that it found: of the class that the object had then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Forward = TypeVar("_Forward", bound=Callable[..., Any])
_FOLLOWS = "_quantpolicy_follows"


def follows_class(forward: _Forward) -> _Forward:
    """Mark a forward that runs the one of the class that its object has when it is called."""
    setattr(forward, _FOLLOWS, True)
    return forward


def is_forward_replaced(target: object) -> bool:
    """Return whether an object has a forward that is not its class's."""
    if "forward" not in vars(target):
        return False
    own = getattr(vars(target)["forward"], "__func__", None)
    return own is not getattr(type(target), "forward", None) and not hasattr(own, _FOLLOWS)


def exchange_class(target: Any, new: type) -> None:
    """Give an object another class, whose forward runs unless a hook has replaced it."""
    if not is_forward_replaced(target):
        vars(target).pop("forward", None)
    target.__class__ = new
