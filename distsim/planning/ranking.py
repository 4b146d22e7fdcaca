"""Every layout of a question: left out with the reason, or timed and ranked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from distsim import __version__
from distsim.common.errors import UsageError
from distsim.hardware.cluster import Cluster
from distsim.planning.layout_result import (
    LayoutEvaluator,
    LayoutResult,
    StepTimePart,
    is_order_certain,
)
from distsim.planning.layouts import ParallelLayout, PlanRequest, RejectedLayout, candidate_layouts
from distsim.planning.simulate_layout import LayoutToSimulate, simulate_layout
from distsim.planning.sweep.grid import propose_points
from distsim.planning.sweep.result_table import ResultTable
from distsim.planning.sweep.worker_pool import available_cores, run_tasks

#: Layouts that a worker takes at a time; they share schedules and prices.
_LAYOUTS_PER_CHUNK = 12
#: Fewer layouts than this are not worth the start of further processes.
_MIN_LAYOUTS_FOR_WORKERS = 60
PLAN_COLUMNS = (
    "cluster",
    "gpus",
    "tp",
    "pp",
    "chunks",
    "cp",
    "ep",
    "dp",
    "zero",
    "recompute",
    "micro_batch",
    "status",
    "step_ns",
    "low_ns",
    "high_ns",
    "tokens_s_gpu",
    "mfu",
    "memory",
    "bubble",
    "exposed",
    "bound",
    "held_nbytes",
    "shares",
    "parts",
    "timed",
    "reason",
)
ProgressCallback = Callable[[int, int], None]


class LayoutChunk(NamedTuple):
    """What a worker gets."""

    question: PlanRequest
    layouts: tuple[ParallelLayout, ...]


class RankedLayout(NamedTuple):
    """A layout and its place. ``tied``: within the band of prices it may be as fast as the first.
    ``front``: no other is at once faster, holds less and takes fewer GPUs."""

    outcome: LayoutResult
    tied: bool
    front: bool


@dataclass(frozen=True)
class LayoutPlan:
    """The layouts that fit, the fastest first, and those that are left out."""

    questions: tuple[PlanRequest, ...]
    ranked: tuple[RankedLayout, ...]
    left: tuple[RejectedLayout, ...]

    @property
    def best(self) -> LayoutResult | None:
        return self.ranked[0].outcome if self.ranked else None

    def question(self, outcome: LayoutResult) -> PlanRequest:
        """The one that an outcome answers."""
        return next(
            q
            for q in self.questions
            if q.gpus == outcome.layout.gpus and q.cluster.name == outcome.cluster
        )


@dataclass(frozen=True)
class PlanOptions:
    """How it is worked out: see `distsim.planning.sweep.worker_pool.run_tasks`; ``output``: the
    table's file; ``budget``: layouts that are tried; ``exact``: so many of the fastest are
    simulated, where that tells another time (`distsim.planning.simulate_layout`)."""

    jobs: int | None = None
    address: str | None = None
    output: Path | None = None
    budget: int | None = None
    seed: int = 0
    exact: int = 0


def plan_layouts(
    questions: Sequence[PlanRequest],
    how: PlanOptions = PlanOptions(),
    tell: ProgressCallback = lambda done, whole: None,
) -> LayoutPlan:
    """Time every layout of the questions (several numbers of GPUs, several clusters) and rank them.

    Raises UsageError where no question has any, and UsageError and EnvironmentFault as the table
    and the back ends do.
    """
    found: dict[tuple[int, ParallelLayout], LayoutResult | RejectedLayout] = {}
    todo: list[tuple[int, ParallelLayout]] = []
    for number, question in enumerate(questions):
        for one in candidate_layouts(question):
            if isinstance(one, RejectedLayout):
                found[number, one.layout] = one
            else:
                todo.append((number, one))
    if not found and not todo:
        raise UsageError(
            f"no layout of {questions[0].gpus} GPUs has the values of --only",
            "the product of tp, pp, cp and ep has to divide the number of GPUs",
        )
    table = ResultTable(how.output, PLAN_COLUMNS)
    try:
        found |= (_guided_search if how.budget is not None else _evaluate_all)(
            questions, todo, table, how, tell
        )
        _simulate_fastest(questions, found, table, how)
    finally:
        table.close()
    _write_table(table, questions, found)
    outcomes = [one for one in found.values() if isinstance(one, LayoutResult)]
    return LayoutPlan(
        tuple(questions),
        rank_layouts(outcomes),
        tuple(one for one in found.values() if isinstance(one, RejectedLayout)),
    )


ResultByLayout = dict[tuple[int, ParallelLayout], LayoutResult | RejectedLayout]


def _simulate_fastest(
    questions: Sequence[PlanRequest], found: ResultByLayout, table: ResultTable, how: PlanOptions
) -> None:
    """Simulate the fastest, until no other can be among them: those that are timed alone take at
    least as long.
    """
    while True:
        timed = {place: one for place, one in found.items() if isinstance(one, LayoutResult)}
        first = sorted(timed, key=lambda place: _rank_key(timed[place]))[: how.exact]
        todo = [place for place in first if timed[place].timed == "alone"]
        if not todo:
            return
        jobs = (
            how.jobs
            if how.jobs is not None
            or how.address is not None
            or len(found) >= _MIN_LAYOUTS_FOR_WORKERS
            else 1
        )
        asked = [
            LayoutToSimulate(questions[number], timed[number, layout]) for number, layout in todo
        ]
        for k, one in run_tasks(simulate_layout, asked, jobs=jobs, address=how.address):
            found[todo[k]] = one
            table.add(
                layout_key(questions[todo[k][0]], todo[k][1]),
                result_row(questions[todo[k][0]], one),
            )


def _evaluate_all(
    questions: Sequence[PlanRequest],
    todo: list[tuple[int, ParallelLayout]],
    table: ResultTable,
    how: PlanOptions,
    tell: ProgressCallback,
) -> ResultByLayout:
    found: ResultByLayout = {}
    fresh: list[tuple[int, ParallelLayout]] = []
    for number, layout in todo:
        row = table.rows.get(layout_key(questions[number], layout))
        if row is None:
            fresh.append((number, layout))
        else:
            found[number, layout] = _from_row(layout, row)
    chunks = _layout_chunks(questions, fresh)
    jobs = (
        how.jobs
        if how.jobs is not None or how.address is not None or len(fresh) >= _MIN_LAYOUTS_FOR_WORKERS
        else 1
    )
    done = 0
    tell(done, len(fresh))
    for k, results in run_tasks(
        evaluate_chunk, [chunk for _, chunk in chunks], jobs=jobs, address=how.address
    ):
        number, chunk = chunks[k]
        for layout, outcome in zip(chunk.layouts, results, strict=True):
            found[number, layout] = outcome
            table.add(layout_key(questions[number], layout), result_row(questions[number], outcome))
        done += len(results)
        tell(done, len(fresh))
    return found


def _layout_chunks(
    questions: Sequence[PlanRequest], todo: Sequence[tuple[int, ParallelLayout]]
) -> list[tuple[int, LayoutChunk]]:
    """Layouts with the same schedules together, the dearest first."""
    chunks: list[tuple[int, LayoutChunk]] = []
    for number, question in enumerate(questions):
        mine = sorted(
            (layout for n, layout in todo if n == number),
            key=lambda one: (-one.pp * one.chunks, -one.pp, one.tp, one),
        )
        size = max(1, min(_LAYOUTS_PER_CHUNK, -(-len(mine) // (4 * available_cores()))))
        chunks += [
            (number, LayoutChunk(question, tuple(mine[k : k + size])))
            for k in range(0, len(mine), size)
        ]
    return chunks


def evaluate_chunk(chunk: LayoutChunk) -> list[LayoutResult | RejectedLayout]:
    """What a worker does."""
    pricing = LayoutEvaluator(chunk.question)
    return [pricing.outcome(layout) for layout in chunk.layouts]


def _guided_search(
    questions: Sequence[PlanRequest],
    todo: list[tuple[int, ParallelLayout]],
    table: ResultTable,
    how: PlanOptions,
    tell: ProgressCallback,
) -> ResultByLayout:
    """One layout after the other, proposed by what those before came to; what can't be is no
    proposal that counts.
    """
    found: ResultByLayout = {}
    words = ("question", *(word for word in ParallelLayout._fields if word != "gpus"))
    known = {
        (str(number), *(str(value) for value in layout[1:])): (number, layout)
        for number, layout in todo
    }
    space = {word: sorted({key[k] for key in known}) for k, word in enumerate(words)}
    pricing = [LayoutEvaluator(question) for question in questions]

    def score(choice: dict[str, str]) -> float | None:
        place = known.get(tuple(choice[word] for word in words))
        if place is None:
            return None
        one = pricing[place[0]].outcome(place[1])
        found[place] = one
        table.add(layout_key(questions[place[0]], place[1]), result_row(questions[place[0]], one))
        tell(len(found), how.budget or 0)
        return float(one.step_ns) if isinstance(one, LayoutResult) else None

    if known:
        for _ in propose_points(space, 20 * (how.budget or 0), how.seed, score):
            if len(found) >= (how.budget or 0):
                break
    return found


# --- ranking ---
def rank_layouts(outcomes: Sequence[LayoutResult]) -> tuple[RankedLayout, ...]:
    """The fastest first; of equally fast ones the one that holds less."""
    order = sorted(outcomes, key=_rank_key)
    front = {id(one) for one in pareto_front(order)}
    return tuple(
        RankedLayout(one, k == 0 or not is_order_certain(order[0], one), id(one) in front)
        for k, one in enumerate(order)
    )


def _rank_key(one: LayoutResult) -> tuple[int, int, ParallelLayout, str]:
    return one.step_ns, one.held_nbytes, one.layout, one.cluster


def pareto_front(outcomes: Sequence[LayoutResult]) -> list[LayoutResult]:
    """Those that no other beats in time, memory or GPUs without losing in another. Of equals the
    first.
    """
    kept: list[LayoutResult] = []
    for one in sorted(outcomes, key=lambda o: (o.step_ns, o.held_nbytes, o.layout.gpus)):
        if not any(
            k.held_nbytes <= one.held_nbytes and k.layout.gpus <= one.layout.gpus for k in kept
        ):
            kept.append(one)
    return kept


# --- rows of the table ---
def layout_key(question: PlanRequest, layout: ParallelLayout) -> str:
    """A hash of all that decides a layout's outcome."""
    model = question.model if isinstance(question.model, str) else dict(question.model)
    step = [
        model,
        question.global_batch,
        question.sequence,
        question.node,
        dict(question.step),
        question.cluster.key,
    ]
    text = json.dumps([__version__, "plan", step, list(layout)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def result_row(question: PlanRequest, one: LayoutResult | RejectedLayout) -> dict[str, object]:
    layout = one.layout
    row: dict[str, object] = {**layout._asdict(), "dp": layout.dp, "cluster": question.cluster.name}
    if isinstance(one, RejectedLayout):
        return {**row, "status": "left out", "reason": one.reason}
    low, high = one.band_ns
    return {
        **row,
        "status": "ok",
        "step_ns": one.step_ns,
        "low_ns": low,
        "high_ns": high,
        "tokens_s_gpu": one.tokens_s_gpu,
        "mfu": one.mfu,
        "memory": one.memory,
        "bubble": one.bubble,
        "exposed": one.exposed,
        "bound": one.bound,
        "held_nbytes": one.held_nbytes,
        "shares": json.dumps(one.shares),
        "parts": json.dumps(one.parts),
        "timed": one.timed,
    }


def _from_row(layout: ParallelLayout, row: Mapping[str, str]) -> LayoutResult | RejectedLayout:
    if row["status"] != "ok":
        return RejectedLayout(layout, row["reason"])
    shares: dict[str, Any] = json.loads(row["shares"])
    parts = tuple(StepTimePart(*part) for part in json.loads(row["parts"]))
    memory, speed, mfu = (float(row[name]) for name in ("memory", "tokens_s_gpu", "mfu"))
    return LayoutResult(
        layout,
        row["cluster"],
        int(row["step_ns"]),
        parts,
        shares,
        int(row["held_nbytes"]),
        memory,
        speed,
        mfu,
        row["timed"],
    )


def _write_table(
    table: ResultTable, questions: Sequence[PlanRequest], found: ResultByLayout
) -> None:
    """The whole table, in the order of the layouts; what can't be is in it too."""
    if table.path is None:
        return
    keys = {place: layout_key(questions[place[0]], place[1]) for place in found}
    order = sorted(found, key=lambda place: (place[0], place[1]))
    for place in order:
        if keys[place] not in table.rows:
            table.add(keys[place], result_row(questions[place[0]], found[place]))
    table.finish([(keys[place], {}) for place in order])


def distinct_clusters(questions: Sequence[PlanRequest]) -> list[Cluster]:
    """The clusters of the questions, each once."""
    return list({question.cluster.name: question.cluster for question in questions}.values())


__all__ = [
    "PlanOptions",
    "LayoutPlan",
    "RankedLayout",
    "distinct_clusters",
    "layout_key",
    "pareto_front",
    "plan_layouts",
    "rank_layouts",
]
