"""What a report is about: a run with all that is known of it."""

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

#: Rows of a trace that a report takes: each is about eight bytes of the file, and a hundred of the
#: browser's memory.
MAX_ROWS = 2_000_000


@dataclass(frozen=True)
class ReportRun:
    """One run. ``simulation``: what is known besides the trace; None of a recording whose calls
    can't be judged.

    ``trace`` is the run that is shown: the simulation's own, or a recording. ``profiles``: every
    back end's outcome, where a check asked for them. ``note``: a sentence on where all this is
    from.
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
            f"a report of {calls:,} calls is more than a browser holds ({MAX_ROWS:,})",
            "report fewer iterations or ranks; `--trace run.json` writes the run for Perfetto",
        )


def report_run_from_simulation(simulation: Simulation) -> ReportRun:
    """A simulated run. Raises UsageError for one with more rows than `MAX_ROWS`."""
    scenario, run = simulation.scenario, simulation.run
    _check_size(
        simulation.program.call_count
    )  # before every call of ranks that were simulated as one is worked out
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
    """A recording, beside what its calls come to under the rules (``judged``), where they can be
    judged.
    """
    outcome = str(trace.header.get("outcome") or "") or "not known"
    name = str(trace.header.get("name") or Path(file).name)
    if judged is None:
        return ReportRun(
            name,
            file,
            trace,
            outcome,
            note="A recording; its calls could not be judged by the rules.",
        )
    found = replace(
        report_run_from_simulation(judged), name=name, file=file, trace=trace, outcome=outcome
    )
    return replace(
        found,
        note="Times as they were recorded; "
        "verdict and findings are those of its calls under the rules.",
    )
