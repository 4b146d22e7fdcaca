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
#: ``reason``: the point cannot be.
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
    """The cells of a simulated point; None becomes an empty cell."""
    low_ns, high_ns = makespan_range(found.cost, found.program, found.timeline) or (None, None)
    available = found.cost.cluster.device.memory_nbytes
    totals = [peak.total for peak in peak_memory(found.scenario, found.program)]
    memory = round(max(totals) / available, 4) if totals and available else None
    facts: dict[str, object] = {
        "outcome": found.outcome,
        "verdict": found.verdict.verdict if found.verdict else None,
        "makespan_ns": found.makespan_ns,
        "low_ns": low_ns,
        "high_ns": high_ns,
        "iteration_ns": found.iteration_ns,
        "memory": memory,
        "findings": " ".join(dict.fromkeys(f.code for f in found.findings)),
    }
    training = training_metrics(found)
    if training is not None:
        facts |= {"tokens_s_gpu": round(training.tokens_s_gpu, 3), "mfu": round(training.mfu, 5)}
        facts |= {"bubble": round(training.bubble, 5), "exposed": round(training.exposed, 5)}
    return facts


__all__ = ["RESULT_COLUMNS", "SweepTask", "table_columns", "evaluate_point"]
