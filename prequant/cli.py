"""The ``prequant`` command line. Each command imports what it needs when it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantpolicy.cli_options import (
    CheckedCommand,
    DebugOption,
    JsonOption,
    RequestOptions,
    RulesOption,
    new_app,
    with_request_options,
)
from quantpolicy.console import print_json, print_table, print_text, run_app
from quantpolicy.errors import RequestError

if TYPE_CHECKING:
    from prequant.report import BakeReport, ValidateReport

app = new_app("prequant", "Bake, validate and inspect pre-quantised checkpoints.")

BakedArgument = Annotated[
    str, typer.Argument(metavar="OUT", help="Folder that bake wrote.", show_default=False)
]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: arguments without the program's name; None takes the process's.
    """
    return run_app(app, argv, "prequant")


@app.command(cls=CheckedCommand)
@with_request_options
def bake(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Folder of a component or a pipeline, or a cached Hub id.",
            show_default=False,
        ),
    ],
    out: Annotated[list[Path], typer.Option("--out", "-o", metavar="OUT", help="Folder to make.")],
    options: RequestOptions,
    plan: Annotated[
        Path | None, typer.Option("--plan", help="Bake this plan instead of resolving one.")
    ] = None,
    component: Annotated[
        str | None, typer.Option("--component", help="Bake only this component.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a baked OUT.")] = False,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Write OUT with the weights quantised that the plan for the host lists."""
    del debug
    target = _only_one(out)
    if plan is not None:
        options.refuse_beside("--plan", "a plan holds its own host and request")
    from prequant.source import find_model
    from prequant.staging import check_out

    source = find_model(model)
    check_out(source, target, force=force)
    from prequant.bake import bake as bake_folder
    from quantpolicy.plan import QuantPlan
    from quantpolicy.resolver import resolve

    if plan is not None:
        chosen = QuantPlan.from_file(plan)
    else:
        host, request, rules = options.load()
        chosen = resolve(source, host=host, request=request, rules=rules)
    with _progress_bar() as progress:
        report = bake_folder(
            source, target, plan=chosen, force=force, component=component, progress=progress
        )
    if json:
        print_json(report.model_dump(mode="json"))
    else:
        _print_bake(report)


@app.command(cls=CheckedCommand)
def validate(
    out: BakedArgument,
    against: Annotated[
        Path | None,
        typer.Option("--against", metavar="PLAN", help="Hold it against this plan's JSON file."),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Also check every shard's hash and the values.")
    ] = False,
    rules: RulesOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Check a baked folder; exit 1 when it is stale, 3 when it is damaged."""
    del debug
    from prequant.validate import validate as validate_folder
    from quantpolicy.plan import QuantPlan
    from quantpolicy.rules import load_rules

    plan = QuantPlan.from_file(against) if against is not None else None
    report = validate_folder(out, plan=plan, full=full, rules=load_rules(*(rules or ())))
    if json:
        print_json(report.model_dump(mode="json"))
    else:
        _print_validation(report)


@app.command(cls=CheckedCommand)
def inspect(out: BakedArgument, json: JsonOption = False, debug: DebugOption = False) -> None:
    """Show what a baked folder says about itself, without checking it."""
    del debug
    from prequant.inspect import describe
    from prequant.inspect import inspect as inspect_folder

    components = inspect_folder(out)
    if json:
        print_json({name: part.model_dump(mode="json") for name, part in components.items()})
        return
    for part in components.values():
        print_table(("what", "value"), describe(part))


@app.command(cls=CheckedCommand)
def demo(json: JsonOption = False, debug: DebugOption = False) -> None:
    """Bake, validate, damage and load a small model with generated weights; no network."""
    del debug
    from prequant.demo import run_demo

    steps = run_demo()
    if json:
        print_json([step.model_dump(mode="json") for step in steps])
    else:
        print_table(
            ("step", "result", "as it should be"),
            [(step.what, step.result, "yes" if step.ok else "NO") for step in steps],
        )
    if not all(step.ok for step in steps):
        raise typer.Exit(1)


def _only_one(out: Sequence[Path]) -> Path:
    if len(out) != 1:
        raise RequestError(
            "--out",
            f"given {len(out)} times",
            allowed="one folder",
            remedy="run bake once for each folder",
        )
    return out[0]


@contextmanager
def _progress_bar() -> Iterator[Callable[[int, int], None] | None]:
    """Give what tells a bar on stderr how far the bake is; None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as SpeedColumn

    columns = (BarColumn(), DownloadColumn(), SpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("bake")
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print_bake(report: BakeReport) -> None:
    from prequant.inspect import GB, size

    columns = ("component", "scheme", "quantised", "kept", "data", "scales", "dense", "source")
    rows = []
    for part in report.components.values():
        counts = part.counts
        layers = (str(counts.quantised_layers), str(counts.kept_layers))
        amounts = (counts.quantised_bytes, counts.scale_bytes, counts.dense_bytes)
        sizes = [size(amount) for amount in (*amounts, counts.source_bytes)]
        rows.append((part.name, part.scheme.value, *layers, *sizes))
    print_table(columns, rows)
    source_bytes = sum(part.counts.source_bytes for part in report.components.values())
    speed = source_bytes / GB / report.seconds
    print_text(
        f"{report.out}: {size(report.written_bytes)} in {report.seconds:.1f} s, "
        f"{speed:.2f} GB of source a second"
    )
    for note in report.notes:
        print_text(note)


def _print_validation(report: ValidateReport) -> None:
    print_table(
        ("component", "family", "scheme", "weights digest", "checked"),
        [
            (
                part.name,
                part.family,
                part.scheme.value,
                part.weights_digest[:16],
                ", ".join(part.checked),
            )
            for part in report.components.values()
        ],
    )
    print_text(f"{report.folder}: in order, held against {report.against}")
