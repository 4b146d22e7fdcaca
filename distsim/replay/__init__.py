"""A trace run again in simulated time: as it was, at another speed, on another cluster or under another back end.

A trace of the simulator, replayed under its own cluster, gives the same times again. A recorded one gives what the simulator makes of
the same calls: durations of compute and the pauses between calls are kept, those of communication are priced anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from distsim.cluster import PRESETS, Cluster, cluster_from, default_cluster
from distsim.cost import CostModel
from distsim.engine import Run, run
from distsim.errors import UsageError
from distsim.profiles import PROFILES
from distsim.program.records import Program
from distsim.replay.program import UNSCALED, Rebuilt, Scale, program_of
from distsim.timeline import Timeline, timeline
from distsim.trace import TIMES, Trace

__all__ = ["Replay", "Scale", "program_of", "replay"]


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
    chosen = backend or str(trace.header.get("backend") or "gloo")
    if chosen not in PROFILES:
        raise UsageError(f"the trace is of back end `{chosen}`, which has no profile", "name one with --backend")
    nodes = int(trace.header.get("nodes") or 1)
    again = trace.header.get("source") == "simulated" and cluster is None and backend is None and scale == UNSCALED
    rebuilt = program_of(trace, backend=chosen, nodes=nodes, options=trace.header.get("options"), scale=scale, resolve=not again)
    program = rebuilt.program
    cost = CostModel(_cluster(trace, cluster, chosen), program.world_size, program.local_size, program.link_faults)
    done = run(program, PROFILES[chosen], cost, ordered=ordered)
    return Replay(trace, program, done, cost, _as_source(trace, rebuilt, done))


def _cluster(trace: Trace, chosen: str | Mapping[str, Any] | Cluster | None, backend: str) -> Cluster:
    if chosen is not None:
        return cluster_from(chosen)
    if trace.header.get("prices"):
        return cluster_from(trace.header["prices"])
    named = trace.header.get("cluster")
    return cluster_from(named) if named in PRESETS else default_cluster(backend)


def _as_source(source: Trace, rebuilt: Rebuilt, done: Run) -> Trace:
    """The run with the rows of the trace that it came from, and that trace's facts; times, matches and queues are the run's."""
    kept = rebuilt.kept
    number = np.cumsum(kept) - 1
    order = np.argsort(source["rank"], kind="stable")  # the program's rows go rank by rank
    columns = {name: column.copy() for name, column in source.columns.items()}
    for name in (*TIMES, "queue"):
        columns[name][order] = done.trace[name][kept]
    match = done.trace["match"][kept]
    columns["match"][order] = np.where(match >= 0, order[number[match]] if len(order) else match, match)
    told = {name: value for name, value in source.header.items() if name != "values"}  # a replay works out none
    header = {**told, "source": "simulated", **{name: done.trace.header[name] for name in _OF_RUN}}
    return Trace(header, {**source.tables, "queue": done.trace.tables["queue"]}, columns)


#: Keys of a header that tell of the run, not of the program.
_OF_RUN = ("backend", "cluster", "prices", "outcome", "makespan_ns", "complete", "ends")
