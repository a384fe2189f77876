"""Write the shipped inventories: ``python -m quantpolicy.measure.generate``.

Each inventory of the rule table is built from its released configuration on the meta device and
probed. The same table and library versions give the same bytes.
"""

from __future__ import annotations

import argparse
import sys

import torch

from quantpolicy.errors import RequestError
from quantpolicy.inventory.live import inventory_from_config, inventory_from_module
from quantpolicy.inventory.model import Inventory
from quantpolicy.inventory.shipped import INVENTORIES, dump_inventory, list_inventories
from quantpolicy.measure.probe import probe_inventory
from quantpolicy.measure.tiny import cast_parameters, tiny_spec
from quantpolicy.rule_schema import ComponentSpec, FamilySpec
from quantpolicy.rules import RuleTable, load_rules
from quantpolicy.schemes import ComponentKind


def generate_inventory(name: str, rules: RuleTable) -> Inventory:
    """Return an inventory that the table names, as it ships.

    Raises:
        RequestError: the table names no such inventory, or a forward does not fit.
    """
    named = named_inventories(rules)
    if name not in named:
        raise RequestError(
            f"inventory {name!r}",
            "the table names none of that name",
            allowed="named: " + ", ".join(named),
            remedy="choose one of them, or add it to a component",
        )
    spec, part = named[name]
    if part.kind is not ComponentKind.DENOISER:
        inventory = text_encoder_inventory(part)
    else:
        inventory = inventory_from_config(
            part.class_name, part.config, dtype=part.dtype, keep_in_fp32=part.keep_in_fp32
        )
        inventory = probe_inventory(inventory, spec, tiny_spec(spec.tiny, rules))
    return inventory.model_copy(update={"source": "shipped"})


def named_inventories(rules: RuleTable) -> dict[str, tuple[FamilySpec, ComponentSpec]]:
    """Return the family and the component that first name each inventory."""
    named: dict[str, tuple[FamilySpec, ComponentSpec]] = {}
    for spec in rules.families.values():
        for part in spec.components.values():
            if part.inventory:
                named.setdefault(part.inventory, (spec, part))
    return named


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
    parser.add_argument("names", nargs="*", metavar="NAME", help="inventories; all without a name")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 on differences")
    args = parser.parse_args(argv)
    rules = load_rules()
    unnamed = [] if args.names else sorted(set(list_inventories()) - set(named_inventories(rules)))
    changed = [f"{name} (not named)" for name in unnamed]
    for name in args.names or named_inventories(rules):
        path, text = INVENTORIES / f"{name}.json", dump_inventory(generate_inventory(name, rules))
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        changed.append(name)
        if not args.check:
            path.write_text(text, encoding="utf-8")
    if not args.check:
        for name in unnamed:
            (INVENTORIES / f"{name}.json").unlink()
    verb = "out of date" if args.check else "written or removed"
    sys.stdout.write(f"{len(changed)} {verb}: {', '.join(changed) or 'none'}\n")
    return 1 if args.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
