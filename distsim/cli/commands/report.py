"""`distsim report`: a run as one HTML file; and ``--report``, the same of other commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli.application import (
    BackendOption,
    ClusterOption,
    MaxCallsOption,
    SetOption,
    command_with_arguments,
    is_trace,
    read_scenario,
)
from distsim.cli.shared import console

if TYPE_CHECKING:
    from distsim.analysis.run_comparison import RunComparison
    from distsim.output.page import ReportRun
    from distsim.real.results.real_run import RealRun
    from distsim.simulation.check_scenario import CheckResult
    from distsim.simulation.simulate_scenario import Simulation

File = Annotated[
    str,
    typer.Argument(
        metavar="FILE", help="A scenario, which is simulated, or a trace; - reads standard input."
    ),
]
Output = Annotated[Path, typer.Option("--output", "-o", metavar="F.html", help="Write there.")]


@dataclass(frozen=True)
class ReportArguments:
    """The arguments of `report`."""

    file: File
    output: Output = Path("report.html")
    backend: BackendOption = None
    cluster: ClusterOption = None
    sets: SetOption = None
    max_calls: MaxCallsOption = None


@command_with_arguments(ReportArguments)
def command(given: ReportArguments) -> None:
    """Write a report to open in a browser: one file, which asks nobody for anything.

    Outcome and verdict, findings beside their source, a timeline to zoom and step through, why each
    call waits, what it costs. A trace is shown as it was recorded, with the verdict on its calls.

    \b
    Example: distsim report scenarios/hybrid.yaml -o hybrid.html
    Example: distsim report run.jsonl -o run.html
    """
    from distsim.cli.commands.simulate import simulation_exit_status
    from distsim.output.page import report_run_from_simulation
    from distsim.simulation.simulate_scenario import simulate

    check_report_path(given.output)
    with console.progress_phases(given.file != "-") as tell:
        if is_trace(given.file):
            told, ended = _report_run_of_trace(given)
        else:
            scenario = read_scenario(given.file, given.sets)
            simulation = simulate(
                scenario,
                backend=given.backend,
                cluster=given.cluster,
                max_calls=given.max_calls,
                tell=tell,
            )
            told, ended = report_run_from_simulation(simulation), simulation_exit_status(simulation)
        tell("the report")
        write_report(given.output, [told])
    raise typer.Exit(ended)


def _report_run_of_trace(given: ReportArguments) -> tuple[ReportRun, int]:
    """A recording, and its exit status: 0 where it came to its end."""
    from distsim.cli.shared.trace_input import simulate_trace
    from distsim.common.errors import DistsimError
    from distsim.output.page import report_run_from_trace
    from distsim.trace.jsonl import read_trace
    from distsim.trace.run_end import is_partial

    trace = read_trace(given.file)
    judged: Simulation | None
    try:
        judged = simulate_trace(
            given.file, backend=given.backend and str(given.backend), cluster=given.cluster
        )
    except DistsimError as error:
        console.note(f"the calls of {given.file} can't be judged: {error}")
        judged = None
    told = report_run_from_trace(trace, given.file, judged)
    return told, int(is_partial(trace) or any(f.severity == "error" for f in told.findings))


def check_report_path(path: Path | None) -> None:
    """Raises UsageError before anything runs, where a report has another ending than a page's, or
    its folder is not there.
    """
    from distsim.common.errors import UsageError
    from distsim.common.file_io import is_stream

    if path is None or is_stream(path):
        return
    if path.suffix.lower() not in (".html", ".htm"):
        raise UsageError(
            f"{path}: a report's file ends in .html", f"name it {path.with_suffix('.html')}"
        )
    if not path.parent.is_dir():
        raise UsageError(
            f"there is no folder {path.parent} for the report",
            "name a file in a folder that exists",
        )


def write_report(
    path: Path | None, runs: Sequence[ReportRun], comparison: RunComparison | None = None
) -> None:
    """Write the page of a run or two, where one is wanted."""
    if path is None:
        return
    from distsim.output.page import report_html

    console.write_file(path, report_html(runs, comparison))
    console.note(f"wrote {path}")


def write_simulation_report(path: Path | None, simulation: Simulation) -> None:
    """``--report`` of commands that simulate."""
    if path is not None:
        from distsim.output.page import report_run_from_simulation

        write_report(path, [report_run_from_simulation(simulation)])


def write_check_report(path: Path, found: CheckResult, simulated: Simulation | None) -> None:
    """``--report`` of a check: its verdict, findings and every back end's outcome beside the run of
    its own. Nothing for a file that can't be read."""
    if simulated is None or found.verdict is None:
        return
    from distsim.output.page import report_run_from_simulation

    told = replace(
        report_run_from_simulation(simulated),
        verdict=found.verdict,
        findings=found.findings,
        profiles=found.profiles,
    )
    write_report(path, [told])


def write_real_run_report(path: Path | None, run: RealRun) -> None:
    """``--report`` of a real run: the recording, and its simulation beside it."""
    if path is None:
        return
    from distsim.analysis.run_comparison import compare_runs
    from distsim.output.page import report_run_from_simulation, report_run_from_trace

    simulated = report_run_from_simulation(run.simulation)
    recorded = report_run_from_trace(run.trace, simulated.file, run.simulation)
    recorded = replace(
        recorded,
        name=f"{simulated.name}, for real",
        outcome=run.outcome or run.reason,
        findings=run.findings,
        final_state=run.final_state,
        note=f"Recorded on torch.distributed with {run.backend}.",
    )
    write_report(
        path,
        [recorded, replace(simulated, name=f"{simulated.name}, simulated")],
        compare_runs(run.trace, run.simulation.run.trace),
    )
