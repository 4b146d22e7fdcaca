"""The report of a simulation as text in 80 columns: outcome and verdict first, then why, then where the time went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from distsim.engine import SHARED_CALLS
from distsim.units import show_bytes, show_ns
from distsim.views.findings import against_lines, findings_lines, verdict_words
from distsim.views.tables import cells, cut, folded, page_width, ranks_text, table

if TYPE_CHECKING:
    from distsim.check.memory import Held
    from distsim.cluster import Cluster
    from distsim.critical_path import Segment
    from distsim.simulation import Simulation
    from distsim.standstill import RankEnd
    from distsim.timeline import CollectiveTimes, RankTimes


LEGEND = "  exposed: communicating, nothing computes; waiting: in a call, before its match"
#: More ranks than this are shown by groups of ranks with equal times.
MOST_RANKS = 16
#: Lines of the longest tables: the first ones, a line with …, the last ones.
MOST_COLLECTIVES = 12
MOST_SEGMENTS = 14


def report(simulation: Simulation) -> str:
    """The whole report."""
    timeline, file = simulation.timeline, simulation.scenario.file
    sections = [
        _head(simulation),
        findings_lines(simulation.findings, file),
        _titled("Ranks", _ranks(timeline.ranks, simulation.run.standstill.ends)),
        _titled("Collectives", _collectives(timeline.collectives)),
        _titled("Critical path", _critical_path(timeline.critical_path, timeline.makespan_ns, file)),
        _memory(simulation),
        _values(simulation),
        folded(band_line(simulation)),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _memory(simulation: Simulation) -> list[str]:
    if not simulation.scenario.memory:
        return []
    from distsim.check.memory import held

    return memory_lines(held(simulation.scenario, simulation.program), simulation.cost.cluster)


def _values(simulation: Simulation) -> list[str]:
    """Nothing where no tensor has numbers: then all that values can tell is whose data they are."""
    if "numbers" not in simulation.program.features:
        return []
    from distsim.views.values import values_lines

    return _titled("Values at the end", values_lines(simulation.values))


def _titled(title: str, lines: Sequence[str]) -> list[str]:
    return [title, *lines] if lines else []


def _head(simulation: Simulation) -> list[str]:
    scenario, program = simulation.scenario, simulation.program
    machines = "1 machine" if program.nodes == 1 else f"{program.nodes} machines of {program.local_size}"
    ranks = "1 rank" if program.world_size == 1 else f"{program.world_size} ranks"
    return [
        *folded(f"{scenario.name or scenario.file}: {_outcome(simulation)}{_verdict(simulation)}"),
        *against_lines(simulation.verdict, simulation.outcome, simulation.run.profile, simulation.findings),
        *folded(scenario.about),
        *folded(f"{ranks} on {machines}, back end {simulation.run.profile}, cluster {simulation.cost.name}"),
        *_figures(simulation),
    ]


def _figures(simulation: Simulation) -> list[str]:
    """Those of a training step; nothing where the file names no strategy."""
    if not simulation.scenario.strategies:
        return []
    from distsim.figures import figures
    from distsim.views.whatifview import figures_lines

    return figures_lines(figures(simulation))


def _outcome(simulation: Simulation) -> str:
    outcome, iteration_ns = simulation.outcome, simulation.timeline.iteration_ns
    at = (
        f"{'in' if outcome == 'completes' else 'after'} {show_ns(simulation.makespan_ns)}"
        if simulation.makespan_ns
        else "at once"
    )
    each = f" ({show_ns(iteration_ns)} an iteration)" if iteration_ns is not None else ""
    return f"{outcome} {at}{each}"


def _verdict(simulation: Simulation) -> str:
    verdict = simulation.verdict
    if verdict is None:
        return ""
    text = f"; {verdict_words(verdict)}"
    return text if verdict.complete else text + " so far (the search is not complete)"


#: Columns of the table of ranks, from the most comfortable on.
_RANK_COLUMNS = ((0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 5), (0, 1, 3, 5), (0, 3, 5))


class _RankLine(NamedTuple):
    ranks: list[int]
    times: RankTimes
    finished: str


def _ranks(ranks: Sequence[RankTimes], ends: Sequence[RankEnd]) -> list[str]:
    """One line per rank; in a large world one per set of ranks with equal times, first those that finish last."""
    statuses = {end.rank: end.status for end in ends}
    groups: dict[object, _RankLine] = {}
    for r in ranks:
        key = r.rank if len(ranks) <= MOST_RANKS else (r[1:], statuses.get(r.rank))
        if key not in groups:
            groups[key] = _RankLine([], r, finished(r, statuses.get(r.rank, "ended")))
        groups[key].ranks.append(r.rank)
    rows = list(groups.values())
    if len(rows) > MOST_RANKS:
        rows.sort(key=lambda row: (row.times.finished_ns >= 0, -row.times.finished_ns, row.ranks[0]))
    for shown in _RANK_COLUMNS:  # the first that fits
        found: list[tuple[str, ...]] = [("rank", "compute", "exposed", "waiting", "idle", "finished")]
        found += [(ranks_text(r.ranks), *shares(r.times), r.finished) for r in rows]
        header, *rest = [[row[i] for i in shown] for row in found]
        lines = table(header, rest)
        if max(map(cells, lines)) <= page_width():
            break
    return [*_shortened(lines, MOST_RANKS), *folded(LEGEND.strip(), "  ")]


def finished(r: RankTimes, status: str = "ended") -> str:
    """When a rank came to its end, or why it never did."""
    if status not in ("ended", "blocked"):
        return status
    return show_ns(r.finished_ns) if r.finished_ns >= 0 else "never"


def shares(r: RankTimes) -> tuple[str, ...]:
    return tuple(show_ns(ns) if ns else "-" for ns in (r.compute_ns, r.exposed_comm_ns, r.waiting_ns, r.idle_ns))


#: Titles of the column of group sizes, widths of those of group names and operations, and whether algbw is shown (and bytes, which go
#: last), from the most comfortable on.
_WIDTHS = (
    ("ranks", 80, 60, True), ("ranks", 40, 40, True), ("ranks", 24, 40, True), ("ranks", 16, 40, True),
    ("ranks", 12, 40, True), ("n", 12, 40, True),
    ("ranks", 24, 40, False), ("n", 16, 40, False), ("n", 12, 40, False), ("n", 8, 40, False), ("n", 8, 28, False),
    ("n", 6, 16, False),
    ("n", 5, 8, None),
)  # fmt: skip


def _collectives(found: Sequence[CollectiveTimes]) -> list[str]:
    if not found:
        return []
    found = _sisters(found, equal=True)
    if len(found) > MOST_COLLECTIVES:
        found = _sisters(found, equal=False)
    once = {4} if all(c.calls == 1 for c in found) else set()
    for ranks, width, op, algbw in _WIDTHS:  # the first that fits
        hidden = once if algbw else once | {6} if algbw is not None else once | {2, 3, 6}
        titles = ("operation", "group", ranks, "bytes", "calls", "time", "algbw", "busbw")
        header, *rest = [
            [c for i, c in enumerate(row) if i not in hidden] for row in (titles, *(_row(c, width, op) for c in found))
        ]
        lines = table(header, rest, left=(0, 1))
        if max(map(cells, lines)) <= page_width():
            break
    return _shortened(lines, MOST_COLLECTIVES)


def _row(c: CollectiveTimes, width: int, op: int) -> tuple[str, ...]:
    sizes = (str(c.n), show_bytes(c.nbytes), str(c.calls))
    return (cut(c.op, op), cut(c.group, width), *sizes, show_ns(c.duration_ns), _rate(c.algbw), _rate(c.busbw))


def _sisters(found: Sequence[CollectiveTimes], equal: bool) -> list[CollectiveTimes]:
    """The same collective on the groups of one axis, as ``dp[pp=0]`` and ``dp[pp=1]``, in one row with the mean of the times.

    ``calls`` stays that of one group. ``equal``: only where the times are the same.
    """
    rows: dict[tuple[object, ...], list[CollectiveTimes]] = {}
    for c in found:
        key = (c.op, c.group.partition("[")[0], c.n, c.nbytes, c.calls, c.duration_ns if equal else 0)
        rows.setdefault(key, []).append(c)
    return [_mean(cs) for cs in rows.values()]


def _mean(sisters: Sequence[CollectiveTimes]) -> CollectiveTimes:
    first, n = sisters[0], len(sisters)
    if n == 1:
        return first
    mean_ns = sum(c.duration_ns for c in sisters) / n
    algbw = first.nbytes / mean_ns if mean_ns else 0.0
    busbw = algbw * first.busbw / first.algbw if first.algbw else 0.0
    return first._replace(group=f"{n} × {first.group.partition('[')[0]}", duration_ns=round(mean_ns), algbw=algbw, busbw=busbw)


def _rate(gb_per_s: float) -> str:
    for unit, factor in (("GB/s", 1), ("MB/s", 1e3)):
        if gb_per_s * factor >= 1:
            return f"{gb_per_s * factor:.3g} {unit}" if gb_per_s * factor < 1000 else f"{gb_per_s * factor:.0f} {unit}"
    return f"{gb_per_s * 1e6:.3g} kB/s" if gb_per_s else "-"


#: Width of what happens, and the columns that are shown, from the most comfortable on.
_PATHS = (
    (64, (0, 1, 2, 3, 4, 5)), (32, (0, 1, 2, 3, 4, 5)), (20, (0, 1, 2, 3, 4, 5)), (20, (1, 2, 3, 4, 5)), (16, (1, 3, 4, 5)),
    (10, (1, 3, 4, 5)),
)  # fmt: skip


def _critical_path(path: Sequence[Segment], makespan_ns: int, file: str) -> list[str]:
    if not path:
        return []
    for words, shown in _PATHS:  # the first that fits
        rows = [(*spans(s, makespan_ns), cut(what(s), words), _where(s, file)) for s in path]
        header = ("from", "takes", "share", "rank", "what", "where")
        lines = table([header[i] for i in shown], [[row[i] for i in shown] for row in rows], [shown.index(4), len(shown) - 1])
        if max(map(cells, lines)) <= page_width():
            break
    return _shortened(lines, MOST_SEGMENTS)


def spans(s: Segment, makespan_ns: int) -> tuple[str, str, str, str]:
    """When a piece of the critical path begins, how long it takes, its share of the whole, its rank."""
    took_ns = s.end_ns - s.start_ns
    return show_ns(s.start_ns), show_ns(took_ns), f"{100 * took_ns / makespan_ns:.0f} %", str(s.rank)


def what(s: Segment) -> str:
    """``forward`` for a compute's name, ``send`` for a transfer, ``waits in recv`` for a wait."""
    if not s.op:
        return "nothing runs"
    text = f"waits in {s.op}" if s.why == "wait" else s.name or s.op
    return text if s.calls == 1 else f"{text} × {s.calls}"


