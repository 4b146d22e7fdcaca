"""A trace as a scenario that people can read: equal ranks as one program, what repeats as loops,
numbers as expressions of the rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from distsim.backends import BACKEND_PROFILES, DEFAULT_BACKEND
from distsim.common.errors import UsageError
from distsim.common.units import duration_text
from distsim.hardware.cluster import PRESETS, cluster_from
from distsim.program.model import Program, RankFault
from distsim.scenario.format.models.sections import ProcessGroupOptions
from distsim.trace.model import Trace
from distsim.trace_replay import rebuild_program
from distsim.trace_replay.compact.call_forms import CallItem, CallItemizer
from distsim.trace_replay.compact.group_names import GroupNames, infer_mesh, name_groups
from distsim.trace_replay.compact.loops import find_loops
from distsim.trace_replay.compact.rank_alignment import (
    AlignedEntry,
    AlignedLoop,
    AlignedStep,
    align_ranks,
)
from distsim.trace_replay.compact.rank_expressions import RankVariables
from distsim.trace_replay.compact.scenario_writer import (
    ScenarioWriter,
    yaml_flow,
    yaml_flow_mapping,
)

#: Steps without their lines, as a share of those with them, from which on they are preferred.
_MERGE_LINES_BELOW: Final = 0.7


class CompactResult(NamedTuple):
    """``text``: of the file. ``calls``: of all ranks; ``steps``: in the file. ``notes``: in what
    the file says less than the trace.
    """

    text: str
    calls: int
    steps: int
    notes: tuple[str, ...]


def compact_trace(
    trace: Trace, *, name: str = "", exact: bool | None = None, resolve: bool | None = None
) -> CompactResult:
    """The scenario of a trace, simulated or recorded.

    It has the calls of a replay of the trace, in each rank's order. ``exact``: durations as they
    were, call by call; else calls that differ in durations alone become one that lasts their
    mean (None: exact for a simulated trace). ``resolve``: a receive from any source names the
    rank whose message it took (None: in a recording). Raises UsageError for a trace that tells
    of no program.
    """
    if not len(trace):
        raise UsageError(
            "the trace has no calls, so there is no program to write", "record one that has"
        )
    simulated = trace.header.get("source") == "simulated"
    exact = simulated if exact is None else exact
    backend = str(trace.header.get("backend") or DEFAULT_BACKEND)
    if backend not in BACKEND_PROFILES:
        raise UsageError(
            f"the trace is of back end `{backend}`, which has no profile",
            f"distsim knows {', '.join(BACKEND_PROFILES)}",
        )
    rebuilt = rebuild_program(
        trace, backend=backend, resolve=not simulated if resolve is None else resolve
    )
    program = rebuilt.program
    mesh = dict(program.mesh) or infer_mesh(program)
    families = name_groups(program, mesh)
    itemizer = CallItemizer(rebuilt, trace, families)
    items = {rank: itemizer.items(rank) for rank in range(program.world_size)}
    entries = _aligned_entries(items, exact)
    rounds, entries = _unwrap_iterations(entries, program.world_size, trace)
    writer = ScenarioWriter(families, RankVariables.of(program.world_size, families.mesh), exact)
    body = writer.program(entries)
    head = _header_lines(trace, program, families, name)
    iterations = [f"iterations: {rounds}"] if rounds > 1 else []
    notes = _notes(
        exact, program, items_of=sum(map(len, items.values())), written=_step_count(entries)
    )
    lines = [
        *(f"# {note}" for note in notes),
        *head,
        "program:" if body else "program: []",
        *body,
        *iterations,
        *_options_and_faults(program),
    ]
    return CompactResult("\n".join(lines) + "\n", program.call_count, _step_count(entries), notes)


def _aligned_entries(items: Mapping[int, list[CallItem]], exact: bool) -> list[AlignedEntry]:
    """Calls of one line of the script as steps; where that says much the same over and over, calls
    that are alike, whatever their line.
    """
    by_line = align_ranks({rank: find_loops(mine, exact) for rank, mine in items.items()})
    bare = {
        rank: [item._replace(form=item.form._replace(source="")) for item in mine]
        for rank, mine in items.items()
    }
    alike = align_ranks({rank: find_loops(mine, exact) for rank, mine in bare.items()})
    return alike if _step_count(alike) < _MERGE_LINES_BELOW * _step_count(by_line) else by_line


def _notes(exact: bool, program: Program, items_of: int, written: int) -> tuple[str, ...]:
    found = [
        f"Written from a trace: {items_of:,} calls of {program.world_size:,} ranks as {written:,} steps."
    ]
    if not exact:
        found.append(
            "Durations of computes and pauses are means over the calls that a step stands for."
        )
    return tuple(found)


def _step_count(entries: list[AlignedEntry]) -> int:
    return sum(
        1 if isinstance(entry, AlignedStep) else _step_count(entry.body) for entry in entries
    )


def _unwrap_iterations(
    entries: list[AlignedEntry], size: int, trace: Trace
) -> tuple[int, list[AlignedEntry]]:
    """Where the whole program is one loop over the trace's iterations, these; and what is
    inside.
    """
    told = int(trace["iteration"].max()) + 1
    if (
        told > 1
        and len(entries) == 1
        and isinstance(entries[0], AlignedLoop)
        and entries[0].times == dict.fromkeys(range(size), told)
    ):
        return told, entries[0].body
    return 1, entries


def _header_lines(trace: Trace, program: Program, families: GroupNames, name: str) -> list[str]:
    nodes, size = program.nodes, program.world_size
    world: object = (
        {"nodes": nodes, "ranks_per_node": size // nodes}
        if nodes > 1 and size % nodes == 0
        else size
    )
    found: dict[str, object] = {
        "name": name or program.name or "trace",
        "world": world,
        "backend": program.backend,
    }
    if (cluster := _cluster_of_trace(trace)) is not None:
        found["cluster"] = cluster
    found |= {
        key: value
        for key, value in (("mesh", families.mesh), ("groups", families.declared))
        if value
    }
    return [f"{key}: {yaml_flow(value)}" for key, value in found.items()]


def _cluster_of_trace(trace: Trace) -> object:
    """The preset's name, where its prices are the trace's; else all of them."""
    named, prices = trace.header.get("cluster"), trace.header.get("prices")
    if named in PRESETS and (not prices or cluster_from(named).to_mapping() == prices):
        return named
    return dict(prices) if isinstance(prices, Mapping) and prices else None


def _options_and_faults(program: Program) -> list[str]:
    """Options that are not the usual ones, and faults."""
    given = {
        ("timeout" if key == "timeout_ns" else key): value
        for key, value in program.options.items()
        if value != _default_option(key)
    }
    if isinstance(given.get("timeout"), int):
        given["timeout"] = duration_text(given["timeout"])
    lines = [f"options: {yaml_flow_mapping(given)}"] if given else []
    faults = [_fault_fields(fault) for fault in program.faults]
    faults += [
        {"link": f.link, "nodes": list(f.nodes), "kind": "slow", "factor": f.factor}
        for f in program.link_faults
    ]
    return lines + (
        ["faults:", *(f"  - {yaml_flow_mapping(fault)}" for fault in faults)] if faults else []
    )


def _default_option(option: str) -> object:
    """What an option is where nobody sets it."""
    default = (
        ProcessGroupOptions.model_fields[option].default
        if option in ProcessGroupOptions.model_fields
        else None
    )
    return (
        getattr(ProcessGroupOptions.model_validate({option: default}), option)
        if isinstance(default, str)
        else default
    )


def _fault_fields(fault: RankFault) -> dict[str, object]:
    found: dict[str, object] = {"rank": fault.rank, "kind": fault.kind}
    if fault.at_ns is not None:
        found["at"] = duration_text(fault.at_ns)
    elif fault.position is not None:
        found["before_call"] = fault.position
    return found


__all__ = ["CompactResult", "compact_trace"]
