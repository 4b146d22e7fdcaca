"""`distsim report`: a run as one self-contained HTML file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli.shared import console
from distsim.cli.shared.arguments import (
    BackendOption,
    ClusterOption,
    MaxCallsOption,
    SetOption,
    command_with_arguments,
)
from distsim.cli.shared.exit_status import simulation_exit_status
from distsim.cli.shared.html_report import check_report_path, write_report
from distsim.cli.shared.input_files import is_trace, read_scenario

if TYPE_CHECKING:
    from distsim.output.page import ReportRun
    from distsim.simulation.simulate_scenario import Simulation

FileArgument = Annotated[
    str,
    typer.Argument(
        metavar="FILE", help="A scenario, which is simulated, or a trace; - reads standard input."
    ),
]
OutputOption = Annotated[
    Path, typer.Option("--output", "-o", metavar="F.html", help="Write there.")
]


@dataclass(frozen=True)
class ReportArguments:
    """The arguments of `report`."""

    file: FileArgument
    output: OutputOption = Path("report.html")
    backend: BackendOption = None
    cluster: ClusterOption = None
    sets: SetOption = None
    max_calls: MaxCallsOption = None


@command_with_arguments(ReportArguments)
def command(arguments: ReportArguments) -> None:
    """Write a report to open in a browser: one file, which asks nobody for anything.

    Outcome and verdict, findings beside their source, a timeline to zoom and step through, why each
    call waits, what it costs. A trace is shown as it was recorded, with the verdict on its calls.

    \b
    Example: distsim report scenarios/hybrid.yaml -o hybrid.html
    Example: distsim report run.jsonl -o run.html
    """
    from distsim.output.page import report_run_from_simulation
    from distsim.simulation.simulate_scenario import simulate

    check_report_path(arguments.output)
    with console.progress_phases(arguments.file != "-") as show_phase:
        if is_trace(arguments.file):
            run, status = _report_run_of_trace(arguments)
        else:
            simulation = simulate(
                read_scenario(arguments.file, arguments.sets),
                backend=arguments.backend,
                cluster=arguments.cluster,
                max_calls=arguments.max_calls,
                tell=show_phase,
            )
            run = report_run_from_simulation(simulation)
            status = simulation_exit_status(simulation)
        show_phase("the report")
        write_report(arguments.output, [run])
    raise typer.Exit(status)


def _report_run_of_trace(arguments: ReportArguments) -> tuple[ReportRun, int]:
    """A recorded run, and the exit status: 1 for a partial recording or an error finding."""
    from distsim.output.page import report_run_from_trace
    from distsim.trace.jsonl import read_trace
    from distsim.trace.run_end import is_partial

    trace = read_trace(arguments.file)
    run = report_run_from_trace(trace, arguments.file, _simulation_of_trace(arguments))
    has_errors = any(finding.severity == "error" for finding in run.findings)
    return run, int(is_partial(trace) or has_errors)


def _simulation_of_trace(arguments: ReportArguments) -> Simulation | None:
    """The recorded calls simulated, for verdict and findings; None if that is impossible."""
    from distsim.cli.shared.trace_input import simulate_trace
    from distsim.common.errors import DistsimError

    backend = arguments.backend and str(arguments.backend)
    try:
        return simulate_trace(arguments.file, backend=backend, cluster=arguments.cluster)
    except DistsimError as error:
        console.note(f"the calls of {arguments.file} can't be judged: {error}")
        return None
