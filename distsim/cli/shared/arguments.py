"""Arguments and options that several commands take, and a decorator that collects them in records.

A command's arguments are a frozen dataclass whose fields have the ``Annotated`` types below. Some
records are shared between commands (`WorkerArguments`, `RealRunArguments`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from distsim.cli.shared.backend_names import BackendName

if TYPE_CHECKING:
    from distsim.scenario import Scenario


def choice_option(choices: type[StrEnum], name: str, help: str, metavar: str | None = None) -> Any:
    """An option that takes one member of an enumeration; a misspelt value gets a suggestion.

    ``metavar`` replaces the list of members in the help, if that is too long for a line.
    """

    def parse(text: str) -> StrEnum:
        names = [choice.value for choice in choices]
        if text not in names:
            from distsim.common.message_text import did_you_mean

            expected = ", ".join(names)
            hint = did_you_mean(text, names)
            raise typer.BadParameter(f"unknown value '{text}'{hint} (expected one of {expected})")
        return choices(text)

    values = "|".join(choice.value for choice in choices)
    return typer.Option(name, parser=parse, metavar=metavar or f"[{values}]", help=help)


class OutputFormat(StrEnum):
    """How the report is printed."""

    text = "text"
    json = "json"


ScenarioArgument = Annotated[
    str, typer.Argument(metavar="FILE", help="Scenario file; `-` means standard input.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Set a variable or a key of the scenario. Repeatable."
    ),
]
BackendOption = Annotated[
    BackendName | None,
    choice_option(BackendName, "--backend", help="Backend semantics; overrides the scenario."),
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="NAME",
        help="Hardware model (preset or file); overrides the input file.",
    ),
]
AllRanksOption = Annotated[
    bool,
    typer.Option(
        "--all-ranks",
        help=(
            "Simulate every rank separately. [default: in large programs, simulate one rank for "
            "all ranks with the same role]"
        ),
    ),
]
MaxCallsOption = Annotated[
    int | None,
    typer.Option(
        "--max-calls",
        metavar="N",
        min=1,
        help=(
            "Accept programs of up to N calls, with any number of ranks and any memory. "
            "[default limits: 5000000 calls, 131072 ranks, 2.3 GiB]"
        ),
    ),
]
ReportOption = Annotated[
    Path | None,
    typer.Option("--report", metavar="F.html", help="Write a self-contained HTML report."),
]
TraceOutputs = Annotated[
    list[Path] | None,
    typer.Option(
        "--trace",
        metavar="F",
        help="Write a trace of the run: F.jsonl (distsim's format) or F.json (for Perfetto).",
    ),
]
FormatOption = Annotated[
    OutputFormat,
    choice_option(OutputFormat, "--format", help="Print a text report, or JSON for programs."),
]
StrictOption = Annotated[
    bool,
    typer.Option(
        "--strict",
        help=(
            "Fail also on leaks (requests without a wait, messages without a receive), and if the "
            "search over orders of events stopped early."
        ),
    ),
]


def read_scenario(file: str, sets: list[str] | None) -> Scenario:
    """The scenario in a file, or on standard input if ``file`` is ``-``. Raises ScenarioErrors."""
    from distsim.api.functions import load

    if file == "-" and sys.stdin.isatty():
        from distsim.cli.shared.console import note

        note("reading a scenario from the terminal; press Ctrl-D to end it")
    return load(file, sets=sets or ())


def read_input(file: str, sets: list[str] | None) -> Scenario | str:
    """The scenario in a file; the name of a trace unchanged, as the public functions take it."""
    from distsim.api.inputs import is_trace

    return file if is_trace(file) else read_scenario(file, sets)


def command_with_arguments(*records: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a function that takes records into a command of typer.

    Each field of each record (a dataclass) becomes an argument or an option of the command.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        hints = {record: get_type_hints(record, include_extras=True) for record in records}
        parameters = [
            parameter.replace(
                annotation=hints[record][parameter.name], kind=inspect.Parameter.KEYWORD_ONLY
            )
            for record in records
            for parameter in inspect.signature(record).parameters.values()
        ]

        def command(**values: object) -> None:
            filled = []
            for record in records:
                own_values = {name: values[name] for name in hints[record]}
                filled.append(record(**own_values))
            function(*filled)

        # typer reads the signature and the annotations, and shows the docstring as help.
        command.__doc__ = function.__doc__
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def parse_share(text: str, option: str) -> float:
    """The share in `0.05` or `5%`. Raises UsageError for anything else."""
    from distsim.common.errors import UsageError

    is_percentage = text.endswith("%")
    divisor, limit = (100, 1e9) if is_percentage else (1, 1.0001)
    try:
        share = float(text.removesuffix("%").strip()) / divisor
    except ValueError:
        share = -1.0
    if not 0 <= share < limit:
        raise UsageError(
            f"{option} {text} is not a share", f"for example {option} 0.05 or {option} 5%"
        )
    return share
