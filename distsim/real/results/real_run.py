"""The record of a finished real run, with its simulation.

This is what the text, JSON and HTML outputs of real runs read. How a run is requested, and the
state of its launcher, are in `distsim.real.launch.session`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distsim.findings.final_state import FinalState
from distsim.findings.finding_types import Finding
from distsim.real.results.posted_calls import DivergingReceive
from distsim.real.results.value_check import BufferCheck
from distsim.trace.model import Trace

if TYPE_CHECKING:
    from distsim.simulation.simulate_scenario import Simulation


@dataclass(frozen=True)
class RealRun:
    """A run on torch.distributed, compared with its simulation.

    How it ended: ``outcome`` (empty if the run was interrupted while it made progress), ``reason``
    (done, standstill, start, interrupted), ``ended_by`` (the signal that interrupted it),
    ``findings`` and ``culprits`` of the real hang.

    Compared with the simulation: ``differences`` between simulated and real ends, in words, empty
    if they agree; ``agreement``: if there are no differences but the ends are not the same, how the
    two go together; ``taken``: receives from any source that took another rank's message than in
    the simulation.

    Measurements: ``makespans_ns``, one per repetition that counts (without the warm-up);
    ``overhead_ns``, the cost of recording one call; ``clock_error_ns``.

    Per rank: ``stacks``, Python stacks of ranks that were stuck; ``outputs``, what a failed rank
    printed last.
    """

    simulation: Simulation
    backend: str
    launcher: str
    outcome: str
    reason: str
    final_state: FinalState
    findings: tuple[Finding, ...]
    culprits: tuple[int, ...]
    differences: tuple[str, ...]
    trace: Trace
    makespans_ns: tuple[int, ...]
    values: tuple[BufferCheck, ...]
    stacks: dict[int, str] = field(default_factory=dict)
    outputs: dict[int, str] = field(default_factory=dict)
    overhead_ns: int = 0
    clock_error_ns: int = 0
    timeout_ns: int = 0
    notes: tuple[str, ...] = ()
    agreement: str = ""
    ended_by: str = ""
    taken: tuple[DivergingReceive, ...] = ()

    @property
    def agrees(self) -> bool:
        """The run ended as the simulation predicted."""
        return not self.differences

    def buffers_in_state(self, state: str) -> list[BufferCheck]:
        """The buffers in one state: equal, close, differs or unknown."""
        return [check for check in self.values if check.state == state]
