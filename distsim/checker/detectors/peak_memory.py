"""Compare the peak memory that a scenario states with the memory of a device (DS806)."""

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
    """One entry of `memory:`: the peak of each of its ranks in bytes, by kind.

    ``total`` decides whether it fits.
    """

    name: str
    ranks: tuple[int, ...]
    parts: Mapping[str, int]
    allocated: int = 0  # the peak of all tensors together; 0 if unknown

    @property
    def total(self) -> int:
        """The peak of each rank in bytes, all kinds together."""
        return sum(self.parts.values())


def peak_memory(scenario: Scenario, program: Program) -> tuple[PeakMemory, ...]:
    """The entries of `memory:` that select a rank, including those of strategies, in file order."""
    found = [
        PeakMemory(name, _selected_ranks(part.ranks, program), part.parts, part.allocated_nbytes)
        for name, part in scenario.memory.items()
    ]
    return tuple(one for one in found if one.ranks)


def memory_findings(scenario: Scenario, program: Program, cluster: Cluster) -> tuple[Finding, ...]:
    """One finding on all entries of `memory:` that exceed the device, the largest first.

    Before it come findings on selectors without ranks and on tensors that exceed the device alone.
    """
    capacity = cluster.device.memory_nbytes
    peaks = peak_memory(scenario, program)
    with_ranks = {peak.name for peak in peaks}
    empty = [name for name in scenario.memory if name not in with_ranks]
    found = [_empty_selector_finding(scenario, name) for name in empty]
    found += _oversized_tensors(scenario, program, cluster)
    excessive = [peak for peak in peaks if peak.total > capacity]
    if excessive:
        excessive.sort(key=lambda peak: (-peak.total, peak.ranks))
        found.append(_excessive_memory_finding(scenario, cluster, excessive))
    return tuple(found)


def _excessive_memory_finding(
    scenario: Scenario, cluster: Cluster, excessive: list[PeakMemory]
) -> Finding:
    # Imported here, because most programs fit and need no wording.
    from distsim.checker.wording import rank_list

    worst, device = excessive[0], cluster.device
    kinds = name_list([f"{kind} {show_bytes(nbytes)}" for kind, nbytes in worst.parts.items()])
    needs = "needs" if len(worst.ranks) == 1 else "each need"
    message = (
        f"{rank_list(worst.ranks)} {needs} {show_bytes(worst.total)} of memory, but "
        f"{device.name} has {show_bytes(device.memory_nbytes)} (per rank: {kinds})"
    )
    ranks = tuple(sorted({rank for peak in excessive for rank in peak.ranks}))
    place = _memory_place(scenario, worst.name)
    lines = [message]
    if len(excessive) > 1:
        lines += [
            f"  {peak.name}: {show_bytes(peak.total)} on {len(peak.ranks)} ranks"
            for peak in excessive[:_MAX_ROWS]
        ]
    if len(excessive) > _MAX_ROWS:
        lines.append(f"  … and {len(excessive) - _MAX_ROWS} more")
    advice = "shard more, recompute activations, or use smaller micro-batches"
    return Finding("DS806", "error", "\n".join(lines), ranks, ranks, (advice,), (place,))


def _oversized_tensors(
    scenario: Scenario, program: Program, cluster: Cluster
) -> tuple[Finding, ...]:
    """Declared tensors that alone exceed the memory of a device, the largest first."""
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
    if not found:
        return ()
    from distsim.checker.wording import rank_list

    return tuple(
        Finding(
            "DS806",
            "error",
            f"tensor {name} needs {show_bytes(round(nbytes))} on {rank_list(ranks)}, but "
            f"{cluster.device.name} has {show_bytes(room)}",
            ranks,
            ranks,
            (f"split {name}, or give it fewer copies",),
            (_declaration_place(scenario, ("tensors", name), "tensor"),),
        )
        for nbytes, name, ranks in sorted(found, key=lambda one: (-one[0], one[1]))[:_MAX_ROWS]
    )


def _empty_selector_finding(scenario: Scenario, name: str) -> Finding:
    message = f"`ranks` of the memory entry `{name}` selects no rank"
    return Finding("DS901", "warning", message, places=(_memory_place(scenario, name),))


def _memory_place(scenario: Scenario, name: str) -> SourceLocation:
    """The place of an entry; of one that a strategy added, the place of the first strategy."""
    return _declaration_place(scenario, ("memory", name), "memory")


def _declaration_place(scenario: Scenario, path: tuple[str, str], op: str) -> SourceLocation:
    spot, top = scenario.problem(path, ""), scenario.problem((), "")
    # A path that is not in the file has the position of the file's root.
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
