"""Shipped inventories: the released models of the rule table, readable without torch or weights.

One JSON file a model, in which a run of equal blocks is written once. ``measure.generate`` writes
the files; nothing here measures.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from pydantic import ValidationError

from quantpolicy.errors import RequestError
from quantpolicy.inventory.forward import AttentionCalls, ForwardWork, PointwiseWork
from quantpolicy.inventory.model import Inventory

INVENTORIES = Path(__file__).parent.parent / "data" / "inventories"

FORMAT = 1
BLOCK = "{}"
COLUMNS = (
    "name",
    "out_features",
    "in_features",
    "dtype",
    "has_bias",
    "rows",
    "zero_rows",
)
WORK_COLUMNS = {
    "attention": tuple(AttentionCalls.model_fields),
    "pointwise": tuple(PointwiseWork.model_fields),
}

Row = list[object]


def list_inventories() -> tuple[str, ...]:
    """Return the names of all shipped inventories, sorted."""
    return tuple(sorted(path.stem for path in INVENTORIES.glob("*.json")))


@lru_cache(maxsize=64)
def load_inventory(name: str) -> Inventory:
    """Return a shipped inventory.

    Raises:
        RequestError: no inventory of that name ships, or its file is damaged.
    """
    path = INVENTORIES / f"{name}.json"
    if name not in list_inventories():
        raise RequestError(
            f"inventory {name!r}",
            "no such inventory ships",
            allowed="shipped: " + ", ".join(list_inventories()),
            remedy="choose one of them",
        )
    try:
        return expand(json.loads(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(
            str(path), f"cannot be read: {error}", remedy="reinstall the package"
        ) from error


def compress(inventory: Inventory) -> dict[str, object]:
    """Return the inventory as JSON values in which a run of equal blocks is written once.

    ``source`` is left out: a shipped inventory always says ``shipped``.
    """
    rows = [[getattr(linear, column) for column in COLUMNS] for linear in inventory.linears]
    return {
        "format": FORMAT,
        "class_name": inventory.class_name,
        "other_bytes": inventory.other_bytes,
        "columns": list(COLUMNS),
        "groups": list(_groups(rows)),
        **({"forward": _work_rows(inventory.forward)} if inventory.forward is not None else {}),
    }


def _work_rows(forward: ForwardWork) -> dict[str, list[Row]]:
    """Return each kind of work as its columns and then a row of values for each entry."""
    return {
        kind: [
            list(columns),
            *([getattr(entry, column) for column in columns] for entry in getattr(forward, kind)),
        ]
        for kind, columns in WORK_COLUMNS.items()
    }


def _expand_work(values: object) -> dict[str, object] | None:
    if values is None:
        return None
    if not isinstance(values, dict) or values.keys() != WORK_COLUMNS.keys():
        raise ValueError(f"forward is {values!r}")
    work: dict[str, object] = {}
    for kind, columns in WORK_COLUMNS.items():
        head, *rows = values[kind]
        if head != list(columns):
            raise ValueError(f"{kind} with columns {head}")
        work[kind] = [dict(zip(columns, row, strict=True)) for row in rows]
    return work


def expand(values: dict[str, object]) -> Inventory:
    """Return the inventory that ``compress`` wrote.

    Raises:
        ValueError: the format or the columns are unknown, or a value is of the wrong type.
    """
    if values["format"] != FORMAT or values["columns"] != list(COLUMNS):
        raise ValueError(f"format {values['format']} with columns {values['columns']}")
    groups = values["groups"]
    if not isinstance(groups, list):
        raise ValueError(f"groups is {type(groups).__name__}, a list is needed")
    try:
        inventory: Inventory = Inventory.model_validate(
            {
                "class_name": values["class_name"],
                "linears": [fact for group in groups for fact in _expand_group(group)],
                "other_bytes": values["other_bytes"],
                "source": "shipped",
                "forward": _expand_work(values.get("forward")),
            }
        )
    except ValidationError as error:
        raise ValueError(str(error)) from error
    return inventory


def _expand_group(group: dict[str, list[Row]]) -> Iterator[dict[str, object]]:
    rows = group["linears"]
    if "blocks" not in group:
        for row in rows:
            yield dict(zip(COLUMNS, row, strict=True))
        return
    start, stop = group["blocks"]
    for index in range(int(str(start)), int(str(stop))):
        for row in rows:
            fact = dict(zip(COLUMNS, row, strict=True))
            fact["name"] = str(fact["name"]).replace(BLOCK, str(index))
            yield fact


def _groups(rows: Sequence[Row]) -> Iterator[dict[str, object]]:
    """Yield runs of equal blocks and, between them, the Linears that repeat nothing."""
    alone: list[Row] = []
    position = 0
    while position < len(rows):
        block = _block_at(rows, position)
        count = _repeats(rows, position, block)
        if count < 2:
            step = max(1, len(block))
            alone += rows[position : position + step]
            position += step
            continue
        if alone:
            yield {"linears": alone}
            alone = []
        start = _block_index(str(rows[position][0]))
        yield {"blocks": [start, start + count], "linears": block}
        position += count * len(block)
    if alone:
        yield {"linears": alone}


def _split(name: str) -> tuple[str, str, str] | None:
    """Return what stands before, is, and follows the first numeric segment."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[:place]), part, ".".join(parts[place + 1 :])
    return None


