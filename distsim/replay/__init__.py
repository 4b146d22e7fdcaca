"""A trace run again in simulated time: as it was, at another speed, on another cluster or under another back end.

A trace of the simulator, replayed under its own cluster, gives the same times again. A recorded one gives what the simulator makes of
the same calls: durations of compute and the pauses between calls are kept, those of communication are priced anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from distsim.cluster import Cluster
from distsim.cost import CostModel
from distsim.engine import Run, run
from distsim.errors import UsageError
from distsim.profiles import DEFAULT_BACKEND, PROFILES
from distsim.program.records import Program
from distsim.replay.program import UNSCALED, Scale, program_of
from distsim.replay.real import Prepared, prepared
from distsim.replay.source import as_source, prices_of
from distsim.timeline import Timeline, timeline
from distsim.trace import Trace

__all__ = ["Prepared", "Replay", "Scale", "prepared", "program_of", "replay"]


@dataclass(frozen=True)
class Replay:
    """``trace`` has the rows of ``source``, with the times of this run. ``run`` is the run of ``program``, pauses included."""

    source: Trace
    program: Program
    run: Run
    cost: CostModel
    trace: Trace

    @cached_property
    def timeline(self) -> Timeline:
        """Where the time went."""
        return timeline(self.trace)

    @property
    def makespan_ns(self) -> int:
        return self.run.makespan_ns


def replay(
    trace: Trace,
    *,
    cluster: str | Mapping[str, Any] | Cluster | None = None,
    backend: str | None = None,
    scale: Scale = UNSCALED,
    ordered: bool = False,
) -> Replay:
    """Simulate a trace's calls again.

    ``cluster``: None takes the prices that the trace carries, else the preset it names, else the back end's default. ``backend``: None
    takes the trace's. ``scale``: see `Scale`. ``ordered``: the time-ordered engine, even where the fast one is exact. Receives from any
    source take what they took; a simulated trace under unchanged conditions needs no help for that.
    Raises UsageError for a trace that tells of no program.
    """
    chosen = backend or str(trace.header.get("backend") or DEFAULT_BACKEND)
    if chosen not in PROFILES:
        raise UsageError(f"the trace is of back end `{chosen}`, which has no profile", "name one with --backend")
    nodes = int(trace.header.get("nodes") or 1)
    again = trace.header.get("source") == "simulated" and cluster is None and backend is None and scale == UNSCALED
    rebuilt = program_of(trace, backend=chosen, nodes=nodes, options=trace.header.get("options"), scale=scale, resolve=not again)
    program = rebuilt.program
    cost = CostModel(prices_of(trace, cluster, chosen), program.world_size, program.local_size, program.link_faults)
    done = run(program, PROFILES[chosen], cost, ordered=ordered)
    return Replay(trace, program, done, cost, as_source(trace, rebuilt, done.trace))
