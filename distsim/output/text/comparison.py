"""A comparison of two runs as text in 80 columns, and as JSON."""

from __future__ import annotations

from collections import Counter

from distsim.analysis.run_comparison import (
    CriticalPathDelta,
    OperationTimes,
    RankTimeShares,
    RunComparison,
    RunDivergence,
)
from distsim.common.units import show_bytes, show_ns
from distsim.output.report_record import (
    Block,
    Column,
    Paragraph,
    Report,
    Section,
    Table,
    TableLayout,
    paragraphs,
    table_of,
    text_column,
)
from distsim.output.report_text import write_text
from distsim.output.text_layout import truncated
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
    "call": ("call in only one run", "calls in only one run"),
    "met": ("call matched differently", "calls matched differently"),
    "value": ("different value", "different values"),
    "time": ("call that ends at different times", "calls that end at different times"),
}
_REASON_TEXT = {
    "compute": "compute",
    "transfer": "transfer",
    "sleep": "sleep",
    "late start": "late start",
    "wait": "idle",
}


def compare_text(comparison: RunComparison, names: tuple[str, str]) -> str:
    """The whole report as text."""
    return write_text(compare_report(comparison, names))


def compare_report(comparison: RunComparison, names: tuple[str, str]) -> Report:
    """Makespans, values, divergences and causes. ``names``: the names of the two runs."""
    head = [
        Paragraph(_stop_text(comparison), further="  "),
        *_run_paragraphs(comparison, names),
        Paragraph(_summary_text(comparison)),
        Paragraph(_values_text(comparison)),
    ]
    return Report(
        [
            Section(head),
            _divergence_section(comparison),
            _cause_section(comparison),
            _operation_section(comparison),
            _rank_section(comparison),
        ]
    )


# --- the head: where a run stopped, makespans, verdict, values ---


def _stop_text(comparison: RunComparison) -> str:
    """Where one run stopped while the other went on, and which ranks stopped there as well."""
    if not comparison.stopped:
        return ""
    trace = _stopped_trace(comparison)
    stops = comparison.stops
    if not stops:
        return f"{comparison.stopped} is {partial_run_text(trace)}"
    first = stops[0]
    first_position = stop_position_text(trace, first)
    at_first_position = [s for s in stops if stop_position_text(trace, s) == first_position]
    later = [s._replace(message="") for s in stops if s not in at_first_position]

    iteration = ""
    if first.row >= 0 and _has_iterations(trace):
        iteration = f"iteration {trace['iteration'][first.row]}"
    where = stopped_rank_lines(trace, at_first_position)[0]
    text = f"{comparison.stopped} stopped"
    if iteration:
        # The iteration is given once, at the beginning of the sentence.
        text += f" in {iteration}"
        where = where.replace(f", {iteration}", "", 1)
    text += f": {where}"
    later_lines = stopped_rank_lines(trace, later)
    return f"{text}; then {'; '.join(later_lines)}" if later_lines else text


def _stopped_trace(comparison: RunComparison) -> Trace:
    return comparison.a if comparison.stopped == "A" else comparison.b


def _has_iterations(trace: Trace) -> bool:
    return bool(trace["iteration"].max() > 0)


def _run_paragraphs(comparison: RunComparison, names: tuple[str, str]) -> list[Block]:
    """The outcome and the makespan of each run."""
    traces = (comparison.a, comparison.b)
    runs = zip("AB", names, traces, comparison.outcomes, comparison.makespans_ns, strict=True)
    texts = []
    for label, name, trace, outcome, makespan_ns in runs:
        end = f"{_outcome_text(trace, outcome)} {show_ns(makespan_ns)}"
        texts.append(f"{label}: {truncated(name, 44)}, {end}")
    return paragraphs(texts, further="   ")


def _summary_text(comparison: RunComparison) -> str:
    return f"{_makespan_difference(*comparison.makespans_ns)}; {_verdict_text(comparison)}"


