"""The application: every command, in the order in which `distsim --help` lists them, and the
arguments that several of them take.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from distsim.scenario import Scenario


#: Every command, in the order in which they are listed; each is the function `command` of the
#: module of that name.
COMMANDS = (
    "simulate",
    "check",
    "plan",
    "sweep",
    "shrink",
    "run",
    "replay",
    "compare",
    "doctor",
    "capture",
    "bench",
    "calibrate",
    "render",
    "report",
    "explain",
    "test",
    "expand",
    "schema",
    "clusters",
    "learn",
    "new",
)
#: What the commands are for: title -> their names, as `distsim --help` lists them.
COMMAND_GROUPS = {
    "Predict": ("simulate", "check", "test", "render", "report"),
    "Plan": ("plan", "sweep"),
    "Run for real": ("run", "replay", "compare", "bench", "calibrate"),
    "Find the cause": ("capture", "doctor", "shrink"),
    "Write scenarios": ("new", "expand", "schema"),
    "Look up": ("explain", "clusters", "learn"),
}


class _GroupedCommandList(TyperGroup):
    """Lists the commands by what they are for."""

    def format_commands(self, ctx: object, formatter: Any) -> None:
        named = {name for names in COMMAND_GROUPS.values() for name in names}
        rest = tuple(name for name in self.commands if name not in named)
        for title, names in (*COMMAND_GROUPS.items(), ("More", rest)):
            rows = [
                (name, self.commands[name].get_short_help_str(limit=400))
                for name in names
                if name in self.commands
            ]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


_CONTEXT_CLASS: Any = TyperCommand.context_class


class _NarrowHelpFormatter(_CONTEXT_CLASS.formatter_class):  # type: ignore[misc]
    """Where there is little room, what an option does stands below it, and no word is cut."""

    def write_dl(self, rows: object, col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl(rows, col_max if self.width >= 60 else 12, col_spacing)


_CONTEXT_CLASS.formatter_class = _NarrowHelpFormatter


def _show_version(wanted: bool) -> None:
    if wanted:
        from distsim import __version__
        from distsim.cli.shared.console import out

        out(f"distsim {__version__}")
        raise typer.Exit


def _global_options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Print the traceback when distsim itself fails.")
    ] = False,
) -> None:
    """Simulate and verify torch.distributed programs.

    Will it hang, crash or compute the wrong thing, and why? How long does a step take, and where
    does the time go?

    \b
    Example: distsim simulate scenarios/hybrid.yaml

    \b
    Exit status: 0 clean; 1 findings or an outcome other than `completes`;
    2 bad input or usage; 3 a fault of distsim; 4 a fault of the surroundings.
    """
    from distsim.cli.shared.console import terminal_columns
    from distsim.output.text_layout import set_page_width

    set_page_width(terminal_columns())


def application(words: Sequence[str] = ()) -> typer.Typer:
    """The application. Where the words of a command line begin with a command's name, it has that
    command alone: the others need not be loaded then."""
    app = typer.Typer(
        name="distsim",
        cls=_GroupedCommandList,
        no_args_is_help=True,
        pretty_exceptions_enable=False,  # main() turns exceptions into messages
        rich_markup_mode=None,  # plain help answers in a fraction of the time
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 200},
    )
    app.callback()(_global_options)
    for name in words[:1] if words and words[0] in COMMANDS else COMMANDS:
        app.command(name)(import_module(f"distsim.cli.commands.{name}").command)
    return app


# --- arguments, and how a scenario file becomes a scenario ---


class BackendName(StrEnum):
    """The back ends that have a profile."""

    gloo = "gloo"
    nccl = "nccl"
    mpi = "mpi"


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


def command_with_arguments(*records: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function of records a command of typer's: each field of each record (a dataclass) is
    an argument or an option of it.
    """

    def made(function: Callable[..., None]) -> Callable[..., None]:
        hints = {record: get_type_hints(record, include_extras=True) for record in records}
        parameters = [
            parameter.replace(
                annotation=hints[record][parameter.name], kind=inspect.Parameter.KEYWORD_ONLY
            )
            for record in records
            for parameter in inspect.signature(record).parameters.values()
        ]

        def command(**given: object) -> None:
            function(
                *(record(**{name: given[name] for name in hints[record]}) for record in records)
            )

        command.__doc__ = function.__doc__
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return made


def read_scenario(file: str, sets: list[str] | None) -> Scenario:
    """The scenario in a file, or on standard input when ``file`` is ``-``. Raises
    ScenarioErrors.
    """
    from distsim.scenario import load, load_stdin

    if file != "-":
        return load(file, sets=tuple(sets or ()))
    import sys

    if sys.stdin.isatty():
        from distsim.cli.shared.console import note

        note("reading a scenario from the terminal; Ctrl-D ends it")
    return load_stdin(tuple(sets or ()))


def is_trace(file: str) -> bool:
    """Whether a file is a trace, where a scenario may be named as well."""
    return file.endswith((".jsonl", ".jsonl.gz", ".jsonl.partial", ".jsonl.gz.partial"))


def check_scenario_suffix(file: Path | None) -> None:
    """Raises UsageError where a scenario that is to be written has another ending than a
    scenario's.
    """
    from distsim.common.errors import UsageError

    if file is not None and file.suffix not in (".yaml", ".yml"):
        raise UsageError(
            f"-o {file}: a scenario's file ends in .yaml", f"-o {file.with_suffix('.yaml')}"
        )
