"""Evaluates the layouts of a plan: all of them, or with a budget those that a search proposes.

Layouts are evaluated in chunks by worker processes, because layouts with the same schedule share
work. Results go into a table on disk at once, so that an interrupted plan continues where it was.
The fastest layouts are simulated afterwards, because the time of an evaluation ignores that
transfers share links.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from distsim.common.errors import UsageError
from distsim.planning.layout_result import LayoutEvaluator, LayoutResult
from distsim.planning.layouts import ParallelLayout, PlanRequest, RejectedLayout, candidate_layouts
from distsim.planning.ranking import LayoutPlan, rank_key, rank_layouts
from distsim.planning.result_rows import PLAN_COLUMNS, layout_key, result_from_row, result_row
from distsim.planning.simulate_layout import LayoutToSimulate, simulate_layout
from distsim.planning.sweep.grid import propose_points
from distsim.planning.sweep.result_table import ResultTable
from distsim.planning.sweep.worker_pool import available_cores, run_tasks

#: The largest number of layouts in a chunk; the layouts of a chunk share schedules and costs.
_LAYOUTS_PER_CHUNK = 12
#: A core gets several chunks, so that one with a long chunk does not finish long after the others.
_CHUNKS_PER_CORE = 4
#: How many of the layouts that may run out of memory a report lists.
MAX_RISKY_LAYOUTS = 3
#: For fewer layouts, worker processes are not worth their start.
_MIN_LAYOUTS_FOR_WORKERS = 60
#: In searches of more layouts, a sample is evaluated first.
_LARGE_SEARCH = 4000
_SAMPLE_SIZE = 200
#: Layouts that take this many times as long as the fastest of the sample are not timed.
_WORTH_TIMING = 1.5
#: A guided search may propose this many choices per layout of the budget, because many choices are
#: no candidate, for example if their sizes do not multiply to the number of GPUs.
_PROPOSALS_PER_LAYOUT = 20
#: The name of the request in a guided search. The sampler orders its draws by these names.
_REQUEST_NAME = "question"
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


@dataclass(frozen=True)
class PlanOptions:
    """How a plan is computed.

    ``jobs``, ``address``: see `distsim.planning.sweep.worker_pool.run_tasks`. ``output``: the file
    of the table. ``budget``: how many layouts are tried (None: all). ``simulate_top``: how many of
    the fastest are simulated if that yields another time (`distsim.planning.simulate_layout`).
    """

    jobs: int | None = None
    address: str | None = None
    output: Path | None = None
    budget: int | None = None
    seed: int = 0
    simulate_top: int = 0


def plan_layouts(
    requests: Sequence[PlanRequest],
    options: PlanOptions = PlanOptions(),
    report_progress: ProgressCallback = lambda done, total: None,
) -> LayoutPlan:
    """Evaluate and rank every layout of the requests (several numbers of GPUs, several clusters).

    Raises UsageError if no request has any layout, and UsageError and EnvironmentFault as the table
    and the workers do.
    """
    results: ResultByLayout = {}
    candidates: list[LayoutId] = []
    for index, request in enumerate(requests):
        for candidate in candidate_layouts(request):
            if isinstance(candidate, RejectedLayout):
                results[LayoutId(index, candidate.layout)] = candidate
            else:
                candidates.append(LayoutId(index, candidate))
    if not results and not candidates:
        raise UsageError(
            f"no layout of {requests[0].gpus} GPUs has the values of --restrict",
            "the product of tp, pp, cp and ep has to divide the number of GPUs",
        )
    planner = _Planner(requests, options, report_progress)
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
    return LayoutPlan(tuple(requests), rank_layouts(outcomes), tuple(rejected))


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
        """The results of all layouts; those that the table contains are not evaluated again."""
        results: ResultByLayout = {}
        missing: list[LayoutId] = []
        for candidate in candidates:
            row = self.table.rows.get(self._key(candidate))
            if row is None:
                missing.append(candidate)
            else:
                results[candidate] = result_from_row(
                    self.requests[candidate.request], candidate.layout, row, str(self.table.path)
                )
        sample = _sample_of_large_search(missing)
        progress = _ProgressCounter(self.report_progress, len(missing))
        self._evaluate(sample, {}, results, progress)
        sampled = set(sample)
        others = [layout_id for layout_id in missing if layout_id not in sampled]
        self._evaluate(others, self._limits(sample, results), results, progress)
        return results

    def _limits(self, sample: Sequence[LayoutId], results: ResultByLayout) -> dict[int, int]:
        """For each request, the longest step that is worth timing, in ns; none without a sample."""
        limits: dict[int, int] = {}
        for layout_id in sample:
            result = results[layout_id]
            if isinstance(result, LayoutResult) and not result.fit.may_run_out:
                limit_ns = round(_WORTH_TIMING * result.step_ns)
                limits[layout_id.request] = min(limits.get(layout_id.request, limit_ns), limit_ns)
        return limits

    def _evaluate(
        self,
        layouts: Sequence[LayoutId],
        limits: Mapping[int, int],
        results: ResultByLayout,
        progress: _ProgressCounter,
    ) -> None:
        """Evaluate layouts in worker processes, and add their results.

        ``limits``: by request, see `LayoutChunk.limit_ns`.
        """
        chunks: list[LayoutChunk] = []
        request_of_chunk: list[int] = []
        for index, request in enumerate(self.requests):
            own_layouts = [layout for owner, layout in layouts if owner == index]
            own_chunks = list(layout_chunks(request, own_layouts, limits.get(index)))
            chunks += own_chunks
            request_of_chunk += [index] * len(own_chunks)
        tasks = run_tasks(
            evaluate_chunk, chunks, jobs=self._jobs(len(layouts)), address=self.options.address
        )
        for number, chunk_results in tasks:
            for layout, result in zip(chunks[number].layouts, chunk_results, strict=True):
                self._add(results, LayoutId(request_of_chunk[number], layout), result)
            progress.add(len(chunk_results))

    def search(self, candidates: Sequence[LayoutId], budget: int) -> ResultByLayout:
        """Evaluate layouts one by one, each proposed by the results so far.

        Proposals that are no candidate do not count against the budget.
        """
        results: ResultByLayout = {}
        names = _choice_names()
        candidate_of = {_choice_values(candidate): candidate for candidate in candidates}
        space = {
            name: sorted({values[position] for values in candidate_of})
            for position, name in enumerate(names)
        }
        evaluators = [LayoutEvaluator(request) for request in self.requests]

        def step_ns_of(choice: dict[str, str]) -> float | None:
            candidate = candidate_of.get(tuple(choice[name] for name in names))
            if candidate is None:
                return None
            result = evaluators[candidate.request].outcome(candidate.layout)
            self._add(results, candidate, result)
            self.report_progress(len(results), budget)
            return float(result.step_ns) if isinstance(result, LayoutResult) else None

        if candidate_of:
            most_proposals = _PROPOSALS_PER_LAYOUT * budget
            for _ in propose_points(space, most_proposals, self.options.seed, step_ns_of):
                if len(results) >= budget:
                    break
        return results

    def simulate_fastest(self, results: ResultByLayout) -> None:
        """Simulate the fastest layouts, until no other layout can be among them.

        A simulation never shortens a step: it adds the waits for shared links. So a layout that was
        not simulated, and is slower than the fastest ones already, cannot overtake them. A layout
        that becomes slower may make room for another one, which is then simulated, too.
        """
        while layout_ids := self._fastest_without_simulation(results):
            tasks = []
            for layout_id in layout_ids:
                result = results[layout_id]
                assert isinstance(result, LayoutResult)
                tasks.append(LayoutToSimulate(self.requests[layout_id.request], result))
            for number, simulated in run_tasks(
                simulate_layout,
                tasks,
                jobs=self._jobs(len(results)),
                address=self.options.address,
            ):
                self._add(results, layout_ids[number], simulated)

    def _fastest_without_simulation(self, results: ResultByLayout) -> list[LayoutId]:
        """The layouts that a report would show with a time that ignores shared links."""
        possible = {
            layout_id: result
            for layout_id, result in results.items()
            if isinstance(result, LayoutResult)
        }
        order = sorted(possible, key=lambda layout_id: rank_key(possible[layout_id]))
        certain = [layout_id for layout_id in order if not possible[layout_id].fit.may_run_out]
        risky = [layout_id for layout_id in order if possible[layout_id].fit.may_run_out]
        shown = certain[: self.options.simulate_top]
        shown += risky[: min(self.options.simulate_top, MAX_RISKY_LAYOUTS)]
        return [layout_id for layout_id in shown if possible[layout_id].timed == "alone"]

    def write_table(self, results: ResultByLayout) -> None:
        """Write the whole table in the order of the layouts, including impossible ones."""
        if self.table.path is None:
            return
        order = sorted(results)
        for layout_id in order:
            if self._key(layout_id) not in self.table.rows:
                row = result_row(self.requests[layout_id.request], results[layout_id])
                self.table.add(self._key(layout_id), row)
        self.table.finish([(self._key(layout_id), {}) for layout_id in order])

    def _jobs(self, layouts: int) -> int | None:
        """The number of worker processes; None lets `run_tasks` choose."""
        options = self.options
        if options.jobs is not None or options.address is not None:
            return options.jobs
        return None if layouts >= _MIN_LAYOUTS_FOR_WORKERS else 1

    def _add(
        self, results: ResultByLayout, layout_id: LayoutId, result: LayoutResult | RejectedLayout
    ) -> None:
        results[layout_id] = result
        self.table.add(self._key(layout_id), result_row(self.requests[layout_id.request], result))

    def _key(self, layout_id: LayoutId) -> str:
        return layout_key(self.requests[layout_id.request], layout_id.layout)


class _ProgressCounter:
    """Reports how many of all layouts are evaluated."""

    def __init__(self, report: ProgressCallback, total: int) -> None:
        self._report = report
        self._total = total
        self._done = 0
        self._report(0, total)

    def add(self, count: int) -> None:
        """Report so many further layouts."""
        self._done += count
        self._report(self._done, self._total)


def _choice_names() -> tuple[str, ...]:
    """What a guided search chooses: a request, and a layout without its number of GPUs."""
    return (_REQUEST_NAME, *(name for name in ParallelLayout._fields if name != "gpus"))


def _choice_values(layout_id: LayoutId) -> tuple[str, ...]:
    """The choices that lead to a layout, in the order of `_choice_names`."""
    chosen = layout_id.layout._asdict()
    del chosen["gpus"]  # The request has it.
    return (str(layout_id.request), *(str(value) for value in chosen.values()))


def _sample_of_large_search(layouts: Sequence[LayoutId]) -> list[LayoutId]:
    """Some layouts of a search that is too large to time all of them; else none.

    The fastest one shows which of the others are worth timing.
    """
    if len(layouts) <= _LARGE_SEARCH:
        return []
    # An odd stride meets all values of fields with an even number of choices.
    stride = len(layouts) // _SAMPLE_SIZE | 1
    return list(layouts[::stride])


def layout_chunks(
    request: PlanRequest, layouts: Sequence[ParallelLayout], limit_ns: int | None = None
) -> Iterator[LayoutChunk]:
    """The layouts of a request in chunks, with equal schedules together and the longest first.

    The number of messages of a schedule grows with pp and with the chunks of each stage.
    """
    ordered = sorted(
        layouts,
        key=lambda layout: (-layout.pp * layout.chunks, -layout.pp, layout.tp, layout),
    )
    per_chunk = -(-len(ordered) // (_CHUNKS_PER_CORE * available_cores()))  # rounded up
    size = max(1, min(_LAYOUTS_PER_CHUNK, per_chunk))
    for start in range(0, len(ordered), size):
        yield LayoutChunk(request, tuple(ordered[start : start + size]), limit_ns)


def evaluate_chunk(chunk: LayoutChunk) -> list[LayoutResult | RejectedLayout]:
    """The work of a worker process."""
    evaluator = LayoutEvaluator(chunk.request)
    return [evaluator.outcome(layout, chunk.limit_ns) for layout in chunk.layouts]