def _verdict_text(comparison: RunComparison) -> str:
    if not comparison.same:
        return "the runs differ"
    if comparison.tolerance == 0:
        return "the runs are the same"
    return f"the runs are the same within {_percent(comparison.tolerance)} of A's makespan"


def _outcome_text(trace: Trace, outcome: str) -> str:
    stop_text = partial_run_text(trace).partition(";")[0]
    if stop_text:
        return f"{stop_text}, after"
    return f"{outcome or 'outcome unknown'} in"


def _makespan_difference(a_ns: int, b_ns: int) -> str:
    if a_ns == b_ns:
        return "equal makespans"
    share = f" ({_percent(abs(b_ns - a_ns) / a_ns)})" if a_ns else ""
    direction = "longer" if b_ns > a_ns else "shorter"
    return f"B is {show_ns(abs(b_ns - a_ns))}{share} {direction} than A"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _values_text(comparison: RunComparison) -> str:
    """How many values are equal, or which run has none."""
    values = comparison.values
    if values.lacking:
        if len(values.lacking) > 1:
            return "values are not compared: neither run recorded them"
        return f"values are not compared: {values.lacking} did not record them"
    counts = {
        "equal": values.equal,
        "equal up to the order of additions": values.close,
        "differ": values.differ,
        "known in only one run": values.one_sided,
    }
    parts = [f"{count} {meaning}" for meaning, count in counts.items() if count]
    return f"tensor values on each rank: {', '.join(parts) or 'none known'}"


# --- divergences ---


def _divergence_count(kind: str, count: int) -> str:
    """A number of differences of one kind, such as "1 different value"."""
    singular, plural = _DIVERGENCE_KINDS[kind]
    return f"{count} {singular if count == 1 else plural}"


def _divergence_section(comparison: RunComparison) -> Section:
    independent = comparison.independent_divergences
    hidden_text = _hidden_text(comparison, len(comparison.divergences) - len(independent))
    if not independent:
        return Section([Paragraph(hidden_text)])
    counts = Counter(divergence.kind for divergence in independent)
    summary = ", ".join(_divergence_count(kind, n) for kind, n in counts.items())
    shown = _shown_divergences(independent)
    texts = [_divergence_text(comparison, divergence) for divergence in shown]
    blocks = [
        *paragraphs(texts, "  ", "    "),
        _more_paragraph(len(independent) - len(shown)),
        Paragraph(hidden_text),
    ]
    return Section(blocks, f"Differences ({summary})")


def _hidden_text(comparison: RunComparison, hidden: int) -> str:
    if not hidden:
        return ""
    return (
        f"{hidden} further differences are not listed: "
        f"they follow from the stop of {comparison.stopped}"
    )


def _shown_divergences(divergences: tuple[RunDivergence, ...]) -> list[RunDivergence]:
    """The first of each kind, then others in their order; further times help least."""
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


_CAUSE_COLUMNS = [
    Column("B - A"),
    Column("A"),
    Column("B"),
    *map(text_column, ("kind", "work", "group", "reason")),
]
_CAUSE_LAYOUT = TableLayout(
    [column.key for column in _CAUSE_COLUMNS],
    {"work": 22, "group": 10},
    flexible={"work": _MIN_COLUMN_WIDTH, "group": _MIN_COLUMN_WIDTH},
)


def _cause_section(comparison: RunComparison) -> Section:
    """The kinds of segments of the critical paths that make one run longer."""
    causes = [cause for cause in comparison.causes if cause.delta_ns]
    rows = [_cause_cells(cause) for cause in causes[:MAX_CAUSES]]
    table = Table(_CAUSE_COLUMNS, rows, (_CAUSE_LAYOUT,))
    more = _more_paragraph(len(causes) - len(rows))
    return Section([table, more], "Causes of the time difference, along the critical paths")


