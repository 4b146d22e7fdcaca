"""The report of a simulation as text in 80 columns: outcome and verdict first, then why, then where
the time went.
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
#: More ranks than this are shown by groups of ranks with equal times.
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
    """Nothing where no tensor has numbers: then all that values can tell is whose data they are."""
    if "numbers" not in simulation.program.features:
        return []
    from distsim.output.json.tensor_values import values_lines

    return _titled_lines("Values at the end", values_lines(simulation.values))


def _titled_lines(title: str, lines: Sequence[str]) -> list[str]:
    return [title, *lines] if lines else []


def _header_lines(simulation: Simulation) -> list[str]:
    scenario, program = simulation.scenario, simulation.program
    machines = (
        "1 machine" if program.nodes == 1 else f"{program.nodes} machines of {program.local_size}"
    )
    ranks = "1 rank" if program.world_size == 1 else f"{program.world_size} ranks"
    return [
        *wrapped_lines(
            f"{scenario.name or scenario.file}: {_outcome_text(simulation)}{_verdict_suffix(simulation)}"
        ),
        *verdict_conflict_lines(
            simulation.verdict, simulation.outcome, simulation.run.profile, simulation.findings
        ),
        *wrapped_lines(scenario.about),
        *wrapped_lines(
            f"{ranks} on {machines}, back end {simulation.run.profile}, cluster {simulation.cost.name}"
        ),
        *_figures_section(simulation),
    ]


def _figures_section(simulation: Simulation) -> list[str]:
    """Those of a training step; nothing where the file names no strategy."""
    if not simulation.scenario.strategies:
        return []
    from distsim.output.text.whatif_tables import figures_lines
    from distsim.simulation.training_metrics import training_metrics

    return figures_lines(training_metrics(simulation))


def _outcome_text(simulation: Simulation) -> str:
    outcome, iteration_ns = simulation.outcome, simulation.timeline.iteration_ns
    at = (
        f"{'in' if outcome == 'completes' else 'after'} {show_ns(simulation.makespan_ns)}"
        if simulation.makespan_ns
        else "at once"
    )
    each = f" ({show_ns(iteration_ns)} an iteration)" if iteration_ns is not None else ""
    return f"{outcome} {at}{each}"


def _verdict_suffix(simulation: Simulation) -> str:
    verdict = simulation.verdict
    if verdict is None:
        return ""
    text = f"; {verdict_text(verdict)}"
    return text if verdict.complete else text + " so far (the search is not complete)"


#: Columns of the table of ranks, from the most comfortable on.
_RANK_COLUMNS = ((0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 5), (0, 1, 3, 5), (0, 3, 5))


class _RankTableRow(NamedTuple):
    ranks: list[int]
    times: RankTimes
    finished: str


def _rank_table(ranks: Sequence[RankTimes], ends: Sequence[RankEnd]) -> list[str]:
    """One line per rank; in a large world one per set of ranks with equal times, first those that
    finish last.
    """
    statuses = {end.rank: end.status for end in ends}
    groups: dict[object, _RankTableRow] = {}
    for r in ranks:
        key = r.rank if len(ranks) <= MAX_RANKS else (r[1:], statuses.get(r.rank))
        if key not in groups:
            groups[key] = _RankTableRow([], r, finish_text(r, statuses.get(r.rank, "ended")))
        groups[key].ranks.append(r.rank)
    rows = list(groups.values())
    if len(rows) > MAX_RANKS:
        rows.sort(
            key=lambda row: (row.times.finished_ns >= 0, -row.times.finished_ns, row.ranks[0])
        )
    for shown in _RANK_COLUMNS:  # the first that fits
        found: list[tuple[str, ...]] = [
            ("rank", "compute", "exposed", "waiting", "idle", "finished")
        ]
        found += [(rank_list(r.ranks), *time_shares(r.times), r.finished) for r in rows]
        header, *rest = [[row[i] for i in shown] for row in found]
        lines = table_lines(header, rest)
        if max(map(display_width, lines)) <= page_width():
            break
    return [*_shorten_table(lines, MAX_RANKS), *wrapped_lines(RANKS_LEGEND.strip(), "  ")]


def finish_text(r: RankTimes, status: str = "ended") -> str:
    """When a rank came to its end, or why it never did."""
    if status not in ("ended", "blocked"):
        return status
    return show_ns(r.finished_ns) if r.finished_ns >= 0 else "never"


def time_shares(r: RankTimes) -> tuple[str, ...]:
    return tuple(
        show_ns(ns) if ns else "-"
        for ns in (r.compute_ns, r.exposed_comm_ns, r.waiting_ns, r.idle_ns)
    )


#: Titles of the column of group sizes, widths of those of group names and operations, and whether
#: algbw is shown (and bytes, which go last), from the most comfortable on.
_COLLECTIVE_TABLE_LAYOUTS = (
    ("ranks", 80, 60, True),
    ("ranks", 40, 40, True),
    ("ranks", 24, 40, True),
    ("ranks", 16, 40, True),
    ("ranks", 12, 40, True),
    ("n", 12, 40, True),
    ("ranks", 24, 40, False),
    ("n", 16, 40, False),
    ("n", 12, 40, False),
    ("n", 8, 40, False),
    ("n", 8, 28, False),
    ("n", 6, 16, False),
    ("n", 5, 8, None),
)


def _collective_table(found: Sequence[CollectiveTimes]) -> list[str]:
    if not found:
        return []
    found = _merge_sibling_groups(found, equal=True)
    if len(found) > MAX_COLLECTIVES:
        found = _merge_sibling_groups(found, equal=False)
    once = {4} if all(c.calls == 1 for c in found) else set()
    for ranks, width, op, algbw in _COLLECTIVE_TABLE_LAYOUTS:  # the first that fits
        hidden = once if algbw else once | {6} if algbw is not None else once | {2, 3, 6}
        titles = ("operation", "group", ranks, "bytes", "calls", "time", "algbw", "busbw")
        header, *rest = [
            [c for i, c in enumerate(row) if i not in hidden]
            for row in (titles, *(_collective_row(c, width, op) for c in found))
        ]
        lines = table_lines(header, rest, left=(0, 1))
        if max(map(display_width, lines)) <= page_width():
            break
    return _shorten_table(lines, MAX_COLLECTIVES)


def _collective_row(c: CollectiveTimes, width: int, op: int) -> tuple[str, ...]:
    sizes = (str(c.n), show_bytes(c.nbytes), str(c.calls))
    return (
        truncated(c.op, op),
        truncated(c.group, width),
        *sizes,
        show_ns(c.duration_ns),
        _bandwidth_text(c.algbw),
        _bandwidth_text(c.busbw),
    )


def _merge_sibling_groups(found: Sequence[CollectiveTimes], equal: bool) -> list[CollectiveTimes]:
    """The same collective on the groups of one axis, as ``dp[pp=0]`` and ``dp[pp=1]``, in one row
    with the mean of the times.

    ``calls`` stays that of one group. ``equal``: only where the times are the same.
    """
    rows: dict[tuple[object, ...], list[CollectiveTimes]] = {}
    for c in found:
        key = (
            c.op,
            c.group.partition("[")[0],
            c.n,
            c.nbytes,
            c.calls,
            c.duration_ns if equal else 0,
        )
        rows.setdefault(key, []).append(c)
    return [_mean_of_groups(cs) for cs in rows.values()]


def _mean_of_groups(sisters: Sequence[CollectiveTimes]) -> CollectiveTimes:
    first, n = sisters[0], len(sisters)
    if n == 1:
        return first
    mean_ns = sum(c.duration_ns for c in sisters) / n
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
        if gb_per_s * factor >= 1:
            return (
                f"{gb_per_s * factor:.3g} {unit}"
                if gb_per_s * factor < 1000
                else f"{gb_per_s * factor:.0f} {unit}"
            )
    return f"{gb_per_s * 1e6:.3g} kB/s" if gb_per_s else "-"


#: Width of what happens, and the columns that are shown, from the most comfortable on.
_PATH_TABLE_LAYOUTS = (
    (64, (0, 1, 2, 3, 4, 5)),
    (32, (0, 1, 2, 3, 4, 5)),
    (20, (0, 1, 2, 3, 4, 5)),
    (20, (1, 2, 3, 4, 5)),
    (16, (1, 3, 4, 5)),
    (10, (1, 3, 4, 5)),
)


def _critical_path_table(
    path: Sequence[CriticalPathSegment], makespan_ns: int, file: str
) -> list[str]:
    if not path:
        return []
    for words, shown in _PATH_TABLE_LAYOUTS:  # the first that fits
        rows = [
            (
                *segment_times(s, makespan_ns),
                truncated(segment_text(s), words),
                _segment_place(s, file),
            )
            for s in path
        ]
        header = ("from", "takes", "share", "rank", "what", "where")
        lines = table_lines(
            [header[i] for i in shown],
            [[row[i] for i in shown] for row in rows],
            [shown.index(4), len(shown) - 1],
        )
        if max(map(display_width, lines)) <= page_width():
            break
    return _shorten_table(lines, MAX_SEGMENTS)


def segment_times(s: CriticalPathSegment, makespan_ns: int) -> tuple[str, str, str, str]:
    """When a piece of the critical path begins, how long it takes, its share of the whole, its
    rank.
    """
    took_ns = s.end_ns - s.start_ns
    return (
        show_ns(s.start_ns),
        show_ns(took_ns),
        f"{100 * took_ns / makespan_ns:.0f} %",
        str(s.rank),
    )


def segment_text(s: CriticalPathSegment) -> str:
    """``forward`` for a compute's name, ``send`` for a transfer, ``waits in recv`` for a wait."""
    if not s.op:
        return "nothing runs"
    text = f"waits in {s.op}" if s.why == "wait" else s.name or s.op
    return text if s.calls == 1 else f"{text} × {s.calls}"


