"""A trace as a scenario that people can read: equal ranks as one program, what repeats as loops, numbers as expressions of the rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from distsim.cluster import PRESETS, cluster_from
from distsim.compact.align import Entry, Round, Step, aligned
from distsim.compact.fit import Names
from distsim.compact.fold import fold
from distsim.compact.groups import Families, families_of, inferred_mesh
from distsim.compact.items import Item, Itemizer
from distsim.compact.write import Writer, flow, text
from distsim.errors import UsageError
from distsim.profiles import DEFAULT_BACKEND, PROFILES
from distsim.program.records import Fault, Program
from distsim.replay import program_of
from distsim.scenario.parts import Options
from distsim.trace import Trace
from distsim.units import duration_text

#: Steps without their lines, as a share of those with them, from which on they are preferred.
_MUCH_LESS: Final = 0.7


class Compact(NamedTuple):
    """``text``: of the file. ``calls``: of all ranks; ``steps``: in the file. ``notes``: in what the file says less than the trace."""

    text: str
    calls: int
    steps: int
    notes: tuple[str, ...]


def compact(trace: Trace, *, name: str = "", exact: bool | None = None, resolve: bool | None = None) -> Compact:
    """The scenario of a trace, simulated or recorded.

    It has the calls of a replay of the trace, in each rank's order. ``exact``: durations as they were, call by call; else calls that
    differ in durations alone become one that lasts their mean (None: exact for a simulated trace). ``resolve``: a receive from any
    source names the rank whose message it took (None: in a recording). Raises UsageError for a trace that tells of no program.
    """
    if not len(trace):
        raise UsageError("the trace has no calls, so there is no program to write", "record one that has")
    simulated = trace.header.get("source") == "simulated"
    exact = simulated if exact is None else exact
    backend = str(trace.header.get("backend") or DEFAULT_BACKEND)
    if backend not in PROFILES:
        raise UsageError(f"the trace is of back end `{backend}`, which has no profile", f"distsim knows {', '.join(PROFILES)}")
    rebuilt = program_of(trace, backend=backend, resolve=not simulated if resolve is None else resolve)
    program = rebuilt.program
    mesh = dict(program.mesh) or inferred_mesh(program)
    families = families_of(program, mesh)
    itemizer = Itemizer(rebuilt, trace, families)
    items = {rank: itemizer.items(rank) for rank in range(program.world_size)}
    entries = _laid_out(items, exact)
    rounds, entries = _iterations(entries, program.world_size, trace)
    writer = Writer(families, Names.of(program.world_size, families.mesh), exact)
    body = writer.program(entries)
    head = _head(trace, program, families, name)
    iterations = [f"iterations: {rounds}"] if rounds > 1 else []
    notes = _notes(exact, program, items_of=sum(map(len, items.values())), written=_count(entries))
    lines = [
        *(f"# {note}" for note in notes),
        *head,
        "program:" if body else "program: []",
        *body,
        *iterations,
        *_tail(program),
    ]
    return Compact("\n".join(lines) + "\n", program.call_count, _count(entries), notes)


def _laid_out(items: Mapping[int, list[Item]], exact: bool) -> list[Entry]:
    """Calls of one line of the script as steps; where that says much the same over and over, calls that are alike, whatever their line."""
    by_line = aligned({rank: fold(mine, exact) for rank, mine in items.items()})
    bare = {rank: [item._replace(form=item.form._replace(source="")) for item in mine] for rank, mine in items.items()}
    alike = aligned({rank: fold(mine, exact) for rank, mine in bare.items()})
    return alike if _count(alike) < _MUCH_LESS * _count(by_line) else by_line


def _notes(exact: bool, program: Program, items_of: int, written: int) -> tuple[str, ...]:
    found = [f"Written from a trace: {items_of:,} calls of {program.world_size:,} ranks as {written:,} steps."]
    if not exact:
        found.append("Durations of computes and pauses are means over the calls that a step stands for.")
    return tuple(found)


def _count(entries: list[Entry]) -> int:
    return sum(1 if isinstance(entry, Step) else _count(entry.body) for entry in entries)


def _iterations(entries: list[Entry], size: int, trace: Trace) -> tuple[int, list[Entry]]:
    """Where the whole program is one loop over the trace's iterations, these; and what is inside."""
    told = int(trace["iteration"].max()) + 1
    if told > 1 and len(entries) == 1 and isinstance(entries[0], Round) and entries[0].times == dict.fromkeys(range(size), told):
        return told, entries[0].body
    return 1, entries


def _head(trace: Trace, program: Program, families: Families, name: str) -> list[str]:
    nodes, size = program.nodes, program.world_size
    world: object = {"nodes": nodes, "ranks_per_node": size // nodes} if nodes > 1 and size % nodes == 0 else size
    found: dict[str, object] = {"name": name or program.name or "trace", "world": world, "backend": program.backend}
    if (cluster := _cluster(trace)) is not None:
        found["cluster"] = cluster
    found |= {key: value for key, value in (("mesh", families.mesh), ("groups", families.declared)) if value}
    return [f"{key}: {text(value)}" for key, value in found.items()]


def _cluster(trace: Trace) -> object:
    """The preset's name, where its prices are the trace's; else all of them."""
    named, prices = trace.header.get("cluster"), trace.header.get("prices")
    if named in PRESETS and (not prices or cluster_from(named).to_mapping() == prices):
        return named
    return dict(prices) if isinstance(prices, Mapping) and prices else None


def _tail(program: Program) -> list[str]:
    """Options that are not the usual ones, and faults."""
    given = {("timeout" if key == "timeout_ns" else key): value for key, value in program.options.items() if value != _usual(key)}
    if isinstance(given.get("timeout"), int):
        given["timeout"] = duration_text(given["timeout"])
    lines = [f"options: {flow(given)}"] if given else []
    faults = [_fault(fault) for fault in program.faults]
    faults += [{"link": f.link, "nodes": list(f.nodes), "kind": "slow", "factor": f.factor} for f in program.link_faults]
    return lines + (["faults:", *(f"  - {flow(fault)}" for fault in faults)] if faults else [])


def _usual(option: str) -> object:
    """What an option is where nobody sets it."""
    default = Options.model_fields[option].default if option in Options.model_fields else None
    return getattr(Options.model_validate({option: default}), option) if isinstance(default, str) else default


def _fault(fault: Fault) -> dict[str, object]:
    found: dict[str, object] = {"rank": fault.rank, "kind": fault.kind}
    if fault.at_ns is not None:
        found["at"] = duration_text(fault.at_ns)
    elif fault.position is not None:
        found["before_call"] = fault.position
    return found


__all__ = ["Compact", "compact"]
