"""What a replay has from its trace: the prices it is under, and the rows that it fills with times of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from distsim.cluster import PRESETS, Cluster, cluster_from
from distsim.profiles import default_cluster
from distsim.replay.program import Rebuilt
from distsim.trace import TIMES, Trace

#: Keys of a header that tell of the program, and stay those of the trace; all others are the run's. A replay works out no values.
_OF_PROGRAM = ("name", "file", "world_size", "nodes", "local_size", "groups", "group_options", "mesh", "options", "link_faults")


def prices_of(trace: Trace, chosen: str | Mapping[str, Any] | Cluster | None, backend: str) -> Cluster:
    """The cluster that was asked for, else the prices that the trace carries, else the preset it names, else the back end's."""
    if chosen is not None:
        return cluster_from(chosen)
    if trace.header.get("prices"):
        return cluster_from(trace.header["prices"])
    named = trace.header.get("cluster")
    return cluster_from(named) if named in PRESETS else default_cluster(backend)


def as_source(source: Trace, rebuilt: Rebuilt, done: Trace) -> Trace:
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
    return Trace({**kept_facts, **run_facts}, {**source.tables, "queue": done.tables["queue"]}, columns)


__all__ = ["as_source", "prices_of"]
