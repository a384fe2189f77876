"""The inventory record: the Linears of a component, what else it does and holds. Torch-free."""

from __future__ import annotations

from quantpolicy.inventory.forward import Extent, ForwardWork, extents
from quantpolicy.match import block_pattern
from quantpolicy.record import Record
from quantpolicy.schemes import DTYPE_BYTES


class LinearFacts(Record):
    """One Linear.

    Args:
        name: normalised module name.
        out_features: rows of its weight.
        in_features: columns of its weight.
        dtype: dtype of its weight as it is loaded.
        has_bias: whether it has a bias.
        rows: activation rows M at the family's declared inputs; None when not known.
        zero_rows: whether padded inputs can make activation rows exactly zero; False when not known
            to.
    """

    name: str
    out_features: int
    in_features: int
    dtype: str
    has_bias: bool
    rows: int | None = None
    zero_rows: bool = False

    @property
    def numel(self) -> int:
        """Number of weights, the bias left out."""
        return self.out_features * self.in_features

    @property
    def dense_bytes(self) -> int:
        """Bytes of the dense weight, the bias left out."""
        return self.numel * DTYPE_BYTES[self.dtype]


class Inventory(Record):
    """The Linears of one component.

    Args:
        class_name: diffusers or transformers class, "" when not known.
        linears: in the order of the model, adapters left out.
        other_bytes: bytes of every parameter and buffer that is not a Linear's weight.
        source: ``shipped``, ``headers``, ``config`` or ``live``.
        forward: the rest of one forward at the declared inputs; None when not known.
    """

    class_name: str
    linears: tuple[LinearFacts, ...]
    other_bytes: int
    source: str
    forward: ForwardWork | None = None

    @property
    def dense_bytes(self) -> int:
        """Bytes of the whole component when nothing is quantised."""
        return sum(linear.dense_bytes for linear in self.linears) + self.other_bytes

    @property
    def extents(self) -> dict[str, Extent]:
        """Blocks by pattern, as ``ForwardWork.fitted`` compares them."""
        return extents((fact.name, fact.in_features + fact.out_features) for fact in self.linears)

    def with_rows_of(self, *references: Inventory) -> Inventory:
        """Return this inventory with the rows and zero rows of others, matched by name.

        The first reference that knows a Linear counts. A name that it lacks takes the values of its
        block pattern: the fewest rows, and zero rows when any Linear of the pattern has them.
        Linears without a match stay as they are. The rest of the forward is that of the first
        reference that knows one, fitted to the blocks here.
        """
        inventory = self
        for reference in reversed(references):
            inventory = inventory._with_rows(reference)
        return inventory

    def _with_rows(self, reference: Inventory) -> Inventory:
        exact = {fact.name: (fact.rows, fact.zero_rows) for fact in reference.linears}
        patterns: dict[str, tuple[int | None, bool]] = {}
        for fact in reference.linears:
            pattern = block_pattern(fact.name)
            rows, zero_rows = patterns.get(pattern, (None, False))
            known = [value for value in (rows, fact.rows) if value is not None]
            patterns[pattern] = (min(known, default=None), zero_rows or fact.zero_rows)
        linears = []
        for fact in self.linears:
            found = exact.get(fact.name) or patterns.get(block_pattern(fact.name))
            rows, zero_rows = found or (fact.rows, fact.zero_rows)
            linears.append(fact.model_copy(update={"rows": rows, "zero_rows": zero_rows}))
        forward = self.forward
        if reference.forward is not None:
            forward = reference.forward.fitted(reference.extents, self.extents)
        return self.model_copy(update={"linears": tuple(linears), "forward": forward})
