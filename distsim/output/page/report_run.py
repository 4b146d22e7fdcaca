"""The content of a report: a run with everything known about it.

A folded run (`distsim.semantics.classes.representatives`) is shown with its representative ranks if
it has many calls. Every representative stands for all ranks of its class, so the size of a report
depends on the number of classes, not on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from distsim.common.errors import UsageError
from distsim.findings.finding_types import Finding
from distsim.program.code import IntVector
from distsim.program.model import Program
from distsim.trace.model import Trace

if TYPE_CHECKING:
    from distsim.checker.verdict import Verdict
    from distsim.engine.backend_outcomes import BackendOutcome
    from distsim.findings.final_state import FinalState
    from distsim.simulation.simulate_scenario import Simulation

#: The largest number of rows of a trace. A row takes about eight bytes of the file and a hundred
#: bytes of the browser's memory.
MAX_ROWS = 2_000_000
#: A folded run with more calls is shown with its representative ranks, so that a browser opens the
#: report within two seconds.
MAX_ROWS_OF_ALL_RANKS = 200_000


@dataclass(frozen=True)
class ReportRun:
    """One run.

    ``trace`` is the displayed run: that of the simulation, or a recording. ``simulation`` is None
    for a recording whose calls cannot be simulated. ``profiles``: the outcome of every backend, if
    a check was requested. ``note``: a sentence about the origin of the data.
    ``representatives``: the folded program, if the trace has only calls of representative ranks.
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
    representatives: Program | None = None

    @property
    def is_simulated(self) -> bool:
        """Whether the trace is that of the simulation, so that all its facts hold for it."""
        if self.simulation is None:
            return False
        if self.representatives is not None:
            return True
        return self.trace.columns is self.simulation.run.trace.columns

    @property
    def shown_ranks(self) -> Sequence[int]:
        """The ranks whose calls the trace has."""
        if self.representatives is not None:
            return self.representatives.present
        return range(self.trace.world_size)

    def ranks_like(self, rank: int) -> tuple[int, ...]:
        """All ranks that a shown rank stands for, ascending."""
        return (rank,) if self.representatives is None else self.representatives.alike([rank])

    def __post_init__(self) -> None:
        _check_size(len(self.trace))


def _check_size(calls: int) -> None:
    if calls > MAX_ROWS:
        raise UsageError(
            f"the run has {calls:,} calls, but a report can show at most {MAX_ROWS:,}",
            "use fewer iterations or ranks, or write a trace for Perfetto with `--trace run.json`",
        )


def report_run_from_simulation(simulation: Simulation, *, all_ranks: bool = False) -> ReportRun:
    """A simulated run. Raises UsageError for one with more rows than `MAX_ROWS`.

    A folded run with many calls is shown with its representative ranks, unless ``all_ranks``.
    """
    scenario, run = simulation.scenario, simulation.run
    section = run.section
    calls = simulation.program.call_count
    is_folded = section is not None and calls > MAX_ROWS_OF_ALL_RANKS and not all_ranks
    # Before the run is expanded from representative ranks to all ranks, which takes long.
    if not is_folded:
        _check_size(calls)
    return ReportRun(
        scenario.name or Path(scenario.file).name,
        scenario.file,
        section.trace if section is not None and is_folded else run.trace,
        simulation.outcome,
        simulation.verdict,
        simulation.findings,
        simulation,
        run.final_state,
        representatives=section.program if section is not None and is_folded else None,
    )


def report_runs(found: Sequence[ReportRun | Simulation]) -> list[ReportRun]:
    """The runs of one report, in the same order.

    The calls of two runs are compared rank by rank, so both need the same representative ranks, or
    all ranks.
    """
    from distsim.simulation.simulate_scenario import Simulation

    simulations = [one for one in found if isinstance(one, Simulation)]
    all_ranks = len(simulations) != len(found) or not _have_equal_classes(simulations)
    return [
        report_run_from_simulation(one, all_ranks=all_ranks) if isinstance(one, Simulation) else one
        for one in found
    ]


def _have_equal_classes(simulations: Sequence[Simulation]) -> bool:
    """Whether each rank has the same representative in all runs."""
    if len(simulations) < 2:
        return True
    sections = [simulation.run.section for simulation in simulations]
    classes: list[IntVector] = []
    for section in sections:
        representative_of = None if section is None else section.program.representative_of
        if representative_of is None:
            return False
        classes.append(representative_of)
    return all(np.array_equal(classes[0], other) for other in classes[1:])


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
        report_run_from_simulation(judged, all_ranks=True),
        name=name,
        file=file,
        trace=trace,
        outcome=outcome,
    )
    return replace(
        found,
        note="Times are recorded times. "
        "The verdict and the findings come from a simulation of the recorded calls.",
    )
