"""The figures at the head of a report, and where the time of a step goes.

Both use the definitions of the text report: `distsim.simulation.training_metrics` for the figures
of a training step, `distsim.analysis.timeline` for the four categories of time. The breakdown is
that of Holistic Trace Analysis (https://hta.readthedocs.io, temporal breakdown): compute, exposed
communication, and idle time by reason.
"""

from __future__ import annotations

from typing import NamedTuple

from distsim.analysis.timeline import Timeline
from distsim.checker.detectors.peak_memory import peak_memory
from distsim.common.units import show_bytes, show_ns, show_ns_range
from distsim.hardware.cost.memory_fit import memory_fit, memory_outside_torch
from distsim.output.page.report_run import ReportRun
from distsim.simulation.simulate_scenario import Simulation
from distsim.simulation.training_metrics import makespan_range, time_shares, training_metrics

#: Kinds of compute in a breakdown; further kinds are summed up.
_MAX_KINDS = 8
#: Smaller shares are not listed.
_NEGLIGIBLE = 0.0005


class KeyFigure(NamedTuple):
    """A figure at the head of the page; ``meaning`` explains it in a few words."""

    name: str
    value: str
    meaning: str


class TimeShare(NamedTuple):
    """A part of the time of a run, as a mean over all ranks.

    ``category``: compute, exposed, waiting or idle; the fill of the timeline.
    """

    name: str
    category: str
    share: float


def key_figures(report_run: ReportRun, timeline: Timeline) -> list[KeyFigure]:
    """Whatever is known of: step time and its range, tokens/s, MFU, bubble, exposed communication,
    memory.
    """
    if not timeline.makespan_ns or not timeline.ranks:
        return []
    found = [_step_time(timeline)]
    simulation = report_run.simulation
    if simulation is None or not report_run.is_simulated:
        return [*found, *_time_figures(report_run, timeline)]
    bounds = makespan_range(simulation.cost, simulation.program, timeline)
    if bounds is not None:
        run = "run" if timeline.iteration_ns is None else f"run of {show_ns(timeline.makespan_ns)}"
        meaning = f"of the {run}, if all modelled costs on its critical path are low, or all high"
        found.append(KeyFigure("range", show_ns_range(*bounds), meaning))
    metrics = training_metrics(simulation)
    if metrics is None:
        found += _time_figures(report_run, timeline)
    else:
        found += [
            KeyFigure("tokens/s", f"{metrics.tokens_s_gpu:,.0f}", "per GPU"),
            KeyFigure("MFU", _percent(metrics.mfu), "model FLOPs utilization"),
            KeyFigure("bubble", _percent(metrics.bubble), "neither compute nor communication"),
            KeyFigure("exposed comm", _percent(metrics.exposed), "communication without compute"),
        ]
    return [*found, *_memory_figures(simulation)]


def _step_time(timeline: Timeline) -> KeyFigure:
    if timeline.iteration_ns is not None:
        return KeyFigure("step time", show_ns(timeline.iteration_ns), "median after the first step")
    return KeyFigure("time", show_ns(timeline.makespan_ns), "of the run")


def _time_figures(report_run: ReportRun, timeline: Timeline) -> list[KeyFigure]:
    """Shares that every run has, as means over all ranks."""
    shares = {one.name: one.share for one in _categories(report_run, timeline)}
    return [
        KeyFigure("compute", _percent(shares["compute"]), "of the time, mean over ranks"),
        KeyFigure("exposed comm", _percent(shares["exposed communication"]), "communication only"),
        KeyFigure("waiting", _percent(shares["waiting"]), "blocked before peers arrive"),
    ]


def _memory_figures(simulation: Simulation) -> list[KeyFigure]:
    """The fullest rank, and whether it may run out of memory."""
    nbytes: dict[int, int] = {}
    for peak in peak_memory(simulation.scenario, simulation.program):
        for rank in peak.ranks:
            nbytes[rank] = nbytes.get(rank, 0) + peak.total
    if not nbytes:
        return []
    device, most = simulation.cost.cluster.device, max(nbytes.values())
    fit = memory_fit(most, memory_outside_torch(device, communicators=1), device)
    meaning = f"of {show_bytes(device.memory_nbytes)}, fullest rank"
    if most > device.memory_nbytes:
        meaning += ": out of memory"
    elif fit.may_run_out:
        meaning += ": may run out"
    else:
        meaning += ": fits"
    return [KeyFigure("memory", show_bytes(most), meaning)]


def step_breakdown(report_run: ReportRun, timeline: Timeline) -> list[TimeShare]:
    """Where the time of the run goes; the shares add up to 1."""
    categories = _categories(report_run, timeline)
    simulation = report_run.simulation
    if simulation is None or not report_run.is_simulated or not timeline.makespan_ns:
        return _listed(categories)
    named = time_shares(simulation.run, simulation.timeline)
    kinds = [
        TimeShare(name, "compute", share)
        for name, share in named.items()
        if name not in ("exposed communication", "bubble")
    ]
    kinds, others = kinds[:_MAX_KINDS], kinds[_MAX_KINDS:]
    if others:
        rest = sum(other.share for other in others)
        kinds.append(TimeShare("other compute", "compute", rest))
    compute, *rest_of_time = categories
    # Work of a host that only enqueues counts as compute of the rank, but not of its device.
    on_host = compute.share - sum(kind.share for kind in kinds)
    if on_host < -_NEGLIGIBLE:
        # Computes of several streams overlap: their sum is longer than the time that they take.
        return _listed(categories)
    host = TimeShare("host work, device idle", "idle", on_host)
    return _listed([*kinds, *rest_of_time[:1], host, *rest_of_time[1:]])


def _categories(report_run: ReportRun, timeline: Timeline) -> list[TimeShare]:
    """The four categories of time, as means over all ranks."""
    sums = [0, 0, 0, 0]
    for rank in report_run.shown_ranks:
        times, many = timeline.ranks[rank], len(report_run.ranks_like(rank))
        for number, ns in enumerate(times[1:5]):
            sums[number] += many * ns
    whole = max(timeline.makespan_ns * report_run.trace.world_size, 1)
    names = ("compute", "exposed communication", "waiting", "idle")
    fills = ("compute", "exposed", "waiting", "idle")
    return [
        TimeShare(name, fill, ns / whole) for name, fill, ns in zip(names, fills, sums, strict=True)
    ]


def _listed(shares: list[TimeShare]) -> list[TimeShare]:
    return [one for one in shares if one.share >= _NEGLIGIBLE]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"
