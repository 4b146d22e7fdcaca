"""The process groups of a trace, entered into the tables of a program."""

from __future__ import annotations

from collections import defaultdict

from distsim.operations.core.resolved_call import RankGroup
from distsim.program.program_tables import ProgramTables
from distsim.trace.model import Trace


def add_recorded_groups(trace: Trace, tables: ProgramTables) -> int:
    """Add the trace's groups to the program's tables; return the offset of their ids.

    Group 0 of a program is always the world. If the trace's first group is another one, all ids
    shift by one.
    """
    header_groups = trace.header.get("groups") or []
    world = tuple(range(trace.world_size))
    has_world_first = header_groups and tuple(header_groups[0][1]) == world
    offset = 0 if has_world_first else 1
    options = trace.header.get("group_options") or {}
    ranks_in_calls = _ranks_in_calls(trace)
    for number, name in enumerate(trace.tables.get("group", ())):
        if number + offset == 0:
            continue
        if number < len(header_groups):
            ranks = tuple(header_groups[number][1])
        else:
            ranks = tuple(sorted(ranks_in_calls[number]))
        own_options = options.get(str(number), {})
        backend, timeout_ns = own_options.get("backend"), own_options.get("timeout_ns")
        tables.groups.append(RankGroup(number + offset, name, ranks, backend, timeout_ns))
    return offset


def _ranks_in_calls(trace: Trace) -> dict[int, set[int]]:
    """For each group, the ranks and peers of its calls."""
    ranks_of: dict[int, set[int]] = defaultdict(set)
    columns = [trace[name].tolist() for name in ("rank", "group", "peer")]
    for rank, group, peer in zip(*columns, strict=True):
        ranks_of[group].add(rank)
        if peer >= 0:
            ranks_of[group].add(peer)
    return ranks_of
