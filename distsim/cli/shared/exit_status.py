"""The exit status of commands that simulate."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distsim.simulation.simulate_scenario import Simulation


def simulation_exit_status(simulation: Simulation, strict: bool = False) -> int:
    """0 if the outcome is `completes`, no finding is an error and the memory suffices; else 1.

    ``strict``: a leak, or a search that stopped at its bound, gives 1 as well. DS806 (the ranks
    need more memory than their device has) gives 1 whatever its severity.
    """
    if simulation.outcome != "completes":
        return 1
    if any(f.severity == "error" or f.code == "DS806" for f in simulation.findings):
        return 1
    verdict = simulation.verdict
    if strict and verdict is not None:
        return int(verdict.verdict == "leak" or not verdict.complete)
    return 0
