"""Ranks the layouts of a plan: evaluates all of them (or searches with a budget), fastest first.

Layouts are evaluated in chunks by worker processes, because layouts with the same schedule share
work. Results go into a table on disk at once, so that an interrupted plan continues where it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from distsim.common.errors import UsageError
from distsim.common.version import __version__
from distsim.hardware.cluster import Cluster
from distsim.hardware.cost.memory_fit import MemoryFit
from distsim.planning.frameworks import FRAMEWORKS
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

#: The largest number of layouts in a chunk; the layouts of a chunk share schedules and costs.
_LAYOUTS_PER_CHUNK = 12
#: How many of the layouts that may run out of memory a report lists.
MAX_RISKY_LAYOUTS = 3
#: For fewer layouts, worker processes are not worth their start.
_MIN_LAYOUTS_FOR_WORKERS = 60
#: In searches of more layouts, a sample of this size is timed first. Layouts that take more than
#: `_WORTH_TIMING` times as long as its fastest one are not timed.
_LARGE_SEARCH, _SAMPLE_SIZE, _WORTH_TIMING = 4000, 200, 1.5
#: No cell of a table of results is larger.
_LARGEST_CELL = 1 << 62
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
    "schedule",
    "precision",
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
    "memory_low_nbytes",
    "memory_high_nbytes",
    "memory_reserve_nbytes",
    "may_run_out",
    "shares",
    "parts",
    "timed",
    "reason",
)
#: Called with (done, total).
ProgressCallback = Callable[[int, int], None]


class LayoutChunk(NamedTuple):
    """The task of a worker: layouts of one request.

    ``limit_ns``: layouts that take longer for certain are rejected without being timed.
    """

    request: PlanRequest
    layouts: tuple[ParallelLayout, ...]
    limit_ns: int | None = None


class LayoutId(NamedTuple):
    """A layout of one of several requests. ``request``: its index."""

    request: int
    layout: ParallelLayout


ResultByLayout = dict[LayoutId, LayoutResult | RejectedLayout]


class RankedLayout(NamedTuple):
    """A layout in the ranking.

    ``tied``: within the range of costs it may be as fast as the first one. ``front``:
    Pareto-optimal in time, memory and number of GPUs, among the layouts that fit for certain.
    """

    outcome: LayoutResult
    tied: bool
    front: bool


@dataclass(frozen=True)
class LayoutPlan:
    """The possible layouts, and the impossible ones (``left``).

    ``ranked`` starts with the layouts that fit into memory for certain, the fastest first. Those
    that may run out of memory follow.
    """

    questions: tuple[PlanRequest, ...]
    ranked: tuple[RankedLayout, ...]
    left: tuple[RejectedLayout, ...]

    @property
    def best(self) -> LayoutResult | None:
        return self.ranked[0].outcome if self.ranked else None

    def best_for(self, framework: str) -> LayoutResult | None:
        """The fastest layout that a framework can run; None if it can run none of them."""
        supported = FRAMEWORKS[framework]
        for ranked in self.ranked:
            layout = ranked.outcome.layout
            if supported.can_run(layout.schedule, layout.recompute):
                return ranked.outcome
        return None

    @property
    def certain(self) -> tuple[RankedLayout, ...]:
        """The layouts that fit into memory for certain."""
        return tuple(ranked for ranked in self.ranked if not ranked.outcome.fit.may_run_out)

    @property
    def risky(self) -> tuple[RankedLayout, ...]:
        """The layouts that may run out of memory."""
        return tuple(ranked for ranked in self.ranked if ranked.outcome.fit.may_run_out)

    def question(self, outcome: LayoutResult) -> PlanRequest:
        """The request of an outcome."""
        return next(
            request
            for request in self.questions
            if (request.gpus, request.cluster.name) == (outcome.layout.gpus, outcome.cluster)
        )


@dataclass(frozen=True)
class PlanOptions:
    """How a plan is computed.

    ``jobs``, ``address``: see `distsim.planning.sweep.worker_pool.run_tasks`. ``output``: the file
    of the table. ``budget``: how many layouts are tried (None: all). ``exact``: how many of the
    fastest are simulated if that yields another time (`distsim.planning.simulate_layout`).
    """

    jobs: int | None = None
    address: str | None = None
    output: Path | None = None
    budget: int | None = None
    seed: int = 0
    exact: int = 0


def plan_layouts(
    questions: Sequence[PlanRequest],
    options: PlanOptions = PlanOptions(),
    report_progress: ProgressCallback = lambda done, total: None,
) -> LayoutPlan:
    """Evaluate and rank every layout of the requests (several numbers of GPUs, several clusters).

    Raises UsageError if no request has any layout, and UsageError and EnvironmentFault as the table
    and the workers do.
    """
    results: ResultByLayout = {}
    candidates: list[LayoutId] = []
    for number, request in enumerate(questions):
        for candidate in candidate_layouts(request):
            if isinstance(candidate, RejectedLayout):
                results[LayoutId(number, candidate.layout)] = candidate
            else:
                candidates.append(LayoutId(number, candidate))
    if not results and not candidates:
        raise UsageError(
            f"no layout of {questions[0].gpus} GPUs has the values of --restrict",
            "the product of tp, pp, cp and ep has to divide the number of GPUs",
        )
    planner = _Planner(questions, options, report_progress)
    try:
        if options.budget is not None:
            results |= planner.search(candidates, options.budget)
        else:
            results |= planner.evaluate_all(candidates)
        planner.simulate_fastest(results)
    except BaseException:
        planner.table.release()
        raise
    planner.write_table(results)
    outcomes = [result for result in results.values() if isinstance(result, LayoutResult)]
    rejected = [result for result in results.values() if isinstance(result, RejectedLayout)]
    return LayoutPlan(tuple(questions), rank_layouts(outcomes), tuple(rejected))


class _Planner:
    """Evaluates layouts of several requests, and keeps the table of results."""

    def __init__(
        self,
        requests: Sequence[PlanRequest],
        options: PlanOptions,
        report_progress: ProgressCallback,
    ) -> None:
        self.requests = requests
        self.options = options
        self.report_progress = report_progress
        self.table = ResultTable(options.output, PLAN_COLUMNS)

    def evaluate_all(self, candidates: Sequence[LayoutId]) -> ResultByLayout:
        """Evaluate the layouts that the table does not contain yet."""
        results: ResultByLayout = {}
        missing: list[LayoutId] = []
        for candidate in candidates:
            row = self.table.rows.get(self._key(candidate))
            if row is None:
                missing.append(candidate)
            else:
                results[candidate] = _from_row(
                    self.requests[candidate.request], candidate.layout, row, str(self.table.path)
                )
        sample = _sample_of_large_search(missing)
        self.report_progress(0, len(missing))
        self._evaluate(results, sample, {}, len(missing), 0)
        sampled = set(sample)
        others = [candidate for candidate in missing if candidate not in sampled]
        self._evaluate(results, others, self._limits(sample, results), len(missing), len(sample))
        return results

    def _limits(self, sample: Sequence[LayoutId], results: ResultByLayout) -> dict[int, int]:
        """For each request, the longest step that is worth timing; none without a sample."""
        limits: dict[int, int] = {}
        for place in sample:
            result = results[place]
            if isinstance(result, LayoutResult) and not result.fit.may_run_out:
                limit_ns = round(_WORTH_TIMING * result.step_ns)
                limits[place.request] = min(limits.get(place.request, limit_ns), limit_ns)
        return limits

    def _evaluate(
        self,
        results: ResultByLayout,
        layouts: Sequence[LayoutId],
        limits: Mapping[int, int],
        total: int,
        done: int,
    ) -> None:
        """Evaluate layouts in worker processes, and add their results."""
        chunks = [
            (number, chunk._replace(limit_ns=limits.get(number)))
            for number, chunk in _layout_chunks(self.requests, layouts)
        ]
        for index, chunk_results in run_tasks(
            evaluate_chunk,
            [chunk for _, chunk in chunks],
            jobs=self._jobs(len(layouts)),
            address=self.options.address,
        ):
            number, chunk = chunks[index]
            for layout, result in zip(chunk.layouts, chunk_results, strict=True):
                self._add(results, LayoutId(number, layout), result)
            done += len(chunk_results)
            self.report_progress(done, total)

    def search(self, candidates: Sequence[LayoutId], budget: int) -> ResultByLayout:
        """Evaluate layouts one by one, each proposed by the results so far.

        Proposals that are no candidate do not count against the budget.
        """
        results: ResultByLayout = {}
        words = ("question", *(name for name in ParallelLayout._fields if name != "gpus"))
        by_choice = {
            (str(number), *(str(value) for value in layout[1:])): LayoutId(number, layout)
            for number, layout in candidates
        }
        space = {word: sorted({key[k] for key in by_choice}) for k, word in enumerate(words)}
        evaluators = [LayoutEvaluator(request) for request in self.requests]

        def score(choice: dict[str, str]) -> float | None:
            candidate = by_choice.get(tuple(choice[word] for word in words))
            if candidate is None:
                return None
            result = evaluators[candidate.request].outcome(candidate.layout)
            self._add(results, candidate, result)
            self.report_progress(len(results), budget)
            return float(result.step_ns) if isinstance(result, LayoutResult) else None

        if by_choice:
            for _ in propose_points(space, 20 * budget, self.options.seed, score):
                if len(results) >= budget:
                    break
        return results

    def simulate_fastest(self, results: ResultByLayout) -> None:
        """Simulate the fastest layouts, until no other layout can be among them.

        A layout whose transfers were timed alone takes at least as long as that, so the ones that
        were not simulated cannot overtake.
        """
        while True:
            timed = {
                place: result
                for place, result in results.items()
                if isinstance(result, LayoutResult)
            }
            fastest = sorted(timed, key=lambda place: _rank_key(timed[place]))
            certain = [place for place in fastest if not timed[place].fit.may_run_out]
            risky = [place for place in fastest if timed[place].fit.may_run_out]
            shown = certain[: self.options.exact]
            shown += risky[: min(self.options.exact, MAX_RISKY_LAYOUTS)]
            inexact = [place for place in shown if timed[place].timed == "alone"]
            if not inexact:
                return
            tasks = [
                LayoutToSimulate(self.requests[place.request], timed[place]) for place in inexact
            ]
            for index, result in run_tasks(
                simulate_layout,
                tasks,
                jobs=self._jobs(len(results)),
                address=self.options.address,
            ):
                self._add(results, inexact[index], result)

    def write_table(self, results: ResultByLayout) -> None:
        """Write the whole table in the order of the layouts, including impossible ones."""
        if self.table.path is None:
            return
        order = sorted(results)
        for place in order:
            if self._key(place) not in self.table.rows:
                row = result_row(self.requests[place.request], results[place])
                self.table.add(self._key(place), row)
        self.table.finish([(self._key(place), {}) for place in order])

    def _jobs(self, layouts: int) -> int | None:
        """The number of worker processes; None lets `run_tasks` choose."""
        options = self.options
        if options.jobs is not None or options.address is not None:
            return options.jobs
        return options.jobs if layouts >= _MIN_LAYOUTS_FOR_WORKERS else 1

    def _add(
        self, results: ResultByLayout, place: LayoutId, result: LayoutResult | RejectedLayout
    ) -> None:
        results[place] = result
        self.table.add(self._key(place), result_row(self.requests[place.request], result))

    def _key(self, place: LayoutId) -> str:
        return layout_key(self.requests[place.request], place.layout)


def _sample_of_large_search(layouts: Sequence[LayoutId]) -> list[LayoutId]:
    """Some layouts of a search that is too large to time all of them; else none.

    The fastest one shows which of the others are worth timing.
    """
    if len(layouts) <= _LARGE_SEARCH:
        return []
    # An odd stride meets all values of fields with an even number of choices.
    stride = len(layouts) // _SAMPLE_SIZE | 1
    return list(layouts[::stride])


def _layout_chunks(
    requests: Sequence[PlanRequest], layouts: Sequence[LayoutId]
) -> list[tuple[int, LayoutChunk]]:
    """(index of the request, chunk), with equal schedules together and the longest first.

    Chunks are small enough to give each core about four of them.
    """
    chunks: list[tuple[int, LayoutChunk]] = []
    for number, request in enumerate(requests):
        ordered = sorted(
            (layout for owner, layout in layouts if owner == number),
            key=lambda layout: (-layout.pp * layout.chunks, -layout.pp, layout.tp, layout),
        )
        per_core = -(-len(ordered) // (4 * available_cores()))
        size = max(1, min(_LAYOUTS_PER_CHUNK, per_core))
        chunks += [
            (number, LayoutChunk(request, tuple(ordered[start : start + size])))
            for start in range(0, len(ordered), size)
        ]
    return chunks


def evaluate_chunk(chunk: LayoutChunk) -> list[LayoutResult | RejectedLayout]:
    """The work of a worker process."""
    evaluator = LayoutEvaluator(chunk.request)
    return [evaluator.outcome(layout, chunk.limit_ns) for layout in chunk.layouts]


# --- ranking ---


def rank_layouts(outcomes: Sequence[LayoutResult]) -> tuple[RankedLayout, ...]:
    """Layouts that fit for certain before those that may run out of memory; each fastest first.

    Of equally fast ones, the one with less memory comes first.
    """
    order = sorted(outcomes, key=_rank_key)
    certain = [result for result in order if not result.fit.may_run_out]
    front = {id(result) for result in pareto_front(certain)}
    ranked = []
    for place, result in enumerate(order):
        is_tied = place == 0 or not is_order_certain(order[0], result)
        ranked.append(RankedLayout(result, is_tied, id(result) in front))
    return tuple(ranked)


def _rank_key(result: LayoutResult) -> tuple[bool, int, int, ParallelLayout, str]:
    return (
        result.fit.may_run_out,
        result.step_ns,
        result.held_nbytes,
        result.layout,
        result.cluster,
    )


def pareto_front(outcomes: Sequence[LayoutResult]) -> list[LayoutResult]:
    """The layouts that no other beats in time, memory or GPUs without being worse in another.

    Of equal layouts the first one is kept.
    """
    front: list[LayoutResult] = []
    by_time = sorted(
        outcomes, key=lambda result: (result.step_ns, result.held_nbytes, result.layout.gpus)
    )
    for result in by_time:
        # Those in front are at least as fast, so only memory and GPUs remain to be compared.
        is_dominated = any(
            better.held_nbytes <= result.held_nbytes and better.layout.gpus <= result.layout.gpus
            for better in front
        )
        if not is_dominated:
            front.append(result)
    return front


# --- rows of the table ---


def layout_key(request: PlanRequest, layout: ParallelLayout) -> str:
    """A hash of everything on which a layout's outcome depends."""
    model = request.model if isinstance(request.model, str) else dict(request.model)
    step = [
        model,
        request.global_batch,
        request.sequence,
        request.node,
        dict(request.step),
        request.cluster.key,
        request.reserve_nbytes,
        request.framework,
    ]
    text = json.dumps([__version__, "plan 3", step, list(layout)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def result_row(request: PlanRequest, result: LayoutResult | RejectedLayout) -> dict[str, object]:
    """The row of a layout, by `PLAN_COLUMNS`."""
    layout = result.layout
    row: dict[str, object] = {**layout._asdict(), "dp": layout.dp, "cluster": request.cluster.name}
    if isinstance(result, RejectedLayout):
        return {**row, "status": "left out", "reason": result.reason}
    low, high = result.band_ns
    return {
        **row,
        "status": "ok",
        "step_ns": result.step_ns,
        "low_ns": low,
        "high_ns": high,
        "tokens_s_gpu": result.tokens_s_gpu,
        "mfu": result.mfu,
        "memory": result.memory,
        "bubble": result.bubble,
        "exposed": result.exposed,
        "bound": result.bound,
        "held_nbytes": result.held_nbytes,
        "memory_low_nbytes": result.fit.low_nbytes,
        "memory_high_nbytes": result.fit.high_nbytes,
        "memory_reserve_nbytes": result.fit.reserve_nbytes,
        "may_run_out": int(result.fit.may_run_out),
        "shares": json.dumps(result.shares),
        "parts": json.dumps(result.parts),
        "timed": result.timed,
    }


def _from_row(
    request: PlanRequest, layout: ParallelLayout, row: Mapping[str, str], file: str
) -> LayoutResult | RejectedLayout:
    """The result that `result_row` wrote. Raises UsageError if somebody has damaged the row."""
    cells = _RowCells(row, file)
    if cells.one_of("status", ("ok", "left out")) != "ok":
        return RejectedLayout(layout, row["reason"])
    fit = MemoryFit(
        cells.whole_number("memory_low_nbytes"),
        cells.whole_number("memory_high_nbytes"),
        cells.whole_number("memory_reserve_nbytes"),
        request.cluster.device.memory_nbytes,
    )
    return LayoutResult(
        layout,
        cells.one_of("cluster", (request.cluster.name,)),
        cells.whole_number("step_ns", least=1),
        cells.parts("parts"),
        cells.shares("shares"),
        cells.whole_number("held_nbytes"),
        fit,
        tokens_s_gpu=cells.number("tokens_s_gpu"),
        mfu=cells.number("mfu"),
        timed=cells.one_of("timed", ("alone", "exact", "short")),
    )


class _RowCells:
    """The cells of a row in a table that was written earlier, checked when they are read."""

    def __init__(self, row: Mapping[str, str], file: str) -> None:
        self.row = row
        self.file = file

    def one_of(self, column: str, choices: Sequence[str]) -> str:
        if self.row[column] not in choices:
            raise self._error(column, f"is not {' or '.join(choices)}")
        return self.row[column]

    def whole_number(self, column: str, least: int = 0) -> int:
        try:
            number = int(self.row[column])
        except ValueError:
            raise self._error(column, "is not a whole number") from None
        if not least <= number <= _LARGEST_CELL:
            raise self._error(column, f"is not between {least} and 2^62")
        return number

    def number(self, column: str) -> float:
        try:
            number = float(self.row[column])
        except ValueError:
            raise self._error(column, "is not a number") from None
        if not _is_amount(number):
            raise self._error(column, "is negative or infinite")
        return number

    def shares(self, column: str) -> dict[str, float]:
        shares = self._json(column)
        if not isinstance(shares, dict) or not all(map(_is_amount, shares.values())):
            raise self._error(column, "is not an object of shares")
        return shares

    def parts(self, column: str) -> tuple[StepTimePart, ...]:
        parts = self._json(column)
        if not isinstance(parts, list) or not all(map(_is_part, parts)):
            raise self._error(column, "is not a list of [name, ns, low, high]")
        return tuple(StepTimePart(*part) for part in parts)

    def _json(self, column: str) -> object:
        try:
            return json.loads(self.row[column])
        except (ValueError, RecursionError):
            raise self._error(column, "is not JSON") from None

    def _error(self, column: str, problem: str) -> UsageError:
        shown = self.row[column][:40] or "an empty cell"
        return UsageError(
            f"{self.file}: row {self.row['key']}, column {column}: {shown} {problem}",
            "remove the row; it is computed again",
        )


def _is_amount(value: object) -> bool:
    """Whether this is a finite number that is not negative."""
    return isinstance(value, int | float) and 0 <= value <= _LARGEST_CELL


def _is_part(part: object) -> bool:
    if not isinstance(part, list) or len(part) != len(StepTimePart._fields):
        return False
    return isinstance(part[0], str) and all(map(_is_amount, part[1:]))


def distinct_clusters(questions: Sequence[PlanRequest]) -> list[Cluster]:
    """The clusters of the requests, each once."""
    return list({request.cluster.name: request.cluster for request in questions}.values())


__all__ = [
    "MAX_RISKY_LAYOUTS",
    "PlanOptions",
    "LayoutPlan",
    "RankedLayout",
    "distinct_clusters",
    "layout_key",
    "pareto_front",
    "plan_layouts",
    "rank_layouts",
]
