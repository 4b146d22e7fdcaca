"""The band of a makespan: the bands of what is on its critical path, added up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distsim.engine import SHARED_CALLS
from distsim.figures import makespan_band
from distsim.units import show_ns

if TYPE_CHECKING:
    from distsim.simulation import Simulation

__all__ = ["band_line", "makespan_band"]


def band_line(simulation: Simulation) -> str:
    """The line that a report ends with: the cost model, its band, and where a run on the machines would end."""
    cost = simulation.cost
    told = f"Times by the cost model of {cost.name}: {cost.error_band}."
    if simulation.run.alone:
        told += f" With more than {SHARED_CALLS:,} calls, what is under way at once counts as if each were alone."
    span = makespan_band(cost, simulation.program, simulation.timeline)
    if span is None:
        return told
    return f"{told} If the prices on the critical path err alike, it takes {show_ns(span[0])} to {show_ns(span[1])}."
