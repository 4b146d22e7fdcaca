"""The typer application: all commands, and the layout of ``distsim --help``.

A command is the function ``command`` of the module ``distsim.cli.commands.NAME``. Modules are
imported by name, so that a command line loads only the command that it runs. No command imports
another command or this module; what they share is in `distsim.cli.shared`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

#: All commands, in the order of docs/reference/cli.md.
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
    "slow",
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
    "demo",
    "new",
    "mcp",
)
#: The sections of `distsim --help`: title -> commands.
COMMAND_GROUPS = {
    "Predict": ("simulate", "check", "test", "render", "report"),
    "Plan": ("plan", "sweep"),
    "Real runs": ("run", "replay", "compare", "bench", "calibrate"),
    "Diagnose": ("capture", "doctor", "slow", "shrink", "mcp"),
    "Write scenarios": ("new", "expand", "schema"),
    "Learn and look up": ("demo", "learn", "explain", "clusters"),
}


#: The parameter of `capture` that contains another command line.
_COMMAND_TO_RUN = "words"


class _GroupedCommandList(TyperGroup):
    """Lists the commands by purpose; a command of no group is listed under "More"."""

    def format_commands(self, ctx: object, formatter: Any) -> None:
        grouped = {name for names in COMMAND_GROUPS.values() for name in names}
        others = tuple(name for name in self.commands if name not in grouped)
        for title, names in (*COMMAND_GROUPS.items(), ("More", others)):
            loaded = [name for name in names if name in self.commands]
            rows = [(name, self.commands[name].get_short_help_str(limit=400)) for name in loaded]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class _CommandWithValues(TyperCommand):
    """Refuses empty values.

    An empty path would mean the current folder. It is usually a variable of a shell script that has
    no value.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if any(word == "" or word.endswith("=") for word in args):
            given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
            parameters: list[Any] = self.get_params(ctx)
            for parameter in parameters:
                if _is_empty(parameter.name, given.get(parameter.name)):
                    remedy = "write a value" if parameter.required else "write a value, or omit it"
                    text = f"the value is empty; {remedy}"
                    raise typer.BadParameter(text, ctx, parameter)
        return super().parse_args(ctx, args)


def _is_empty(parameter: str | None, value: object) -> bool:
    """Whether a value or one of several is empty. A command to capture may have empty arguments."""
    if isinstance(value, list | tuple):
        return "" in value[: 1 if parameter == _COMMAND_TO_RUN else None]
    return value == ""


_CONTEXT_CLASS: Any = TyperCommand.context_class


#: The Python type that typer prints after the name of an argument, such as ` <list[str]>`.
_PYTHON_TYPE = re.compile(r"(?<=[A-Z…]) <[a-zA-Z\[\]]+>$")


class _HelpFormatter(_CONTEXT_CLASS.formatter_class):  # type: ignore[misc]
    """Omits Python types. On narrow terminals, prints the help of an option below its name."""

    def write_dl(
        self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2
    ) -> None:
        rows = [(_PYTHON_TYPE.sub("", name), text) for name, text in rows]
        # The formatter moves the help to the next line if the first column exceeds `col_max`.
        super().write_dl(rows, col_max if self.width >= 60 else 12, col_spacing)


_CONTEXT_CLASS.formatter_class = _HelpFormatter


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
        bool, typer.Option("--debug", help="Print the traceback of an internal error of distsim.")
    ] = False,
) -> None:
    """Simulate and verify torch.distributed programs.

    Find out whether a program hangs, crashes or computes wrong results, and why. Predict how long a
    step takes, and where the time goes.

    \b
    Example: distsim simulate scenarios/hybrid.yaml

    \b
    Exit status: 0 success (warnings are allowed); 1 an error, or a run that
    does not complete; 2 invalid input or usage; 3 internal error
    of distsim; 4 environment error.
    """
    from distsim.cli.shared.console import terminal_columns
    from distsim.output.text_layout import set_page_width

    set_page_width(terminal_columns())


def application(words: Sequence[str] = ()) -> typer.Typer:
    """The application with all commands, or with the one that ``words`` begin with.

    ``words``: the command line. If its first word is a command, the others are not even loaded.
    """
    app = typer.Typer(
        name="distsim",
        cls=_GroupedCommandList,
        no_args_is_help=True,
        pretty_exceptions_enable=False,  # main() turns exceptions into messages
        rich_markup_mode=None,  # plain help answers in a fraction of the time
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 200},
    )
    app.callback()(_global_options)
    runs_one_command = bool(words) and words[0] in COMMANDS
    for name in words[:1] if runs_one_command else COMMANDS:
        module = import_module(f"distsim.cli.commands.{name}")
        app.command(name, cls=_CommandWithValues)(module.command)
    return app
