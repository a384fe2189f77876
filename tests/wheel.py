"""Build the wheel, install it in a clean environment, and check that it finds its rule table.

Run as a script: it needs a package index for the few dependencies, and takes about a minute.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{command} failed ({done.returncode}):\n{done.stdout}\n{done.stderr}")
    return done.stdout


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        build = [sys.executable, "-m", "build", "--wheel", "--outdir", scratch / "dist"]
        run(*build, cwd=ROOT)
        (wheel,) = (scratch / "dist").glob("*.whl")
        venv.create(scratch / "clean", with_pip=True)
        python = scratch / "clean" / "bin" / "python"
        constraints = ROOT / "constraints.txt"
        run(python, "-m", "pip", "install", "--quiet", "-c", constraints, wheel, cwd=scratch)
        found = run(
            python,
            "-c",
            "import quantpolicy.rules as r; print(r.find_families_file())",
            cwd=scratch,
        ).strip()
        if not Path(found).is_relative_to(scratch.resolve()):
            raise SystemExit(f"the wheel reads {found}, which is outside its environment")
        command = scratch / "clean" / "bin" / "quantpolicy"
        plan = json.loads(run(command, "resolve", "ltx-2", "--host", "h200", "--json", cwd=scratch))
        scheme = plan["components"]["transformer"]["scheme"]
        if scheme != "fp8":
            raise SystemExit(f"the wheel resolves ltx-2 on an h200 to {scheme}, not to fp8")
        print(f"{wheel.name}: found {Path(found).name}, resolved ltx-2 on h200 to {scheme}")


if __name__ == "__main__":
    main()