def _block_index(name: str) -> int:
    split = _split(name)
    assert split is not None
    return int(split[1])


def _templated(row: Row, prefix: str, index: str) -> Row | None:
    split = _split(str(row[0]))
    if split is None or split[:2] != (prefix, index):
        return None
    parts = [part for part in (prefix, BLOCK, split[2]) if part]
    return [".".join(parts), *row[1:]]


def _block_at(rows: Sequence[Row], position: int) -> list[Row]:
    """Return the templates of the Linears that share the block at this position."""
    split = _split(str(rows[position][0]))
    if split is None:
        return []
    block: list[Row] = []
    for row in rows[position:]:
        template = _templated(row, split[0], split[1])
        if template is None:
            break
        block.append(template)
    return block


def _repeats(rows: Sequence[Row], position: int, block: list[Row]) -> int:
    """Return how many equal blocks with consecutive indices follow one another."""
    if not block:
        return 0
    count = 1
    size = len(block)
    while _block_at_equals(rows, position + count * size, block, count):
        count += 1
    return count


def _block_at_equals(rows: Sequence[Row], position: int, block: list[Row], ahead: int) -> bool:
    if position >= len(rows) or _block_at(rows, position) != block:
        return False
    first = position - ahead * len(block)
    return _block_index(str(rows[position][0])) == _block_index(str(rows[first][0])) + ahead


def dump_inventory(inventory: Inventory) -> str:
    """Return the text of an inventory's file, one Linear a line."""
    values = compress(inventory)
    groups, forward = values.pop("groups"), values.pop("forward", None)
    assert isinstance(groups, list)
    head = json.dumps(values, indent=1).removesuffix("\n}")
    body = ",\n".join(_dump_group(group) for group in groups)
    tail = f',\n "forward": {{\n{_dump_work(forward)}\n }}' if isinstance(forward, dict) else ""
    return f'{head},\n "groups": [\n{body}\n ]{tail}\n}}\n'


def _dump_work(forward: dict[str, list[Row]]) -> str:
    lines = {kind: ",\n".join(f"   {json.dumps(row)}" for row in forward[kind]) for kind in forward}
    return ",\n".join(f'  "{kind}": [\n{body}\n  ]' for kind, body in lines.items())


def _dump_group(group: dict[str, object]) -> str:
    rows = group["linears"]
    assert isinstance(rows, list)
    blocks = f'"blocks": {json.dumps(group["blocks"])}, ' if "blocks" in group else ""
    lines = ",\n".join("   " + json.dumps(row) for row in rows)
    return f'  {{{blocks}"linears": [\n{lines}\n  ]}}'
