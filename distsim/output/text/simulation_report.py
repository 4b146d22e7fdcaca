"""The report of a simulation as text, laid out for the width of the page.

Outcome and verdict come first, then the findings, then the time: ranks, collectives, critical path.
A table that is too wide drops columns step by step, by a list of layouts from wide to narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from distsim.common.units import show_bytes, show_ns
from distsim.engine import MAX_SHARED_LINK_CALLS
from distsim.output.text.finding_list import findings_lines, verdict_conflict_lines, verdict_text
from distsim.output.text_layout import (
    display_width,
    page_width,
    rank_list,
    table_lines,
    truncated,
    wrapped_lines,
)

if TYPE_CHECKING:
    from distsim.analysis.critical_path import CriticalPathSegment
    from distsim.analysis.timeline import CollectiveTimes, RankTimes
    from distsim.checker.detectors.peak_memory import PeakMemory
    from distsim.findings.final_state import RankEnd
    from distsim.hardware.cluster import Cluster
    from distsim.simulation.simulate_scenario import Simulation


RANKS_LEGEND = "  exposed: communicating, nothing computes; waiting: in a call, before its match"
#: With more ranks than this, ranks with equal times are joined.
MAX_RANKS = 16
#: Lines of the longest tables: the first ones, a line with …, the last ones.
MAX_COLLECTIVES = 12
MAX_SEGMENTS = 14


def simulation_report_text(simulation: Simulation) -> str:
    """The whole report."""
    timeline, file = simulation.timeline, simulation.scenario.file
    sections = [
        _header_lines(simulation),
        findings_lines(simulation.findings, file),
        _titled_lines("Ranks", _rank_table(timeline.ranks, simulation.run.final_state.ends)),
        _titled_lines("Collectives", _collective_table(timeline.collectives)),
        _titled_lines(
            "Critical path",
            _critical_path_table(timeline.critical_path, timeline.makespan_ns, file),
        ),
        _memory_section(simulation),
        _values_section(simulation),
        wrapped_lines(prediction_range_text(simulation)),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _memory_section(simulation: Simulation) -> list[str]:
    if not simulation.scenario.memory:
        return []
    from distsim.checker.detectors.peak_memory import peak_memory

    return memory_lines(
        peak_memory(simulation.scenario, simulation.program), simulation.cost.cluster
    )


def _values_section(simulation: Simulation) -> list[str]:
    """The values, unless no tensor has numbers: values would then show only the origin of data."""
    if "numbers" not in simulation.program.features:
        return []
    from distsim.output.json.tensor_values import values_lines

    return _titled_lines("Values at the end", values_lines(simulation.values))


def _titled_lines(title: str, lines: Sequence[str]) -> list[str]:
    return [title, *lines] if lines else []


def _header_lines(simulation: Simulation) -> list[str]:
    scenario, program = simulation.scenario, simulation.program
    name = scenario.name or scenario.file
    backend = simulation.run.profile
    machines = "1 machine"
    if program.nodes != 1:
        machines = f"{program.nodes} machines of {program.local_size}"
    ranks = "1 rank" if program.world_size == 1 else f"{program.world_size} ranks"
    lines = wrapped_lines(f"{name}: {_outcome_text(simulation)}{_verdict_suffix(simulation)}")
    lines += verdict_conflict_lines(
        simulation.verdict, simulation.outcome, backend, simulation.findings
    )
    lines += wrapped_lines(scenario.about)
    lines += wrapped_lines(
        f"{ranks} on {machines}, back end {backend}, cluster {simulation.cost.name}"
    )
    return lines + _figures_section(simulation)


def _figures_section(simulation: Simulation) -> list[str]:
    """The metrics of a training step; nothing if the scenario has no strategy."""
    if not simulation.scenario.strategies:
        return []
    from distsim.output.text.whatif_tables import figures_lines
    from distsim.simulation.training_metrics import training_metrics

    return figures_lines(training_metrics(simulation))


def _outcome_text(simulation: Simulation) -> str:
    text = f"{simulation.outcome} at once"
    if simulation.makespan_ns:
        preposition = "in" if simulation.outcome == "completes" else "after"
        text = f"{simulation.outcome} {preposition} {show_ns(simulation.makespan_ns)}"
    iteration_ns = simulation.timeline.iteration_ns
    if iteration_ns is not None:
        text += f" ({show_ns(iteration_ns)} an iteration)"
    return text


def _verdict_suffix(simulation: Simulation) -> str:
    verdict = simulation.verdict
    if verdict is None:
        return ""
    text = f"; {verdict_text(verdict)}"
    return text if verdict.complete else text + " so far (the search is not complete)"


# --- ranks ---
#: Columns of the table of ranks, from wide to narrow.
_RANK_COLUMNS = (
    ("rank", "compute", "exposed", "waiting", "idle", "finished"),
    ("rank", "compute", "exposed", "waiting", "finished"),
    ("rank", "compute", "waiting", "finished"),
    ("rank", "waiting", "finished"),
)


class _RankTableRow(NamedTuple):
    """Ranks with equal times, the times of the first one, and when it finished."""

    ranks: list[int]
    times: RankTimes
    finished: str


def _rank_table(ranks: Sequence[RankTimes], ends: Sequence[RankEnd]) -> list[str]:
    """One line per rank; in a large world one per set of ranks with equal times.

    If there are too many sets, those come first that never finish, then those that finish last.
    """
    rows = _rank_rows(ranks, {end.rank: end.status for end in ends})
    if len(rows) > MAX_RANKS:
        rows.sort(
            key=lambda row: (row.times.finished_ns >= 0, -row.times.finished_ns, row.ranks[0])
        )
    titles = _RANK_COLUMNS[0]
    cells = [
        dict(zip(titles, (rank_list(r.ranks), *time_shares(r.times), r.finished), strict=True))
        for r in rows
    ]
    for shown in _RANK_COLUMNS:
        lines = table_lines(shown, [[row[title] for title in shown] for row in cells])
        if _fits_page(lines):
            break
    return [*_shorten_table(lines, MAX_RANKS), *wrapped_lines(RANKS_LEGEND.strip(), "  ")]


def _rank_rows(ranks: Sequence[RankTimes], statuses: dict[int, str]) -> list[_RankTableRow]:
    rows: dict[object, _RankTableRow] = {}
    for times in ranks:
        status = statuses.get(times.rank)
        _, *times_without_rank = times
        key: object = times.rank
        if len(ranks) > MAX_RANKS:
            key = (*times_without_rank, status)
        if key not in rows:
            rows[key] = _RankTableRow([], times, finish_text(times, status or "ended"))
        rows[key].ranks.append(times.rank)
    return list(rows.values())


def _fits_page(lines: Sequence[str]) -> bool:
    return max(map(display_width, lines)) <= page_width()


def finish_text(r: RankTimes, status: str = "ended") -> str:
    """When a rank finished, or why it never did."""
    if status not in ("ended", "blocked"):
        return status
    return show_ns(r.finished_ns) if r.finished_ns >= 0 else "never"


def time_shares(r: RankTimes) -> tuple[str, ...]:
    """Compute, exposed communication, waiting and idle time of a rank."""
    times_ns = (r.compute_ns, r.exposed_comm_ns, r.waiting_ns, r.idle_ns)
    return tuple(show_ns(ns) if ns else "-" for ns in times_ns)


# --- collectives ---


class _CollectiveTableLayout(NamedTuple):
    """Title of the column of group sizes, widths of two columns, and omitted columns."""

    size_title: str
    group_width: int
    op_width: int
    omitted: tuple[str, ...] = ()


#: From wide to narrow.
_COLLECTIVE_TABLE_LAYOUTS = (
    _CollectiveTableLayout("ranks", 80, 60),
    _CollectiveTableLayout("ranks", 40, 40),
    _CollectiveTableLayout("ranks", 24, 40),
    _CollectiveTableLayout("ranks", 16, 40),
    _CollectiveTableLayout("ranks", 12, 40),
    _CollectiveTableLayout("n", 12, 40),
    _CollectiveTableLayout("ranks", 24, 40, ("algbw",)),
    _CollectiveTableLayout("n", 16, 40, ("algbw",)),
    _CollectiveTableLayout("n", 12, 40, ("algbw",)),
    _CollectiveTableLayout("n", 8, 40, ("algbw",)),
    _CollectiveTableLayout("n", 8, 28, ("algbw",)),
    _CollectiveTableLayout("n", 6, 16, ("algbw",)),
    _CollectiveTableLayout("n", 5, 8, ("n", "bytes", "algbw")),
)


def _collective_table(collectives: Sequence[CollectiveTimes]) -> list[str]:
    if not collectives:
        return []
    rows = _merge_sibling_groups(collectives, equal_times=True)
    if len(rows) > MAX_COLLECTIVES:
        rows = _merge_sibling_groups(rows, equal_times=False)
    omitted_always = {"calls"} if all(row.calls == 1 for row in rows) else set()
    for layout in _COLLECTIVE_TABLE_LAYOUTS:
        cells = [_collective_cells(row, layout) for row in rows]
        omitted = omitted_always.union(layout.omitted)
        titles = [title for title in cells[0] if title not in omitted]
        lines = table_lines(titles, [[row[title] for title in titles] for row in cells], (0, 1))
        if _fits_page(lines):
            break
    return _shorten_table(lines, MAX_COLLECTIVES)


def _collective_cells(c: CollectiveTimes, layout: _CollectiveTableLayout) -> dict[str, str]:
    """The cells of a row by their titles."""
    return {
        "operation": truncated(c.op, layout.op_width),
        "group": truncated(c.group, layout.group_width),
        layout.size_title: str(c.n),
        "bytes": show_bytes(c.nbytes),
        "calls": str(c.calls),
        "time": show_ns(c.duration_ns),
        "algbw": _bandwidth_text(c.algbw),
        "busbw": _bandwidth_text(c.busbw),
    }


def _merge_sibling_groups(
    collectives: Sequence[CollectiveTimes], equal_times: bool
) -> list[CollectiveTimes]:
    """Join the rows of the same collective on the groups of one axis (``dp[pp=0]``, ``dp[pp=1]``).

    A joined row has the mean of the times, and the ``calls`` of one group. ``equal_times``: join
    only rows with equal times.
    """
    rows: dict[tuple[object, ...], list[CollectiveTimes]] = {}
    for c in collectives:
        axis = c.group.partition("[")[0]
        time_ns = c.duration_ns if equal_times else None
        rows.setdefault((c.op, axis, c.n, c.nbytes, c.calls, time_ns), []).append(c)
    return [_mean_of_groups(siblings) for siblings in rows.values()]


def _mean_of_groups(siblings: Sequence[CollectiveTimes]) -> CollectiveTimes:
    first, n = siblings[0], len(siblings)
    if n == 1:
        return first
    mean_ns = sum(c.duration_ns for c in siblings) / n
    algbw = first.nbytes / mean_ns if mean_ns else 0.0
    busbw = algbw * first.busbw / first.algbw if first.algbw else 0.0
    return first._replace(
        group=f"{n} × {first.group.partition('[')[0]}",
        duration_ns=round(mean_ns),
        algbw=algbw,
        busbw=busbw,
    )


def _bandwidth_text(gb_per_s: float) -> str:
    for unit, factor in (("GB/s", 1), ("MB/s", 1e3)):
        value = gb_per_s * factor
        if value >= 1000:
            # `g` would write 1e+03.
            return f"{value:.0f} {unit}"
        if value >= 1:
            return f"{value:.3g} {unit}"
    return f"{gb_per_s * 1e6:.3g} kB/s" if gb_per_s else "-"


# --- critical path ---
#: Width of the column "what", and the columns that are shown, from wide to narrow.
_PATH_TABLE_LAYOUTS = (
    (64, ("from", "takes", "share", "rank", "what", "where")),
    (32, ("from", "takes", "share", "rank", "what", "where")),
    (20, ("from", "takes", "share", "rank", "what", "where")),
    (20, ("takes", "share", "rank", "what", "where")),
    (16, ("takes", "rank", "what", "where")),
    (10, ("takes", "rank", "what", "where")),
)


def _critical_path_table(
    path: Sequence[CriticalPathSegment], makespan_ns: int, file: str
) -> list[str]:
    if not path:
        return []
    for what_width, shown in _PATH_TABLE_LAYOUTS:
        cells = [_segment_cells(segment, makespan_ns, what_width, file) for segment in path]
        rows = [[row[title] for title in shown] for row in cells]
        lines = table_lines(shown, rows, left=[shown.index("what"), shown.index("where")])
        if _fits_page(lines):
            break
    return _shorten_table(lines, MAX_SEGMENTS)


def _segment_cells(
    segment: CriticalPathSegment, makespan_ns: int, what_width: int, file: str
) -> dict[str, str]:
    """The cells of a row by their titles."""
    start, duration, share, rank = segment_times(segment, makespan_ns)
    return {
        "from": start,
        "takes": duration,
        "share": share,
        "rank": rank,
        "what": truncated(segment_text(segment), what_width),
        "where": _segment_place(segment, file),
    }


def segment_times(s: CriticalPathSegment, makespan_ns: int) -> tuple[str, str, str, str]:
    """Start, duration, share of the makespan, and rank of a segment of the critical path."""
    duration_ns = s.end_ns - s.start_ns
    share = f"{100 * duration_ns / makespan_ns:.0f} %"
    return show_ns(s.start_ns), show_ns(duration_ns), share, str(s.rank)


def segment_text(s: CriticalPathSegment) -> str:
    """``forward`` for a compute's name, ``send`` for a transfer, ``waits in recv`` for a wait."""
    if not s.op:
        return "nothing runs"
    text = f"waits in {s.op}" if s.why == "wait" else s.name or s.op
    return text if s.calls == 1 else f"{text} × {s.calls}"


