"""One point of a sweep: simulated, as a row of the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distsim.check.memory import held
from distsim.errors import OUT_OF_BOUNDS, ScenarioErrors, UsageError, out_of_bounds
from distsim.figures import figures, makespan_band
from distsim.scenario import loads
from distsim.simulation import Simulation, simulate
from distsim.sweep.points import Point

#: Columns of the table besides those of the grid. ``status``: `ok`, or `refused` with the ``reason``: the point can't be.
COLUMNS = (
    "status", "outcome", "verdict", "makespan_ns", "low_ns", "high_ns", "iteration_ns", "tokens_s_gpu", "mfu", "bubble", "exposed",
    "memory", "findings", "reason",
)  # fmt: skip


class Task(NamedTuple):
    """A point and the file that it changes, as a worker gets it: plain data."""

    text: str
    file: str
    point: Point
    sets: tuple[str, ...] = ()
    backend: str | None = None
    max_calls: int | None = None


def columns_of(names: Sequence[str], clusters: Sequence[str]) -> tuple[str, ...]:
    """The columns of a sweep's table."""
    return (*names, *(("cluster",) if clusters else ()), *COLUMNS)


def evaluate(task: Task) -> dict[str, object]:
    """The row of a point. What makes it impossible is a row as well."""
    point = task.point
    row: dict[str, object] = {**dict(point.values), **({"cluster": point.cluster} if point.cluster is not None else {})}
    try:
        scenario = loads(task.text, task.file, (*task.sets, *point.sets))
        found = simulate(scenario, backend=task.backend, cluster=point.cluster, with_values=False, max_calls=task.max_calls)
    except ScenarioErrors as errors:
        return {**row, "status": "refused", "reason": errors.problems[0].message}
    except UsageError as error:
        return {**row, "status": "refused", "reason": error.message}
    except OUT_OF_BOUNDS as error:
        return {**row, "status": "refused", "reason": out_of_bounds(error, "").message}
    return {**row, "status": "ok", **_facts(found)}


def _facts(found: Simulation) -> dict[str, object]:
    band = makespan_band(found.cost, found.program, found.timeline)
    told, room = figures(found), found.cost.cluster.device.memory_nbytes
    most = max((one.total for one in held(found.scenario, found.program)), default=None)
    facts: dict[str, object] = {
        "outcome": found.outcome, "verdict": found.verdict.verdict if found.verdict else None, "makespan_ns": found.makespan_ns,
        "low_ns": band[0] if band else None, "high_ns": band[1] if band else None, "iteration_ns": found.iteration_ns,
        "memory": round(most / room, 4) if most is not None and room else None,
        "findings": " ".join(dict.fromkeys(f.code for f in found.findings)),
    }  # fmt: skip
    if told is not None:
        facts |= {"tokens_s_gpu": round(told.tokens_s_gpu, 3), "mfu": round(told.mfu, 5)}
        facts |= {"bubble": round(told.bubble, 5), "exposed": round(told.exposed, 5)}
    return facts


__all__ = ["COLUMNS", "Task", "columns_of", "evaluate"]
