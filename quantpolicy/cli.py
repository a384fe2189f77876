"""The ``quantpolicy`` command line. Each command imports what it needs when it runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from quantpolicy.cli_options import (
    CheckedCommand,
    DebugOption,
    JsonOption,
    ModelArgument,
    RequestOptions,
    RulesOption,
    new_app,
    with_request_options,
)
from quantpolicy.console import print_json, print_text, run_app

app = new_app("quantpolicy", "One quantisation plan per diffusion model and machine.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: arguments without the program's name; None takes the process's.
    """
    return run_app(app, argv, "quantpolicy")


@app.command(cls=CheckedCommand)
def families(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Show this family alone, in detail.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Write a Markdown table.")] = False,
    rules: RulesOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List the families of the rule table: classes, schemes, measured evidence."""
    del debug
    from quantpolicy.cli_tables import print_families, print_family
    from quantpolicy.rules import load_rules

    table = load_rules(*(rules or ()))
    if name is None:
        print_families(table, as_json=json, as_markdown=markdown)
    else:
        print_family(table, name, as_json=json, as_markdown=markdown)


@app.command(cls=CheckedCommand)
@with_request_options
def resolve(
    model: ModelArgument,
    options: RequestOptions,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Resolve a plan and say why each candidate was taken or not."""
    del debug
    from quantpolicy.resolver import resolve as resolve_plan

    host, request, rules = options.load()
    plan = resolve_plan(model, host=host, request=request, rules=rules)
    print_text(plan.to_json() if json else plan.explain())


@app.command(cls=CheckedCommand)
def lint(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE]...", help="Tables or overlays; the shipped table if none."),
    ] = None,
    meta: Annotated[
        bool, typer.Option("--meta", help="Also build every released model on the meta device.")
    ] = False,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Check the rule table; exit 1 when something in it is wrong or dead."""
    del debug
    from quantpolicy.cli_tables import print_findings
    from quantpolicy.lint import lint as lint_table
    from quantpolicy.rules import load_rules

    findings = lint_table(load_rules(), *(files or ()), meta=meta)
    print_findings(findings, as_json=json)
    if findings:
        raise typer.Exit(1)


@app.command(cls=CheckedCommand)
def doctor(json: JsonOption = False, debug: DebugOption = False) -> None:
    """Show versions, this machine as a host record, and the presets."""
    del debug
    from quantpolicy.doctor import examine, print_examination

    examination = examine()
    if json:
        print_json(examination)
    else:
        print_examination(examination)


@app.command(cls=CheckedCommand)
def probe(
    model: ModelArgument,
    rules: RulesOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure the rows and zero rows of every Linear, on the meta device and a small model."""
    del debug
    from quantpolicy.cli_tables import print_probe
    from quantpolicy.rules import load_rules

    print_probe(model, load_rules(*(rules or ())), as_json=json)
