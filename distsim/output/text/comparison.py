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
MAX_DIVERGENCES, MAX_CAUSES, MAX_OPS, MAX_RANKS = 6, 8, 10, 16
_DIVERGENCE_KINDS = {
    "call": "calls of one run alone",
    "met": "calls that met others",
    "value": "values that differ",
    "time": "calls that end at another time",
}
_REASON_TEXT = {"compute": "computing", "transfer": "moving", "sleep": "asleep", "wait": "waiting"}


def compare_text(found: RunComparison, names: tuple[str, str]) -> str:
    """The report. ``names``: what the two runs are called."""
    sections = [
        [*_stop_lines(found), *_header_lines(found, names), *_values_lines(found)],
        _divergence_lines(found),
        _cause_lines(found),
        _operation_lines(found),
        _rank_lines(found),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _stop_lines(found: RunComparison) -> list[str]:
    """Where one run stopped that the other passed: the cause, and who has come no further since."""
    if not found.stopped:
        return []
    trace, stops = (found.a if found.stopped == "A" else found.b), found.stops
    if not stops:
        return wrapped_lines(f"{found.stopped} is {partial_run_text(trace)}")
    first = stops[0]
    same = [s for s in stops if stop_position_text(trace, s) == stop_position_text(trace, first)]
    at = (
        f" in iteration {trace['iteration'][first.row]}"
        if first.row >= 0 and trace["iteration"].max() > 0
        else ""
    )
    rest = stopped_rank_lines(trace, [s._replace(said="") for s in stops if s not in same])
    where = stopped_rank_lines(trace, same)[0].replace(at.replace(" in ", ", "), "", 1)
    since = f"; since then {'; '.join(rest)}" if rest else ""
    return wrapped_lines(f"{found.stopped} stopped{at}: {where}{since}", further="  ")


def _header_lines(found: RunComparison, names: tuple[str, str]) -> list[str]:
    a_ns, b_ns = found.makespans_ns
    if found.same:
        verdict = (
            "the same"
            if found.tolerance == 0
            else f"the same within {_percent(found.tolerance)} of A's makespan"
        )
    else:
        verdict = "they differ"
    sides = [
        f"{x}: {truncated(name, 44)}, {_outcome_text(t, outcome)} {show_ns(ns)}"
        for x, name, outcome, ns, t in zip(
            "AB", names, found.outcomes, (a_ns, b_ns), (found.a, found.b), strict=True
        )
    ]
    return [
        *(line for side in sides for line in wrapped_lines(side, further="   ")),
        *wrapped_lines(f"{_makespan_difference(a_ns, b_ns)}; {verdict}"),
    ]


def _outcome_text(trace: Trace, outcome: str) -> str:
    told = partial_run_text(trace).partition(";")[0]
    return f"{told}, after" if told else f"{outcome or 'outcome unknown'} in"


def _values_lines(found: RunComparison) -> list[str]:
    """How the values compare, or who has none."""
    v = found.values
    if v.lacking:
        return wrapped_lines(
            f"values are not compared: {'neither' if len(v.lacking) > 1 else v.lacking} has {_any_or_none(v.lacking)} recorded"
        )
    parts = [
        f"{n} {word}"
        for n, word in (
            (v.equal, "equal"),
            (v.close, "equal but for the order of addition"),
            (v.differ, "differ"),
            (v.one_sided, "known in one run alone"),
        )
        if n
    ]
    return wrapped_lines(f"values of tensors, rank by rank: {', '.join(parts) or 'none known'}")


def _any_or_none(lacking: str) -> str:
    return "any" if len(lacking) > 1 else "none"


def _makespan_difference(a_ns: int, b_ns: int) -> str:
    if a_ns == b_ns:
        return "equal makespans"
    share = f", {_percent(abs(b_ns - a_ns) / a_ns)}" if a_ns else ""
    return (
        f"B takes {show_ns(abs(b_ns - a_ns))}{share} {'longer' if b_ns > a_ns else 'less'} than A"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _divergence_lines(found: RunComparison) -> list[str]:
    if not found.divergences:
        return []
    shown = found.told
    hidden = len(found.divergences) - len(shown)
    rest = (
        wrapped_lines(
            f"{hidden} differences that follow from where {found.stopped} stopped are not listed"
        )
        if hidden
        else []
    )
    if not shown:
        return rest
    counts = Counter(p.kind for p in shown)
    title = f"Where they part ({', '.join(f'{n} {_DIVERGENCE_KINDS[kind]}' for kind, n in counts.items())})"
    chosen = _shown_divergences(shown)
    told = [
        line
        for parting in chosen
        for line in wrapped_lines(_divergence_text(found, parting), indent="  ", further="    ")
    ]
    return [*wrapped_lines(title), *told, *_more_lines(len(shown) - len(chosen)), *rest]


def _shown_divergences(divergences: tuple[RunDivergence, ...]) -> list[RunDivergence]:
    """The first of all, then the first of each kind, then what comes next; what is no matter of
    time before what is.
    """
    firsts = [
        next(p for p in divergences if p.kind == kind)
        for kind in dict.fromkeys(p.kind for p in divergences)
    ]
    rest = [p for p in divergences if p not in firsts and p.kind != "time"]
    return [*firsts, *rest][:MAX_DIVERGENCES]


def _divergence_text(found: RunComparison, p: RunDivergence) -> str:
    if p.kind != "time" or p.a < 0:
        return (
            f"rank {p.rank}: {p.text}"
            if p.kind == "value"
            else f"{p.text}{_location_text(found, p)}"
        )
    ends = [
        max(int(t["finished_ns"][row]), int(t["returned_ns"][row]))
        for t, row in ((found.a, p.a), (found.b, p.b))
    ]
    shown = [show_ns(ns) if ns >= 0 else "never" for ns in ends]
    return f"{p.text.removesuffix(' at another time')} at {shown[0]} in A, {shown[1]} in B{_location_text(found, p)}"


def _location_text(found: RunComparison, p: RunDivergence) -> str:
    trace, row = (found.a, p.a) if p.a >= 0 else (found.b, p.b)
    place = trace.text("place", int(trace["place"][row]))
    iteration = [f"iteration {trace['iteration'][row]}"] if trace["iteration"].max() > 0 else []
    parts = [*([f"line {place.line}"] if place.line else []), *iteration]
    return f" ({', '.join(parts)})" if parts else ""


def _cause_lines(found: RunComparison) -> list[str]:
    causes = [c for c in found.causes if c.delta_ns]
    if not causes:
        return []
    rows = [
        (
            _signed_duration(c.delta_ns),
            show_ns(c.a_ns),
            show_ns(c.b_ns),
            _REASON_TEXT[c.why],
            truncated(_cause_subject(c), 22),
            truncated(c.group, 10),
            _cause_reason(c),
        )
        for c in causes[:MAX_CAUSES]
    ]
    lines = _table_that_fits(
        ("B - A", "A", "B", "time", "what", "group", "because"),
        rows,
        left=(3, 4, 5, 6),
        narrower=(4, 5),
    )
    return [
        "What makes the difference, along the critical paths",
        *lines,
        *_more_lines(len(causes) - len(rows)),
    ]


def _table_that_fits(
    header: Sequence[str],
    rows: Sequence[tuple[str, ...]],
    left: Sequence[int],
    narrower: Sequence[int],
) -> list[str]:
    """A table in 80 columns: those numbered in ``narrower`` give way, the first one first."""
    over = max(map(len, table_lines(header, rows, left))) - page_width()
    for column in narrower:
        if over > 0:
            most = max(len(row[column]) for row in rows)
            width = max(most - over, len(header[column]), 6)
            rows = [
                (*row[:column], truncated(row[column], width), *row[column + 1 :]) for row in rows
            ]
            over -= most - width
    return [truncated(line, page_width()) for line in table_lines(header, rows, left)]


def _more_lines(count: int) -> list[str]:
    return [f"  … {count} more"] if count > 0 else []


def _signed_duration(ns: int) -> str:
    return ("+" if ns > 0 else "-") + show_ns(abs(ns))


def _cause_subject(c: CriticalPathDelta) -> str:
    if not c.op:
        return "nothing runs"
    return (c.name or c.op) + (f" {show_bytes(c.nbytes)}" if c.nbytes else "")


def _cause_reason(c: CriticalPathDelta) -> str:
    if not c.a_calls or not c.b_calls:
        return f"only in {'B' if c.b_calls else 'A'}"
    if c.a_calls != c.b_calls:
        return f"{c.a_calls} → {c.b_calls} calls"
    return f"× {c.b_ns / c.a_ns:.2f}" if c.a_ns else ""


def _operation_lines(found: RunComparison) -> list[str]:
    moved = [o for o in found.ops if (o.a_ns, o.a_waiting_ns) != (o.b_ns, o.b_waiting_ns)]
    if not moved:
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
        for o in moved[:MAX_OPS]
    ]
    lines = _table_that_fits(
        ("operation", "bytes", "calls", "A", "B", "B/A", "A waits", "B waits"),
        rows,
        left=(0,),
        narrower=(0,),
    )
    return [
        "Calls, means of those that both runs have",
        *lines,
        *_more_lines(len(moved) - len(rows)),
    ]


def _rank_lines(found: RunComparison) -> list[str]:
    moved = [r for r in found.ranks if any(x != y for x, y in r[1:])]
    rows = [
        (str(r.rank), *(_signed_duration(y - x) if x != y else "-" for x, y in r[1:]))
        for r in moved[:MAX_RANKS]
    ]
    lines = table_lines(("rank", "compute", "exposed", "waiting", "idle"), rows)
    return ["Ranks, B - A", *lines, *_more_lines(len(moved) - len(rows))] if moved else []


# --- JSON ---


def compare_json(found: RunComparison, names: tuple[str, str]) -> dict[str, object]:
    """What `distsim compare --format json` prints. Times are ns; ``same`` is the exit status."""
    return {
        "schema_version": SCHEMA_VERSION,
        "a": names[0],
        "b": names[1],
        "same": found.same,
        "tolerance": found.tolerance,
        "makespan_ns": list(found.makespans_ns),
        "outcome": list(found.outcomes),
        "aligned": len(found.pairs),
        "only_a": len(found.only_a),
        "only_b": len(found.only_b),
        "worst_ns": found.worst_ns,
        "values": found.values._asdict(),
        "stopped": {
            "run": found.stopped,
            **(partial_run_json(found.a if found.stopped == "A" else found.b) or {}),
        }
        if found.stopped
        else None,
        "partings": [_divergence_json(found, p) for p in found.divergences],
        "causes": [{**c._asdict(), "delta_ns": c.delta_ns} for c in found.causes],
        "ops": [o._asdict() for o in found.ops],
        "ranks": [_rank_json(r) for r in found.ranks],
    }


def _divergence_json(found: RunComparison, p: RunDivergence) -> dict[str, object]:
    calls = [None if row < 0 else trace.row(row) for trace, row in ((found.a, p.a), (found.b, p.b))]
    sides = [
        None
        if c is None
        else {
            "position": c.position,
            "part": c.part,
            "op": c.op,
            "line": c.place.line,
            "iteration": c.iteration,
            "posted_ns": c.posted_ns,
            "finished_ns": c.finished_ns,
            "returned_ns": c.returned_ns,
        }
        for c in calls
    ]
    value = {
        "tensor": p.tensor,
        "element": p.element if p.element >= 0 else None,
        "numbers": list(p.numbers) if p.numbers else None,
    }
    return {
        "kind": p.kind,
        "rank": p.rank,
        "text": p.text,
        "a": sides[0],
        "b": sides[1],
        **(value if p.kind == "value" else {}),
    }


def _rank_json(r: RankTimeShares) -> dict[str, object]:
    return {
        "rank": r.rank,
        **{
            f"{name}_ns": list(getattr(r, name))
            for name in ("compute", "exposed", "waiting", "idle")
        },
    }