def _cause_cells(cause: CriticalPathDelta) -> dict[str, str]:
    return {
        "B - A": _signed_duration(cause.delta_ns),
        "A": show_ns(cause.a_ns),
        "B": show_ns(cause.b_ns),
        "kind": _REASON_TEXT[cause.why],
        "work": _cause_subject(cause),
        "group": cause.group,
        "reason": _cause_reason(cause),
    }


def _cause_subject(cause: CriticalPathDelta) -> str:
    if not cause.op:
        return "idle"
    subject = cause.name or cause.op
    return f"{subject} {show_bytes(cause.nbytes)}" if cause.nbytes else subject


def _cause_reason(cause: CriticalPathDelta) -> str:
    if not cause.a_calls or not cause.b_calls:
        return f"only in {'B' if cause.b_calls else 'A'}"
    if cause.a_calls != cause.b_calls:
        return f"{cause.a_calls} → {cause.b_calls} calls"
    return f"× {cause.b_ns / cause.a_ns:.2f}" if cause.a_ns else ""


_OPERATION_COLUMNS = [
    text_column("operation"),
    *map(Column, ("bytes", "calls", "A", "B", "B/A", "wait in A", "wait in B")),
]
_OPERATION_LAYOUT = TableLayout(
    [column.key for column in _OPERATION_COLUMNS],
    {"operation": 20},
    flexible={"operation": _MIN_COLUMN_WIDTH},
)


def _operation_section(comparison: RunComparison) -> Section:
    """The calls whose mean duration or waiting time differs."""
    changed = [o for o in comparison.ops if (o.a_ns, o.a_waiting_ns) != (o.b_ns, o.b_waiting_ns)]
    rows = [_operation_cells(operation) for operation in changed[:MAX_OPS]]
    table = Table(_OPERATION_COLUMNS, rows, (_OPERATION_LAYOUT,))
    more = _more_paragraph(len(changed) - len(rows))
    return Section([table, more], "Calls in both runs, mean times")


def _operation_cells(o: OperationTimes) -> dict[str, str]:
    return {
        "operation": o.name or o.op,
        "bytes": show_bytes(o.nbytes) if o.nbytes else "",
        "calls": str(o.calls),
        "A": show_ns(o.a_ns),
        "B": show_ns(o.b_ns),
        "B/A": f"{o.b_ns / o.a_ns:.2f}" if o.a_ns else "-",
        "wait in A": show_ns(o.a_waiting_ns),
        "wait in B": show_ns(o.b_waiting_ns),
    }


_RANK_COLUMNS = [
    text_column("rank"),
    *map(Column, ("compute", "exposed comm", "wait for peers", "idle")),
]


#: The second one fits 48 columns, the third one 40.
_RANK_LAYOUTS = (
    TableLayout([column.key for column in _RANK_COLUMNS]),
    TableLayout(
        [column.key for column in _RANK_COLUMNS],
        headings={"exposed comm": "exposed", "wait for peers": "waits"},
    ),
    TableLayout(
        ["rank", "compute", "exposed comm", "wait for peers"],
        headings={"exposed comm": "exposed", "wait for peers": "waits"},
    ),
)


def _rank_section(comparison: RunComparison) -> Section:
    """The ranks whose time shares differ."""
    rows = []
    for rank, *shares in comparison.ranks:
        cells = [_signed_duration(b_ns - a_ns) if a_ns != b_ns else "-" for a_ns, b_ns in shares]
        if any(cell != "-" for cell in cells):
            rows.append((str(rank), *cells))
    table = table_of(_RANK_COLUMNS, rows[:MAX_RANKS])._replace(layouts=_RANK_LAYOUTS)
    return Section([table, _more_paragraph(len(rows) - MAX_RANKS)], "Ranks, B - A")


def _more_paragraph(hidden: int) -> Paragraph:
    return Paragraph(f"… {hidden} more" if hidden > 0 else "", "  ")


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
        "divergences": [_divergence_json(comparison, d) for d in comparison.divergences],
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
