"""One place of a model that a fusion changes, and how its object is changed and given back.

An object (a module or an attention processor) is changed by giving it a subclass of its own class:
the rewrites' forward with the mounted slots switched on. Its attributes, parameters, hooks and
state_dict are not touched, and giving the class back restores it exactly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

from torch import nn

from quantpolicy.errors import KernelMountError
from quantpolicy.object_class import exchange_class, follows_class, is_forward_replaced

# A module or processor of a foreign class, whose attributes a finder checks before it is mounted.
Part = Any

_FORMER = "_quantpolicy_former"
_SLOTS = "_quantpolicy_slots"
_FORWARD = "_quantpolicy_forward"


class Rewrite:
    """A class whose methods replace those of a model's class, put in front of it.

    Every boolean class attribute is a slot: a part of the forward that one op may take over. With
    all slots off a rewrite computes what the former class computes, bit for bit.
    """

    def _quantpolicy_mounted(self: Part, slot: str) -> None:
        """Prepare the object after a slot was switched on."""

    def _quantpolicy_unmounted(self: Part) -> None:
        """Undo what mounting prepared; the former class is back."""


class Site(NamedTuple):
    """One object, the rewrite that it needs, and the slot of it that the op takes.

    Args:
        name: the module's name in the model.
    """

    name: str
    target: object
    rewrite: type[Rewrite]
    slot: str


class Sites(NamedTuple):
    """All places of one op in a model, and the reason for each that cannot be taken."""

    found: tuple[Site, ...]
    rejected: tuple[tuple[str, str], ...] = ()


def find_in_each(
    blocks: Iterable[tuple[str, Part]], make: Callable[[str, Part], tuple[Site, str]]
) -> Sites:
    """Return one site a block, or the reason against it.

    Args:
        blocks: by name.
        make: gives the site of a block, and why it cannot be taken, "" when it can.
    """
    made = [make(name, block) for name, block in blocks]
    return Sites(
        tuple(site for site, reason in made if not reason),
        tuple((site.name, reason) for site, reason in made if reason),
    )


class Slot(NamedTuple):
    """A slot in use: the rewrite it belongs to, and the op that has it."""

    rewrite: type[Rewrite]
    op: str


def former_class(target: object) -> type:
    """Return the class that an object has without any mount."""
    former: type = getattr(type(target), _FORMER, type(target))
    return former


def mounted_slots(target: object) -> Mapping[str, Slot]:
    """Return the slots in use on an object, by name."""
    return dict(getattr(type(target), _SLOTS, ()))


def set_slots(target: object, slots: Mapping[str, Slot]) -> None:
    """Give an object the class with exactly these slots in use; none gives its own class back."""
    former = former_class(target)
    current = mounted_slots(target)
    if not slots:
        if current:
            rewrites = {slot.rewrite: None for slot in current.values()}
            exchange_class(target, former)
            for rewrite in rewrites:
                rewrite._quantpolicy_unmounted(target)
        return
    exchange_class(target, _subclass(former, tuple(sorted(slots.items()))))
    for name in slots.keys() - current.keys():
        slots[name].rewrite._quantpolicy_mounted(target, name)


@functools.cache
def _subclass(former: type, slots: tuple[tuple[str, Slot], ...]) -> type:
    rewrites = dict.fromkeys(slot.rewrite for _, slot in slots)
    body: dict[str, object] = {name: True for name, _ in slots}
    body |= {_FORMER: former, _SLOTS: slots, "__module__": former.__module__}
    subclass: Any = type(former.__name__, (*rewrites, former), body)
    if any(hasattr(rewrite, "forward") for rewrite in rewrites):
        setattr(subclass, _FORWARD, subclass.forward)
        subclass.forward = _switching_forward(former)
    return cast("type", subclass)


def _switching_forward(former: Any) -> Callable[..., Any]:
    """Return a forward that runs the one of the class that an object has when it is called.

    Hooks that replace a forward keep the method that they found, and call it after an unmount too.
    """

    def forward(self: Part, *args: Any, **kwargs: Any) -> Any:
        current = type(self)
        return getattr(current, _FORWARD, current.forward)(self, *args, **kwargs)

    # A compiler keeps what it compiled by code object, and so many graphs of each.
    forward.__code__ = forward.__code__.replace(co_name=former.__name__)
    return follows_class(functools.update_wrapper(forward, former.forward))


def why_not_plain(module: Part) -> str:
    """Return why a module's forward cannot be rewritten, "" when it can.

    A forward that a hook has replaced on the object is not the class's own.
    """
    if is_forward_replaced(module):
        return "its forward is replaced on the object (an offloading or caching hook)"
    return ""


def why_not_processor(attn: Part, kind: type) -> str:
    """Return why an attention is not computed as a class of processors does, "" when it is."""
    found = former_class(attn.processor)
    return "" if found is kind else f"its attention processor is a {found.__name__}"


def why_not_bypassed(module: Part) -> str:
    """Return why a module cannot be computed without its own call, "" when it can."""
    if module._forward_hooks or module._forward_pre_hooks:
        return f"a {type(module).__name__} inside it has hooks"
    if is_forward_replaced(module):
        return f"the forward of a {type(module).__name__} inside it is replaced"
    return ""


def why_not_passed_on(module: Part, *kinds: type) -> str:
    """Return why a module may not hand on codes as it hands on rows, "" when it does.

    Args:
        kinds: the classes that are known to.
    """
    if former_class(module) not in kinds:
        return f"in the place of a {kinds[0].__name__} is a {former_class(module).__name__}"
    return why_not_bypassed(module)


def why_not_attended_by(attn: Part, kind: type, processor: type) -> str:
    """Return why an attention of a class may not take codes as it takes rows, "" when it does."""
    return why_not_passed_on(attn, kind) or why_not_processor(attn, processor)


def is_unhooked(*modules: Part) -> bool:
    """Return whether modules can still be computed without their own calls.

    Asked at every call: hooks that offload weights may come after a mount, and what reads weights
    past them reads none.
    """
    return not any(why_not_bypassed(module) for module in modules)


def is_still(kinds: type | tuple[type, ...], *modules: Part) -> bool:
    """Return whether modules are what an op computes in their place, and have no hooks.

    Asked at every call: one that was exchanged after a mount is called itself.
    """
    return all(isinstance(module, kinds) for module in modules) and is_unhooked(*modules)


def is_dense(linear: Part) -> bool:
    """Return whether a Linear is still a plain one: it can be quantised while this is mounted."""
    return type(linear) is nn.Linear and type(linear.weight) is nn.Parameter


def is_free_dense(linear: Part) -> bool:
    """Return whether an op can do what a plain Linear does, without its call."""
    return is_dense(linear) and is_unhooked(linear)


class Conflicts:
    """Which op takes which slot of which object, before anything is changed."""

    def __init__(self) -> None:
        self._owners: dict[tuple[int, str], str] = {}

    def claim(self, op: str, sites: Sites) -> str:
        """Take the slots of an op, all or none; return why not, "" when they are taken."""
        for site in sites.found:
            mounted = mounted_slots(site.target).get(site.slot)
            owner = self._owners.get((id(site.target), site.slot)) or (
                mounted.op if mounted else op
            )
            if owner != op:
                return f"{site.name}: {owner} has this part of the forward"
        for site in sites.found:
            self._owners[id(site.target), site.slot] = op
        return ""


def check_slot(site: Site) -> None:
    """Refuse a site whose rewrite has no such slot."""
    if getattr(site.rewrite, site.slot, None) is not False:
        raise KernelMountError(
            f"{site.name}.{site.slot}",
            f"{site.rewrite.__name__} has no such slot",
            remedy="name a boolean attribute of the rewrite",
        )
