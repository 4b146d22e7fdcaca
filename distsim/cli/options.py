"""Arguments that several commands take, and how a scenario file becomes a scenario."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

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
MaxCalls = Annotated[
    int | None, typer.Option("--max-calls", metavar="N", min=1, help="Calls that may be simulated (5000000, on 131072 ranks).")
]


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
