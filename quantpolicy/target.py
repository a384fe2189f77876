"""What a plan is resolved for: a family and the inventories of its components. Torch-free."""

from __future__ import annotations

from quantpolicy.inventory.model import Inventory
from quantpolicy.record import Record
from quantpolicy.schemes import ComponentKind


class TargetComponent(Record):
    """One component of the model at hand.

    Args:
        class_name: diffusers or transformers class, "" when not known.
        dtype: dtype in which it is loaded.
        keep_in_fp32: tokens of the modules that stay fp32.
        inventory: its modules; None when only its size is known (nothing in it can be quantised
            then).
        dense_bytes: its size when nothing is quantised.
    """

    kind: ComponentKind
    class_name: str
    dtype: str
    keep_in_fp32: tuple[str, ...]
    inventory: Inventory | None
    dense_bytes: int


class Target(Record):
    """The model at hand.

    Args:
        family: key of the family in the rule table, ``generic`` for an unknown class.
        source: what the caller gave, for messages.
        recognised_by: how the family was recognised, for the plan's notes.
        components: by name, in the order of the pipeline: denoisers, text encoders, VAE.
    """

    family: str
    source: str
    recognised_by: str
    components: dict[str, TargetComponent]
