"""How long a whole `quantpolicy resolve` process takes, against importing its three libraries.

Both commands run in turn, and the fastest run of each counts, so that a busy machine disturbs
little. Usage: python -m bench.startup [--runs 15] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

from bench.provenance import provenance

ROOT = Path(__file__).parent.parent
CLI = "import sys; from quantpolicy.cli import main; sys.exit(main())"
COMMANDS = {
    "imports": ["-c", "import typer, pydantic, yaml"],
    "resolve": ["-c", CLI, "resolve", "ltx-2", "--host", "h200", "--json"],
}
LIMIT = 3.0


def time_command(arguments: list[str]) -> float:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=environment
    )
    return time.perf_counter() - start


def measure(runs: int) -> dict[str, object]:
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for arguments in COMMANDS.values():
        time_command(arguments)
    for _ in range(runs):
        for name, arguments in COMMANDS.items():
            seconds[name].append(time_command(arguments))
    best = {name: min(times) for name, times in seconds.items()}
    return {
        "benchmark": "startup",
        **provenance(),
        "commands": {name: " ".join(arguments) for name, arguments in COMMANDS.items()},
        "runs": runs,
        "best_seconds": {name: round(value, 4) for name, value in best.items()},
        "ratio": round(best["resolve"] / best["imports"], 3),
        "limit": LIMIT,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("typer", "pydantic", "pyyaml")},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the result here")
    options = parser.parse_args()
    result = measure(options.runs)
    text = json.dumps(result, indent=2) + "\n"
    if options.json:
        options.json.write_text(text)
    print(text, end="")
    return 0 if float(str(result["ratio"])) < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
