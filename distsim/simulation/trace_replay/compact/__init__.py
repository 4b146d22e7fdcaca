"""Converts a trace into a readable scenario.

The stages, each in a module: calls become items, whose form is separate from their numbers
(`call_forms`); repetitions of a rank become loops (`loops`); the ranks are aligned into one program
(`rank_alignment`); numbers that differ by rank become expressions (`rank_expressions`); and all is
written as YAML (`scenario_writer`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from distsim.backends import BACKEND_PROFILES, DEFAULT_BACKEND
from distsim.common.errors import UsageError
from distsim.common.units import duration_text, size_text
from distsim.hardware.cluster import PRESETS, cluster_from
from distsim.program.model import Program, RankFault
from distsim.scenario.format.models.sections import ProcessGroupOptions
from distsim.simulation.trace_replay import rebuild_program
from distsim.simulation.trace_replay.compact.call_forms import CallItem, CallItemizer
from distsim.simulation.trace_replay.compact.group_names import GroupNames, infer_mesh, name_groups
from distsim.simulation.trace_replay.compact.loops import find_loops
from distsim.simulation.trace_replay.compact.rank_alignment import (
    AlignedEntry,
    AlignedLoop,
    AlignedStep,
    align_ranks,
)
from distsim.simulation.trace_replay.compact.rank_expressions import RankVariables
from distsim.simulation.trace_replay.compact.scenario_writer import (
    ScenarioWriter,
    yaml_flow,
    yaml_flow_mapping,
)
from distsim.trace.model import Trace

#: If merging equal calls of different lines leaves less than this share of the steps, it is done.
_MERGE_LINES_BELOW: Final = 0.7


class CompactResult(NamedTuple):
    """A scenario file. ``calls``: of all ranks; ``steps``: in the file.

    ``notes``: what the file omits from the trace.
    """

    text: str
    calls: int
    steps: int
    notes: tuple[str, ...]


def compact_trace(
    trace: Trace, *, name: str = "", exact: bool | None = None, resolve: bool | None = None
) -> CompactResult:
    """The scenario of a trace, simulated or recorded.

    It has the calls of a replay of the trace, in each rank's order. ``exact``: keep the duration of
    each call; otherwise calls that differ only in durations become one that takes their mean (None:
    exact for a simulated trace). ``resolve``: a receive from any source names the rank whose
    message it took (None: in a recording). Raises UsageError for a trace without a program.
    """
    if not len(trace):
        raise UsageError(
            "the trace has no calls, so there is no program to write", ("record a trace with calls")
        )
    simulated = trace.header.get("source") == "simulated"
    exact = simulated if exact is None else exact
    resolve = not simulated if resolve is None else resolve
    backend = str(trace.header.get("backend") or DEFAULT_BACKEND)
    if backend not in BACKEND_PROFILES:
        raise UsageError(
            f"distsim does not know the backend `{backend}` of this trace",
            f"distsim knows {', '.join(BACKEND_PROFILES)}",
        )
    rebuilt = rebuild_program(trace, backend=backend, resolve=resolve)
    program = rebuilt.program
    mesh = dict(program.mesh) or infer_mesh(program)
    names = name_groups(program, mesh)
    itemizer = CallItemizer(rebuilt, trace, names)
    items = {rank: itemizer.items(rank) for rank in range(program.world_size)}
    iterations, entries = _unwrap_iterations(
        _aligned_entries(items, exact), program.world_size, trace
    )
    writer = ScenarioWriter(names, RankVariables.of(program.world_size, names.mesh), exact)
    body = writer.program(entries)
    steps = _step_count(entries)
    notes = _notes(exact, program, calls=sum(map(len, items.values())), steps=steps)
    lines = [
        *(f"# {note}" for note in notes),
        *_header_lines(trace, program, names, name),
        "program:" if body else "program: []",
        *body,
        *([f"iterations: {iterations}"] if iterations > 1 else []),
        *_options_and_faults(program),
    ]
    return CompactResult("\n".join(lines) + "\n", program.call_count, steps, notes)


def _aligned_entries(items: Mapping[int, list[CallItem]], exact: bool) -> list[AlignedEntry]:
    """The program of all ranks.

    Calls of different lines of the script stay separate steps, because a reader knows the lines. If
    that makes the program much longer, equal calls are merged whatever their lines.
    """
    by_line = _align_items(items, exact)
    without_lines = {
        rank: [item._replace(form=item.form._replace(source="")) for item in rank_items]
        for rank, rank_items in items.items()
    }
    merged = _align_items(without_lines, exact)
    is_much_shorter = _step_count(merged) < _MERGE_LINES_BELOW * _step_count(by_line)
    return merged if is_much_shorter else by_line


def _align_items(items: Mapping[int, list[CallItem]], exact: bool) -> list[AlignedEntry]:
    return align_ranks({rank: find_loops(rank_items, exact) for rank, rank_items in items.items()})


def _notes(exact: bool, program: Program, calls: int, steps: int) -> tuple[str, ...]:
    notes = [
        f"Written from a trace: {calls:,} calls of {program.world_size:,} ranks as {steps:,} steps."
    ]
    if not exact:
        notes.append(
            "Durations of computes and sleeps are means over the calls that a step represents."
        )
    return tuple(notes)


def _step_count(entries: list[AlignedEntry]) -> int:
    return sum(
        1 if isinstance(entry, AlignedStep) else _step_count(entry.body) for entry in entries
    )


def _unwrap_iterations(
    entries: list[AlignedEntry], size: int, trace: Trace
) -> tuple[int, list[AlignedEntry]]:
    """(iterations, body) if the whole program is one loop over the trace's iterations."""
    iterations = int(trace["iteration"].max()) + 1
    if iterations > 1 and len(entries) == 1:
        loop = entries[0]
        every_rank = dict.fromkeys(range(size), iterations)
        if isinstance(loop, AlignedLoop) and loop.times == every_rank:
            return iterations, loop.body
    return 1, entries