def _segment_place(s: CriticalPathSegment, file: str) -> str:
    if not s.place.line:
        return ""
    return (
        f"line {s.place.line}"
        if s.place.file == file
        else truncated(f"{s.place.file}:{s.place.line}", 24)
    )


def _shorten_table(lines: list[str], most: int) -> list[str]:
    """A table's header, its first lines and its last ones, with the number of those between."""
    if len(lines) <= most + 1:
        return lines
    head, tail = most - most // 3, most // 3
    return [*lines[: head + 1], f"  … {len(lines) - 1 - head - tail} more …", *lines[-tail:]]


# --- what ranks hold at their peak, beside what their device has ---
#: Lines of the table: the largest, and how many more there are.
MAX_MEMORY_ROWS = 12
#: Where the ranks have fewer characters than this left, the heads of the columns are shorter.
_MIN_RANKS_WIDTH = 12
_SHORT_KIND_NAMES = {"parameters": "params", "gradients": "grads", "activations": "activ."}


def memory_lines(found: Sequence[PeakMemory], cluster: Cluster) -> list[str]:
    """One line for each kind of rank, that is for all entries that hold the same; the fullest
    first. Empty where nothing is stated.
    """
    if not found:
        return []
    room = cluster.device.memory_nbytes
    kinds = [kind for kind in _memory_kinds(found) if any(one.parts.get(kind) for one in found)]
    rows = sorted(_merged_entries(found), key=lambda row: (-row[1].total, row[0]))
    sizes = [
        [
            *(_bytes_or_dash(one.parts.get(kind, 0)) for kind in kinds),
            show_bytes(one.total),
            _percent_of_memory(one.total, room),
        ]
        for _, one in rows
    ]
    heads: tuple[dict[str, str], ...] = ({}, _SHORT_KIND_NAMES)
    for words in heads:
        lines = table_lines(
            [*(words.get(kind, kind) for kind in kinds), "total", "%"], sizes, left=()
        )
        narrow = max(4, page_width() - 2 - max(map(len, lines)))
        if narrow >= _MIN_RANKS_WIDTH:
            break
    labels = table_lines(["ranks"], [[truncated(label, narrow)] for label, _ in rows])
    wide = max(map(len, labels))
    lines = [f"{label.ljust(wide)}{line}" for label, line in zip(labels, lines, strict=True)][
        : 1 + MAX_MEMORY_ROWS
    ]
    more = [f"  … {len(rows) - MAX_MEMORY_ROWS} more …"] if len(rows) > MAX_MEMORY_ROWS else []
    title = f"Memory of a rank at its peak; {cluster.device.name} has {show_bytes(room)}"
    return [*wrapped_lines(title), *lines, *more, *_allocated_lines(found)]


