"""The JSON Schema of families.yaml, for editors. ``python -m quantpolicy.json_schema`` writes it.

It says less than ``load_rules`` checks: references between sections are not in it.
"""

from __future__ import annotations

import json
from pathlib import Path

from quantpolicy.rule_schema import RuleFile

SCHEMA_FILE = Path(__file__).parent / "data" / "families.schema.json"


def schema_text() -> str:
    """Return the JSON Schema of a complete rule table."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **RuleFile.model_json_schema(),
    }
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def write_schema(path: Path = SCHEMA_FILE) -> None:
    """Write the JSON Schema into the package."""
    path.write_text(schema_text(), encoding="utf-8")


if __name__ == "__main__":
    write_schema()
