"""Write the shipped inventories: ``python -m quantpolicy.measure.generate [--check]``.

Each inventory of the rule table is built from its released configuration on the meta device and
probed. The same table and library versions give the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import torch

from quantpolicy.inventory.live import inventory_from_config, inventory_from_module
from quantpolicy.inventory.model import Inventory
from quantpolicy.inventory.shipped import INVENTORIES, dump_inventory, list_inventories
from quantpolicy.measure.probe import probe_inventory
from quantpolicy.measure.tiny import cast_parameters
from quantpolicy.rule_schema import ComponentSpec
from quantpolicy.rules import RuleTable, load_rules
from quantpolicy.schemes import ComponentKind


def generate_inventories(rules: RuleTable) -> Iterator[tuple[str, Inventory]]:
    """Yield every inventory that the table names, each name once."""
    done: set[str] = set()
    for spec in rules.families.values():
        for part in spec.components.values():
            if not part.inventory or part.inventory in done:
                continue
            done.add(part.inventory)
            if part.kind is ComponentKind.DENOISER:
                inventory = probe_inventory(
                    inventory_from_config(
                        part.class_name,
                        part.config,
                        dtype=part.dtype,
                        keep_in_fp32=part.keep_in_fp32,
                    ),
                    spec,
                    rules.file.tiny[spec.tiny],
                )
            else:
                inventory = text_encoder_inventory(part)
            yield part.inventory, inventory.model_copy(update={"source": "shipped"})


def text_encoder_inventory(part: ComponentSpec) -> Inventory:
    """Return the inventory of a transformers model, built on the meta device; no rows are known."""
    import transformers

    model_class = getattr(transformers, part.class_name)
    with torch.device("meta"):
        module = model_class(model_class.config_class(**part.config))
    cast_parameters(module, part)
    return inventory_from_module(module)


def main(argv: list[str] | None = None) -> int:
    """Write the files, or with ``--check`` say which are out of date; 1 when any is."""
    parser = argparse.ArgumentParser(prog="quantpolicy.measure.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 on differences")
    check = parser.parse_args(argv).check
    stale = set(list_inventories())
    changed = []
    for name, inventory in generate_inventories(load_rules()):
        stale.discard(name)
        path, text = INVENTORIES / f"{name}.json", dump_inventory(inventory)
        if path.is_file() and path.read_text() == text:
            continue
        changed.append(name)
        if not check:
            path.write_text(text)
    for name in sorted(stale):
        changed.append(name)
        if not check:
            (INVENTORIES / f"{name}.json").unlink()
    verb = "out of date" if check else "written or removed"
    sys.stdout.write(f"{len(changed)} {verb}: {', '.join(changed) or 'none'}\n")
    return 1 if check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