def _header_lines(trace: Trace, program: Program, names: GroupNames, name: str) -> list[str]:
    nodes, size = program.nodes, program.world_size
    world: object = size
    if nodes > 1 and size % nodes == 0:
        world = {"nodes": nodes, "ranks_per_node": size // nodes}
    header: dict[str, object] = {
        "name": name or program.name or "trace",
        "world": world,
        "backend": program.backend,
    }
    cluster = _cluster_of_trace(trace)
    if cluster is not None:
        header["cluster"] = cluster
    if names.mesh:
        header["mesh"] = names.mesh
    if names.declared:
        header["groups"] = names.declared
    return [f"{key}: {yaml_flow(value)}" for key, value in header.items()]


def _cluster_of_trace(trace: Trace) -> object:
    """The preset's name if its costs are those of the trace, else all costs."""
    name, costs = trace.header.get("cluster"), trace.header.get("prices")
    if name in PRESETS and (not costs or cluster_from(name).to_mapping() == costs):
        return name
    return dict(costs) if isinstance(costs, Mapping) and costs else None


def _options_and_faults(program: Program) -> list[str]:
    """The lines of options that differ from their defaults, and of faults."""
    lines = []
    options = {
        key: value for key, value in program.options.items() if value != _default_option(key)
    }
    if options:
        lines.append(f"options: {yaml_flow_mapping(_option_fields(options))}")
    faults = [_fault_fields(fault) for fault in program.faults]
    faults += [
        {
            "link": fault.link,
            "nodes": list(fault.nodes),
            "kind": "slow",
            "factor": fault.factor,
        }
        for fault in program.link_faults
    ]
    if faults:
        lines += ["faults:", *(f"  - {yaml_flow_mapping(fault)}" for fault in faults)]
    return lines


def _option_fields(options: Mapping[str, object]) -> dict[str, object]:
    """Options under their names in a scenario."""
    fields = {("timeout" if key == "timeout_ns" else key): options[key] for key in options}
    timeout = fields.get("timeout")
    if isinstance(timeout, int):
        fields["timeout"] = duration_text(timeout)
    for profile in BACKEND_PROFILES.values():
        name = profile.buffer_option.name if profile.buffer_option is not None else ""
        nbytes = fields.get(name)
        if isinstance(nbytes, int):
            fields[name] = size_text(nbytes)
    return fields


def _default_option(option: str) -> object:
    """The default of an option, in the form that a program has."""
    if option not in ProcessGroupOptions.model_fields:
        return None
    default = ProcessGroupOptions.model_fields[option].default
    if isinstance(default, str):
        # A text such as a duration is parsed by the model.
        return getattr(ProcessGroupOptions.model_validate({option: default}), option)
    return default


def _fault_fields(fault: RankFault) -> dict[str, object]:
    fields: dict[str, object] = {"rank": fault.rank, "kind": fault.kind}
    if fault.at_ns is not None:
        fields["at"] = duration_text(fault.at_ns)
    elif fault.position is not None:
        fields["before_call"] = fault.position
    return fields


__all__ = ["CompactResult", "compact_trace"]
