"""`distsim report`: a run as one HTML file; and ``--report``, the same of other commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli import console
from distsim.cli.app import BackendOption, ClusterOption, MaxCalls, Sets, is_trace, read_scenario, taking

if TYPE_CHECKING:
    from distsim.checking import CheckResult
    from distsim.compare import Comparison
    from distsim.real.record import RealRun
    from distsim.report import Told
    from distsim.simulation import Simulation

File = Annotated[str, typer.Argument(metavar="FILE", help="A scenario, which is simulated, or a trace; - reads standard input.")]
Output = Annotated[Path, typer.Option("--output", "-o", metavar="F.html", help="Write there.")]


@dataclass(frozen=True)
class ReportOptions:
    """The arguments of `report`."""

    file: File
    output: Output = Path("report.html")
    backend: BackendOption = None
    cluster: ClusterOption = None
    sets: Sets = None
    max_calls: MaxCalls = None


@taking(ReportOptions)
def command(given: ReportOptions) -> None:
    """Write a report to open in a browser: one file, which asks nobody for anything.

    Outcome and verdict, findings beside their source, a timeline to zoom and step through, why each call waits, what it costs.
    A trace is shown as it was recorded, with the verdict on its calls.

    \b
    Example: distsim report scenarios/hybrid.yaml -o hybrid.html
    Example: distsim report run.jsonl -o run.html
    """
    from distsim.cli.simulate import status
    from distsim.report import told_of
    from distsim.simulation import simulate

    check_report_name(given.output)
    with console.phases(given.file != "-") as tell:
        if is_trace(given.file):
            told, ended = _of_trace(given)
        else:
            scenario = read_scenario(given.file, given.sets)
            simulation = simulate(scenario, backend=given.backend, cluster=given.cluster, max_calls=given.max_calls, tell=tell)
            told, ended = told_of(simulation), status(simulation)
        tell("the report")
        write_report(given.output, [told])
    raise typer.Exit(ended)


def _of_trace(given: ReportOptions) -> tuple[Told, int]:
    """A recording, and its exit status: 0 where it came to its end."""
    from distsim.cli.traced import simulate_trace
    from distsim.errors import DistsimError
    from distsim.report import told_of_trace
    from distsim.trace import is_partial
    from distsim.trace_io import read_trace

    trace = read_trace(given.file)
    judged: Simulation | None
    try:
        judged = simulate_trace(given.file, backend=given.backend and str(given.backend), cluster=given.cluster)
    except DistsimError as error:
        console.note(f"the calls of {given.file} can't be judged: {error}")
        judged = None
    told = told_of_trace(trace, given.file, judged)
    return told, int(is_partial(trace) or any(f.severity == "error" for f in told.findings))


def check_report_name(path: Path | None) -> None:
    """Raises UsageError before anything runs, where a report has another ending than a page's, or its folder is not there."""
    from distsim.errors import UsageError
    from distsim.files import is_stream

    if path is None or is_stream(path):
        return
    if path.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"{path}: a report's file ends in .html", f"name it {path.with_suffix('.html')}")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} for the report", "name a file in a folder that exists")


def write_report(path: Path | None, runs: Sequence[Told], comparison: Comparison | None = None) -> None:
    """Write the page of a run or two, where one is wanted."""
    if path is None:
        return
    from distsim.report import report_page

    console.write_file(path, report_page(runs, comparison))
    console.note(f"wrote {path}")


def report_simulation(path: Path | None, simulation: Simulation) -> None:
    """``--report`` of commands that simulate."""
    if path is not None:
        from distsim.report import told_of

        write_report(path, [told_of(simulation)])


def report_check(path: Path, found: CheckResult, simulated: Simulation | None) -> None:
    """``--report`` of a check: its verdict, findings and every back end's outcome beside the run of its own. Nothing for a file that
    can't be read."""
    if simulated is None or found.verdict is None:
        return
    from distsim.report import told_of

    told = replace(told_of(simulated), verdict=found.verdict, findings=found.findings, profiles=found.profiles)
    write_report(path, [told])


def report_real(path: Path | None, run: RealRun) -> None:
    """``--report`` of a real run: the recording, and its simulation beside it."""
    if path is None:
        return
    from distsim.compare import compare
    from distsim.report import told_of, told_of_trace

    simulated = told_of(run.simulation)
    recorded = told_of_trace(run.trace, simulated.file, run.simulation)
    recorded = replace(
        recorded, name=f"{simulated.name}, for real", outcome=run.outcome or run.reason, findings=run.findings, standstill=run.standstill,
        note=f"Recorded on torch.distributed with {run.backend}.",
    )  # fmt: skip
    write_report(
        path, [recorded, replace(simulated, name=f"{simulated.name}, simulated")], compare(run.trace, run.simulation.run.trace)
    )
