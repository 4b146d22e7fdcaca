"""A comparison of two runs as text in 80 columns, and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from distsim.compare import Cause, Comparison, Parting, RankShares
from distsim.trace import Trace
from distsim.units import show_bytes, show_ns
from distsim.views.ending import ending_json, how_it_ended, stood, stop_lines
from distsim.views.tables import cut, folded, page_width, table

SCHEMA_VERSION = 1
#: Lines of each table.
MOST_PARTINGS, MOST_CAUSES, MOST_OPS, MOST_RANKS = 6, 8, 10, 16
_WORDS = {
    "call": "calls of one run alone", "met": "calls that met others", "value": "values that differ",
    "time": "calls that end at another time",
}  # fmt: skip
_WHY = {"compute": "computing", "transfer": "moving", "sleep": "asleep", "wait": "waiting"}


def compare_text(found: Comparison, names: tuple[str, str]) -> str:
    """The report. ``names``: what the two runs are called."""
    sections = [
        [*_stop(found), *_head(found, names), *_values(found)],
        _partings(found),
        _causes(found),
        _ops(found),
        _ranks(found),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _stop(found: Comparison) -> list[str]:
    """Where one run stopped that the other passed: the cause, and who has come no further since."""
    if not found.stopped:
        return []
    trace, stops = (found.a if found.stopped == "A" else found.b), found.stops
    if not stops:
        return folded(f"{found.stopped} is {how_it_ended(trace)}")
    first = stops[0]
    same = [s for s in stops if stood(trace, s) == stood(trace, first)]
    at = f" in iteration {trace['iteration'][first.row]}" if first.row >= 0 and trace["iteration"].max() > 0 else ""
    rest = stop_lines(trace, [s._replace(said="") for s in stops if s not in same])
    where = stop_lines(trace, same)[0].replace(at.replace(" in ", ", "), "", 1)
    since = f"; since then {'; '.join(rest)}" if rest else ""
    return folded(f"{found.stopped} stopped{at}: {where}{since}", further="  ")


def _head(found: Comparison, names: tuple[str, str]) -> list[str]:
    a_ns, b_ns = found.makespans_ns
    if found.same:
        verdict = "the same" if found.tolerance == 0 else f"the same within {_percent(found.tolerance)} of A's makespan"
    else:
        verdict = "they differ"
    sides = [f"{x}: {cut(name, 44)}, {_ended(t, outcome)} {show_ns(ns)}"
             for x, name, outcome, ns, t in zip("AB", names, found.outcomes, (a_ns, b_ns), (found.a, found.b), strict=True)]  # fmt: skip
    return [*(line for side in sides for line in folded(side, further="   ")), *folded(f"{_longer(a_ns, b_ns)}; {verdict}")]


def _ended(trace: Trace, outcome: str) -> str:
    told = how_it_ended(trace).partition(";")[0]
    return f"{told}, after" if told else f"{outcome or 'outcome unknown'} in"


def _values(found: Comparison) -> list[str]:
    """How the values compare, or who has none."""
    v = found.values
    if v.lacking:
        return folded(
            f"values are not compared: {'neither' if len(v.lacking) > 1 else v.lacking} has {_some(v.lacking)} recorded"
        )
    parts = [f"{n} {word}" for n, word in ((v.equal, "equal"), (v.close, "equal but for the order of addition"), (v.differ, "differ"),
                                           (v.one_sided, "known in one run alone")) if n]  # fmt: skip
    return folded(f"values of tensors, rank by rank: {', '.join(parts) or 'none known'}")


def _some(lacking: str) -> str:
    return "any" if len(lacking) > 1 else "none"


def _longer(a_ns: int, b_ns: int) -> str:
    if a_ns == b_ns:
        return "equal makespans"
    share = f", {_percent(abs(b_ns - a_ns) / a_ns)}" if a_ns else ""
    return f"B takes {show_ns(abs(b_ns - a_ns))}{share} {'longer' if b_ns > a_ns else 'less'} than A"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _partings(found: Comparison) -> list[str]:
    if not found.partings:
        return []
    shown = found.told
    hidden = len(found.partings) - len(shown)
    rest = folded(f"{hidden} differences that follow from where {found.stopped} stopped are not listed") if hidden else []
    if not shown:
        return rest
    counts = Counter(p.kind for p in shown)
    title = f"Where they part ({', '.join(f'{n} {_WORDS[kind]}' for kind, n in counts.items())})"
    chosen = _chosen(shown)
    told = [line for parting in chosen for line in folded(_parting(found, parting), indent="  ", further="    ")]
    return [*folded(title), *told, *_more(len(shown) - len(chosen)), *rest]


def _chosen(partings: tuple[Parting, ...]) -> list[Parting]:
    """The first of all, then the first of each kind, then what comes next; what is no matter of time before what is."""
    firsts = [next(p for p in partings if p.kind == kind) for kind in dict.fromkeys(p.kind for p in partings)]
    rest = [p for p in partings if p not in firsts and p.kind != "time"]
    return [*firsts, *rest][:MOST_PARTINGS]


def _parting(found: Comparison, p: Parting) -> str:
    if p.kind != "time" or p.a < 0:
        return f"rank {p.rank}: {p.text}" if p.kind == "value" else f"{p.text}{_where(found, p)}"
    ends = [max(int(t["finished_ns"][row]), int(t["returned_ns"][row])) for t, row in ((found.a, p.a), (found.b, p.b))]
    shown = [show_ns(ns) if ns >= 0 else "never" for ns in ends]
    return f"{p.text.removesuffix(' at another time')} at {shown[0]} in A, {shown[1]} in B{_where(found, p)}"


def _where(found: Comparison, p: Parting) -> str:
    trace, row = (found.a, p.a) if p.a >= 0 else (found.b, p.b)
    place = trace.text("place", int(trace["place"][row]))
    iteration = [f"iteration {trace['iteration'][row]}"] if trace["iteration"].max() > 0 else []
    parts = [*([f"line {place.line}"] if place.line else []), *iteration]
    return f" ({', '.join(parts)})" if parts else ""


def _causes(found: Comparison) -> list[str]:
    causes = [c for c in found.causes if c.delta_ns]
    if not causes:
        return []
    rows = [
        (_difference(c.delta_ns), show_ns(c.a_ns), show_ns(c.b_ns), _WHY[c.why], cut(_what(c), 22), cut(c.group, 10), _why(c))
        for c in causes[:MOST_CAUSES]
    ]
    lines = _fitted(("B - A", "A", "B", "time", "what", "group", "because"), rows, left=(3, 4, 5, 6), narrower=(4, 5))
    return ["What makes the difference, along the critical paths", *lines, *_more(len(causes) - len(rows))]


def _fitted(
    header: Sequence[str], rows: Sequence[tuple[str, ...]], left: Sequence[int], narrower: Sequence[int]
) -> list[str]:  # fmt: skip
    """A table in 80 columns: those numbered in ``narrower`` give way, the first one first."""
    over = max(map(len, table(header, rows, left))) - page_width()
    for column in narrower:
        if over > 0:
            most = max(len(row[column]) for row in rows)
            width = max(most - over, len(header[column]), 6)
            rows = [(*row[:column], cut(row[column], width), *row[column + 1 :]) for row in rows]
            over -= most - width
    return [cut(line, page_width()) for line in table(header, rows, left)]


def _more(count: int) -> list[str]:
    return [f"  … {count} more"] if count > 0 else []


def _difference(ns: int) -> str:
    return ("+" if ns > 0 else "-") + show_ns(abs(ns))


def _what(c: Cause) -> str:
    if not c.op:
        return "nothing runs"
    return (c.name or c.op) + (f" {show_bytes(c.nbytes)}" if c.nbytes else "")


def _why(c: Cause) -> str:
    if not c.a_calls or not c.b_calls:
        return f"only in {'B' if c.b_calls else 'A'}"
    if c.a_calls != c.b_calls:
        return f"{c.a_calls} → {c.b_calls} calls"
    return f"× {c.b_ns / c.a_ns:.2f}" if c.a_ns else ""


def _ops(found: Comparison) -> list[str]:
    moved = [o for o in found.ops if (o.a_ns, o.a_waiting_ns) != (o.b_ns, o.b_waiting_ns)]
    if not moved:
        return []
    rows = [
        (cut(o.name or o.op, 20), show_bytes(o.nbytes) if o.nbytes else "", str(o.calls), show_ns(o.a_ns), show_ns(o.b_ns),
         f"{o.b_ns / o.a_ns:.2f}" if o.a_ns else "-", show_ns(o.a_waiting_ns), show_ns(o.b_waiting_ns))
        for o in moved[:MOST_OPS]
    ]  # fmt: skip
    lines = _fitted(("operation", "bytes", "calls", "A", "B", "B/A", "A waits", "B waits"), rows, left=(0,), narrower=(0,))
    return ["Calls, means of those that both runs have", *lines, *_more(len(moved) - len(rows))]


def _ranks(found: Comparison) -> list[str]:
    moved = [r for r in found.ranks if any(x != y for x, y in r[1:])]
    rows = [(str(r.rank), *(_difference(y - x) if x != y else "-" for x, y in r[1:])) for r in moved[:MOST_RANKS]]
    lines = table(("rank", "compute", "exposed", "waiting", "idle"), rows)
    return ["Ranks, B - A", *lines, *_more(len(moved) - len(rows))] if moved else []


# --- JSON ---


def compare_json(found: Comparison, names: tuple[str, str]) -> dict[str, object]:
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
        "stopped": {"run": found.stopped, **(ending_json(found.a if found.stopped == "A" else found.b) or {})}
        if found.stopped
        else None,
        "partings": [_parting_json(found, p) for p in found.partings],
        "causes": [{**c._asdict(), "delta_ns": c.delta_ns} for c in found.causes],
        "ops": [o._asdict() for o in found.ops],
        "ranks": [_rank_json(r) for r in found.ranks],
    }


def _parting_json(found: Comparison, p: Parting) -> dict[str, object]:
    calls = [None if row < 0 else trace.row(row) for trace, row in ((found.a, p.a), (found.b, p.b))]
    sides = [None if c is None else {"position": c.position, "part": c.part, "op": c.op, "line": c.place.line,
                                     "iteration": c.iteration, "posted_ns": c.posted_ns, "finished_ns": c.finished_ns,
                                     "returned_ns": c.returned_ns} for c in calls]  # fmt: skip
    value = {
        "tensor": p.tensor,
        "element": p.element if p.element >= 0 else None,
        "numbers": list(p.numbers) if p.numbers else None,
    }
    return {"kind": p.kind, "rank": p.rank, "text": p.text, "a": sides[0], "b": sides[1], **(value if p.kind == "value" else {})}


def _rank_json(r: RankShares) -> dict[str, object]:
    return {"rank": r.rank, **{f"{name}_ns": list(getattr(r, name)) for name in ("compute", "exposed", "waiting", "idle")}}
