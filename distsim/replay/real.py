"""A trace made ready to run on torch.distributed, with what the simulator says of it beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distsim.cluster import Cluster
from distsim.cost import CostModel
from distsim.errors import UsageError
from distsim.profiles import PROFILES
from distsim.program.records import Program
from distsim.replay.program import UNSCALED, Rebuilt, Scale, program_of
from distsim.replay.source import as_source, prices_of
from distsim.scenario import Scenario
from distsim.simulation import Simulation, simulate_program
from distsim.trace import Trace


@dataclass(frozen=True)
class Prepared:
    """``simulation`` is of the calls of ``source``, pauses included."""

    source: Trace
    rebuilt: Rebuilt
    simulation: Simulation

    @property
    def program(self) -> Program:
        """The simulated calls, with memory that a process can work in."""
        return self.rebuilt.program

    def rows_of(self, recorded: Trace) -> Trace:
        """A recording of the run with the rows of the source: without the pauses."""
        return as_source(self.source, self.rebuilt, recorded)


def prepared(
    trace: Trace,
    file: str,
    *,
    backend: str,
    cluster: str | Mapping[str, Any] | Cluster | None = None,
    scale: Scale = UNSCALED,
) -> Prepared:
    """Make a trace's calls a program again and simulate it under ``backend``. ``cluster``: see `replay`.

    ``file``: what the trace is called in a report. Raises UsageError for a trace that tells of no program.
    """
    if not len(trace):
        raise UsageError(
            f"{file} has no calls, so there is nothing to run", "record one with `distsim run FILE --real --trace F.jsonl`"
        )
    if backend not in PROFILES:
        raise UsageError(f"the trace is of back end `{backend}`, which has no profile", "name one with --backend")
    nodes, size = int(trace.header.get("nodes") or 1), trace.world_size
    options = trace.header.get("options")
    plain, named = (
        program_of(trace, backend=backend, nodes=nodes, options=options, scale=scale, real=True, named=named)
        for named in (False, True)
    )
    program = plain.program
    scenario = Scenario(name=program.name, world=_world(size, nodes), backend=backend, program=[], file=program.file or file)
    cost = CostModel(prices_of(trace, cluster, backend), size, program.local_size, program.link_faults)
    simulation = simulate_program(scenario, program, cost, with_values=False)
    return Prepared(trace, named, simulation)


def _world(size: int, nodes: int) -> Any:
    return {"nodes": nodes, "ranks_per_node": size // nodes} if size % nodes == 0 else size


__all__ = ["Prepared", "prepared"]
