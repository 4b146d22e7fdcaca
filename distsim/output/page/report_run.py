"""The content of a report: a run with everything known about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from distsim.common.errors import UsageError
from distsim.findings.finding_types import Finding
from distsim.trace.model import Trace

if TYPE_CHECKING:
    from distsim.checker.verdict import Verdict
    from distsim.engine.backend_outcomes import BackendOutcome
    from distsim.findings.final_state import FinalState
    from distsim.simulation.simulate_scenario import Simulation

#: The largest number of rows of a trace. A row takes about eight bytes of the file and a hundred
#: bytes of the browser's memory.
MAX_ROWS = 2_000_000


@dataclass(frozen=True)
class ReportRun:
    """One run.

    ``trace`` is the displayed run: that of the simulation, or a recording. ``simulation`` is None
    for a recording whose calls cannot be simulated. ``profiles``: the outcome of every backend, if
    a check was requested. ``note``: a sentence about the origin of the data.
    """

    name: str
    file: str
    trace: Trace
    outcome: str
    verdict: Verdict | None = None
    findings: tuple[Finding, ...] = ()
    simulation: Simulation | None = None
    final_state: FinalState | None = None
    profiles: Mapping[str, BackendOutcome] | None = None
    note: str = ""

    def __post_init__(self) -> None:
        _check_size(len(self.trace))


def _check_size(calls: int) -> None:
    if calls > MAX_ROWS:
        raise UsageError(
            f"the run has {calls:,} calls, but a report can show at most {MAX_ROWS:,}",
            "use fewer iterations or ranks, or write a trace for Perfetto with `--trace run.json`",
        )


def report_run_from_simulation(simulation: Simulation) -> ReportRun:
    """A simulated run. Raises UsageError for one with more rows than `MAX_ROWS`."""
    scenario, run = simulation.scenario, simulation.run
    # Before the run is expanded from representative ranks to all ranks, which takes long.
    _check_size(simulation.program.call_count)
    return ReportRun(
        scenario.name or Path(scenario.file).name,
        scenario.file,
        run.trace,
        simulation.outcome,
        simulation.verdict,
        simulation.findings,
        simulation,
        run.final_state,
    )


def report_run_from_trace(trace: Trace, file: str, judged: Simulation | None) -> ReportRun:
    """A recording. ``judged``: the simulation of its calls, which gives verdict and findings; None
    if they cannot be simulated.
    """
    outcome = str(trace.header.get("outcome") or "") or "unknown outcome"
    name = str(trace.header.get("name") or Path(file).name)
    if judged is None:
        return ReportRun(
            name,
            file,
            trace,
            outcome,
            note="This is a recording. Its calls could not be checked.",
        )
    found = replace(
        report_run_from_simulation(judged), name=name, file=file, trace=trace, outcome=outcome
    )
    return replace(
        found,
        note="Times are recorded times. "
        "The verdict and the findings come from a simulation of the recorded calls.",
    )
