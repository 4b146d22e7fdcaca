"""A replay as text in 80 columns, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from distsim.analysis.critical_path import CriticalPathSegment
from distsim.analysis.timeline import RankTimes
from distsim.common.units import show_ns
from distsim.output.text.real_run import real_run_json
from distsim.output.text.simulation_report import (
    finish_text,
    segment_text,
    segment_times,
    time_shares,
)
from distsim.output.text_layout import table_lines, truncated, wrapped_lines
from distsim.output.trace_data.partial_run import (
    partial_run_json,
    partial_run_text,
    recording_length_text,
    stopped_rank_lines,
)
from distsim.real.results.real_run import RealRun
from distsim.trace.model import Trace
from distsim.trace_replay import ReplayResult

SCHEMA_VERSION = 1
MAX_RANKS, MAX_SEGMENTS = 16, 12


def replay_text(found: ReplayResult, file: str) -> str:
    """The report: how long it takes now and took then, rank by rank, and the critical path."""
    sections = [
        _header_lines(found, file),
        _stop_lines(found.source),
        _rank_table(found.timeline.ranks),
        _critical_path_table(found.timeline.critical_path, found.makespan_ns),
        _cost_model_lines(found),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _header_lines(found: ReplayResult, file: str) -> list[str]:
    source = found.source
    trace_ns = source.makespan_ns
    partial = partial_run_text(source)
    if partial:
        outcome = partial
        times = (
            f"goes on for {show_ns(trace_ns)}{recording_length_text(source)}; "
            f"{_simulated_text(found)}"
        )
    else:
        outcome = f"{found.outcome} in {show_ns(found.makespan_ns)}"
        ratio = "the same"
        if trace_ns and found.makespan_ns != trace_ns:
            ratio = f"{found.makespan_ns / trace_ns:.3g} times that"
        times = f"took {show_ns(trace_ns)}; the replay takes {ratio}"
    name = truncated(str(source.header.get("name") or file), 40)
    return [
        *wrapped_lines(f"{name}: {outcome}"),
        *wrapped_lines(
            f"the trace, {_trace_kind(source)} under {source.header.get('backend')}, {times}"
        ),
        *wrapped_lines(
            f"{found.program.world_size} ranks, back end {found.run.profile}, "
            f"cluster {found.cost.name}, {len(source)} calls"
        ),
    ]


def _simulated_text(found: ReplayResult) -> str:
    """The simulation of the calls of a partial trace, in words."""
    makespan = show_ns(found.makespan_ns)
    if found.source.header.get("cut"):
        return f"what is left of its calls takes {makespan}, which says nothing of the rest"
    if found.run.outcome in ("completes", "wrong-data"):
        return (
            f"simulated, its calls take {makespan}, those that it never made no time of their own"
        )
    return f"simulated, the same calls end so: {found.run.outcome}, after {makespan}"


def _stop_lines(source: Trace) -> list[str]:
    texts = stopped_rank_lines(source)
    if not texts:
        return []
    lines = ["Where it stopped"]
    for text in texts:
        lines += wrapped_lines(text, "  ", "    ")
    return lines


def _rank_table(ranks: Sequence[RankTimes]) -> list[str]:
    rows = [(str(r.rank), *time_shares(r), finish_text(r)) for r in ranks[:MAX_RANKS]]
    more = [f"  … {len(ranks) - MAX_RANKS} more ranks"] if len(ranks) > MAX_RANKS else []
    return [
        "Ranks",
        *table_lines(("rank", "compute", "exposed", "waiting", "idle", "finished"), rows),
        *more,
    ]


def _critical_path_table(path: Sequence[CriticalPathSegment], makespan_ns: int) -> list[str]:
    rows = [
        (*segment_times(s, makespan_ns), truncated(segment_text(s._replace(calls=1)), 30))
        for s in path[:MAX_SEGMENTS]
    ]
    more = [f"  … {len(path) - MAX_SEGMENTS} more"] if len(path) > MAX_SEGMENTS else []
    return (
        [
            "Critical path",
            *table_lines(("from", "takes", "share", "rank", "what"), rows, left=(4,)),
            *more,
        ]
        if rows
        else []
    )


def _cost_model_lines(found: ReplayResult) -> list[str]:
    return wrapped_lines(f"Times by the cost model of {found.cost.name}: {found.cost.error_band}.")


def replay_json(found: ReplayResult, file: str) -> dict[str, object]:
    """What `distsim replay --format json` prints. Times are ns."""
    return {
        "schema_version": SCHEMA_VERSION,
        "file": file,
        "name": found.source.header.get("name"),
        "outcome": found.outcome,
        "partial": partial_run_json(found.source),
        "profile": found.run.profile,
        "world_size": found.program.world_size,
        "calls": len(found.source),
        "trace_makespan_ns": found.source.makespan_ns,
        "makespan_ns": found.makespan_ns,
        "iteration_ns": found.timeline.iteration_ns,
        "ranks": [r._asdict() for r in found.timeline.ranks],
        "critical_path": [
            {**s._asdict(), "place": f"{s.place.file}:{s.place.line}"}
            for s in found.timeline.critical_path
        ],
        "cost_model": {
            "name": found.cost.name,
            "source": found.cost.source,
            "error_band": found.cost.error_band,
        },
    }


# --- for real ---


def real_replay_lines(source: Trace, file: str, untimed: int) -> tuple[str, ...]:
    """The notes about the trace in the report of a real run.

    ``untimed``: the number of computes of the trace that never ended.
    """
    notes = [
        f"a replay of {truncated(file, 40)}, {_trace_kind(source)} "
        f"under {source.header.get('backend')}, which took {show_ns(source.makespan_ns)}"
    ]
    partial = partial_run_text(source)
    if partial:
        notes.append(f"the trace is {partial}")
    if untimed:
        notes.append(f"{untimed} computes of the trace never ended; they last no time here")
    return tuple(notes)


def real_replay_json(run: RealRun, source: Trace, file: str) -> dict[str, object]:
    """The output of `distsim replay --real --format json`: that of `run`, and ``replay_of``."""
    replayed = {
        "file": file,
        "source": _trace_kind(source),
        "backend": source.header.get("backend"),
        "makespan_ns": source.makespan_ns,
    }
    return {**real_run_json(run), "replay_of": replayed}


def _trace_kind(source: Trace) -> str:
    return "recorded" if source.header.get("source") == "recorded" else "simulated"
