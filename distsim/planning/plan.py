"""Every layout of a question: left out with the reason, or timed and ranked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from distsim import __version__
from distsim.cluster import Cluster
from distsim.errors import UsageError
from distsim.planning.exact import Asked, exact
from distsim.planning.layouts import Layout, Left, Question, layouts
from distsim.planning.outcome import Outcome, Part, Pricing, apart
from distsim.sweep.backends import cores, finished
from distsim.sweep.points import proposed
from distsim.sweep.table import Table

#: Layouts that a worker takes at a time; they share schedules and prices.
_CHUNK = 12
#: Fewer layouts than this are not worth the start of further processes.
_WORTH = 60
COLUMNS = (
    "cluster", "gpus", "tp", "pp", "chunks", "cp", "ep", "dp", "zero", "recompute", "micro_batch", "status", "step_ns", "low_ns", "high_ns",
    "tokens_s_gpu", "mfu", "memory", "bubble", "exposed", "bound", "held_nbytes", "shares", "parts", "timed", "reason",
)  # fmt: skip
Tell = Callable[[int, int], None]


class Chunk(NamedTuple):
    """What a worker gets."""

    question: Question
    layouts: tuple[Layout, ...]


class Ranked(NamedTuple):
    """A layout and its place. ``tied``: within the band of prices it may be as fast as the first. ``front``: no other is at once faster,
    holds less and takes fewer GPUs."""

    outcome: Outcome
    tied: bool
    front: bool


@dataclass(frozen=True)
class Plan:
    """The layouts that fit, the fastest first, and those that are left out."""

    questions: tuple[Question, ...]
    ranked: tuple[Ranked, ...]
    left: tuple[Left, ...]

    @property
    def best(self) -> Outcome | None:
        return self.ranked[0].outcome if self.ranked else None

    def question(self, outcome: Outcome) -> Question:
        """The one that an outcome answers."""
        return next(q for q in self.questions if q.gpus == outcome.layout.gpus and q.cluster.name == outcome.cluster)


@dataclass(frozen=True)
class How:
    """How it is worked out: see `distsim.sweep.backends.finished`; ``output``: the table's file; ``budget``: layouts that are tried;
    ``exact``: so many of the fastest are simulated, where that tells another time (`distsim.planning.exact`)."""

    jobs: int | None = None
    address: str | None = None
    output: Path | None = None
    budget: int | None = None
    seed: int = 0
    exact: int = 0


def plan(questions: Sequence[Question], how: How = How(), tell: Tell = lambda done, whole: None) -> Plan:
    """Time every layout of the questions (several numbers of GPUs, several clusters) and rank them.

    Raises UsageError where no question has any, and UsageError and EnvironmentFault as the table and the back ends do.
    """
    found: dict[tuple[int, Layout], Outcome | Left] = {}
    todo: list[tuple[int, Layout]] = []
    for number, question in enumerate(questions):
        for one in layouts(question):
            if isinstance(one, Left):
                found[number, one.layout] = one
            else:
                todo.append((number, one))
    if not found and not todo:
        raise UsageError(f"no layout of {questions[0].gpus} GPUs has the values of --only",
                         "the product of tp, pp, cp and ep has to divide the number of GPUs")  # fmt: skip
    table = Table(how.output, COLUMNS)
    try:
        found |= (_guided if how.budget is not None else _walked)(questions, todo, table, how, tell)
        _settle(questions, found, table, how)
    finally:
        table.close()
    _keep(table, questions, found)
    outcomes = [one for one in found.values() if isinstance(one, Outcome)]
    return Plan(tuple(questions), rank(outcomes), tuple(one for one in found.values() if isinstance(one, Left)))


Found = dict[tuple[int, Layout], Outcome | Left]


def _settle(questions: Sequence[Question], found: Found, table: Table, how: How) -> None:
    """Simulate the fastest, until no other can be among them: those that are timed alone take at least as long."""
    while True:
        timed = {place: one for place, one in found.items() if isinstance(one, Outcome)}
        first = sorted(timed, key=lambda place: _place(timed[place]))[: how.exact]
        todo = [place for place in first if timed[place].timed == "alone"]
        if not todo:
            return
        jobs = how.jobs if how.jobs is not None or how.address is not None or len(found) >= _WORTH else 1
        asked = [Asked(questions[number], timed[number, layout]) for number, layout in todo]
        for k, one in finished(exact, asked, jobs=jobs, address=how.address):
            found[todo[k]] = one
            table.add(key_of(questions[todo[k][0]], todo[k][1]), row_of(questions[todo[k][0]], one))


def _walked(questions: Sequence[Question], todo: list[tuple[int, Layout]], table: Table, how: How, tell: Tell) -> Found:
    found: Found = {}
    fresh: list[tuple[int, Layout]] = []
    for number, layout in todo:
        row = table.rows.get(key_of(questions[number], layout))
        if row is None:
            fresh.append((number, layout))
        else:
            found[number, layout] = _from_row(layout, row)
    chunks = _chunks(questions, fresh)
    jobs = how.jobs if how.jobs is not None or how.address is not None or len(fresh) >= _WORTH else 1
    done = 0
    tell(done, len(fresh))
    for k, results in finished(evaluate, [chunk for _, chunk in chunks], jobs=jobs, address=how.address):
        number, chunk = chunks[k]
        for layout, outcome in zip(chunk.layouts, results, strict=True):
            found[number, layout] = outcome
            table.add(key_of(questions[number], layout), row_of(questions[number], outcome))
        done += len(results)
        tell(done, len(fresh))
    return found


def _chunks(questions: Sequence[Question], todo: Sequence[tuple[int, Layout]]) -> list[tuple[int, Chunk]]:
    """Layouts with the same schedules together, the dearest first."""
    chunks: list[tuple[int, Chunk]] = []
    for number, question in enumerate(questions):
        mine = sorted((layout for n, layout in todo if n == number), key=lambda one: (-one.pp * one.chunks, -one.pp, one.tp, one))
        size = max(1, min(_CHUNK, -(-len(mine) // (4 * cores()))))
        chunks += [(number, Chunk(question, tuple(mine[k : k + size]))) for k in range(0, len(mine), size)]
    return chunks


def evaluate(chunk: Chunk) -> list[Outcome | Left]:
    """What a worker does."""
    pricing = Pricing(chunk.question)
    return [pricing.outcome(layout) for layout in chunk.layouts]


def _guided(questions: Sequence[Question], todo: list[tuple[int, Layout]], table: Table, how: How, tell: Tell) -> Found:
    """One layout after the other, proposed by what those before came to; what can't be is no proposal that counts."""
    found: Found = {}
    words = ("question", *(word for word in Layout._fields if word != "gpus"))
    known = {(str(number), *(str(value) for value in layout[1:])): (number, layout) for number, layout in todo}
    space = {word: sorted({key[k] for key in known}) for k, word in enumerate(words)}
    pricing = [Pricing(question) for question in questions]

    def score(choice: dict[str, str]) -> float | None:
        place = known.get(tuple(choice[word] for word in words))
        if place is None:
            return None
        one = pricing[place[0]].outcome(place[1])
        found[place] = one
        table.add(key_of(questions[place[0]], place[1]), row_of(questions[place[0]], one))
        tell(len(found), how.budget or 0)
        return float(one.step_ns) if isinstance(one, Outcome) else None

    if known:
        for _ in proposed(space, 20 * (how.budget or 0), how.seed, score):
            if len(found) >= (how.budget or 0):
                break
    return found


