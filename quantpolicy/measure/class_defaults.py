"""Write the denoiser classes' defaults: ``python -m quantpolicy.measure.class_defaults``.

With them a configuration is held against a released one without importing diffusers.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys

from quantpolicy.family_match import DEFAULTS_FILE
from quantpolicy.inventory.live import model_class
from quantpolicy.rules import RuleTable, load_rules


def read_class_defaults(class_name: str) -> dict[str, object]:
    """Return the default of every constructor argument that has one, as JSON values.

    Raises:
        RequestError: diffusers has no such model class.
    """
    parameters = inspect.signature(model_class(class_name).__init__).parameters.values()
    defaults = {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.default is not inspect.Parameter.empty
    }
    values: dict[str, object] = json.loads(json.dumps(defaults))
    return values


def dump_class_defaults(rules: RuleTable) -> str:
    """Return the text of the shipped file, for every denoiser class of the table."""
    classes = sorted({spec.recognise.class_name for spec in rules.families.values()})
    return json.dumps({name: read_class_defaults(name) for name in classes}, indent=1) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Write the file, or with ``--check`` say whether it is out of date; 1 when it is."""
    parser = argparse.ArgumentParser(prog="quantpolicy.measure.class_defaults")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 on differences")
    check = parser.parse_args(argv).check
    text = dump_class_defaults(load_rules())
    if DEFAULTS_FILE.is_file() and DEFAULTS_FILE.read_text(encoding="utf-8") == text:
        sys.stdout.write("class defaults are up to date\n")
        return 0
    if not check:
        DEFAULTS_FILE.write_text(text, encoding="utf-8")
    sys.stdout.write(f"class defaults {'are out of date' if check else 'written'}\n")
    return 1 if check else 0


if __name__ == "__main__":
    sys.exit(main())
