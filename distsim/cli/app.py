"""The application: every command, in the order in which `distsim --help` lists them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

#: Every command, in the order in which they are listed; each is the function `command` of the module of that name.
COMMANDS = (
    "simulate", "check", "plan", "sweep", "shrink", "run", "replay", "compare", "doctor", "capture", "bench", "calibrate", "render",
    "report", "explain", "test", "expand", "schema", "clusters", "learn", "new",
)  # fmt: skip
#: What the commands are for: title -> their names, as `distsim --help` lists them.
GROUPS = {
    "Predict": ("simulate", "check", "test", "render", "report"),
    "Plan": ("plan", "sweep"),
    "Run for real": ("run", "replay", "compare", "bench", "calibrate"),
    "Find the cause": ("capture", "doctor", "shrink"),
    "Write scenarios": ("new", "expand", "schema"),
    "Look up": ("explain", "clusters", "learn"),
}


class _Grouped(TyperGroup):
    """Lists the commands by what they are for."""

    def format_commands(self, ctx: object, formatter: Any) -> None:
        named = {name for names in GROUPS.values() for name in names}
        rest = tuple(name for name in self.commands if name not in named)
        for title, names in (*GROUPS.items(), ("More", rest)):
            rows = [(name, self.commands[name].get_short_help_str(limit=400)) for name in names if name in self.commands]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


_CONTEXT: Any = TyperCommand.context_class


class _Narrow(_CONTEXT.formatter_class):  # type: ignore[misc]
    """Where there is little room, what an option does stands below it, and no word is cut."""

    def write_dl(self, rows: object, col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl(rows, col_max if self.width >= 60 else 12, col_spacing)


_CONTEXT.formatter_class = _Narrow


def _show_version(wanted: bool) -> None:
    if wanted:
        from distsim import __version__
        from distsim.cli.console import out

        out(f"distsim {__version__}")
        raise typer.Exit


def _distsim(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print the traceback when distsim itself fails.")] = False,
) -> None:
    """Simulate and verify torch.distributed programs.

    Will it hang, crash or compute the wrong thing, and why? How long does a step take, and where does the time go?

    \b
    Example: distsim simulate scenarios/hybrid.yaml

    \b
    Exit status: 0 clean; 1 findings or an outcome other than `completes`;
    2 bad input or usage; 3 a fault of distsim; 4 a fault of the surroundings.
    """
    from distsim.cli.console import columns
    from distsim.views.tables import set_width

    set_width(columns())


def application(words: Sequence[str] = ()) -> typer.Typer:
    """The application. Where the words of a command line begin with a command's name, it has that command alone: the others need not be
    loaded then."""
    app = typer.Typer(
        name="distsim",
        cls=_Grouped,
        no_args_is_help=True,
        pretty_exceptions_enable=False,  # main() turns exceptions into messages
        rich_markup_mode=None,  # plain help answers in a fraction of the time
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 200},
    )
    app.callback()(_distsim)
    for name in words[:1] if words and words[0] in COMMANDS else COMMANDS:
        app.command(name)(import_module(f"distsim.cli.{name}").command)
    return app


def __getattr__(name: str) -> typer.Typer:
    """`app`: the application with all its commands, made when it is asked for."""
    if name != "app":
        raise AttributeError(name)
    globals()["app"] = found = application()
    return found