def _where(s: Segment, file: str) -> str:
    if not s.place.line:
        return ""
    return f"line {s.place.line}" if s.place.file == file else cut(f"{s.place.file}:{s.place.line}", 24)


def _shortened(lines: list[str], most: int) -> list[str]:
    """A table's header, its first lines and its last ones, with the number of those between."""
    if len(lines) <= most + 1:
        return lines
    head, tail = most - most // 3, most // 3
    return [*lines[: head + 1], f"  … {len(lines) - 1 - head - tail} more …", *lines[-tail:]]


# --- what ranks hold at their peak, beside what their device has ---
#: Lines of the table: the largest, and how many more there are.
MOST_KINDS = 12
#: Where the ranks have fewer characters than this left, the heads of the columns are shorter.
_LEAST_RANKS = 12
_SHORT = {"parameters": "params", "gradients": "grads", "activations": "activ."}


def memory_lines(found: Sequence[Held], cluster: Cluster) -> list[str]:
    """One line for each kind of rank, that is for all entries that hold the same; the fullest first. Empty where nothing is stated."""
    if not found:
        return []
    room = cluster.device.memory_nbytes
    kinds = [kind for kind in _kinds(found) if any(one.parts.get(kind) for one in found)]
    rows = sorted(_merged(found), key=lambda row: (-row[1].total, row[0]))
    sizes = [
        [*(_size(one.parts.get(kind, 0)) for kind in kinds), show_bytes(one.total), _share_of(one.total, room)] for _, one in rows
    ]
    heads: tuple[dict[str, str], ...] = ({}, _SHORT)
    for words in heads:
        lines = table([*(words.get(kind, kind) for kind in kinds), "total", "%"], sizes, left=())
        narrow = max(4, page_width() - 2 - max(map(len, lines)))
        if narrow >= _LEAST_RANKS:
            break
    labels = table(["ranks"], [[cut(label, narrow)] for label, _ in rows])
    wide = max(map(len, labels))
    lines = [f"{label.ljust(wide)}{line}" for label, line in zip(labels, lines, strict=True)][: 1 + MOST_KINDS]
    more = [f"  … {len(rows) - MOST_KINDS} more …"] if len(rows) > MOST_KINDS else []
    title = f"Memory of a rank at its peak; {cluster.device.name} has {show_bytes(room)}"
    return [*folded(title), *lines, *more, *_allocated(found)]


