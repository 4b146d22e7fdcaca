"""A trace run again: in simulated time, as it was, at another speed, on another cluster or under
another back end; or for real.

A trace of the simulator, replayed under its own cluster, gives the same times again. A recorded one
gives what the simulator makes of the same calls: durations of compute and the pauses between calls
are kept, those of communication are priced anew.
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
from distsim.program.code import Program
from distsim.scenario import Scenario
from distsim.simulation.simulate_scenario import Simulation, simulate_program
from distsim.trace.model import TIME_COLUMNS, Trace
from distsim.trace.run_end import is_partial
from distsim.trace_replay.rebuild import (
    UNSCALED,
    RebuiltProgram,
    ReplayScale,
    node_count,
    rebuild_program,
)

#: Keys of a header that tell of the program, and stay those of the trace; all others are the run's.
#: A replay works out no values.
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
    """``trace`` has the rows of ``source``, with the times of this run. ``run`` is the run of
    ``program``, pauses included.
    """

    source: Trace
    program: Program
    run: SimulatedRun
    cost: CostModel
    trace: Trace

    @cached_property
    def timeline(self) -> Timeline:
        """Where the time went."""
        return build_timeline(self.trace)

    @property
    def makespan_ns(self) -> int:
        return self.run.makespan_ns

    @property
    def outcome(self) -> str:
        """The run's; of a trace that did not come to its end "partial" where the run did, or says
        nothing of how the rest would end.
        """
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

    ``cluster``: None takes the prices that the trace carries, else the preset it names, else the
    back end's default. ``backend``: None takes the trace's. ``scale``: see `ReplayScale`.
    ``ordered``: the time-ordered engine, even where the fast one is exact. Receives from any source
    take what they took; a simulated trace under unchanged conditions needs no help for that. Raises
    UsageError for a trace that tells of no program.
    """
    chosen = _choose_backend(trace, backend)
    again = (
        trace.header.get("source") == "simulated"
        and cluster is None
        and backend is None
        and scale == UNSCALED
    )
    rebuilt = rebuild_program(trace, backend=chosen, scale=scale, resolve=not again)
    cost = _cost_model(trace, cluster, rebuilt.program)
    done = run_program(rebuilt.program, BACKEND_PROFILES[chosen], cost, ordered=ordered)
    return ReplayResult(
        trace, rebuilt.program, done, cost, _with_source_rows(trace, rebuilt, done.trace)
    )


def _replayed_outcome(source: Trace, outcome: str) -> str:
    unknown = (
        source.header.get("cut")
        or not source.header.get("outcome")
        or outcome in ("completes", "wrong-data")
    )
    return "partial" if is_partial(source) and unknown else outcome


def _choose_backend(trace: Trace, wanted: str | None) -> str:
    """The back end that was asked for, else the trace's. Raises UsageError for one without a
    profile.
    """
    chosen = wanted or str(trace.header.get("backend") or DEFAULT_BACKEND)
    if chosen not in BACKEND_PROFILES:
        raise UsageError(
            f"the trace is of back end `{chosen}`, which has no profile", "name one with --backend"
        )
    return chosen


def _cost_model(trace: Trace, wanted: ClusterChoice, program: Program) -> CostModel:
    """Under the cluster that was asked for, else the prices that the trace carries, else the preset
    it names, else the back end's.
    """
    named = trace.header.get("cluster")
    given = (
        wanted
        if wanted is not None
        else trace.header.get("prices") or (named if named in PRESETS else None)
    )
    cluster = default_cluster(program.backend) if given is None else cluster_from(given)
    return CostModel(cluster, program.world_size, program.local_size, program.link_faults)


def _with_source_rows(source: Trace, rebuilt: RebuiltProgram, done: Trace) -> Trace:
    """A run with the rows of the trace that it came from, and that trace's facts; times, matches
    and queues are the run's.
    """
    kept = rebuilt.kept
    number = np.cumsum(kept) - 1
    order = np.argsort(source["rank"], kind="stable")  # the program's rows go rank by rank
    columns = {name: column.copy() for name, column in source.columns.items()}
    for name in (*TIME_COLUMNS, "queue"):
        columns[name][order] = done[name][kept]
    match = done["match"][kept]
    if done.header["source"] == "simulated" and len(order):  # a match is the first row that has it
        match = np.where(match >= 0, order[number[match]], match)
    columns["match"][order] = match
    kept_facts = {
        name: source.header[name] for name in _PROGRAM_HEADER_KEYS if name in source.header
    }
    run_facts = {
        name: value for name, value in done.header.items() if name not in _PROGRAM_HEADER_KEYS
    }
    if done.header["source"] == "simulated" and is_partial(source):
        run_facts |= {
            "outcome": _replayed_outcome(source, str(done.header.get("outcome"))),
            "complete": False,
        }
        run_facts |= {"cut": source.header["cut"]} if source.header.get("cut") else {}
    return Trace(
        {**kept_facts, **run_facts}, {**source.tables, "queue": done.tables["queue"]}, columns
    )


# --- for real ---


@dataclass(frozen=True)
class RealReplay:
    """``simulation`` is of the calls of ``source``, pauses included."""

    source: Trace
    rebuilt: RebuiltProgram
    simulation: Simulation

    @property
    def program(self) -> Program:
        """The simulated calls, with memory that a process can work in."""
        return self.rebuilt.program

    def rows_of(self, recorded: Trace) -> Trace:
        """A recording of the run with the rows of the source: without the pauses."""
        return _with_source_rows(self.source, self.rebuilt, recorded)


def prepare_real_replay(
    trace: Trace,
    file: str,
    *,
    backend: str,
    cluster: ClusterChoice = None,
    scale: ReplayScale = UNSCALED,
) -> RealReplay:
    """Make a trace's calls a program again and simulate it under ``backend``. ``cluster``: see
    `replay`.

    ``file``: what the trace is called in a report. Raises UsageError for a trace that tells of no
    program.
    """
    if not len(trace):
        raise UsageError(
            f"{file} has no calls, so there is nothing to run",
            "record one with `distsim run FILE --real --trace F.jsonl`",
        )
    plain, named = (
        rebuild_program(
            trace, backend=_choose_backend(trace, backend), scale=scale, real=True, named=named
        )
        for named in (False, True)
    )
    program, size, nodes = plain.program, trace.world_size, node_count(trace)
    world = {"nodes": nodes, "ranks_per_node": size // nodes} if size % nodes == 0 else size
    scenario = Scenario(
        name=program.name, world=world, backend=backend, program=[], file=program.file or file
    )
    simulation = simulate_program(
        scenario, program, _cost_model(trace, cluster, program), with_values=False
    )
    return RealReplay(trace, named, simulation)


__all__ = [
    "RealReplay",
    "ReplayResult",
    "ReplayScale",
    "prepare_real_replay",
    "rebuild_program",
    "replay_trace",
]
