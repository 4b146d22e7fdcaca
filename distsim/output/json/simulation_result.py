"""A simulation as JSON: an interface, so a key keeps its meaning while `schema_version` stays."""

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
    """What `distsim simulate FILE --format json` prints. Times are ns, sizes bytes, bandwidths
    GB/s.
    """
    run, verdict, timeline, cost = (
        simulation.run,
        simulation.verdict,
        simulation.timeline,
        simulation.cost,
    )
    return {
        "schema_version": SCHEMA_VERSION,
        "file": simulation.scenario.file,
        "name": simulation.scenario.name,
        "outcome": simulation.outcome,
        "possible": [simulation.outcome],
        "verdict": None if verdict is None else verdict.verdict,
        "complete": None if verdict is None else verdict.complete,
        "depends_on": None if verdict is None else verdict.depends_on,
        "verdict_ranks": None if verdict is None else sorted(verdict.ranks),
        "core": None if verdict is None else sorted(verdict.core),
        "profile": run.profile,
        "world_size": simulation.program.world_size,
        "makespan_ns": simulation.makespan_ns,
        "iteration_ns": timeline.iteration_ns,
        "ranks": [_rank_json(r) for r in timeline.ranks],
        "critical_path": [_segment_json(s) for s in timeline.critical_path],
        "collectives": [_collective_json(c) for c in timeline.collectives],
        "memory": _memory_json(simulation),
        "values": values_json(simulation.values),
        "findings": [finding_json(f) for f in simulation.findings],
        "makespan_band_ns": _range_json(makespan_range(cost, simulation.program, timeline)),
        "figures": _figures_json(simulation),
        "cost_model": {"name": cost.name, "source": cost.source, "error_band": cost.error_band},
    }


def _figures_json(simulation: Simulation) -> dict[str, object] | None:
    """Of a transformer's step; null for other programs."""
    found = training_metrics(simulation)
    if found is None:
        return None
    shares = {kind: round(share, 6) for kind, share in found.shares.items()}
    return {
        "step_ns": found.step_ns,
        "tokens": found.tokens,
        "tokens_s_gpu": round(found.tokens_s_gpu, 3),
        "mfu": round(found.mfu, 6),
        "shares": shares,
    }


def _range_json(band: tuple[int, int] | None) -> list[int] | None:
    return None if band is None else list(band)


def finding_json(finding: Finding) -> Mapping[str, object]:
    """A finding as every command's JSON has it."""
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


def _rank_json(r: RankTimes) -> dict[str, object]:
    """``finished_ns`` is null for a rank that never came to its end."""
    return {**r._asdict(), "finished_ns": r.finished_ns if r.finished_ns >= 0 else None}


def _memory_json(simulation: Simulation) -> list[dict[str, object]]:
    """What ranks hold at their peak, an object for each entry of `memory:`, those of strategies
    included.
    """
    device = simulation.cost.cluster.device
    return [
        {
            "name": one.name,
            "ranks": list(one.ranks),
            "parts_nbytes": dict(one.parts),
            "total_nbytes": one.total,
            "allocated_nbytes": one.allocated or None,
            "device": device.name,
            "device_nbytes": device.memory_nbytes,
            "fits": one.total <= device.memory_nbytes,
        }
        for one in peak_memory(simulation.scenario, simulation.program)
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
