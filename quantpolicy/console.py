"""What both command lines share: running an app, errors in one sentence, JSON and tables.

Results go to stdout, everything else to stderr. rich is imported only to draw a table for a person.
"""

from __future__ import annotations

import atexit
import gc
import json
import logging
import os
import shutil
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quantpolicy.errors import QuantPolicyError
from quantpolicy.text import align

if TYPE_CHECKING:
    import typer

EXIT_PIPE = 1
EXIT_INTERRUPTED = 130
COLLECT_EVERY = 100_000
CHATTY_LOGGERS = ("torchao", "torch.utils._pytree")


def run_app(app: typer.Typer, argv: Sequence[str] | None, name: str) -> int:
    """Run a command line and return its exit code; no error escapes without ``--debug``.

    With ``--json`` an error of ours is JSON on stdout. What typer refuses before a command runs (an
    unknown flag, a missing argument) stays text on stderr with exit code 2, as its usage is.

    Args:
        argv: arguments without the program's name; None takes the process's, and then sets up the
            process as a command line wants it.
        name: the program's name, for its usage text.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        _tune_collector()
        quiet_libraries()
    try:
        app(arguments, prog_name=name)
        sys.stdout.flush()
    except QuantPolicyError as error:
        return _report(error, arguments)
    except SystemExit as stop:
        return _flushed(stop.code)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return _close_pipe()
    return 0


def quiet_libraries() -> None:
    """Silence, by their own switches, what libraries say on import that concerns no command.

    torchao tells of compiled extensions that this build of torch cannot load, torch of torchao's
    enums, diffusers of torchao classes that a newer torchao moved. A level or a variable that is
    set already stands.
    """
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    for name in CHATTY_LOGGERS:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.ERROR)


def _tune_collector() -> None:
    """Let the garbage collector run rarely, and not at exit: half of a short command's time.

    Only for the process's own command line; a caller's process stays as it is.
    """
    gc.set_threshold(COLLECT_EVERY, 10, 10)
    atexit.register(_skip_last_collection)


def _skip_last_collection() -> None:
    """Freeze what lives, unless torch is loaded: triton's bindings then call it all leaked."""
    if "torch" not in sys.modules:
        gc.freeze()


def _flushed(code: str | int | None) -> int:
    """Return the exit code, after what was printed has left."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return _close_pipe()
    return code if isinstance(code, int) else 0


def _close_pipe() -> int:
    """Point stdout at nothing, so that the interpreter's own flush at exit stays quiet."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_PIPE


def _report(error: QuantPolicyError, arguments: Sequence[str]) -> int:
    if "--debug" in arguments:
        traceback.print_exception(error, file=sys.stderr)
    if "--json" in arguments:
        print_json(error.to_dict())
    else:
        note(f"error: {error}")
    return error.exit_code


def note(text: str) -> None:
    """Write a line to stderr."""
    sys.stderr.write(text + "\n")


def print_text(text: str) -> None:
    """Write text to stdout, with a line end."""
    sys.stdout.write(text.rstrip("\n") + "\n")


def print_json(value: object) -> None:
    """Write plain values to stdout as JSON."""
    print_text(json.dumps(value, indent=2))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a table: drawn for a terminal, plain aligned columns for a pipe or a file.

    It is plain too where NO_COLOR is set, and where drawn it would not fit: no cell is ever cut.
    """
    lines = align([columns, *rows])
    drawn_width = max(map(len, lines)) + len(columns) + 3
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or drawn_width > _width():
        print_text("\n".join(lines))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


def _width() -> int:
    return shutil.get_terminal_size().columns


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )
