"""What a real run leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distsim.findings.record import Finding
from distsim.real.sameness import Held
from distsim.standstill import Standstill
from distsim.trace import Trace

if TYPE_CHECKING:
    from distsim.simulation import Simulation


@dataclass(frozen=True)
class RealRun:
    """A run on torch.distributed beside its simulation.

    ``makespans_ns``: one per repetition that counted, the warm-up left out. ``findings``, ``culprits``: of the real standstill.
    ``differences``: where simulated and real ends differ, in words; empty where they agree. ``stacks``: Python stack by rank of
    those that were stuck; ``outputs``: what a failed rank printed last. ``overhead_ns``: what recording a call cost.
    ``reason``: done, standstill, start, interrupted. ``outcome`` is empty where the run was ended from outside while it got on.
    """

    simulation: Simulation
    backend: str
    launcher: str
    outcome: str
    reason: str
    standstill: Standstill
    findings: tuple[Finding, ...]
    culprits: tuple[int, ...]
    differences: tuple[str, ...]
    trace: Trace
    makespans_ns: tuple[int, ...]
    values: tuple[Held, ...]
    stacks: dict[int, str] = field(default_factory=dict)
    outputs: dict[int, str] = field(default_factory=dict)
    overhead_ns: int = 0
    clock_error_ns: int = 0
    timeout_ns: int = 0
    notes: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """The run ended as the simulation said."""
        return not self.differences

    def held(self, state: str) -> list[Held]:
        """The buffers that are equal, close, that differ, or are unknown."""
        return [one for one in self.values if one.state == state]


__all__ = ["RealRun"]