def _allocated(found: Sequence[Held]) -> list[str]:
    most = max(one.allocated for one in found)
    return [f"  tensors: at most {show_bytes(most)} at a time; total: near what the allocator keeps"] if most else []


def _kinds(found: Sequence[Held]) -> list[str]:
    return list(dict.fromkeys(kind for one in found for kind in one.parts))


def _merged(found: Sequence[Held]) -> list[tuple[str, Held]]:
    """(ranks, one of the entries) for entries that hold the same; by name where ranks have several entries."""
    seen = [rank for one in found for rank in one.ranks]
    if len(set(seen)) < len(seen):
        return [(one.name, one) for one in found]
    same: dict[tuple[tuple[str, int], ...], list[Held]] = {}
    for one in found:
        same.setdefault(tuple(one.parts.items()), []).append(one)
    return [(ranks_text(sorted(r for one in equal for r in one.ranks)), equal[0]) for equal in same.values()]


def _size(nbytes: int) -> str:
    return show_bytes(nbytes) if nbytes else "-"


def _share_of(nbytes: int, room: int) -> str:
    """Rounded up: what does not fit is never shown as 100 %"""
    if 0 < 100 * nbytes < room:
        return "<1"
    return str(-(-100 * nbytes // room)) if room else "-"


def band_line(simulation: Simulation) -> str:
    """The line that a report ends with: the cost model, its band, and where a run on the machines would end."""
    cost = simulation.cost
    told = f"Times by the cost model of {cost.name}: {cost.error_band}."
    if simulation.run.alone:
        told += f" With more than {SHARED_CALLS:,} calls, what is under way at once counts as if each were alone."
    if not cost.nccl:
        return told
    from distsim.figures import makespan_band

    span = makespan_band(cost, simulation.program, simulation.timeline)
    if span is None:
        return told
    return f"{told} If the prices on the critical path err alike, it takes {show_ns(span[0])} to {show_ns(span[1])}."
