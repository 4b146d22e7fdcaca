"""Whether what ranks hold fits their device (DS806)."""

from __future__ import annotations

from typing import Any

import numpy as np

from distsim.cluster import Cluster
from distsim.expr import Expression
from distsim.findings.record import Finding, Place
from distsim.names import listing
from distsim.program.records import Program
from distsim.scenario import Scenario
from distsim.scenario.entries import Block
from distsim.units import show_bytes

#: Rows of the finding's table.
_MOST = 16


def memory_findings(scenario: Scenario, program: Program, cluster: Cluster) -> tuple[Finding, ...]:
    """One finding for all entries of `memory:` that are more than a device has, the largest first; none where all fit."""
    room = cluster.device.memory_nbytes
    held = [(sum(part.parts.values()), name, part, _ranks(part.ranks, program)) for name, part in scenario.memory.items()]
    over = sorted((row for row in held if row[0] > room and row[3]), key=lambda row: (-row[0], row[3]))
    if not over:
        return ()
    total, name, part, _ = over[0]
    kinds = listing([f"{kind} {show_bytes(n)}" for kind, n in part.parts.items()])
    message = f"{name} needs {show_bytes(total)}, {cluster.device.name} has {show_bytes(room)}: {kinds}"
    ranks = tuple(sorted({rank for row in over for rank in row[3]}))
    place = _place(scenario, name)
    table = (
        [f"{name}: {show_bytes(total)} on {len(ranks)} ranks" for total, name, _, ranks in over[:_MOST]] if len(over) > 1 else []
    )
    more = [f"{len(over) - _MOST} more"] if len(over) > _MOST else []
    advice = "shard more, recompute activations, or take smaller micro-batches"
    return (Finding("DS806", "warning", message, ranks, ranks, (*table, *more, advice), (place,)),)


def _place(scenario: Scenario, name: str) -> Place:
    """Where the entry is written; one that a strategy added stands nowhere: then where the first strategy's block does."""
    spot, top = scenario.problem(("memory", name), ""), scenario.problem((), "")
    block = next((entry for entry in scenario.program if isinstance(entry, Block)), None)
    if (spot.line, spot.column) == (top.line, top.column) and block is not None:
        return Place(scenario.file, block.line, block.column, "memory")
    return Place(scenario.file, spot.line, spot.column, "memory")


def _ranks(selector: Any, program: Program) -> tuple[int, ...]:
    if selector is None:
        return tuple(range(program.world_size))
    if not isinstance(selector, Expression):
        return tuple(selector)
    found = np.broadcast_to(np.asarray(selector.evaluate(dict(program.names))), (program.world_size,))
    return tuple(np.flatnonzero(found).tolist())
