"""`distsim test`: scenarios as tests."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli import console

if TYPE_CHECKING:
    from distsim.expectations import Checked

Paths = Annotated[list[Path], typer.Argument(metavar="PATHS", help="Scenario files, or folders that hold some.")]


def command(paths: Paths) -> None:
    """Run scenarios and compare with what each says under `expect`.

    Ends with 0 when all came out as expected, with 1 when one did not, with 2 when one can't be read.

    \b
    Example: distsim test scenarios/
    """
    from distsim.expectations import check_file, scenario_files
    from distsim.views.checkview import summary, table_of

    files = scenario_files(paths)
    checked = [check_file(path) for path in _with_progress(files)]
    console.out(table_of(checked))
    for one in checked:
        if one.error is not None:
            console.note(str(one.error))
    console.note(summary(checked))
    raise typer.Exit(_status(checked))


def _status(checked: list[Checked]) -> int:
    statuses = {one.status for one in checked}
    return 2 if "unreadable" in statuses else int("failed" in statuses)


def _with_progress(files: tuple[Path, ...]) -> Iterator[Path] | Iterable[Path]:
    """A bar on a terminal that goes away when all is done; elsewhere nothing."""
    if not console.coloured(sys.stderr) or len(files) < 2:
        return files
    from rich.console import Console
    from rich.progress import track

    return track(files, description="simulating", console=Console(stderr=True), transient=True)
