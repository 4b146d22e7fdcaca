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
from typing import TYPE_CHECKING, Annotated, get_type_hints

import typer

from distsim.cli.shared.backend_names import BackendName

if TYPE_CHECKING:
    from distsim.scenario import Scenario


class OutputFormat(StrEnum):
    """How the report is printed."""

    text = "text"
    json = "json"


ScenarioArgument = Annotated[
    str, typer.Argument(metavar="FILE", help="A scenario; - reads standard input.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a var or a key of the file. Repeatable."
    ),
]
BackendOption = Annotated[
    BackendName | None, typer.Option("--backend", help="Whose rules hold, in place of the file's.")
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="NAME",
        help="What it costs: a preset or a file, in place of the file's.",
    ),
]
NoFoldOption = Annotated[
    bool, typer.Option("--no-fold", help="Every rank by itself, those that do the same as well.")
]
MaxCallsOption = Annotated[
    int | None,
    typer.Option(
        "--max-calls",
        metavar="N",
        min=1,
        help="Calls that may be simulated (5000000, on 131072 ranks).",
    ),
]
ReportOption = Annotated[
    Path | None,
    typer.Option(
        "--report", metavar="F.html", help="Write a report to open in a browser, in one file."
    ),
]
TraceOutputs = Annotated[
    list[Path] | None,
    typer.Option(
        "--trace", metavar="F", help="Write the run: F.jsonl native, F.json for Perfetto."
    ),
]
FormatOption = Annotated[
    OutputFormat, typer.Option("--format", help="A report to read, or JSON for programs.")
]
StrictOption = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="A leak counts as an error, and a search that stopped at its bound as a failure.",
    ),
]


def read_scenario(file: str, sets: list[str] | None) -> Scenario:
    """The scenario in a file, or on standard input if ``file`` is ``-``. Raises ScenarioErrors."""
    from distsim.api.functions import load

    if file == "-" and sys.stdin.isatty():
        from distsim.cli.shared.console import note

        note("reading a scenario from the terminal; Ctrl-D ends it")
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
