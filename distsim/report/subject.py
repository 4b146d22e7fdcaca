"""What a report is about: a run with all that is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from distsim.errors import UsageError
from distsim.findings.record import Finding
from distsim.trace import Trace

if TYPE_CHECKING:
    from distsim.check.verdict import Verdict
    from distsim.engine.outcomes import ProfileOutcome
    from distsim.simulation import Simulation
    from distsim.standstill import Standstill

#: Rows of a trace that a report takes: each is about eight bytes of the file, and a hundred of the browser's memory.
MOST_ROWS = 2_000_000


@dataclass(frozen=True)
class Told:
    """One run. ``simulation``: what is known besides the trace; None of a recording whose calls can't be judged.

    ``trace`` is the run that is shown: the simulation's own, or a recording. ``profiles``: every back end's outcome, where a check asked
    for them. ``note``: a sentence on where all this is from.
    """

    name: str
    file: str
    trace: Trace
    outcome: str
    verdict: Verdict | None = None
    findings: tuple[Finding, ...] = ()
    simulation: Simulation | None = None
    standstill: Standstill | None = None
    profiles: Mapping[str, ProfileOutcome] | None = None
    note: str = ""

    def __post_init__(self) -> None:
        _bounded(len(self.trace))


def _bounded(calls: int) -> None:
    if calls > MOST_ROWS:
        raise UsageError(
            f"a report of {calls:,} calls is more than a browser holds ({MOST_ROWS:,})",
            "report fewer iterations or ranks; `--trace run.json` writes the run for Perfetto",
        )


def told_of(simulation: Simulation) -> Told:
    """A simulated run. Raises UsageError for one with more rows than `MOST_ROWS`."""
    scenario, run = simulation.scenario, simulation.run
    _bounded(simulation.program.call_count)  # before every call of ranks that were simulated as one is worked out
    return Told(
        scenario.name or Path(scenario.file).name, scenario.file, run.trace, simulation.outcome, simulation.verdict,
        simulation.findings, simulation, run.standstill,
    )  # fmt: skip


def told_of_trace(trace: Trace, file: str, judged: Simulation | None) -> Told:
    """A recording, beside what its calls come to under the rules (``judged``), where they can be judged."""
    outcome = str(trace.header.get("outcome") or "") or "not known"
    name = str(trace.header.get("name") or Path(file).name)
    if judged is None:
        return Told(name, file, trace, outcome, note="A recording; its calls could not be judged by the rules.")
    found = replace(told_of(judged), name=name, file=file, trace=trace, outcome=outcome)
    return replace(found, note="Times as they were recorded; verdict and findings are those of its calls under the rules.")
