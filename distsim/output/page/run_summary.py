"""The data of the page about a run, except its calls. Times are in ns, sizes in bytes, and
bandwidths in GB/s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from distsim.analysis.timeline import Timeline
from distsim.checker.detectors.peak_memory import PeakMemory, peak_memory
from distsim.common.units import show_ns
from distsim.findings.final_state import FinalState
from distsim.output.json.simulation_result import finding_json
from distsim.output.page.key_figures import key_figures, step_breakdown
from distsim.output.page.report_run import ReportRun
from distsim.output.text.finding_list import verdict_text
from distsim.output.trace_data.lanes import group_equal_steps, representative_step
from distsim.output.trace_data.memory_over_time import MemoryProfile, memory_profiles
from distsim.output.trace_data.partial_run import partial_run_text, stopped_rank_lines
from distsim.output.trace_data.traffic_matrix import measure_traffic, ranks_per_row
from distsim.simulation.training_metrics import makespan_range
from distsim.simulation.what_if import resource_speedups
from distsim.trace.model import Trace

#: The largest number of findings on the page.
MAX_FINDINGS = 200
#: The largest number of calls of a run that is repeated with faster resources.
MAX_CALLS_FOR_SPEEDUPS = 20_000


def headline(report_run: ReportRun) -> str:
    """`hangs at once`, `completes in 19.08 ms`."""
    ns = report_run.trace.makespan_ns
    if not ns:
        return f"{report_run.outcome} at once"
    preposition = "in" if report_run.outcome == "completes" else "after"
    return f"{report_run.outcome} {preposition} {show_ns(ns)}"


def summary_data(report_run: ReportRun, timeline: Timeline) -> dict[str, object]:
    """All data of a run except columns, costs and values."""
    header = report_run.trace.header
    partial = partial_run_text(report_run.trace)
    return {
        "name": report_run.name,
        "file": report_run.file,
        "note": report_run.note,
        "outcome": report_run.outcome,
        "headline": headline(report_run),
        "source": str(header.get("source") or ""),
        "backend": str(header.get("backend") or ""),
        "cluster": str(header.get("cluster") or ""),
        "world": report_run.trace.world_size,
        "makespan": timeline.makespan_ns,
        "iteration_ns": timeline.iteration_ns,
        "nodes": int(header.get("nodes") or 1),
        "local": _ranks_per_node(report_run.trace),
        "mesh": dict(header.get("mesh") or {}),
        "groups": [[name, list(ranks)] for name, ranks in header.get("groups", ())],
        "ended": [partial, *stopped_rank_lines(report_run.trace)] if partial else [],
        "ends": [list(end) for end in header.get("ends") or ()],
        "findings": [finding_json(finding) for finding in report_run.findings[:MAX_FINDINGS]],
        "more_findings": max(0, len(report_run.findings) - MAX_FINDINGS),
        "classes": _classes_data(report_run),
        "figures": [list(figure) for figure in key_figures(report_run, timeline)],
        "breakdown": [list(share) for share in step_breakdown(report_run, timeline)],
        "ranks": [list(timeline.ranks[rank]) for rank in report_run.shown_ranks],
        "collectives": [times._asdict() for times in timeline.collectives],
        "traffic": None
        if report_run.representatives is not None
        else traffic_data(report_run.trace),
        "steps": equal_steps_data(report_run.trace, report_run.shown_ranks),
        **_simulation_data(report_run, timeline),
        **_waits_data(report_run),
    }


def _classes_data(report_run: ReportRun) -> list[list[int]] | None:
    """For each shown rank, all ranks that it stands for, itself first; None if all are shown."""
    if report_run.representatives is None:
        return None
    return [
        [rank, *(other for other in report_run.ranks_like(rank) if other != rank)]
        for rank in report_run.shown_ranks
    ]


def _ranks_per_node(trace: Trace) -> int:
    """The number of ranks on a node."""
    nodes = int(trace.header.get("nodes") or 1)
    return int(trace.header.get("local_size") or 0) or -(-max(trace.world_size, 1) // nodes)


def _simulation_data(report_run: ReportRun, timeline: Timeline) -> dict[str, object]:
    """Data that only a simulation has: verdict, cost model, memory."""
    verdict, simulation = report_run.verdict, report_run.simulation
    found: dict[str, object] = {
        "verdict": None,
        "about": "",
        "memory": [],
        "filled": None,
        "cost": None,
        "profiles": [],
        "speedups": [],
    }
    if verdict is not None:
        found["verdict"] = {
            "word": verdict.verdict,
            "text": verdict_text(verdict),
            "complete": verdict.complete,
            "core": list(verdict.core),
            "ranks": list(verdict.ranks),
        }
    if report_run.profiles is not None:
        found["profiles"] = [
            [name, one.outcome, list(one.possible), list(one.ranks)]
            for name, one in report_run.profiles.items()
        ]
    if simulation is None:
        return found
    cost = simulation.cost
    device = cost.cluster.device
    # A recorded trace has no predicted times, and therefore no range of a prediction.
    span = makespan_range(cost, simulation.program, timeline) if report_run.is_simulated else None
    stated = peak_memory(simulation.scenario, simulation.program)
    return found | {
        "about": simulation.scenario.about or "",
        "cost": {
            "name": cost.name,
            "source": cost.source,
            "band": cost.error_band,
            "makespan": list(span) if span else None,
        },
        "device": {"name": device.name, "nbytes": device.memory_nbytes},
        "speedups": speedups_data(report_run),
        "memory": [[one.name, list(one.ranks), dict(one.parts)] for one in stated],
        "filled": memory_data(stated, report_run),
    }


def speedups_data(report_run: ReportRun) -> list[list[object]]:
    """[resource, run time in ns if it were twice as fast], the largest effect first.

    Empty for recordings, for runs that do not complete, and for long runs: each resource costs one
    more simulation.
    """
    simulation = report_run.simulation
    if simulation is None or not report_run.is_simulated or report_run.outcome != "completes":
        return []
    if len(report_run.trace) > MAX_CALLS_FOR_SPEEDUPS:
        return []
    found = sorted(resource_speedups(simulation), key=lambda one: (one.makespan_ns, one.resource))
    return [[one.resource, one.makespan_ns] for one in found]


def _waits_data(report_run: ReportRun) -> dict[str, object]:
    """The blocked ranks of this run, or else of the execution that the verdict found."""
    own = report_run.final_state
    if own is not None and own.blocked:
        return {"waits": _blocked_ranks_data(own), "waits_of": "this run"}
    of_verdict = report_run.verdict.final_state if report_run.verdict is not None else None
    if of_verdict is not None and of_verdict.blocked:
        return {
            "waits": _blocked_ranks_data(of_verdict),
            "waits_of": "another execution that the contract allows",
        }
    return {"waits": None, "waits_of": ""}


def _blocked_ranks_data(found: FinalState) -> dict[str, object]:
    """``sets``: the sets of awaited ranks, each once; a need names its set by its number."""
    sets: dict[tuple[int, ...], int] = {}
    blocked: list[object] = []
    for b in found.blocked:
        needs = [
            [need.position, need.part, sets.setdefault(need.ranks, len(sets)), int(need.any)]
            for need in b.needs
        ]
        blocked.append([b.rank, b.position, b.since_ns, int(b.device), needs])
    ends = [
        [e.rank, e.status, e.position, e.at_ns, e.message]
        for e in found.ends
        if e.status not in ("ended", "blocked")
    ]
    return {"blocked": blocked, "sets": [list(ranks) for ranks in sets], "ends": ends}


# --- sums over the run ---
#: The largest numbers of memory curves, and of points of a curve.
_MAX_CURVES, _MAX_CURVE_POINTS = 8, 400


def traffic_data(trace: Trace) -> dict[str, object]:
    """``pairs``: [from, to, bytes] of blocks of ``block`` ranks, the largest first; ``by``: the
    algorithm of each collective.
    """
    found = measure_traffic(trace, ranks_per_row(trace))
    source, target = found.sent.nonzero()
    nbytes = found.sent[source, target]
    order = np.lexsort((target, source, -nbytes))
    columns = (column[order].tolist() for column in (source, target, nbytes))
    return {
        "block": found.block,
        "by": found.by,
        "pairs": [list(pair) for pair in zip(*columns, strict=True)],
    }


def equal_steps_data(trace: Trace, ranks: Sequence[int]) -> list[list[int]]:
    """[first, count, start, end of the first] of consecutive equal steps; empty if the run has no
    steps.
    """
    return [[s.first, s.times, s.start_ns, s.end_ns] for s in group_equal_steps(trace, ranks)]


def memory_data(stated: Iterable[PeakMemory], report_run: ReportRun) -> dict[str, object] | None:
    """The memory of each kind of rank over one step, or over the run; None if there are no forward
    and backward passes.
    """
    trace, ranks = report_run.trace, report_run.shown_ranks
    step, words = representative_step(trace, ranks)
    profiles = memory_profiles(stated, trace, ranks, step)
    with_curve = [profile for profile in profiles if profile.share is not None]
    kinds = [profile for profile in with_curve if profile.parts.get("activations")]
    if not kinds:
        return None
    start, end = step or (0, max(trace.makespan_ns, 1))
    curves = []
    for one in kinds[:_MAX_CURVES]:
        like = sorted(other for rank in one.ranks for other in report_run.ranks_like(rank))
        curves.append([like, dict(one.parts), *_thinned_activation_curve(one)])
    return {
        "note": words,
        "from": start,
        "to": end,
        "curves": curves,
        "more": sum(
            len(report_run.ranks_like(rank)) for one in kinds[_MAX_CURVES:] for rank in one.ranks
        ),
    }


def _thinned_activation_curve(one: MemoryProfile) -> tuple[list[int], list[float]]:
    """Instants, and the share of the peak of the activations there.

    Long curves are thinned: of each interval, the highest and the lowest point remain.
    """
    assert one.share is not None
    at, share = one.share
    if len(at) > _MAX_CURVE_POINTS:
        kept_points: list[int] = []
        for interval in np.array_split(np.arange(len(at)), _MAX_CURVE_POINTS // 2):
            levels = share[interval]
            kept_points += [interval[levels.argmin()], interval[levels.argmax()]]
        kept = np.unique(kept_points)
        at, share = at[kept], share[kept]
    return at.tolist(), [round(level, 4) for level in share.tolist()]