def _allocated_lines(found: Sequence[PeakMemory]) -> list[str]:
    most = max(one.allocated for one in found)
    return (
        [f"  tensors: at most {show_bytes(most)} at a time; total: near what the allocator keeps"]
        if most
        else []
    )


def _memory_kinds(found: Sequence[PeakMemory]) -> list[str]:
    return list(dict.fromkeys(kind for one in found for kind in one.parts))


def _merged_entries(found: Sequence[PeakMemory]) -> list[tuple[str, PeakMemory]]:
    """(ranks, one of the entries) for entries that hold the same; by name where ranks have several
    entries.
    """
    seen = [rank for one in found for rank in one.ranks]
    if len(set(seen)) < len(seen):
        return [(one.name, one) for one in found]
    same: dict[tuple[tuple[str, int], ...], list[PeakMemory]] = {}
    for one in found:
        same.setdefault(tuple(one.parts.items()), []).append(one)
    return [
        (rank_list(sorted(r for one in equal for r in one.ranks)), equal[0])
        for equal in same.values()
    ]


def _bytes_or_dash(nbytes: int) -> str:
    return show_bytes(nbytes) if nbytes else "-"


def _percent_of_memory(nbytes: int, room: int) -> str:
    """Rounded up: what does not fit is never shown as 100 %"""
    if 0 < 100 * nbytes < room:
        return "<1"
    return str(-(-100 * nbytes // room)) if room else "-"


def prediction_range_text(simulation: Simulation) -> str:
    """The line that a report ends with: the cost model, its band, and where a run on the machines
    would end.
    """
    cost = simulation.cost
    told = f"Times by the cost model of {cost.name}: {cost.error_band}."
    if simulation.run.alone:
        told += f" With more than {MAX_SHARED_LINK_CALLS:,} calls, what is under way at once counts as if each were alone."
    if not cost.nccl:
        return told
    from distsim.simulation.training_metrics import makespan_range

    span = makespan_range(cost, simulation.program, simulation.timeline)
    if span is None:
        return told
    return f"{told} If the prices on the critical path err alike, it takes {show_ns(span[0])} to {show_ns(span[1])}."
