"""The request flags, declared once for both command lines, and what they turn into.

``with_request_options`` adds them to a command, which then takes one ``RequestOptions``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_type_hints

import typer
from typer.core import TyperCommand, TyperOption

from quantpolicy.errors import RequestError
from quantpolicy.record import MAX_SAFE_INTEGER
from quantpolicy.schemes import Confidence, Execution, Quality, SchemeChoice, Tier
from quantpolicy.text import GIB

if TYPE_CHECKING:
    from quantpolicy.host import Host
    from quantpolicy.request import Request
    from quantpolicy.rules import RuleTable


JsonOption = Annotated[bool, typer.Option("--json", help="Write JSON to stdout.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
RulesOption = Annotated[
    list[Path] | None,
    typer.Option("--rules", metavar="FILE", help="Overlay of the rule table; repeatable."),
]
ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Family name, folder of a pipeline or component, config.json, or cached Hub id.",
        show_default=False,
    ),
]


class CheckedCommand(TyperCommand):
    """A command that refuses an option of one value given several times: no value is dropped."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse the arguments; see the class."""
        _, _, order = self.make_parser(ctx).parse_args(list(args))
        for option in order:
            count = order.count(option)
            if not isinstance(option, TyperOption) or option.is_flag or option.multiple:
                continue
            if count > 1:
                raise RequestError(
                    option.opts[0],
                    f"given {count} times",
                    allowed="one value",
                    remedy="keep one of them",
                )
        return super().parse_args(ctx, args)


def _print_version(context: typer.Context, wanted: bool) -> None:
    if wanted:
        from quantpolicy.console import print_text
        from quantpolicy.versions import own_version

        print_text(f"{context.info_name} {own_version()}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    del version


def new_app(name: str, summary: str) -> typer.Typer:
    """Return a command line without commands, set up as both are."""
    app = typer.Typer(
        name=name,
        help=summary,
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_root)
    return app


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The values of the request flags; the annotations declare the flags.

    Args:
        given: the flags that stand on the command line, whatever their values.
    """

    host: Annotated[
        str | None, typer.Option("--host", help="Preset or host file; this machine when left out.")
    ] = None
    speed: Annotated[Tier, typer.Option("--speed", help="Speed tier.")] = Tier.AUTO
    quality: Annotated[Quality, typer.Option("--quality", help="Which kernels may be mounted.")] = (
        Quality.LOSSLESS
    )
    transformer: Annotated[
        SchemeChoice, typer.Option("--transformer", help="Scheme of the denoiser.")
    ] = SchemeChoice.AUTO
    text_encoder: Annotated[
        SchemeChoice, typer.Option("--text-encoder", help="Scheme of the text encoders.")
    ] = SchemeChoice.AUTO
    vae: Annotated[SchemeChoice, typer.Option("--vae", help="Scheme of the VAE.")] = (
        SchemeChoice.AUTO
    )
    execution: Annotated[
        Execution, typer.Option("--execution", help="How quantised tensors are multiplied.")
    ] = Execution.TORCHAO
    resolution: Annotated[
        str | None,
        typer.Option("--resolution", metavar="WIDTHxHEIGHT", help="Output size in pixels."),
    ] = None
    frames: Annotated[int | None, typer.Option("--frames", help="Output frames.")] = None
    memory_gib: Annotated[
        float | None, typer.Option("--memory-gib", help="Memory budget in GiB (2^30 bytes).")
    ] = None
    min_features: Annotated[
        int | None,
        typer.Option("--min-features", help="Smaller Linears stay dense."),
    ] = None
    confidence: Annotated[
        Confidence, typer.Option("--confidence", help="Least confidence that auto accepts.")
    ] = Confidence.DERIVED
    lift: Annotated[
        list[str] | None, typer.Option("--lift", metavar="RULE", help="Lift a rule; repeatable.")
    ] = None
    rules: RulesOption = None
    given: tuple[str, ...] = ()

    def refuse_beside(self, flag: str, reason: str) -> None:
        """Refuse request flags that another flag would make void.

        Raises:
            RequestError: there are any.
        """
        if self.given:
            raise RequestError(
                flag,
                f"given together with {', '.join(self.given)}",
                allowed=reason,
                remedy=f"leave these out, or leave {flag} out",
            )

    def load(self) -> tuple[Host, Request, RuleTable]:
        """Return the host, the request and the rule table that the flags ask for.

        Raises:
            RequestError: a flag's value is out of range, or this machine cannot be detected.
            RuleTableError: the rule table or an overlay is malformed.
        """
        from quantpolicy.rules import load_rules

        request = self.request()
        return self.load_host(), request, load_rules(*(self.rules or ()))

    def load_host(self) -> Host:
        """Return the named host, or this machine."""
        from quantpolicy.host import Host

        return Host.load(self.host) if self.host is not None else detect_host()

    def request(self) -> Request:
        """Return the request; see ``load``."""
        from quantpolicy.request import Request

        values = {name: getattr(self, name) for name in Request.model_fields if hasattr(self, name)}
        values["memory_bytes"] = _bytes_of_gib(self.memory_gib)
        values["lift"] = tuple(self.lift or ())
        try:
            request: Request = Request.model_validate(values)
        except RequestError as error:
            flag = "--" + error.where.replace("_", "-")
            raise RequestError(
                flag, error.found, allowed=error.allowed, remedy=error.remedy
            ) from error
        return request


def detect_host() -> Host:
    """Return this machine as a host.

    Raises:
        RequestError: torch is missing.
    """
    from quantpolicy.host import Host

    try:
        return Host.detect()
    except ImportError as error:
        raise RequestError(
            "--host",
            f"this machine cannot be detected: {error}",
            remedy="name a preset, such as --host h200, or install quantpolicy[runtime]",
        ) from error


def _bytes_of_gib(gib: float | None) -> int | None:
    if gib is None:
        return None
    size = gib * GIB
    if not 1 <= size <= MAX_SAFE_INTEGER:
        raise RequestError(
            "--memory-gib",
            f"{gib:g} is no budget",
            allowed=f"a number above 0 and below {(MAX_SAFE_INTEGER + 1) // GIB}",
            remedy="give the memory that the plan may use",
        )
    return int(size)


def with_request_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the request flags in place of its ``options`` parameter."""
    hints = get_type_hints(RequestOptions, include_extras=True)
    shared = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in fields(RequestOptions)
        if field.name != "given"
    ]
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    names = [parameter.name for parameter in shared]
    signature = inspect.signature(command, eval_str=True)
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in signature.parameters.items()
        if name != "options"
    ]

    @functools.wraps(command)
    def wrapper(context: typer.Context, **values: object) -> None:
        chosen = {name: values.pop(name) for name in names}
        given = tuple(f"--{name.replace('_', '-')}" for name in names if _is_given(context, name))
        command(**values, options=RequestOptions(**chosen, given=given))  # type: ignore[arg-type]

    parameters = [context, *own, *shared]
    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
