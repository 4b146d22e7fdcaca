"""Writes regular runs of a rank's entries as `repeat`.

A rank's program is a sequence of templates, each with numbers of copies. A run can be written as a
loop if the same templates come again, and if each number grows by the same step in every round.
For every start and every size of a loop's body the number of rounds is computed at once, with
arrays, because pipelines with many micro-batches have long sequences. The choice is greedy: from
each position the repeat that saves the most entries is taken. Bodies of more than
``_MAX_SHORT_BODY`` entries are tried only for a few likely sizes, so some repeats are not found.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.scenario.strategies.base import Entry
from distsim.scenario.strategies.layers import repeat_entries

#: All bodies of up to this many entries are tried.
_MAX_SHORT_BODY = 24
#: Of longer bodies, up to this many entries, only the few sizes at which most templates recur.
_MAX_LONG_BODY = 600
_LONG_BODIES_TRIED = 3
#: A template with more numbers is treated as different from all others.
_MAX_NUMBERS = 8

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]


class EntryTemplate(ABC):
    """An entry without the numbers of the copies that it names; equal ones can share a repeat."""

    @abstractmethod
    def entries(self, numbers: Sequence[str]) -> list[Entry]:
        """The entries with numbers, or expressions, filled in."""

    def key(self) -> Hashable:
        """Equal for templates that are equal."""
        return self


class TemplateInstance(NamedTuple):
    """A template and the numbers of the copies that it names.

    Inside repeats, ``steps`` has a tuple for each index, the outer one first: how much each number
    grows with that index.
    """

    what: EntryTemplate
    numbers: tuple[int, ...] = ()
    steps: tuple[tuple[int, ...], ...] = ()

    def entries(self, *indices: str) -> list[Entry]:
        expressions = []
        for k, base in enumerate(self.numbers):
            steps = [steps[k] for steps in self.steps]
            expressions.append(_index_expression(base, list(zip(steps, indices, strict=False))))
        return self.what.entries(expressions)

    def with_next_round(self, following: TemplateInstance) -> TemplateInstance:
        """The instance in the body of a repeat, given its successor in the next round."""
        steps = tuple(b - a for a, b in zip(self.numbers, following.numbers, strict=True))
        return self._replace(steps=(*self.steps, steps))


class Repeat(NamedTuple):
    """A repeat: the number of templates in its body, and of rounds."""

    size: int
    rounds: int


_NO_REPEAT = Repeat(1, 1)


def reroll_loops(instances: Sequence[TemplateInstance], *indices: str) -> list[Entry]:
    """The entries of the instances, with regular runs as `repeat`.

    ``indices`` are the names of the loop counters. With a second one, a long body gets repeats
    inside it.
    """
    is_inner = bool(instances and instances[0].steps)
    index = indices[-1 if is_inner else 0]
    finder = _RepeatFinder(instances, wide=not is_inner and len(indices) > 1)
    steps: list[Entry] = []
    k = 0
    while k < len(instances):
        size, rounds = finder.longest(k)
        if rounds == 1:
            steps += instances[k].entries(*indices)
        else:
            body = _loop_body(instances[k : k + size], instances[k + size : k + 2 * size])
            if size > _MAX_SHORT_BODY:
                entries = reroll_loops(body, *indices)
            else:
                entries = [entry for one in body for entry in one.entries(*indices)]
            steps += repeat_entries(rounds, entries, index)
        k += size * rounds
    return steps


def _loop_body(
    first: Sequence[TemplateInstance], second: Sequence[TemplateInstance]
) -> list[TemplateInstance]:
    """The body of a loop from its first two rounds."""
    return [one.with_next_round(other) for one, other in zip(first, second, strict=True)]


def _index_expression(base: int, terms: Sequence[tuple[int, str]]) -> str:
    """A number as an expression over loop counters; ``terms`` are pairs (step, counter)."""
    terms = [(step, index) for step, index in terms if step]
    if not terms:
        return str(base)
    if len(terms) > 1:
        products = [index if step == 1 else f"{step} * {index}" for step, index in terms]
        return f"({' + '.join([str(base), *products])})"
    ((step, index),) = terms
    if step == 1:
        return index if base == 0 else f"({index} + {base})"
    return f"({base} - {index})" if step == -1 else f"({base} + {step} * {index})"


class _RepeatFinder:
    """Finds, for each position, the repeat from there on that saves the most entries.

    All repeats are computed by the constructor, so that a look-up costs nothing.
    """

    def __init__(self, instances: Sequence[TemplateInstance], wide: bool = False) -> None:
        self.count = len(instances)
        self.best = [_NO_REPEAT] * self.count
        template_ids = _template_ids(instances)
        numbers = _pack_rows(_number_rows(instances))
        sizes = list(range(1, min(_MAX_SHORT_BODY, self.count // 2) + 1))
        if wide:
            sizes += _likely_long_bodies(template_ids)
        if not sizes:
            return
        rounds = np.array([self._rounds(template_ids, numbers, size) for size in sizes])
        # A row for each size, a column for each start. Two rounds are not worth a loop.
        saved = np.where(rounds > 2, (rounds - 1) * np.array(sizes)[:, None], 0)
        best_rows = saved.argmax(axis=0)
        starts = np.flatnonzero(saved.max(axis=0) > 1)
        best_rounds = rounds[best_rows[starts], starts].tolist()
        for start, row, count in zip(
            starts.tolist(), best_rows[starts].tolist(), best_rounds, strict=True
        ):
            self.best[start] = Repeat(sizes[row], count)

    def _rounds(self, template_ids: IntArray, numbers: IntArray, size: int) -> IntArray:
        """For each start, the number of blocks of a size that follow each other.

        The second block only needs equal templates; from the third on, the numbers must also have
        the same distance as between the two blocks before.
        """
        rounds = np.ones(self.count, dtype=np.int64)
        distance = numbers[size:] - numbers[:-size]
        same = template_ids[size:] == template_ids[:-size]
        equal = distance[size:] == distance[:-size]
        steady = np.zeros_like(same)
        steady[size:] = same[size:] & (equal if equal.ndim == 1 else equal.all(axis=1))
        same_run = _run_lengths(same)
        steady_run = _run_lengths(steady)
        starts = np.flatnonzero(same_run >= size)
        continued = starts[starts + size < len(steady_run)]
        rounds[starts] = 2
        rounds[continued] += steady_run[continued + size] // size
        return rounds

    def longest(self, start: int) -> Repeat:
        """The repeat from ``start`` on that saves the most entries; (1, 1) if there is none."""
        return self.best[start]


def _likely_long_bodies(template_ids: IntArray) -> list[int]:
    """Sizes of longer bodies that are worth trying: at that distance most templates are equal."""
    count = len(template_ids)
    sizes = range(_MAX_SHORT_BODY + 1, min(count // 3, _MAX_LONG_BODY) + 1)
    matches = {
        size: int(np.count_nonzero(template_ids[size:] == template_ids[:-size])) for size in sizes
    }
    most_first = sorted(sizes, key=lambda size: (-matches[size], size))
    return [size for size in most_first[:_LONG_BODIES_TRIED] if 2 * matches[size] > count]


def _run_lengths(flags: BoolArray) -> IntArray:
    """From each position on, the number of true values without a gap."""
    positions = np.arange(len(flags), dtype=np.int64)
    gaps = np.where(flags, len(flags), positions)
    return np.minimum.accumulate(gaps[::-1])[::-1] - positions


def _template_ids(instances: Sequence[TemplateInstance]) -> IntArray:
    """A number for each template, equal for equal ones.

    Most templates recur as the same object, so objects are looked up before their keys.
    """
    id_of_key: dict[Hashable, int] = {}
    id_of_object: dict[tuple[int, Hashable], int] = {}
    ids = []
    for k, (template, numbers, steps) in enumerate(instances):
        if len(numbers) > _MAX_NUMBERS:
            ids.append(-1 - k)
            continue
        number = id_of_object.get((id(template), steps))
        if number is None:
            number = id_of_key.setdefault((template.key(), steps), len(id_of_key))
            id_of_object[id(template), steps] = number
        ids.append(number)
    return np.array(ids, dtype=np.int64)


def _pack_rows(numbers: IntArray) -> IntArray:
    """One number for each row if possible, so that rows can be compared faster.

    The difference of two packed rows equals that of two others exactly if the rows' differences are
    equal: each number is a digit in a base in which differences, of either sign, have a digit of
    their own. If the result does not fit into 64 bits, the rows are returned.
    """
    if not numbers.size:
        return np.zeros(len(numbers), dtype=np.int64)
    width = numbers.shape[1]
    if width == 1:
        return numbers[:, 0]
    base = 4 * int(np.abs(numbers).max()) + 3
    if base**width >= 2**62:
        return numbers
    return numbers @ np.array([base**k for k in range(width)], dtype=np.int64)


def _number_rows(instances: Sequence[TemplateInstance]) -> IntArray:
    """A row of numbers for each instance, filled up with zeros."""
    rows = [one.numbers if len(one.numbers) <= _MAX_NUMBERS else () for one in instances]
    width = max(map(len, rows), default=0)
    zeros = [(0,) * (width - n) for n in range(width + 1)]
    padded = [row + zeros[len(row)] for row in rows]
    return np.array(padded, dtype=np.int64).reshape(len(instances), width)
