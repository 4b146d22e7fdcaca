"""Arguments that several commands take, and how a scenario file becomes a scenario."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_type_hints

import typer

if TYPE_CHECKING:
    from distsim.scenario import Scenario


class Backend(StrEnum):
    """The back ends that have a profile."""

    gloo = "gloo"
    nccl = "nccl"
    mpi = "mpi"


File = Annotated[str, typer.Argument(metavar="FILE", help="A scenario; - reads standard input.")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a var or a key of the file. Repeatable.")
]
BackendOption = Annotated[Backend | None, typer.Option("--backend", help="Whose rules hold, in place of the file's.")]
ClusterOption = Annotated[
    str | None, typer.Option("--cluster", metavar="NAME", help="What it costs: a preset or a file, in place of the file's.")
]
NoFold = Annotated[bool, typer.Option("--no-fold", help="Every rank by itself, those that do the same as well.")]
MaxCalls = Annotated[
    int | None, typer.Option("--max-calls", metavar="N", min=1, help="Calls that may be simulated (5000000, on 131072 ranks).")
]
ReportOption = Annotated[
    Path | None, typer.Option("--report", metavar="F.html", help="Write a report to open in a browser, in one file.")
]


def taking(*records: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function of records a command of typer's: each field of each record (a dataclass) is an argument or an option of it."""

    def made(function: Callable[..., None]) -> Callable[..., None]:
        hints = {record: get_type_hints(record, include_extras=True) for record in records}
        parameters = [
            parameter.replace(annotation=hints[record][parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
            for record in records
            for parameter in inspect.signature(record).parameters.values()
        ]

        def command(**given: object) -> None:
            function(*(record(**{name: given[name] for name in hints[record]}) for record in records))

        command.__doc__ = function.__doc__
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return made


def read_scenario(file: str, sets: list[str] | None) -> Scenario:
    """The scenario in a file, or on standard input when ``file`` is ``-``. Raises ScenarioErrors."""
    from distsim.scenario import load, load_stdin

    if file != "-":
        return load(file, sets=tuple(sets or ()))
    import sys

    if sys.stdin.isatty():
        from distsim.cli.console import note

        note("reading a scenario from the terminal; Ctrl-D ends it")
    return load_stdin(tuple(sets or ()))


def is_trace(file: str) -> bool:
    """Whether a file is a trace, where a scenario may be named as well."""
    return file.endswith((".jsonl", ".jsonl.gz", ".jsonl.partial", ".jsonl.gz.partial"))


def check_scenario_name(file: Path | None) -> None:
    """Raises UsageError where a scenario that is to be written has another ending than a scenario's."""
    from distsim.errors import UsageError

    if file is not None and file.suffix not in (".yaml", ".yml"):
        raise UsageError(f"-o {file}: a scenario's file ends in .yaml", f"-o {file.with_suffix('.yaml')}")