def _segment_place(s: CriticalPathSegment, file: str) -> str:
    if not s.place.line:
        return ""
    if s.place.file == file:
        return f"line {s.place.line}"
    return truncated(f"{s.place.file}:{s.place.line}", 24)


def _shorten_table(lines: list[str], limit: int) -> list[str]:
    """The header, the first and the last rows of a table, and the number of rows between them."""
    if len(lines) <= limit + 1:
        return lines
    tail = limit // 3
    head = limit - tail
    hidden = len(lines) - 1 - limit
    return [*lines[: head + 1], f"  … {hidden} more …", *lines[-tail:]]


# --- peak memory, compared with the memory of the device ---
#: Rows of the table: the fullest ranks.
MAX_MEMORY_ROWS = 12
#: If the column of ranks would be narrower, the titles of the other columns are shortened.
_MIN_RANKS_WIDTH = 12
_SHORT_KIND_NAMES = {"parameters": "params", "gradients": "grads", "activations": "activ."}


class _MemoryRow(NamedTuple):
    """Ranks with equal memory, as text, and the peak memory of one of them."""

    label: str
    peak: PeakMemory


def memory_lines(peaks: Sequence[PeakMemory], cluster: Cluster) -> list[str]:
    """One line for each set of ranks with equal memory, the fullest first; empty without peaks."""
    if not peaks:
        return []
    capacity = cluster.device.memory_nbytes
    rows = sorted(_memory_rows(peaks), key=lambda row: (-row.peak.total, row.label))
    kinds = _memory_kinds(peaks)
    cells = [_memory_cells(row.peak, kinds, capacity) for row in rows]
    short_names: tuple[dict[str, str], ...] = ({}, _SHORT_KIND_NAMES)
    for names in short_names:
        titles = [*(names.get(kind, kind) for kind in kinds), "total", "%"]
        columns = table_lines(titles, cells, left=())
        label_width = max(4, page_width() - 2 - max(map(len, columns)))
        if label_width >= _MIN_RANKS_WIDTH:
            break
    labels = table_lines(["ranks"], [[truncated(row.label, label_width)] for row in rows])
    width = max(map(len, labels))
    table = [
        f"{label.ljust(width)}{columns_of_row}"
        for label, columns_of_row in zip(labels, columns, strict=True)
    ]
    title = f"Memory of a rank at its peak; {cluster.device.name} has {show_bytes(capacity)}"
    lines = [*wrapped_lines(title), *table[: 1 + MAX_MEMORY_ROWS]]
    if len(rows) > MAX_MEMORY_ROWS:
        lines.append(f"  … {len(rows) - MAX_MEMORY_ROWS} more …")
    return lines + _allocated_lines(peaks)


