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

from quantpolicy.errors import QuantPolicyError, RequestError
from quantpolicy.text import align

if TYPE_CHECKING:
    import typer

EXIT_PIPE = 1
EXIT_INTERRUPTED = 130
COLLECT_EVERY = 100_000
RUNTIME_PACKAGES = frozenset(
    {"torch", "torchao", "diffusers", "transformers", "accelerate", "safetensors", "numpy"}
)
CHATTY_LOGGERS = ("torchao", "torch.utils._pytree")


class _OutputError(OSError):
    """A result could not be written to stdout."""


def run_app(app: typer.Typer, argv: Sequence[str] | None, name: str) -> int:
    """Run a command line and return its exit code; no error escapes without ``--debug``.

    With ``--json`` every error is JSON on stdout, what typer refuses before a command runs (an
    unknown flag, a missing argument) included.

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
        code = _run(app, arguments, name)
    except QuantPolicyError as error:
        code = _report(error, arguments)
    except ImportError as error:
        code = _report(_needs_runtime(error), arguments)
    except SystemExit as stop:
        code = stop.code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return _close_pipe()
    except _OutputError as error:
        _close_pipe()
        code = _report(_of_system(error), ())
    except OSError as error:
        code = _report(_of_system(error), arguments)
    return _flushed(code)


def _run(app: typer.Typer, arguments: Sequence[str], name: str) -> str | int | None:
    """Run a command line and return its exit code.

    Raises:
        RequestError: the arguments are refused before a command runs.
    """
    import typer

    # UsageError of typer's own copy of click, or of click: typer names neither.
    usage_error: type[typer.BadParameter] = typer.BadParameter.__bases__[0]
    try:
        code: str | int | None = app(arguments, prog_name=name, standalone_mode=False)
    except usage_error as error:
        if not arguments:
            error.show()
            return int(error.exit_code)
        path = error.ctx.command_path if error.ctx is not None else name
        found = " ".join(error.format_message().split())
        raise RequestError(path, found, remedy=f"see `{path} --help`") from error
    return code


def _needs_runtime(error: ImportError) -> RequestError:
    """Return the error of a command that needs a package of the runtime extra.

    Raises:
        ImportError: another package is missing, which no extra mends.
    """
    package = (error.name or "").partition(".")[0]
    if package not in RUNTIME_PACKAGES:
        raise error
    return RequestError(
        f"package {package}",
        f"needed by this command, and not usable: {error}",
        remedy="install the runtime extra: `pip install 'quantpolicy[runtime]'`",
    )


def _of_system(error: OSError) -> QuantPolicyError:
    return QuantPolicyError(
        str(error.filename or "output"),
        f"cannot be read or written: {error.strerror or error}",
        remedy="check its permissions and the space left",
    )


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
    error = _drain()
    if error is None:
        return code if isinstance(code, int) else 0
    if not isinstance(error, BrokenPipeError):
        note(f"error: {_of_system(error)}")
    return EXIT_PIPE


def _drain() -> OSError | None:
    """Flush stdout; where that fails, drop what it holds and return why."""
    try:
        sys.stdout.flush()
    except OSError as error:
        _close_pipe()
        return error
    return None


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
    try:
        sys.stdout.write(text.rstrip("\n") + "\n")
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _OutputError(*error.args) from error


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
