"""A replay as text in 80 columns, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from distsim.analysis.critical_path import CriticalPathSegment
from distsim.analysis.timeline import RankTimes
from distsim.common.units import show_ns
from distsim.output.json.simulation_result import rank_times_json
from distsim.output.report_record import (
    Column,
    Paragraph,
    Report,
    Section,
    Table,
    TableLayout,
    paragraphs,
    text_column,
)
from distsim.output.report_text import write_text
from distsim.output.text.real_run import real_run_json
from distsim.output.text.simulation_report import (
    RANK_COLUMNS,
    finish_text,
    segment_cells,
    time_shares,
)
from distsim.output.text_layout import truncated
from distsim.output.trace_data.partial_run import (
    partial_run_json,
    partial_run_text,
    recording_length_text,
    stopped_rank_lines,
)
from distsim.real.results.real_run import RealRun
from distsim.simulation.trace_replay import ReplayResult
from distsim.simulation.trace_replay.as_recorded import RecordedReplay
from distsim.trace.model import Trace

AnyReplay = ReplayResult | RecordedReplay
SCHEMA_VERSION = 1
MAX_RANKS, MAX_SEGMENTS = 16, 12


def replay_text(found: AnyReplay, file: str) -> str:
    """The whole report as text."""
    return write_text(replay_report(found, file))


def replay_report(found: AnyReplay, file: str) -> Report:
    """The times of the trace and of its replay, the times of each rank, and the critical path."""
    return Report(
        [
            _header_section(found, file),
            Section(paragraphs(stopped_rank_lines(found.source), "  ", "    "), "Where it stopped"),
            _rank_section(found.timeline.ranks),
            _critical_path_section(found.timeline.critical_path, found.makespan_ns),
            Section([Paragraph(_communication_text(found))]),
        ]
    )


def _header_section(found: AnyReplay, file: str) -> Section:
    source = found.source
    trace_ns = source.makespan_ns
    partial = partial_run_text(source)
    if partial:
        outcome = partial
        times = (
            f"covers {show_ns(trace_ns)}{recording_length_text(source)}; {_simulated_text(found)}"
        )
    else:
        outcome = f"{found.outcome} in {show_ns(found.makespan_ns)}"
        ratio = "the same time"
        if trace_ns and found.makespan_ns != trace_ns:
            ratio = f"{found.makespan_ns / trace_ns:.3g} times as long"
        times = f"took {show_ns(trace_ns)}; the replay takes {ratio}"
    name = truncated(str(source.header.get("name") or file), 40)
    texts = [
        f"{name}: {outcome}",
        f"The {_trace_kind(source)} trace ({source.header.get('backend')}) {times}",
        f"{source.world_size} ranks, {_conditions_text(found)}, {len(source)} calls",
    ]
    return Section(paragraphs(texts))


def _conditions_text(found: AnyReplay) -> str:
    if isinstance(found, RecordedReplay):
        if found.cluster:
            return f"compute as recorded, communication predicted for cluster {found.cluster}"
        return "communication as recorded"
    return f"backend {found.run.profile}, cluster {found.cost.name}"


def _simulated_text(found: AnyReplay) -> str:
    """A sentence about the simulation of the calls of a partial trace."""
    makespan = show_ns(found.makespan_ns)
    if isinstance(found, RecordedReplay):
        return f"as recorded, its calls take {makespan}"
    if found.source.header.get("cut"):
        return f"the remaining calls take {makespan}; the missing calls are unknown"
    if found.run.outcome in ("completes", "wrong-data"):
        return f"simulated, its calls take {makespan}; calls that it never made are not included"
    return f"simulated, the same calls end with outcome {found.run.outcome} after {makespan}"


def _rank_section(ranks: Sequence[RankTimes]) -> Section:
    rows = [
        {"rank": str(r.rank), **time_shares(r), "finished": finish_text(r)}
        for r in ranks[:MAX_RANKS]
    ]
    hidden = len(ranks) - MAX_RANKS
    more = f"… {hidden} more ranks" if hidden > 0 else ""
    return Section([Table(RANK_COLUMNS, rows), Paragraph(more, "  ")], "Ranks")


_PATH_COLUMNS = [*map(Column, ("start", "time", "share", "rank")), text_column("work")]
_PATH_LAYOUT = TableLayout(("start", "time", "share", "rank", "work"), {"work": 30})


def _critical_path_section(path: Sequence[CriticalPathSegment], makespan_ns: int) -> Section:
    rows = [segment_cells(s._replace(calls=1), makespan_ns) for s in path[:MAX_SEGMENTS]]
    hidden = len(path) - MAX_SEGMENTS
    more = f"… {hidden} more" if hidden > 0 else ""
    table = Table(_PATH_COLUMNS, rows, (_PATH_LAYOUT,))
    return Section([table, Paragraph(more, "  ")], "Critical path")


def _communication_text(found: AnyReplay) -> str:
    if not isinstance(found, RecordedReplay):
        return f"Hardware model {found.cost.name}: {found.cost.error_band}."
    if found.largest_change_ns:
        changed = show_ns(found.largest_change_ns)
        return f"{found.events} events replayed; the changes move them by up to {changed}."
    return f"{found.events} events replayed; all times match the recording exactly."


def replay_json(found: AnyReplay, file: str) -> dict[str, object]:
    """What `distsim replay --format json` prints. Times are ns."""
    source = found.source
    profile = source.header.get("backend")
    if isinstance(found, ReplayResult):
        profile = found.run.profile
    return {
        "schema_version": SCHEMA_VERSION,
        "file": file,
        "name": source.header.get("name"),
        "outcome": found.outcome,
        "partial": partial_run_json(source),
        "as_recorded": isinstance(found, RecordedReplay),
        "predicted_communication": (isinstance(found, RecordedReplay) and found.cluster) or None,
        "profile": profile,
        "world_size": source.world_size,
        "calls": len(source),
        "trace_makespan_ns": source.makespan_ns,
        "makespan_ns": found.makespan_ns,
        "iteration_ns": found.timeline.iteration_ns,
        "ranks": [rank_times_json(rank) for rank in found.timeline.ranks],
        "critical_path": [
            {**s._asdict(), "place": f"{s.place.file}:{s.place.line}"}
            for s in found.timeline.critical_path
        ],
        "cost_model": None if isinstance(found, RecordedReplay) else _cost_model_json(found),
    }


def _cost_model_json(found: ReplayResult) -> dict[str, object]:
    cost = found.cost
    return {"name": cost.name, "source": cost.source, "error_band": cost.error_band}


# --- for real ---


def real_replay_lines(source: Trace, file: str, untimed: int) -> tuple[str, ...]:
    """The notes about the trace in the report of a real run.

    ``untimed``: the number of computes of the trace that never ended.
    """
    notes = [
        f"replay of {truncated(file, 40)}: {_trace_kind(source)} "
        f"with {source.header.get('backend')}, took {show_ns(source.makespan_ns)}"
    ]
    partial = partial_run_text(source)
    if partial:
        notes.append(f"the trace is {partial}")
    if untimed:
        notes.append(f"{untimed} compute calls of the trace never ended; they take no time here")
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