def _memory_cells(peak: PeakMemory, kinds: Sequence[str], capacity: int) -> list[str]:
    parts = [_bytes_or_dash(peak.parts.get(kind, 0)) for kind in kinds]
    return [*parts, show_bytes(peak.total), _percent_of_memory(peak.total, capacity)]


def _allocated_lines(peaks: Sequence[PeakMemory]) -> list[str]:
    most = max(peak.allocated for peak in peaks)
    if not most:
        return []
    return [
        f"  tensors: at most {show_bytes(most)} at a time; total: near what the allocator keeps"
    ]


def _memory_kinds(peaks: Sequence[PeakMemory]) -> list[str]:
    """The kinds of memory that some rank holds, each once."""
    kinds = dict.fromkeys(kind for peak in peaks for kind in peak.parts)
    return [kind for kind in kinds if any(peak.parts.get(kind) for peak in peaks)]


def _memory_rows(peaks: Sequence[PeakMemory]) -> list[_MemoryRow]:
    """Peaks with equal parts joined; by name if some ranks have several peaks."""
    ranks = [rank for peak in peaks for rank in peak.ranks]
    if len(set(ranks)) < len(ranks):
        return [_MemoryRow(peak.name, peak) for peak in peaks]
    by_parts: dict[tuple[tuple[str, int], ...], list[PeakMemory]] = {}
    for peak in peaks:
        by_parts.setdefault(tuple(peak.parts.items()), []).append(peak)
    rows = []
    for equal in by_parts.values():
        ranks = sorted(rank for peak in equal for rank in peak.ranks)
        rows.append(_MemoryRow(rank_list(ranks), equal[0]))
    return rows


def _bytes_or_dash(nbytes: int) -> str:
    return show_bytes(nbytes) if nbytes else "-"


def _percent_of_memory(nbytes: int, capacity: int) -> str:
    """Rounded up, so that memory that does not fit is never shown as 100 %."""
    if 0 < 100 * nbytes < capacity:
        return "<1"
    return str(-(-100 * nbytes // capacity)) if capacity else "-"


def prediction_range_text(simulation: Simulation) -> str:
    """The last line of a report: the cost model, and the range of its predictions."""
    cost = simulation.cost
    text = f"Times by the cost model of {cost.name}: {cost.error_band}."
    if simulation.run.alone:
        text += (
            f" With more than {MAX_SHARED_LINK_CALLS:,} calls, "
            "what is under way at once counts as if each were alone."
        )
    if not cost.nccl:
        return text
    from distsim.simulation.training_metrics import makespan_range

    bounds = makespan_range(cost, simulation.program, simulation.timeline)
    if bounds is None:
        return text
    low, high = map(show_ns, bounds)
    return f"{text} If the prices on the critical path err alike, it takes {low} to {high}."
