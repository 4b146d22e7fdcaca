"""`distsim report`: a run as one self-contained HTML file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from distsim.cli.shared import console
from distsim.cli.shared.arguments import (
    BackendOption,
    ClusterOption,
    MaxCallsOption,
    SetOption,
    command_with_arguments,
    read_input,
)
from distsim.cli.shared.html_report import check_report_path

FileArgument = Annotated[
    str,
    typer.Argument(
        metavar="FILE", help="Scenario to simulate, or trace; `-` means standard input."
    ),
]
OtherArgument = Annotated[
    str | None,
    typer.Argument(metavar="OTHER", help="A second run, to compare with the first."),
]
OutputOption = Annotated[
    Path, typer.Option("--output", "-o", metavar="F.html", help="Write the report to this file.")
]


@dataclass(frozen=True)
class ReportArguments:
    """The arguments of `report`."""

    file: FileArgument
    other: OtherArgument = None
    output: OutputOption = Path("report.html")
    backend: BackendOption = None
    cluster: ClusterOption = None
    sets: SetOption = None
    max_calls: MaxCallsOption = None


@command_with_arguments(ReportArguments)
def command(arguments: ReportArguments) -> None:
    """Write a self-contained HTML report.

    The report shows the outcome, the verdict, findings next to their source lines, an interactive
    timeline, the reason for each wait, and costs. A trace is shown as recorded, with the verdict on
    its calls. With two files, the report compares their runs.

    \b
    Example: distsim report scenarios/hybrid.yaml -o hybrid.html
    Example: distsim report run.jsonl -o run.html
    """
    from distsim.api.functions import report

    check_report_path(arguments.output)
    files = [arguments.file] if arguments.other is None else [arguments.file, arguments.other]
    with console.progress_phases(arguments.file != "-") as show_phase:
        page = report(
            *(read_input(file, arguments.sets) for file in files),
            backend=arguments.backend,
            cluster=arguments.cluster,
            max_calls=arguments.max_calls,
            progress=show_phase,
        )
        for note in page.notes:
            console.note(note)
        console.write_file(arguments.output, page.html)
        console.note(f"wrote {arguments.output}")
    raise typer.Exit(int(not page.ok))
