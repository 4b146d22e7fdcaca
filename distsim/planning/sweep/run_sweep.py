"""Run a sweep: known points are not simulated again, and each new row is saved at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distsim.planning.sweep.evaluate_point import SweepTask, evaluate_point, table_columns
from distsim.planning.sweep.grid import (
    GridPoint,
    check_grid_names,
    grid_points,
    point_key,
    propose_points,
)
from distsim.planning.sweep.result_table import ResultTable
from distsim.planning.sweep.worker_pool import run_tasks

#: Called with (points done, points in all).
ProgressCallback = Callable[[int, int], None]


@dataclass(frozen=True)
class SweepRequest:
    """The grid and options of a sweep.

    ``output``: the file of the table, .csv or .parquet, or None.
    ``budget``: number of points of a guided search; None: all points.

    ``jobs`` and ``address`` as `distsim.planning.sweep.worker_pool.run_tasks` takes them.
    """

    text: str
    file: str
    grid: Mapping[str, Sequence[str]]
    clusters: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    backend: str | None = None
    max_calls: int | None = None
    output: Path | None = None
    jobs: int | None = None
    address: str | None = None
    budget: int | None = None
    seed: int = 0

    @property
    def points(self) -> list[GridPoint]:
        return grid_points(self.grid, self.clusters)

    def key(self, point: GridPoint) -> str:
        return point_key(self.text, self.file, point, self.sets, [self.backend, self.max_calls])

    def task(self, point: GridPoint) -> SweepTask:
        return SweepTask(self.text, self.file, point, self.sets, self.backend, self.max_calls)


@dataclass(frozen=True)
class SweepResult:
    """The rows of a sweep in the order of its points; ``known``: points that the
    table already had.
    """

    points: tuple[GridPoint, ...]
    rows: tuple[dict[str, str], ...]
    computed: int
    known: int


def run_sweep(
    asked: SweepRequest, tell: ProgressCallback = lambda done, whole: None
) -> SweepResult:
    """Run the sweep. Points in the table are skipped, and equal points are simulated once.

    Raises UsageError for an unknown name and for a table of another sweep, EnvironmentFault
    if a package or a cluster of workers is missing.
    """
    check_grid_names(asked.text, asked.file, asked.grid, asked.sets)
    table = ResultTable(asked.output, table_columns(tuple(asked.grid), asked.clusters))
    known = set(table.rows)
    try:
        chosen = (
            _guided_search(asked, table, tell)
            if asked.budget is not None
            else _run_all(asked, table, tell)
        )
    except BaseException:
        table.release()
        raise
    keys = [asked.key(point) for point in chosen]
    rows = table.finish(
        [(key, _point_cells(point)) for key, point in zip(keys, chosen, strict=True)]
    )
    return SweepResult(tuple(chosen), tuple(rows), len(set(keys) - known), len(set(keys) & known))


def _point_cells(point: GridPoint) -> dict[str, str]:
    """The cells that identify a point."""
    return {
        **dict(point.values),
        **({"cluster": point.cluster} if point.cluster is not None else {}),
    }


def _run_all(asked: SweepRequest, table: ResultTable, tell: ProgressCallback) -> list[GridPoint]:
    every = asked.points
    todo: dict[str, GridPoint] = {}
    for point in every:
        key = asked.key(point)
        if key not in table.rows:
            todo.setdefault(key, point)
    done = 0
    tell(done, len(todo))
    keys = list(todo)
    for number, row in run_tasks(
        evaluate_point,
        [asked.task(todo[key]) for key in keys],
        jobs=asked.jobs,
        address=asked.address,
    ):
        table.add(keys[number], row)
        done += 1
        tell(done, len(todo))
    return every


def _guided_search(
    asked: SweepRequest, table: ResultTable, tell: ProgressCallback
) -> list[GridPoint]:
    """One point after the other: each proposal knows all results before it."""
    space = {**asked.grid, **({"cluster ": asked.clusters} if asked.clusters else {})}
    budget, found = asked.budget or 0, list[GridPoint]()

    def point_of(choice: Mapping[str, str]) -> GridPoint:
        return GridPoint(tuple((name, choice[name]) for name in asked.grid), choice.get("cluster "))

    def score(choice: dict[str, str]) -> float | None:
        row = table.rows[asked.key(point_of(choice))]
        return (
            float(row["makespan_ns"])
            if row["outcome"] == "completes" and "DS806" not in row["findings"]
            else None
        )

    for choice in propose_points(space, budget, asked.seed, score):
        point = point_of(choice)
        key = asked.key(point)
        if key not in table.rows:
            table.add(key, evaluate_point(asked.task(point)))
        found.append(point)
        tell(len(found), budget)
    return found


def grid_from_block(block: Mapping[str, Iterable[object]]) -> dict[str, tuple[str, ...]]:
    """The grid of a file's `sweep:` block, its values as `--set` takes them."""
    return {name: tuple(_set_text(value) for value in values) for name, values in block.items()}


def _set_text(value: object) -> str:
    import json

    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)


def ranked_rows(swept: SweepResult) -> Iterator[tuple[GridPoint, dict[str, str]]]:
    """Points with their rows, completed ones first, the fastest at the top."""

    def order(pair: tuple[GridPoint, dict[str, str]]) -> tuple[bool, bool, int]:
        row = pair[1]
        completes = row["outcome"] == "completes"
        return (
            row["status"] != "ok",
            not completes,
            int(row["makespan_ns"] or 0) if completes else 0,
        )

    yield from sorted(zip(swept.points, swept.rows, strict=True), key=order)


__all__ = ["SweepRequest", "SweepResult", "ranked_rows", "run_sweep", "grid_from_block"]
