"""One point of a sweep: simulated, as a row of the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distsim.checker.detectors.peak_memory import peak_memory
from distsim.common.errors import RESOURCE_ERRORS, ScenarioErrors, UsageError, resource_error
from distsim.planning.sweep.grid import GridPoint
from distsim.scenario import loads
from distsim.simulation.simulate_scenario import Simulation, simulate
from distsim.simulation.training_metrics import makespan_range, training_metrics

#: Columns of the table besides those of the grid. ``status``: `ok`, or `refused` with the
#: ``reason``: the point can't be.
RESULT_COLUMNS = (
    "status",
    "outcome",
    "verdict",
    "makespan_ns",
    "low_ns",
    "high_ns",
    "iteration_ns",
    "tokens_s_gpu",
    "mfu",
    "bubble",
    "exposed",
    "memory",
    "findings",
    "reason",
)


class SweepTask(NamedTuple):
    """A point and the file that it changes, as a worker gets it: plain data."""

    text: str
    file: str
    point: GridPoint
    sets: tuple[str, ...] = ()
    backend: str | None = None
    max_calls: int | None = None


def table_columns(names: Sequence[str], clusters: Sequence[str]) -> tuple[str, ...]:
    """The columns of a sweep's table."""
    return (*names, *(("cluster",) if clusters else ()), *RESULT_COLUMNS)


def evaluate_point(task: SweepTask) -> dict[str, object]:
    """The row of a point. What makes it impossible is a row as well."""
    point = task.point
    row: dict[str, object] = {
        **dict(point.values),
        **({"cluster": point.cluster} if point.cluster is not None else {}),
    }
    try:
        scenario = loads(task.text, task.file, (*task.sets, *point.sets))
        found = simulate(
            scenario,
            backend=task.backend,
            cluster=point.cluster,
            with_values=False,
            max_calls=task.max_calls,
        )
    except ScenarioErrors as errors:
        return {**row, "status": "refused", "reason": errors.problems[0].message}
    except UsageError as error:
        return {**row, "status": "refused", "reason": error.message}
    except RESOURCE_ERRORS as error:
        return {**row, "status": "refused", "reason": resource_error(error, "").message}
    return {**row, "status": "ok", **_result_cells(found)}


def _result_cells(found: Simulation) -> dict[str, object]:
    band = makespan_range(found.cost, found.program, found.timeline)
    told, room = training_metrics(found), found.cost.cluster.device.memory_nbytes
    most = max((one.total for one in peak_memory(found.scenario, found.program)), default=None)
    facts: dict[str, object] = {
        "outcome": found.outcome,
        "verdict": found.verdict.verdict if found.verdict else None,
        "makespan_ns": found.makespan_ns,
        "low_ns": band[0] if band else None,
        "high_ns": band[1] if band else None,
        "iteration_ns": found.iteration_ns,
        "memory": round(most / room, 4) if most is not None and room else None,
        "findings": " ".join(dict.fromkeys(f.code for f in found.findings)),
    }
    if told is not None:
        facts |= {"tokens_s_gpu": round(told.tokens_s_gpu, 3), "mfu": round(told.mfu, 5)}
        facts |= {"bubble": round(told.bubble, 5), "exposed": round(told.exposed, 5)}
    return facts


__all__ = ["RESULT_COLUMNS", "SweepTask", "table_columns", "evaluate_point"]
