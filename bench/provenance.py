"""Where a measurement comes from: date, git revision and command. Torch-free."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from pathlib import Path


def provenance() -> dict[str, object]:
    """Return the date, the revision and the command of this run, without the machine's folders."""
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "revision": _revision(),
        "command": " ".join(["python", "-m", _module_name(), *map(_portable, sys.argv[1:])]),
    }


def _portable(argument: str) -> str:
    path = Path(argument)
    return path.name if path.is_absolute() else argument


def _module_name() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec is not None else Path(sys.argv[0]).name


def _revision() -> str:
    """Return the git revision; QUANTPOLICY_REVISION names it where the checkout has no git."""
    given = os.environ.get("QUANTPOLICY_REVISION")
    if given:
        return given
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
