"""A comparison of two runs as text in 80 columns, and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from distsim.analysis.run_comparison import (
    CriticalPathDelta,
    RankTimeShares,
    RunComparison,
    RunDivergence,
)
from distsim.common.units import show_bytes, show_ns
from distsim.output.text_layout import page_width, table_lines, truncated, wrapped_lines
from distsim.output.trace_data.partial_run import (
    partial_run_json,
    partial_run_text,
    stop_position_text,
    stopped_rank_lines,
)
from distsim.trace.model import Trace

SCHEMA_VERSION = 1
#: Lines of each table.
MAX_DIVERGENCES = 6
MAX_CAUSES = 8
MAX_OPS = 10
MAX_RANKS = 16
_MIN_COLUMN_WIDTH = 6
_DIVERGENCE_KINDS = {
    "call": "calls of one run alone",
    "met": "calls that met others",
    "value": "values that differ",
    "time": "calls that end at another time",
}
_REASON_TEXT = {"compute": "computing", "transfer": "moving", "sleep": "asleep", "wait": "waiting"}


def compare_text(comparison: RunComparison, names: tuple[str, str]) -> str:
    """The report. ``names``: the names of the two runs."""
    head = [
        *_stop_lines(comparison),
        *_header_lines(comparison, names),
        *_values_lines(comparison),
    ]
    sections = [
        head,
        _divergence_lines(comparison),
        _cause_lines(comparison),
        _operation_lines(comparison),
        _rank_lines(comparison),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


# --- the head: where a run stopped, makespans, verdict, values ---


def _stop_lines(comparison: RunComparison) -> list[str]:
    """Where one run stopped while the other went on, and which ranks stopped there as well."""
    if not comparison.stopped:
        return []
    trace = _stopped_trace(comparison)
    stops = comparison.stops
    if not stops:
        return wrapped_lines(f"{comparison.stopped} is {partial_run_text(trace)}")
    first = stops[0]
    first_position = stop_position_text(trace, first)
    at_first_position = [s for s in stops if stop_position_text(trace, s) == first_position]
    later = [s._replace(said="") for s in stops if s not in at_first_position]

    iteration = ""
    if first.row >= 0 and _has_iterations(trace):
        iteration = f"iteration {trace['iteration'][first.row]}"
    where = stopped_rank_lines(trace, at_first_position)[0]
    text = f"{comparison.stopped} stopped"
    if iteration:
        # The iteration is said once, at the beginning of the sentence.
        text += f" in {iteration}"
        where = where.replace(f", {iteration}", "", 1)
    text += f": {where}"
    later_lines = stopped_rank_lines(trace, later)
    if later_lines:
        text += f"; since then {'; '.join(later_lines)}"
    return wrapped_lines(text, further="  ")


def _stopped_trace(comparison: RunComparison) -> Trace:
    return comparison.a if comparison.stopped == "A" else comparison.b


def _has_iterations(trace: Trace) -> bool:
    return bool(trace["iteration"].max() > 0)


def _header_lines(comparison: RunComparison, names: tuple[str, str]) -> list[str]:
    a_ns, b_ns = comparison.makespans_ns
    traces = (comparison.a, comparison.b)
    lines = []
    for label, name, trace, outcome, makespan_ns in zip(
        "AB", names, traces, comparison.outcomes, (a_ns, b_ns), strict=True
    ):
        text = f"{truncated(name, 44)}, {_outcome_text(trace, outcome)} {show_ns(makespan_ns)}"
        lines += wrapped_lines(f"{label}: {text}", further="   ")
    verdict = _verdict_text(comparison)
    return [*lines, *wrapped_lines(f"{_makespan_difference(a_ns, b_ns)}; {verdict}")]


def _verdict_text(comparison: RunComparison) -> str:
    if not comparison.same:
        return "they differ"
    if comparison.tolerance == 0:
        return "the same"
    return f"the same within {_percent(comparison.tolerance)} of A's makespan"


def _outcome_text(trace: Trace, outcome: str) -> str:
    stop_text = partial_run_text(trace).partition(";")[0]
    if stop_text:
        return f"{stop_text}, after"
    return f"{outcome or 'outcome unknown'} in"


def _makespan_difference(a_ns: int, b_ns: int) -> str:
    if a_ns == b_ns:
        return "equal makespans"
    share = f", {_percent(abs(b_ns - a_ns) / a_ns)}" if a_ns else ""
    direction = "longer" if b_ns > a_ns else "less"
    return f"B takes {show_ns(abs(b_ns - a_ns))}{share} {direction} than A"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _values_lines(comparison: RunComparison) -> list[str]:
    """How many values are equal, or which run has none."""
    values = comparison.values
    if values.lacking:
        both_lack = len(values.lacking) > 1
        lacking = "neither has any" if both_lack else f"{values.lacking} has none"
        return wrapped_lines(f"values are not compared: {lacking} recorded")
    counts = {
        "equal": values.equal,
        "equal but for the order of addition": values.close,
        "differ": values.differ,
        "known in one run alone": values.one_sided,
    }
    parts = [f"{count} {meaning}" for meaning, count in counts.items() if count]
    return wrapped_lines(f"values of tensors, rank by rank: {', '.join(parts) or 'none known'}")


# --- divergences ---


def _divergence_lines(comparison: RunComparison) -> list[str]:
    if not comparison.divergences:
        return []
    independent = comparison.told
    hidden = len(comparison.divergences) - len(independent)
    hidden_lines: list[str] = []
    if hidden:
        hidden_lines = wrapped_lines(
            f"{hidden} differences that follow from where {comparison.stopped} stopped "
            "are not listed"
        )
    if not independent:
        return hidden_lines
    counts = Counter(divergence.kind for divergence in independent)
    summary = ", ".join(f"{n} {_DIVERGENCE_KINDS[kind]}" for kind, n in counts.items())
    lines = wrapped_lines(f"Where they part ({summary})")
    shown = _shown_divergences(independent)
    for divergence in shown:
        text = _divergence_text(comparison, divergence)
        lines += wrapped_lines(text, indent="  ", further="    ")
    return [*lines, *_more_lines(len(independent) - len(shown)), *hidden_lines]


def _shown_divergences(divergences: tuple[RunDivergence, ...]) -> list[RunDivergence]:
    """The first of each kind, then others in their order; further times are the least telling."""
    first_of_kind: dict[str, RunDivergence] = {}
    for divergence in divergences:
        first_of_kind.setdefault(divergence.kind, divergence)
    firsts = list(first_of_kind.values())
    others = [d for d in divergences if d not in firsts and d.kind != "time"]
    return [*firsts, *others][:MAX_DIVERGENCES]


def _divergence_text(comparison: RunComparison, divergence: RunDivergence) -> str:
    if divergence.kind == "value":
        return f"rank {divergence.rank}: {divergence.text}"
    location = _location_text(comparison, divergence)
    if divergence.kind != "time" or divergence.a < 0:
        return f"{divergence.text}{location}"
    what = divergence.text.removesuffix(" at another time")
    end_in_a = _end_text(comparison.a, divergence.a)
    end_in_b = _end_text(comparison.b, divergence.b)
    return f"{what} at {end_in_a} in A, {end_in_b} in B{location}"


def _end_text(trace: Trace, row: int) -> str:
    """When a call was over: its work finished and the function returned."""
    end_ns = max(int(trace["finished_ns"][row]), int(trace["returned_ns"][row]))
    return show_ns(end_ns) if end_ns >= 0 else "never"


def _location_text(comparison: RunComparison, divergence: RunDivergence) -> str:
    if divergence.a >= 0:
        trace, row = comparison.a, divergence.a
    else:
        trace, row = comparison.b, divergence.b
    place = trace.text("place", int(trace["place"][row]))
    parts = []
    if place.line:
        parts.append(f"line {place.line}")
    if _has_iterations(trace):
        parts.append(f"iteration {trace['iteration'][row]}")
    return f" ({', '.join(parts)})" if parts else ""


# --- tables ---


def _cause_lines(comparison: RunComparison) -> list[str]:
    """The kinds of segments of the critical paths that make one run longer."""
    causes = [cause for cause in comparison.causes if cause.delta_ns]
    if not causes:
        return []
    rows = [
        (
            _signed_duration(cause.delta_ns),
            show_ns(cause.a_ns),
            show_ns(cause.b_ns),
            _REASON_TEXT[cause.why],
            truncated(_cause_subject(cause), 22),
            truncated(cause.group, 10),
            _cause_reason(cause),
        )
        for cause in causes[:MAX_CAUSES]
    ]
    lines = _table_that_fits(
        ("B - A", "A", "B", "time", "what", "group", "because"),
        rows,
        left=(3, 4, 5, 6),
        shrinkable=(4, 5),
    )
    title = "What makes the difference, along the critical paths"
    return [title, *lines, *_more_lines(len(causes) - len(rows))]


def _cause_subject(cause: CriticalPathDelta) -> str:
    if not cause.op:
        return "nothing runs"
    subject = cause.name or cause.op
    return f"{subject} {show_bytes(cause.nbytes)}" if cause.nbytes else subject


def _cause_reason(cause: CriticalPathDelta) -> str:
    if not cause.a_calls or not cause.b_calls:
        return f"only in {'B' if cause.b_calls else 'A'}"
    if cause.a_calls != cause.b_calls:
        return f"{cause.a_calls} → {cause.b_calls} calls"
    return f"× {cause.b_ns / cause.a_ns:.2f}" if cause.a_ns else ""


def _operation_lines(comparison: RunComparison) -> list[str]:
    """The calls whose mean duration or waiting time differs."""
    changed = [o for o in comparison.ops if (o.a_ns, o.a_waiting_ns) != (o.b_ns, o.b_waiting_ns)]
    if not changed:
        return []
    rows = [
        (
            truncated(o.name or o.op, 20),
            show_bytes(o.nbytes) if o.nbytes else "",
            str(o.calls),
            show_ns(o.a_ns),
            show_ns(o.b_ns),
            f"{o.b_ns / o.a_ns:.2f}" if o.a_ns else "-",
            show_ns(o.a_waiting_ns),
            show_ns(o.b_waiting_ns),
        )
        for o in changed[:MAX_OPS]
    ]
    lines = _table_that_fits(
        ("operation", "bytes", "calls", "A", "B", "B/A", "A waits", "B waits"),
        rows,
        left=(0,),
        shrinkable=(0,),
    )
    title = "Calls, means of those that both runs have"
    return [title, *lines, *_more_lines(len(changed) - len(rows))]


def _rank_lines(comparison: RunComparison) -> list[str]:
    """The ranks whose time shares differ."""
    rows = []
    for rank, *shares in comparison.ranks:
        cells = [_signed_duration(b_ns - a_ns) if a_ns != b_ns else "-" for a_ns, b_ns in shares]
        if any(cell != "-" for cell in cells):
            rows.append((str(rank), *cells))
    if not rows:
        return []
    lines = table_lines(("rank", "compute", "exposed", "waiting", "idle"), rows[:MAX_RANKS])
    return ["Ranks, B - A", *lines, *_more_lines(len(rows) - MAX_RANKS)]


def _table_that_fits(
    header: Sequence[str],
    rows: Sequence[tuple[str, ...]],
    left: Sequence[int],
    shrinkable: Sequence[int],
) -> list[str]:
    """A table as wide as the page; the columns ``shrinkable`` are cut, the first one first."""
    excess = max(map(len, table_lines(header, rows, left))) - page_width()
    for column in shrinkable:
        if excess <= 0:
            break
        present = max(len(row[column]) for row in rows)
        width = max(present - excess, len(header[column]), _MIN_COLUMN_WIDTH)
        rows = [(*row[:column], truncated(row[column], width), *row[column + 1 :]) for row in rows]
        excess -= present - width
    return [truncated(line, page_width()) for line in table_lines(header, rows, left)]


def _more_lines(count: int) -> list[str]:
    return [f"  … {count} more"] if count > 0 else []


def _signed_duration(ns: int) -> str:
    sign = "+" if ns > 0 else "-"
    return sign + show_ns(abs(ns))


# --- JSON ---


def compare_json(comparison: RunComparison, names: tuple[str, str]) -> dict[str, object]:
    """The output of `distsim compare --format json`.

    Times are ns. ``same`` decides the exit status.
    """
    stopped = None
    if comparison.stopped:
        stop = partial_run_json(_stopped_trace(comparison)) or {}
        stopped = {"run": comparison.stopped, **stop}
    return {
        "schema_version": SCHEMA_VERSION,
        "a": names[0],
        "b": names[1],
        "same": comparison.same,
        "tolerance": comparison.tolerance,
        "makespan_ns": list(comparison.makespans_ns),
        "outcome": list(comparison.outcomes),
        "aligned": len(comparison.pairs),
        "only_a": len(comparison.only_a),
        "only_b": len(comparison.only_b),
        "worst_ns": comparison.worst_ns,
        "values": comparison.values._asdict(),
        "stopped": stopped,
        "partings": [_divergence_json(comparison, d) for d in comparison.divergences],
        "causes": [{**cause._asdict(), "delta_ns": cause.delta_ns} for cause in comparison.causes],
        "ops": [operation._asdict() for operation in comparison.ops],
        "ranks": [_rank_json(rank) for rank in comparison.ranks],
    }


def _divergence_json(comparison: RunComparison, divergence: RunDivergence) -> dict[str, object]:
    record: dict[str, object] = {
        "kind": divergence.kind,
        "rank": divergence.rank,
        "text": divergence.text,
        "a": _call_json(comparison.a, divergence.a),
        "b": _call_json(comparison.b, divergence.b),
    }
    if divergence.kind == "value":
        record["tensor"] = divergence.tensor
        record["element"] = divergence.element if divergence.element >= 0 else None
        record["numbers"] = list(divergence.numbers) if divergence.numbers else None
    return record


def _call_json(trace: Trace, row: int) -> dict[str, object] | None:
    """A call of one run; None if the run has no such call."""
    if row < 0:
        return None
    call = trace.row(row)
    return {
        "position": call.position,
        "part": call.part,
        "op": call.op,
        "line": call.place.line,
        "iteration": call.iteration,
        "posted_ns": call.posted_ns,
        "finished_ns": call.finished_ns,
        "returned_ns": call.returned_ns,
    }


def _rank_json(shares: RankTimeShares) -> dict[str, object]:
    return {
        "rank": shares.rank,
        "compute_ns": list(shares.compute),
        "exposed_ns": list(shares.exposed),
        "waiting_ns": list(shares.waiting),
        "idle_ns": list(shares.idle),
    }
