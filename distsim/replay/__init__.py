"""A trace run again: in simulated time, as it was, at another speed, on another cluster or under another back end; or for real.

A trace of the simulator, replayed under its own cluster, gives the same times again. A recorded one gives what the simulator makes of
the same calls: durations of compute and the pauses between calls are kept, those of communication are priced anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distsim.cluster import PRESETS, Cluster, cluster_from
from distsim.cost import CostModel
from distsim.engine import Run, run
from distsim.errors import UsageError
from distsim.profiles import DEFAULT_BACKEND, PROFILES, default_cluster
from distsim.program.records import Program
from distsim.replay.program import UNSCALED, Rebuilt, Scale, nodes_of, program_of
from distsim.scenario import Scenario
from distsim.simulation import Simulation, simulate_program
from distsim.timeline import Timeline, timeline
from distsim.trace import TIMES, Trace, is_partial

#: Keys of a header that tell of the program, and stay those of the trace; all others are the run's. A replay works out no values.
_OF_PROGRAM = ("name", "file", "world_size", "nodes", "local_size", "groups", "group_options", "mesh", "options", "link_faults")
#: A preset's name, or a cluster's file.
ClusterWish = str | Mapping[str, object] | Cluster | None


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

    @property
    def outcome(self) -> str:
        """The run's; of a trace that did not come to its end "partial" where the run did, or says nothing of how the rest would end."""
        return _outcome(self.source, self.run.outcome)


def replay(
    trace: Trace, *, cluster: ClusterWish = None, backend: str | None = None, scale: Scale = UNSCALED, ordered: bool = False
) -> Replay:
    """Simulate a trace's calls again.

    ``cluster``: None takes the prices that the trace carries, else the preset it names, else the back end's default. ``backend``: None
    takes the trace's. ``scale``: see `Scale`. ``ordered``: the time-ordered engine, even where the fast one is exact. Receives from any
    source take what they took; a simulated trace under unchanged conditions needs no help for that.
    Raises UsageError for a trace that tells of no program.
    """
    chosen = _backend_of(trace, backend)
    again = trace.header.get("source") == "simulated" and cluster is None and backend is None and scale == UNSCALED
    rebuilt = program_of(trace, backend=chosen, scale=scale, resolve=not again)
    cost = _cost(trace, cluster, rebuilt.program)
    done = run(rebuilt.program, PROFILES[chosen], cost, ordered=ordered)
    return Replay(trace, rebuilt.program, done, cost, _as_source(trace, rebuilt, done.trace))


def _outcome(source: Trace, outcome: str) -> str:
    unknown = source.header.get("cut") or not source.header.get("outcome") or outcome in ("completes", "wrong-data")
    return "partial" if is_partial(source) and unknown else outcome


def _backend_of(trace: Trace, wanted: str | None) -> str:
    """The back end that was asked for, else the trace's. Raises UsageError for one without a profile."""
    chosen = wanted or str(trace.header.get("backend") or DEFAULT_BACKEND)
    if chosen not in PROFILES:
        raise UsageError(f"the trace is of back end `{chosen}`, which has no profile", "name one with --backend")
    return chosen


def _cost(trace: Trace, wanted: ClusterWish, program: Program) -> CostModel:
    """Under the cluster that was asked for, else the prices that the trace carries, else the preset it names, else the back end's."""
    named = trace.header.get("cluster")
    given = wanted if wanted is not None else trace.header.get("prices") or (named if named in PRESETS else None)
    cluster = default_cluster(program.backend) if given is None else cluster_from(given)
    return CostModel(cluster, program.world_size, program.local_size, program.link_faults)


def _as_source(source: Trace, rebuilt: Rebuilt, done: Trace) -> Trace:
    """A run with the rows of the trace that it came from, and that trace's facts; times, matches and queues are the run's."""
    kept = rebuilt.kept
    number = np.cumsum(kept) - 1
    order = np.argsort(source["rank"], kind="stable")  # the program's rows go rank by rank
    columns = {name: column.copy() for name, column in source.columns.items()}
    for name in (*TIMES, "queue"):
        columns[name][order] = done[name][kept]
    match = done["match"][kept]
    if done.header["source"] == "simulated" and len(order):  # a match is the first row that has it
        match = np.where(match >= 0, order[number[match]], match)
    columns["match"][order] = match
    kept_facts = {name: source.header[name] for name in _OF_PROGRAM if name in source.header}
    run_facts = {name: value for name, value in done.header.items() if name not in _OF_PROGRAM}
    if done.header["source"] == "simulated" and is_partial(source):
        run_facts |= {"outcome": _outcome(source, str(done.header.get("outcome"))), "complete": False}
        run_facts |= {"cut": source.header["cut"]} if source.header.get("cut") else {}
    return Trace({**kept_facts, **run_facts}, {**source.tables, "queue": done.tables["queue"]}, columns)


# --- for real ---


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
        return _as_source(self.source, self.rebuilt, recorded)


def prepared(trace: Trace, file: str, *, backend: str, cluster: ClusterWish = None, scale: Scale = UNSCALED) -> Prepared:
    """Make a trace's calls a program again and simulate it under ``backend``. ``cluster``: see `replay`.

    ``file``: what the trace is called in a report. Raises UsageError for a trace that tells of no program.
    """
    if not len(trace):
        raise UsageError(
            f"{file} has no calls, so there is nothing to run", "record one with `distsim run FILE --real --trace F.jsonl`"
        )
    plain, named = (
        program_of(trace, backend=_backend_of(trace, backend), scale=scale, real=True, named=named) for named in (False, True)
    )
    program, size, nodes = plain.program, trace.world_size, nodes_of(trace)
    world = {"nodes": nodes, "ranks_per_node": size // nodes} if size % nodes == 0 else size
    scenario = Scenario(name=program.name, world=world, backend=backend, program=[], file=program.file or file)
    simulation = simulate_program(scenario, program, _cost(trace, cluster, program), with_values=False)
    return Prepared(trace, named, simulation)


__all__ = ["Prepared", "Replay", "Scale", "prepared", "program_of", "replay"]
