"""`distsim test`: scenarios as tests."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli.shared import console

if TYPE_CHECKING:
    from distsim.simulation.expectations import ScenarioTestResult

Paths = Annotated[
    list[Path], typer.Argument(metavar="PATHS", help="Scenario files, or folders that hold some.")
]


def command(paths: Paths) -> None:
    """Run scenarios and compare with what each says under `expect`.

    Ends with 0 when all came out as expected, with 1 when one did not, with 2 when one can't be
    read.

    \b
    Example: distsim test scenarios/
    """
    from distsim.output.text.check_results import expectations_summary, expectations_table
    from distsim.simulation.expectations import check_expectations, scenario_files

    files = scenario_files(paths)
    checked = [check_expectations(path) for path in _files_with_progress(files)]
    console.out(expectations_table(checked))
    for one in checked:
        if one.error is not None:
            console.note(str(one.error))
    console.note(expectations_summary(checked))
    raise typer.Exit(_exit_status(checked))


def _exit_status(checked: list[ScenarioTestResult]) -> int:
    statuses = {one.status for one in checked}
    return 2 if "unreadable" in statuses else int("failed" in statuses)


def _files_with_progress(files: tuple[Path, ...]) -> Iterator[Path] | Iterable[Path]:
    """A bar on a terminal that goes away when all is done; elsewhere nothing."""
    if not console.uses_colour(sys.stderr) or len(files) < 2:
        return files
    from rich.console import Console
    from rich.progress import track

    return track(files, description="simulating", console=Console(stderr=True), transient=True)
