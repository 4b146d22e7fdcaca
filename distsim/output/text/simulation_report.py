"""The report of a simulation as text, laid out for the width of the page.

Outcome and verdict come first, then the findings, then the time: ranks, collectives, critical path.
A table that is too wide drops columns step by step, by a list of layouts from wide to narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from distsim.common.units import show_bytes, show_ns, show_ns_range
from distsim.engine import MAX_SHARED_LINK_CALLS
from distsim.hardware.cost.memory_fit import MEMORY_RANGE, memory_fit, memory_outside_torch
from distsim.output.report_record import (
    Column,
    Paragraph,
    Report,
    RowLimit,
    Section,
    Table,
    TableLayout,
    paragraphs,
    text_column,
)
from distsim.output.report_text import write_text
from distsim.output.text.finding_list import finding_sections, verdict_conflict_text, verdict_text
from distsim.output.text_layout import rank_list, truncated
from distsim.simulation.simulate_scenario import EACH_RANK_RAN_ALONE

if TYPE_CHECKING:
    from distsim.analysis.critical_path import CriticalPathSegment
    from distsim.analysis.timeline import CollectiveTimes, RankTimes
    from distsim.checker.detectors.peak_memory import PeakMemory
    from distsim.findings.final_state import RankEnd
    from distsim.hardware.cluster import Cluster
    from distsim.hardware.cost import CostModel
    from distsim.simulation.simulate_scenario import Simulation


#: With more ranks than this, ranks with equal times are joined.
MAX_RANKS = 16
#: Rows of the longest tables: the first ones, a line with …, the last ones.
_MOST_RANK_ROWS = RowLimit(11, 5)
_MOST_COLLECTIVES = RowLimit(8, 4)
_MOST_SEGMENTS = RowLimit(10, 4)


def simulation_report_text(simulation: Simulation) -> str:
    """The whole report as text."""
    return write_text(simulation_report(simulation))


def simulation_report(simulation: Simulation) -> Report:
    """The whole report."""
    timeline, file = simulation.timeline, simulation.scenario.file
    return Report(
        [
            _header_section(simulation),
            *finding_sections(simulation.findings, file),
            _rank_section(timeline.ranks, simulation.run.final_state.ends),
            _collective_section(timeline.collectives),
            _critical_path_section(timeline.critical_path, timeline.makespan_ns, file),
            _memory_section(simulation),
            _values_section(simulation),
            Section([Paragraph(prediction_range_text(simulation))]),
        ]
    )


def _memory_section(simulation: Simulation) -> Section:
    if not simulation.scenario.memory:
        return Section([])
    from distsim.checker.detectors.peak_memory import peak_memory

    return peak_memory_section(
        peak_memory(simulation.scenario, simulation.program), simulation.cost.cluster
    )


def _values_section(simulation: Simulation) -> Section:
    """The values, unless no tensor has numbers: values would then show only the origin of data."""
    if "numbers" not in simulation.program.features:
        return Section([])
    from distsim.output.text.tensor_values import values_table

    return Section([values_table(simulation.values)], "Final values")


def _header_section(simulation: Simulation) -> Section:
    scenario, program = simulation.scenario, simulation.program
    name = scenario.name or scenario.file
    backend = simulation.run.profile
    nodes = "1 node"
    if program.nodes != 1:
        nodes = f"{program.nodes} nodes ({program.local_size} ranks per node)"
    ranks = "1 rank" if program.world_size == 1 else f"{program.world_size} ranks"
    conflict = verdict_conflict_text(
        simulation.verdict, simulation.outcome, backend, simulation.findings
    )
    texts = [
        f"{name}: {_outcome_text(simulation)}{_verdict_suffix(simulation)}",
        conflict,
        scenario.about,
        f"{ranks} on {nodes}, backend {backend}, cluster {simulation.cost.name}",
        _training_metrics_text(simulation),
    ]
    return Section(paragraphs(texts))


def _training_metrics_text(simulation: Simulation) -> str:
    """The metrics of a training step; empty if the scenario has no strategy."""
    if not simulation.scenario.strategies:
        return ""
    from distsim.output.text.whatif_tables import training_metrics_text
    from distsim.simulation.training_metrics import training_metrics

    return training_metrics_text(training_metrics(simulation))


def _outcome_text(simulation: Simulation) -> str:
    if simulation.outcome == EACH_RANK_RAN_ALONE:
        return simulation.outcome
    text = f"{simulation.outcome} immediately"
    if simulation.makespan_ns:
        preposition = "in" if simulation.outcome == "completes" else "after"
        text = f"{simulation.outcome} {preposition} {show_ns(simulation.makespan_ns)}"
    iteration_ns = simulation.timeline.iteration_ns
    if iteration_ns is not None:
        text += f" ({show_ns(iteration_ns)} per iteration)"
    return text


def _verdict_suffix(simulation: Simulation) -> str:
    verdict = simulation.verdict
    if verdict is None:
        return ""
    text = f"; {verdict_text(verdict)}"
    return text if verdict.complete else text + " so far (the search is incomplete)"


# --- ranks ---
RANK_COLUMNS = [
    text_column("rank"),
    Column("compute"),
    Column("exposed comm"),
    Column("waiting", "wait for peers"),
    Column("idle"),
    Column("finished"),
]
#: From wide to narrow.
_RANK_LAYOUTS = (
    TableLayout(("rank", "compute", "exposed comm", "waiting", "idle", "finished")),
    TableLayout(("rank", "compute", "exposed comm", "waiting", "finished")),
    TableLayout(("rank", "compute", "waiting", "finished")),
    TableLayout(("rank", "waiting", "finished")),
)


class _RankTableRow(NamedTuple):
    """Ranks with equal times, the times of the first one, and when it finished."""

    ranks: list[int]
    times: RankTimes
    finished: str


def _rank_section(ranks: Sequence[RankTimes], ends: Sequence[RankEnd]) -> Section:
    """One row per rank; in a large world one per set of ranks with equal times.

    If there are too many sets, those come first that never finish, then those that finish last.
    """
    rows = _rank_rows(ranks, {end.rank: end.status for end in ends})
    if len(rows) > MAX_RANKS:
        rows.sort(
            key=lambda row: (row.times.finished_ns >= 0, -row.times.finished_ns, row.ranks[0])
        )
    cells = [
        {"rank": rank_list(row.ranks), **time_shares(row.times), "finished": row.finished}
        for row in rows
    ]
    table = Table(RANK_COLUMNS, cells, _RANK_LAYOUTS, _MOST_RANK_ROWS)
    return Section([table], "Ranks")


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


def finish_text(r: RankTimes, status: str = "ended") -> str:
    """When a rank finished, or why it never did."""
    if status not in ("ended", "blocked"):
        return status
    return show_ns(r.finished_ns) if r.finished_ns >= 0 else "blocked"


def time_shares(r: RankTimes) -> dict[str, str]:
    """Compute, exposed communication, waiting and idle time of a rank, by column."""
    times_ns = {
        "compute": r.compute_ns,
        "exposed comm": r.exposed_comm_ns,
        "waiting": r.waiting_ns,
        "idle": r.idle_ns,
    }
    return {column: show_ns(ns) if ns else "-" for column, ns in times_ns.items()}


# --- collectives ---
_COLLECTIVE_COLUMNS = (
    text_column("operation"),
    text_column("group"),
    Column("ranks"),
    Column("bytes"),
    Column("calls"),
    Column("time"),
    Column("algbw"),
    Column("busbw"),
)


def _collective_layout(
    group_width: int, op_width: int, size_heading: str = "ranks", omitted: Sequence[str] = ()
) -> TableLayout:
    keys = [column.key for column in _COLLECTIVE_COLUMNS if column.key not in omitted]
    widths = {"operation": op_width, "group": group_width}
    return TableLayout(keys, widths, headings={"ranks": size_heading})


#: From wide to narrow.
_COLLECTIVE_LAYOUTS = (
    _collective_layout(80, 60),
    _collective_layout(40, 40),
    _collective_layout(24, 40),
    _collective_layout(16, 40),
    _collective_layout(12, 40),
    _collective_layout(12, 40, "n"),
    _collective_layout(24, 40, "ranks", ("algbw",)),
    _collective_layout(16, 40, "n", ("algbw",)),
    _collective_layout(12, 40, "n", ("algbw",)),
    _collective_layout(8, 40, "n", ("algbw",)),
    _collective_layout(8, 28, "n", ("algbw",)),
    _collective_layout(6, 16, "n", ("algbw",)),
    _collective_layout(5, 8, "n", ("ranks", "bytes", "algbw")),
    _collective_layout(5, 8, "n", ("ranks", "bytes", "calls", "algbw")),
)


def _collective_section(collectives: Sequence[CollectiveTimes]) -> Section:
    rows = _merge_sibling_groups(collectives, equal_times=True)
    if len(rows) > _MOST_COLLECTIVES.first + _MOST_COLLECTIVES.last:
        rows = _merge_sibling_groups(rows, equal_times=False)
    columns = list(_COLLECTIVE_COLUMNS)
    if all(row.calls == 1 for row in rows):
        columns = [column for column in columns if column.key != "calls"]
    cells = [_collective_cells(row) for row in rows]
    table = Table(columns, cells, _COLLECTIVE_LAYOUTS, _MOST_COLLECTIVES)
    notes = _joined_rows_note(rows)
    return Section([table, *notes] if rows else [], "Collectives")


def _joined_rows_note(rows: Sequence[CollectiveTimes]) -> list[Paragraph]:
    """What a group such as `4 × dp` means."""
    for row in rows:
        count, sign, axis = row.group.partition(" × ")
        if sign:
            return [
                Paragraph(f"{row.group}: mean over the {count} groups called {axis}", "  ", "    ")
            ]
    return []


def _collective_cells(c: CollectiveTimes) -> dict[str, str]:
    return {
        "operation": c.op,
        "group": c.group,
        "ranks": str(c.n),
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
_PATH_COLUMNS = (
    Column("start"),
    Column("time"),
    Column("share"),
    Column("rank"),
    text_column("work"),
    text_column("where"),
)
#: From wide to narrow.
_PATH_LAYOUTS = (
    TableLayout(("start", "time", "share", "rank", "work", "where"), {"work": 64}),
    TableLayout(("start", "time", "share", "rank", "work", "where"), {"work": 32}),
    TableLayout(("start", "time", "share", "rank", "work", "where"), {"work": 20}),
    TableLayout(("time", "share", "rank", "work", "where"), {"work": 20}),
    TableLayout(("time", "rank", "work", "where"), {"work": 16}),
    TableLayout(("time", "rank", "work", "where"), {"work": 10}),
)


def _critical_path_section(
    path: Sequence[CriticalPathSegment], makespan_ns: int, file: str
) -> Section:
    rows = [
        {**segment_cells(segment, makespan_ns), "where": _segment_place(segment, file)}
        for segment in path
    ]
    table = Table(_PATH_COLUMNS, rows, _PATH_LAYOUTS, _MOST_SEGMENTS)
    return Section([table] if rows else [], "Critical path")


def segment_cells(s: CriticalPathSegment, makespan_ns: int) -> dict[str, str]:
    """Start, duration, share of the makespan, rank and work of a segment of the critical path."""
    duration_ns = s.end_ns - s.start_ns
    return {
        "start": show_ns(s.start_ns),
        "time": show_ns(duration_ns),
        "share": f"{100 * duration_ns / makespan_ns:.0f} %",
        "rank": str(s.rank),
        "work": segment_text(s),
    }


def segment_text(s: CriticalPathSegment) -> str:
    """``forward`` for a compute's name, ``send`` for a transfer, ``idle before send`` for a gap.

    Only a run that does not complete has such gaps.
    """
    if s.why == "late start":
        return "process starts late"
    if not s.op:
        return "idle"
    text = f"idle before {s.op}" if s.why == "wait" else s.name or s.op
    return text if s.calls == 1 else f"{text} × {s.calls}"


def _segment_place(s: CriticalPathSegment, file: str) -> str:
    if not s.place.line:
        return ""
    if s.place.file == file:
        return f"line {s.place.line}"
    return truncated(f"{s.place.file}:{s.place.line}", 24)


# --- peak memory, compared with the memory of the device ---
#: Rows of the table: the fullest ranks.
_MOST_MEMORY_ROWS = RowLimit(12)
_SHORT_HEADINGS = {"%": "%", "parameters": "params", "gradients": "grads", "activations": "activ."}


class _MemoryRow(NamedTuple):
    """Ranks with equal memory, as text, and the peak memory of one of them."""

    label: str
    peak: PeakMemory


def peak_memory_section(peaks: Sequence[PeakMemory], cluster: Cluster) -> Section:
    """One row for each set of ranks with equal memory, the fullest first; empty without peaks."""
    if not peaks:
        return Section([])
    capacity = cluster.device.memory_nbytes
    rows = sorted(_memory_rows(peaks), key=lambda row: (-row.peak.total, row.label))
    kinds = _memory_kinds(peaks)
    keys = ["ranks", *kinds, "total", "%"]
    columns = [text_column("ranks"), *map(Column, kinds), Column("total"), Column("%", "used, %")]
    layouts = (
        TableLayout(keys, flexible={"ranks": 12}),
        TableLayout(keys, flexible={"ranks": 4}, headings=_SHORT_HEADINGS),
    )
    cells = [_memory_cells(row, kinds, capacity) for row in rows]
    table = Table(columns, cells, layouts, _MOST_MEMORY_ROWS)
    title = f"Peak memory per rank ({cluster.device.name}: {show_bytes(capacity)})"
    notes = [_allocated_text(peaks), _out_of_memory_text(rows[0].peak.total, cluster)]
    return Section([table, *paragraphs([note for note in notes if note], "  ")], title)


def _memory_cells(row: _MemoryRow, kinds: Sequence[str], capacity: int) -> dict[str, str]:
    peak = row.peak
    return {
        "ranks": row.label,
        **{kind: _bytes_or_dash(peak.parts.get(kind, 0)) for kind in kinds},
        "total": show_bytes(peak.total),
        "%": _percent_of_memory(peak.total, capacity),
    }


def _out_of_memory_text(peak_nbytes: int, cluster: Cluster) -> str:
    """A warning if the fullest rank may need more than the device has; otherwise empty.

    A peak that exceeds the device even as predicted is an error of its own (DS806).
    """
    reserve = memory_outside_torch(cluster.device, communicators=1)
    fit = memory_fit(peak_nbytes, reserve, cluster.device)
    if not reserve or not fit.may_run_out or peak_nbytes > fit.capacity_nbytes:
        return ""
    low, high = MEMORY_RANGE
    return (
        f"may run out of memory: 90 % of measured peaks are {low:g}–{high:g}x the predicted total, "
        f"and the CUDA context and NCCL need at least {show_bytes(reserve)} more"
    )


def _allocated_text(peaks: Sequence[PeakMemory]) -> str:
    most = max(peak.allocated for peak in peaks)
    if not most:
        return ""
    return f"total: estimate of torch's reserved memory; live tensors use up to {show_bytes(most)}"


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


def _crowded_node_text(cost: CostModel) -> str:
    """A warning if a preset's node has fewer GPUs than the run places there."""
    from distsim.hardware.cluster.presets import gpus_per_machine, is_preset

    gpus, ranks = gpus_per_machine(cost.name), cost.machine_size
    if not is_preset(cost.name) or cost.cluster.intra.domain or ranks <= gpus:
        return ""
    return (
        f" Its nodes have {gpus} GPU{'' if gpus == 1 else 's'}, but the run places {ranks} ranks "
        "on one node: set `world: {nodes: …, ranks_per_node: …}`."
    )


def prediction_range_text(simulation: Simulation) -> str:
    """The last line of a report: the cost model, and the range of its predictions."""
    cost = simulation.cost
    text = f"Hardware model {cost.name}: {cost.error_band}."
    if simulation.run.alone:
        text += (
            f" The program has more than {MAX_SHARED_LINK_CALLS:,} calls, "
            "so transfers in flight at the same time do not slow each other down."
        )
    if not cost.nccl or simulation.outcome == "hangs":
        return text
    text += _crowded_node_text(cost)
    from distsim.simulation.training_metrics import makespan_range

    bounds = makespan_range(cost, simulation.program, simulation.timeline)
    if bounds is None:
        return text
    run_range = f"{show_ns_range(*bounds)} ({_range_condition(simulation)})"
    return f"{text} Expected range of the run: {run_range}."


def _range_condition(simulation: Simulation) -> str:
    """What varies in the range of a run: communication, and compute without a given time."""
    from distsim.simulation.training_metrics import has_estimated_compute

    if has_estimated_compute(simulation.program):
        return "fastest to slowest communication and compute on the critical path"
    condition = "fastest to slowest communication on the critical path"
    if any(piece.op == "compute" for piece in simulation.timeline.critical_path):
        condition += "; compute times as given"
    return condition
