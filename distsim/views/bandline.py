"""The band of a makespan: the bands of what is on its critical path, added up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distsim.cost import CostModel
from distsim.cost.band import COMPUTED, several
from distsim.ops.table import OPS
from distsim.units import show_ns

if TYPE_CHECKING:
    from distsim.program.records import Program
    from distsim.simulation import Simulation
    from distsim.timeline import Timeline


def band_line(simulation: Simulation) -> str:
    """The line that a report ends with: the cost model, its band, and where a run on the machines would end."""
    cost = simulation.cost
    told = f"Times by the cost model of {cost.name}: {cost.error_band}."
    span = makespan_band(cost, simulation.program, simulation.timeline)
    if span is None:
        return told
    return f"{told} If the prices on the critical path err alike, it takes {show_ns(span[0])} to {show_ns(span[1])}."


def makespan_band(cost: CostModel, program: Program, timeline: Timeline) -> tuple[int, int] | None:
    """(shortest, longest) ns if every price on the critical path is at the end of its band; None where there is no band.

    Compute by a given time counts as known; by FLOP and bytes it has the band of `COMPUTED`.
    """
    if not cost.nccl or not timeline.critical_path or cost.cluster.measured:
        return None
    calls = several(cost, program.world_size)
    priced = any(call.fields.get("flops") or call.fields.get("mem_bytes") for code in program.codes for call in code.calls)
    low, high = 0.0, 0.0
    for piece in timeline.critical_path:
        ns = piece.end_ns - piece.start_ns
        row = OPS.get(piece.op)
        moves = row is not None and row.kind in ("collective", "p2p", "batch")
        below, above = calls if moves else COMPUTED if priced else (1.0, 1.0)
        low, high = low + ns * below, high + ns * above
    return (int(low), int(high)) if high > low else None
