"""`distsim test`: run scenarios as tests of their own expectations."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli.shared import console
from distsim.cli.shared.arguments import choice_option

if TYPE_CHECKING:
    from distsim.simulation.expectations import ScenarioTestResult

PathsArgument = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="PATH",
        help=(
            "Scenario files, or folders with scenarios; `-` means standard input. "
            "[default: the scenarios under the current folder]"
        ),
    ),
]


class ResultFormat(StrEnum):
    """How the results are printed."""

    text = "text"
    junit = "junit"


FormatOption = Annotated[
    ResultFormat,
    choice_option(ResultFormat, "--format", help="Print a table, or JUnit XML for CI systems."),
]


def command(paths: PathsArgument = None, format: FormatOption = ResultFormat.text) -> None:
    """Simulate scenarios and compare the results with their `expect` block.

    Without paths, test finds the scenarios under the current folder. pyproject.toml sets defaults
    under [tool.distsim.test]: paths, exclude.

    Exit status: 0 if all results are as expected, 1 if one is not, 2 if a file cannot be read.

    \b
    Example: distsim test scenarios/
    Example: distsim test scenarios/ --format junit > report.xml
    """
    from distsim.cli.shared.project_files import (
        command_settings,
        expand_folders,
        find_scenarios,
    )
    from distsim.output.junit import expectations_junit
    from distsim.output.text.check_results import expectations_summary, expectations_table
    from distsim.simulation.expectations import check_expectations, scenario_files

    settings = command_settings("test")
    names = expand_folders([str(path) for path in paths or ()]) or find_scenarios(settings)
    files = scenario_files([Path(name) for name in names])
    results = [check_expectations(path) for path in _files_with_progress(files)]
    write = expectations_junit if format is ResultFormat.junit else expectations_table
    console.out(write(results))
    for result in results:
        if result.error is not None:
            console.note(str(result.error))
    console.note(expectations_summary(results))
    raise typer.Exit(_exit_status(results))


def _exit_status(results: list[ScenarioTestResult]) -> int:
    statuses = {result.status for result in results}
    if "unreadable" in statuses:
        return 2
    return 1 if "failed" in statuses else 0


def _files_with_progress(files: tuple[Path, ...]) -> Iterable[Path]:
    """The files, with a bar on a terminal that disappears after the last one."""
    if not console.uses_colour(sys.stderr) or len(files) < 2:
        return files
    from rich.console import Console
    from rich.progress import track

    return track(files, description="simulating", console=Console(stderr=True), transient=True)
