"""The application: every command, in the order in which `distsim --help` lists them."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from distsim.cli import (
    bench,
    calibrate,
    capture,
    check,
    clusters,
    compare,
    doctor,
    expand,
    explain,
    learn,
    new,
    plan,
    render,
    replay,
    report,
    run,
    schema,
    shrink,
    simulate,
    sweep,
    test,
)

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

    def format_commands(self, ctx: Any, formatter: Any) -> None:
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

    def write_dl(self, rows: Any, col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl(rows, col_max if self.width >= 60 else 12, col_spacing)


_CONTEXT.formatter_class = _Narrow
app = typer.Typer(
    name="distsim",
    cls=_Grouped,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # main() turns exceptions into messages
    rich_markup_mode=None,  # plain help answers in a fraction of the time
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 200},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from distsim import __version__
        from distsim.cli.console import out

        out(f"distsim {__version__}")
        raise typer.Exit


@app.callback()
def distsim(
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


app.command("simulate")(simulate.command)
app.command("check")(check.command)
app.command("plan")(plan.command)
app.command("sweep")(sweep.command)
app.command("shrink")(shrink.command)
app.command("run")(run.command)
app.command("replay")(replay.command)
app.command("compare")(compare.command)
app.command("doctor")(doctor.command)
app.command("capture")(capture.command)
app.command("bench")(bench.command)
app.command("calibrate")(calibrate.command)
app.command("render")(render.command)
app.command("report")(report.command)
app.command("explain")(explain.command)
app.command("test")(test.command)
app.command("expand")(expand.command)
app.command("schema")(schema.command)
app.command("clusters")(clusters.command)
app.command("learn")(learn.command)
app.command("new")(new.command)
