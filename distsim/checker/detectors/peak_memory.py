"""What ranks hold at their peak, and whether it fits their device (DS806)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from distsim.common.expressions import Expression
from distsim.common.message_text import name_list
from distsim.common.units import show_bytes
from distsim.findings.finding_types import Finding, SourceLocation
from distsim.hardware.cluster import Cluster
from distsim.operations.core.resolved_call import DTYPE_BYTES
from distsim.program.model import Program
from distsim.scenario import Scenario
from distsim.scenario.format.models.entries import ScenarioBlock

#: Rows of the finding's table.
_MAX_ROWS = 16


class PeakMemory(NamedTuple):
    """One entry of `memory:`: what each of its ranks holds at its peak, in bytes, by kind. What
    fits is judged by ``total``.
    """

    name: str
    ranks: tuple[int, ...]
    parts: Mapping[str, int]
    allocated: int = 0  # the most that tensors hold at a time; 0: not known

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def peak_memory(scenario: Scenario, program: Program) -> tuple[PeakMemory, ...]:
    """Every entry of `memory:` that selects a rank, those of strategies included, in the file's
    order.
    """
    found = [
        PeakMemory(name, _selected_ranks(part.ranks, program), part.parts, part.allocated_nbytes)
        for name, part in scenario.memory.items()
    ]
    return tuple(one for one in found if one.ranks)


def memory_findings(scenario: Scenario, program: Program, cluster: Cluster) -> tuple[Finding, ...]:
    """One finding for all entries of `memory:` that are more than a device has, the largest first;
    none where all fit.
    """
    room = cluster.device.memory_nbytes
    stated = peak_memory(scenario, program)
    nobody = tuple(
        _empty_selector_finding(scenario, name)
        for name in scenario.memory
        if name not in {one.name for one in stated}
    )
    over = sorted(
        (one for one in stated if one.total > room), key=lambda one: (-one.total, one.ranks)
    )
    nobody = (*nobody, *_oversized_tensors(scenario, program, cluster))
    if not over:
        return nobody
    worst = over[0]
    kinds = name_list([f"{kind} {show_bytes(n)}" for kind, n in worst.parts.items()])
    message = f"{worst.name} needs {show_bytes(worst.total)}, {cluster.device.name} has {show_bytes(room)}: {kinds}"
    ranks = tuple(sorted({rank for one in over for rank in one.ranks}))
    place = _memory_place(scenario, worst.name)
    table = (
        [
            f"{one.name}: {show_bytes(one.total)} on {len(one.ranks)} ranks"
            for one in over[:_MAX_ROWS]
        ]
        if len(over) > 1
        else []
    )
    more = [f"{len(over) - _MAX_ROWS} more"] if len(over) > _MAX_ROWS else []
    advice = "shard more, recompute activations, or take smaller micro-batches"
    return (
        *nobody,
        Finding("DS806", "error", message, ranks, ranks, (*table, *more, advice), (place,)),
    )


def _oversized_tensors(
    scenario: Scenario, program: Program, cluster: Cluster
) -> tuple[Finding, ...]:
    """Declared tensors that alone are more than a device has, the largest first."""
    room, found = cluster.device.memory_nbytes, []
    for tensor in program.tensors.values():
        nbytes = np.asarray(float(DTYPE_BYTES[tensor.dtype])) * tensor.copies
        for size in tensor.shape or ():
            nbytes = nbytes * size
        if np.max(nbytes) > room and tensor.shape is not None:
            ranks = tuple(
                np.flatnonzero(np.broadcast_to(nbytes > room, (program.world_size,))).tolist()
            )
            found.append((float(np.max(nbytes)), tensor.name, ranks))
    return tuple(
        Finding(
            "DS806",
            "error",
            f"the tensor {name} has {show_bytes(round(nbytes))}, {cluster.device.name} has {show_bytes(room)}",
            ranks,
            ranks,
            ("cut it, or give it fewer copies",),
            (_declaration_place(scenario, ("tensors", name), "tensor"),),
        )
        for nbytes, name, ranks in sorted(found, key=lambda one: (-one[0], one[1]))[:_MAX_ROWS]
    )


def _empty_selector_finding(scenario: Scenario, name: str) -> Finding:
    said = f"the selector of the memory {name} selects no rank"
    return Finding("DS901", "warning", said, places=(_memory_place(scenario, name),))


def _memory_place(scenario: Scenario, name: str) -> SourceLocation:
    """Where the entry is written; one that a strategy added stands nowhere: then where the first
    strategy's block does.
    """
    return _declaration_place(scenario, ("memory", name), "memory")


def _declaration_place(scenario: Scenario, path: tuple[str, str], op: str) -> SourceLocation:
    spot, top = scenario.problem(path, ""), scenario.problem((), "")
    block = next((entry for entry in scenario.program if isinstance(entry, ScenarioBlock)), None)
    if (spot.line, spot.column) == (top.line, top.column) and block is not None:
        return SourceLocation(scenario.file, block.line, block.column, op)
    return SourceLocation(scenario.file, spot.line, spot.column, op)


def _selected_ranks(
    selector: Expression | Iterable[int] | None, program: Program
) -> tuple[int, ...]:
    if selector is None:
        return tuple(range(program.world_size))
    if not isinstance(selector, Expression):
        return tuple(selector)
    found = np.broadcast_to(
        np.asarray(selector.evaluate(dict(program.names))), (program.world_size,)
    )
    return tuple(np.flatnonzero(found).tolist())