# --- ranking ---
def rank(outcomes: Sequence[Outcome]) -> tuple[Ranked, ...]:
    """The fastest first; of equally fast ones the one that holds less."""
    order = sorted(outcomes, key=_place)
    front = {id(one) for one in pareto(order)}
    return tuple(Ranked(one, k == 0 or not apart(order[0], one), id(one) in front) for k, one in enumerate(order))


def _place(one: Outcome) -> tuple[int, int, Layout, str]:
    return one.step_ns, one.held_nbytes, one.layout, one.cluster


def pareto(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those that no other beats in time, memory or GPUs without losing in another. Of equals the first."""
    kept: list[Outcome] = []
    for one in sorted(outcomes, key=lambda o: (o.step_ns, o.held_nbytes, o.layout.gpus)):
        if not any(k.held_nbytes <= one.held_nbytes and k.layout.gpus <= one.layout.gpus for k in kept):
            kept.append(one)
    return kept


# --- rows of the table ---
def key_of(question: Question, layout: Layout) -> str:
    """A hash of all that decides a layout's outcome."""
    model = question.model if isinstance(question.model, str) else dict(question.model)
    step = [model, question.global_batch, question.sequence, question.node, dict(question.step), question.cluster.key]
    text = json.dumps([__version__, "plan", step, list(layout)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def row_of(question: Question, one: Outcome | Left) -> dict[str, object]:
    layout = one.layout
    row: dict[str, object] = {**layout._asdict(), "dp": layout.dp, "cluster": question.cluster.name}
    if isinstance(one, Left):
        return {**row, "status": "left out", "reason": one.reason}
    low, high = one.band_ns
    return {
        **row, "status": "ok", "step_ns": one.step_ns, "low_ns": low, "high_ns": high, "tokens_s_gpu": one.tokens_s_gpu, "mfu": one.mfu,
        "memory": one.memory, "bubble": one.bubble, "exposed": one.exposed, "bound": one.bound, "held_nbytes": one.held_nbytes,
        "shares": json.dumps(one.shares), "parts": json.dumps(one.parts), "timed": one.timed,
    }  # fmt: skip


def _from_row(layout: Layout, row: Mapping[str, str]) -> Outcome | Left:
    if row["status"] != "ok":
        return Left(layout, row["reason"])
    shares: dict[str, Any] = json.loads(row["shares"])
    parts = tuple(Part(*part) for part in json.loads(row["parts"]))
    memory, speed, mfu = (float(row[name]) for name in ("memory", "tokens_s_gpu", "mfu"))
    return Outcome(
        layout, row["cluster"], int(row["step_ns"]), parts, shares, int(row["held_nbytes"]), memory, speed, mfu, row["timed"]
    )


def _keep(table: Table, questions: Sequence[Question], found: Found) -> None:
    """The whole table, in the order of the layouts; what can't be is in it too."""
    if table.path is None:
        return
    keys = {place: key_of(questions[place[0]], place[1]) for place in found}
    order = sorted(found, key=lambda place: (place[0], place[1]))
    for place in order:
        if keys[place] not in table.rows:
            table.add(keys[place], row_of(questions[place[0]], found[place]))
    table.finish([(keys[place], {}) for place in order])


def clusters_of(questions: Sequence[Question]) -> list[Cluster]:
    """The clusters of the questions, each once."""
    return list({question.cluster.name: question.cluster for question in questions}.values())


__all__ = ["How", "Plan", "Ranked", "clusters_of", "key_of", "pareto", "plan", "rank"]
