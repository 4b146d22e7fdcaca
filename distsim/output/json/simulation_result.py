"""The result of `distsim simulate` as JSON.

The JSON is a public interface: no key changes its meaning while `schema_version` stays the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from distsim.checker.detectors.peak_memory import peak_memory
from distsim.findings.finding_types import Finding
from distsim.output.json.tensor_values import values_json
from distsim.simulation.training_metrics import makespan_range, training_metrics

if TYPE_CHECKING:
    from distsim.analysis.critical_path import CriticalPathSegment
    from distsim.analysis.timeline import CollectiveTimes, RankTimes
    from distsim.simulation.simulate_scenario import Simulation

SCHEMA_VERSION = 1


def simulation_json(simulation: Simulation) -> dict[str, object]:
    """The output of `distsim simulate FILE --format json`.

    Times are in ns, sizes in bytes and bandwidths in GB/s.
    """
    timeline = simulation.timeline
    cost = simulation.cost
    return {
        "schema_version": SCHEMA_VERSION,
        "file": simulation.scenario.file,
        "name": simulation.scenario.name,
        "outcome": simulation.outcome,
        "possible": list(simulation.possible_outcomes),
        **_verdict_json(simulation),
        "profile": simulation.run.profile,
        "world_size": simulation.program.world_size,
        "driver": simulation.run.driver,
        "simulated_ranks": simulation.run.simulated_ranks,
        "makespan_ns": simulation.makespan_ns,
        "iteration_ns": timeline.iteration_ns,
        "ranks": [rank_times_json(r) for r in timeline.ranks],
        "critical_path": [_segment_json(s) for s in timeline.critical_path],
        "collectives": [_collective_json(c) for c in timeline.collectives],
        "memory": _memory_json(simulation),
        "values": values_json(simulation.values),
        "findings": [finding_json(f) for f in simulation.findings],
        "makespan_band_ns": _range_json(makespan_range(cost, simulation.program, timeline)),
        "figures": _figures_json(simulation),
        "cost_model": {"name": cost.name, "source": cost.source, "error_band": cost.error_band},
    }


def _verdict_json(simulation: Simulation) -> dict[str, object]:
    """The keys of the verdict; all are null if no verdict was asked for."""
    verdict = simulation.verdict
    if verdict is None:
        return dict.fromkeys(("verdict", "complete", "depends_on", "verdict_ranks", "core"))
    return {
        "verdict": verdict.verdict,
        "complete": verdict.complete,
        "depends_on": verdict.depends_on,
        "verdict_ranks": sorted(verdict.ranks),
        "core": sorted(verdict.core),
    }


def _figures_json(simulation: Simulation) -> dict[str, object] | None:
    """The metrics of a transformer's training step; null for other programs."""
    metrics = training_metrics(simulation)
    if metrics is None:
        return None
    shares = {kind: round(share, 6) for kind, share in metrics.shares.items()}
    return {
        "step_ns": metrics.step_ns,
        "tokens": metrics.tokens,
        "tokens_s_gpu": round(metrics.tokens_s_gpu, 3),
        "mfu": round(metrics.mfu, 6),
        "shares": shares,
    }


def _range_json(band: tuple[int, int] | None) -> list[int] | None:
    return None if band is None else list(band)


def finding_json(finding: Finding) -> Mapping[str, object]:
    """A finding in the form that the JSON of all commands shares."""
    return {
        "code": finding.code,
        "severity": finding.severity,
        "ranks": list(finding.ranks),
        "core": list(finding.core),
        "message": finding.message,
        "help": list(finding.help),
        "places": [
            {"rank": p.rank, "file": p.file, "line": p.line, "column": p.column, "op": p.op}
            for p in finding.places
        ],
    }


def rank_times_json(r: RankTimes) -> dict[str, object]:
    """The times of a rank; ``finished_ns`` is null if the rank never finishes."""
    return {**r._asdict(), "finished_ns": r.finished_ns if r.finished_ns >= 0 else None}


def _memory_json(simulation: Simulation) -> list[dict[str, object]]:
    """The peak memory of ranks: an object for each entry of `memory:`.

    Strategies add entries of their own.
    """
    device = simulation.cost.cluster.device
    return [
        {
            "name": peak.name,
            "ranks": list(peak.ranks),
            "parts_nbytes": dict(peak.parts),
            "total_nbytes": peak.total,
            "allocated_nbytes": peak.allocated or None,
            "device": device.name,
            "device_nbytes": device.memory_nbytes,
            "fits": peak.total <= device.memory_nbytes,
        }
        for peak in peak_memory(simulation.scenario, simulation.program)
    ]


def _segment_json(s: CriticalPathSegment) -> dict[str, object]:
    return {
        "rank": s.rank,
        "op": s.op,
        "name": s.name,
        "why": s.why,
        "start_ns": s.start_ns,
        "end_ns": s.end_ns,
        "calls": s.calls,
        "file": s.place.file,
        "line": s.place.line,
        "column": s.place.column,
    }


def _collective_json(c: CollectiveTimes) -> dict[str, object]:
    return {
        "op": c.op,
        "group": c.group,
        "group_size": c.n,
        "nbytes": c.nbytes,
        "calls": c.calls,
        "duration_ns": c.duration_ns,
        "algbw": round(c.algbw, 6),
        "busbw": round(c.busbw, 6),
    }
