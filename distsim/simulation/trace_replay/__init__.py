"""Replays a trace: simulates its calls again, or prepares them for a real run.

A replay may change the speed, the cluster or the backend. A simulated trace under its own cluster
yields the same times again. A recorded trace yields the prediction for the same calls: durations of
compute and the pauses between calls are kept, those of communication are predicted.

`rebuild` turns the trace into a program; `compact` turns it into a readable scenario.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distsim.analysis.timeline import Timeline, build_timeline
from distsim.backends import BACKEND_PROFILES, DEFAULT_BACKEND, default_cluster
from distsim.common.errors import UsageError
from distsim.engine import SimulatedRun, run_program
from distsim.hardware.cluster import PRESETS, Cluster, cluster_from
from distsim.hardware.cost import CostModel
from distsim.program.model import Program
from distsim.scenario import Scenario
from distsim.simulation.simulate_scenario import Simulation, simulate_program
from distsim.simulation.trace_replay.rebuild import (
    UNSCALED,
    RebuiltProgram,
    ReplayScale,
    node_count,
    rebuild_program,
)
from distsim.trace.model import TIME_COLUMNS, Trace
from distsim.trace.run_end import is_partial

#: Keys of a header that describe the program and are kept from the trace; all others come from the
#: new run. A replay computes no values.
_PROGRAM_HEADER_KEYS = (
    "name",
    "file",
    "world_size",
    "nodes",
    "local_size",
    "groups",
    "group_options",
    "mesh",
    "options",
    "link_faults",
)
#: A preset's name, or a cluster's file.
ClusterChoice = str | Mapping[str, object] | Cluster | None


@dataclass(frozen=True)
class ReplayResult:
    """A simulated replay.

    ``trace`` has the rows of ``source`` with the times of the replay. ``run`` is the run of
    ``program``, which has pauses too.
    """

    source: Trace
    program: Program
    run: SimulatedRun
    cost: CostModel
    trace: Trace

    @cached_property
    def timeline(self) -> Timeline:
        """How the time is spent."""
        return build_timeline(self.trace)

    @property
    def makespan_ns(self) -> int:
        """The duration of the replayed run."""
        return self.run.makespan_ns

    @property
    def outcome(self) -> str:
        """The outcome of the replay; see `_replayed_outcome` for partial traces."""
        return _replayed_outcome(self.source, self.run.outcome)


def replay_trace(
    trace: Trace,
    *,
    cluster: ClusterChoice = None,
    backend: str | None = None,
    scale: ReplayScale = UNSCALED,
    ordered: bool = False,
) -> ReplayResult:
    """Simulate a trace's calls again.

    ``cluster``: None takes the costs that the trace contains, else the preset that it names, else
    the backend's default. ``backend``: None takes the trace's. ``ordered``: use the event-driven
    engine even if the fast one is exact. Receives from any source take the same messages again; a
    simulated trace under unchanged conditions needs no help for that. Raises UsageError for a trace
    without a program.
    """
    chosen = _choose_backend(trace, backend)
    is_unchanged = cluster is None and backend is None and scale == UNSCALED
    repeats_simulation = is_unchanged and trace.header.get("source") == "simulated"
    rebuilt = rebuild_program(trace, backend=chosen, scale=scale, resolve=not repeats_simulation)
    cost = _cost_model(trace, cluster, rebuilt.program)
    run = run_program(rebuilt.program, BACKEND_PROFILES[chosen], cost, ordered=ordered)
    replayed = _with_source_rows(trace, rebuilt, run.trace)
    return ReplayResult(trace, rebuilt.program, run, cost, replayed)


def _replayed_outcome(source: Trace, outcome: str) -> str:
    """The outcome of a replay, given the run's outcome.

    It is "partial" if the trace is partial and the run does not reveal how the rest would end.
    """
    if not is_partial(source):
        return outcome
    if source.header.get("cut") or not source.header.get("outcome"):
        return "partial"
    return "partial" if outcome in ("completes", "wrong-data") else outcome


def _choose_backend(trace: Trace, wanted: str | None) -> str:
    """The wanted backend, else the trace's. Raises UsageError for one without a profile."""
    chosen = wanted or str(trace.header.get("backend") or DEFAULT_BACKEND)
    if chosen not in BACKEND_PROFILES:
        raise UsageError(
            f"distsim does not know the backend `{chosen}` of this trace", "name one with --backend"
        )
    return chosen


