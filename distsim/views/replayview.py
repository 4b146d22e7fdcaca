"""A replay as text in 80 columns, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from distsim.critical_path import Segment
from distsim.real.record import RealRun
from distsim.replay import Replay
from distsim.timeline import RankTimes
from distsim.trace import Trace
from distsim.units import show_ns
from distsim.views.ending import ending_json, how_it_ended, stop_lines, until
from distsim.views.real import real_json
from distsim.views.tables import cut, folded, table
from distsim.views.text import finished, shares, spans, what

SCHEMA_VERSION = 1
MOST_RANKS, MOST_SEGMENTS = 16, 12


def replay_text(found: Replay, file: str) -> str:
    """The report: how long it takes now and took then, rank by rank, and the critical path."""
    sections = [
        _head(found, file),
        _stopped(found.source),
        _ranks(found.timeline.ranks),
        _path(found.timeline.critical_path, found.makespan_ns),
        _foot(found),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _head(found: Replay, file: str) -> list[str]:
    source, then_ns, now_ns = found.source, found.source.makespan_ns, found.makespan_ns
    ratio = f", {now_ns / then_ns:.3g} times that" if then_ns and now_ns != then_ns else ", the same"
    ended = how_it_ended(source)
    told = f"took {show_ns(then_ns)}; the replay takes{ratio[1:]}"
    if ended:
        told = f"goes on for {show_ns(then_ns)}{until(source)}; {_simulated(found)}"
    return [
        *folded(f"{cut(str(source.header.get('name') or file), 40)}: {ended or f'{found.outcome} in {show_ns(now_ns)}'}"),
        *folded(f"the trace, {_kind(source)} under {source.header.get('backend')}, {told}"),
        *folded(
            f"{found.program.world_size} ranks, back end {found.run.profile}, cluster {found.cost.name}, {len(source)} calls"
        ),
    ]


def _simulated(found: Replay) -> str:
    """What the simulator makes of the calls of a trace that did not come to its end."""
    if found.source.header.get("cut"):
        return f"what is left of its calls takes {show_ns(found.makespan_ns)}, which says nothing of the rest"
    if found.run.outcome in ("completes", "wrong-data"):
        return f"simulated, its calls take {show_ns(found.makespan_ns)}, those that it never made no time of their own"
    return f"simulated, the same calls end so: {found.run.outcome}, after {show_ns(found.makespan_ns)}"


def _stopped(source: Trace) -> list[str]:
    lines = stop_lines(source)
    return ["Where it stopped", *(line for one in lines for line in folded(one, "  ", "    "))] if lines else []


def _ranks(ranks: Sequence[RankTimes]) -> list[str]:
    rows = [(str(r.rank), *shares(r), finished(r)) for r in ranks[:MOST_RANKS]]
    more = [f"  … {len(ranks) - MOST_RANKS} more ranks"] if len(ranks) > MOST_RANKS else []
    return ["Ranks", *table(("rank", "compute", "exposed", "waiting", "idle", "finished"), rows), *more]


def _path(path: Sequence[Segment], makespan_ns: int) -> list[str]:
    rows = [(*spans(s, makespan_ns), cut(what(s._replace(calls=1)), 30)) for s in path[:MOST_SEGMENTS]]
    more = [f"  … {len(path) - MOST_SEGMENTS} more"] if len(path) > MOST_SEGMENTS else []
    return ["Critical path", *table(("from", "takes", "share", "rank", "what"), rows, left=(4,)), *more] if rows else []


def _foot(found: Replay) -> list[str]:
    return folded(f"Times by the cost model of {found.cost.name}: {found.cost.error_band}.")


def replay_json(found: Replay, file: str) -> dict[str, object]:
    """What `distsim replay --format json` prints. Times are ns."""
    return {
        "schema_version": SCHEMA_VERSION,
        "file": file,
        "name": found.source.header.get("name"),
        "outcome": found.outcome,
        "partial": ending_json(found.source),
        "profile": found.run.profile,
        "world_size": found.program.world_size,
        "calls": len(found.source),
        "trace_makespan_ns": found.source.makespan_ns,
        "makespan_ns": found.makespan_ns,
        "iteration_ns": found.timeline.iteration_ns,
        "ranks": [r._asdict() for r in found.timeline.ranks],
        "critical_path": [{**s._asdict(), "place": f"{s.place.file}:{s.place.line}"} for s in found.timeline.critical_path],
        "cost_model": {"name": found.cost.name, "source": found.cost.source, "error_band": found.cost.error_band},
    }


# --- for real ---


def real_replay_lines(source: Trace, file: str, untimed: int) -> tuple[str, ...]:
    """What the report of a real run says besides: of what it is a replay. ``untimed``: computes of the trace that never ended."""
    told = f"a replay of {cut(file, 40)}, {_kind(source)} under {source.header.get('backend')}, which took {show_ns(source.makespan_ns)}"
    short = (f"{untimed} computes of the trace never ended; they last no time here",) if untimed else ()
    ended = how_it_ended(source)
    return (told, *((f"the trace is {ended}",) if ended else ()), *short)


def real_replay_json(run: RealRun, source: Trace, file: str) -> dict[str, object]:
    """What `distsim replay --real --format json` prints: the keys of `distsim run --real`, and ``replay_of``."""
    told = {"file": file, "source": _kind(source), "backend": source.header.get("backend"), "makespan_ns": source.makespan_ns}
    return {**real_json(run), "replay_of": told}


def _kind(source: Trace) -> str:
    return "recorded" if source.header.get("source") == "recorded" else "simulated"
