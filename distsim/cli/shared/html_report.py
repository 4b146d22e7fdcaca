"""Writing the HTML report: `distsim report`, and ``--report`` of other commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from distsim.cli.shared import console

if TYPE_CHECKING:
    from distsim.analysis.run_comparison import RunComparison
    from distsim.output.page import ReportRun
    from distsim.real.results.real_run import RealRun
    from distsim.simulation.check_scenario import CheckResult
    from distsim.simulation.simulate_scenario import Simulation


def check_report_path(path: Path | None) -> None:
    """Check the name of a report before anything runs.

    Raises UsageError for another suffix than .html, or for a missing folder.
    """
    from distsim.common.errors import UsageError
    from distsim.common.file_io import is_stream

    if path is None or is_stream(path):
        return
    if path.suffix.lower() not in (".html", ".htm"):
        raise UsageError(
            f"{path}: the name of a report must end in .html",
            f"use {path.with_suffix('.html') if path.name.strip('-') else 'report.html'}",
        )
    if not path.parent.is_dir():
        raise UsageError(
            f"the folder {path.parent} does not exist",
            "name a file in a folder that exists",
        )


def write_report(
    path: Path | None, runs: Sequence[ReportRun], comparison: RunComparison | None = None
) -> None:
    """Write the page of one or two runs, if ``path`` is given."""
    if path is None:
        return
    from distsim.output.page import report_html

    console.write_file(path, report_html(runs, comparison))
    console.note(f"wrote {path}")


def write_simulation_report(path: Path | None, simulation: Simulation) -> None:
    """Write ``--report`` of a command that simulates."""
    if path is not None:
        from distsim.output.page import report_run_from_simulation

        write_report(path, [report_run_from_simulation(simulation)])


def write_check_report(path: Path, result: CheckResult, simulation: Simulation | None) -> None:
    """Write ``--report`` of a check: a simulated run with the verdict and findings of the check.

    Does nothing for a file that cannot be read (no simulation or no verdict).
    """
    if simulation is None or result.verdict is None:
        return
    from distsim.output.page import report_run_from_simulation

    run = replace(
        report_run_from_simulation(simulation),
        verdict=result.verdict,
        findings=result.findings,
        profiles=result.profiles,
    )
    write_report(path, [run])


def write_real_run_report(path: Path | None, run: RealRun) -> None:
    """Write ``--report`` of a real run: its recording compared with its simulation."""
    if path is None:
        return
    from distsim.analysis.run_comparison import compare_runs
    from distsim.output.page import report_run_from_simulation, report_run_from_trace

    simulated = report_run_from_simulation(run.simulation, all_ranks=True)
    recorded = report_run_from_trace(run.trace, simulated.file, run.simulation)
    recorded = replace(
        recorded,
        name=f"{simulated.name}, measured",
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