def _cost_model(trace: Trace, wanted: ClusterChoice, program: Program) -> CostModel:
    """The cost model of the wanted cluster, else of the trace's, else of the backend's default."""
    choice = wanted
    if choice is None:
        name = trace.header.get("cluster")
        choice = trace.header.get("prices") or (name if name in PRESETS else None)
    cluster = default_cluster(program.backend) if choice is None else cluster_from(choice)
    return CostModel(cluster, program.world_size, program.local_size, program.link_faults)


def _with_source_rows(source: Trace, rebuilt: RebuiltProgram, run: Trace) -> Trace:
    """A run with the rows and the program's header keys of the trace that it replays.

    Times, matches and queues are those of the run; its pauses are dropped.
    """
    kept = rebuilt.kept
    # The rows of the program are ordered by rank: the k-th kept row is row order[k] of the source.
    order = np.argsort(source["rank"], kind="stable")
    columns = {name: column.copy() for name, column in source.columns.items()}
    for name in (*TIME_COLUMNS, "queue"):
        columns[name][order] = run[name][kept]
    match = run["match"][kept]
    is_simulated = run.header["source"] == "simulated"
    if is_simulated and len(order):
        # A simulated match is the number of its first row, so it has to be renumbered.
        kept_before = np.cumsum(kept) - 1
        match = np.where(match >= 0, order[kept_before[match]], match)
    columns["match"][order] = match

    header = {name: source.header[name] for name in _PROGRAM_HEADER_KEYS if name in source.header}
    header |= {
        name: value for name, value in run.header.items() if name not in _PROGRAM_HEADER_KEYS
    }
    if is_simulated and is_partial(source):
        header["outcome"] = _replayed_outcome(source, str(run.header.get("outcome")))
        header["complete"] = False
        if source.header.get("cut"):
            header["cut"] = source.header["cut"]
    return Trace(header, {**source.tables, "queue": run.tables["queue"]}, columns)


# --- for real ---


@dataclass(frozen=True)
class RealReplay:
    """A replay that is ready for a real run. ``simulation``: of the same calls, with pauses."""

    source: Trace
    rebuilt: RebuiltProgram
    simulation: Simulation

    @property
    def program(self) -> Program:
        """The simulated calls with named buffers, so that a process can allocate them first."""
        return self.rebuilt.program

    def rows_of(self, recorded: Trace) -> Trace:
        """A recording of the run, reduced to the rows of the source."""
        return _with_source_rows(self.source, self.rebuilt, recorded)


def prepare_real_replay(
    trace: Trace,
    file: str,
    *,
    backend: str,
    cluster: ClusterChoice = None,
    scale: ReplayScale = UNSCALED,
) -> RealReplay:
    """Rebuild the program of a trace, and simulate it with ``backend``.

    ``file``: the name of the trace in a report. ``cluster``: see `replay_trace`. Raises UsageError
    for a trace without a program.
    """
    if not len(trace):
        raise UsageError(
            f"{file} has no calls, so there is nothing to run",
            "record one with `distsim run FILE --real --trace F.jsonl`",
        )
    chosen = _choose_backend(trace, backend)
    unnamed = rebuild_program(trace, backend=chosen, scale=scale, real=True)
    named = rebuild_program(trace, backend=chosen, scale=scale, real=True, named=True)
    program, size, nodes = unnamed.program, trace.world_size, node_count(trace)
    world = {"nodes": nodes, "ranks_per_node": size // nodes} if size % nodes == 0 else size
    scenario = Scenario(
        name=program.name, world=world, backend=backend, program=[], file=program.file or file
    )
    cost = _cost_model(trace, cluster, program)
    simulation = simulate_program(scenario, program, cost, with_values=False)
    return RealReplay(trace, named, simulation)


__all__ = [
    "RealReplay",
    "ReplayResult",
    "ReplayScale",
    "prepare_real_replay",
    "rebuild_program",
    "replay_trace",
]
