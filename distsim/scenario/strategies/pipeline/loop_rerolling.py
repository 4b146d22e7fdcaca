"""Entries of a rank one after the other, regular runs of them written as `repeat`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.scenario.strategies.base import Entry
from distsim.scenario.strategies.layers import repeat_entries

#: Repeats are looked for up to so many entries long.
_MAX_SHORT_BODY = 24
#: Of longer ones, up to so many entries, those few whose pieces come again most often.
_MAX_LONG_BODY, _LONG_BODIES_TRIED = 600, 3
#: A piece that names more copies is taken as equal to none.
_MAX_NUMBERS = 8

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]


class EntryTemplate(ABC):
    """An entry without the numbers of the copies that it names; equal ones may become one in a
    repeat.
    """

    @abstractmethod
    def entries(self, numbers: Sequence[str]) -> list[Entry]:
        """The entries with numbers, or expressions, put in."""

    def key(self) -> Hashable:
        """The same for templates that are equal."""
        return self


class TemplateInstance(NamedTuple):
    """A template and the copies that it names; inside repeats, how far each number goes on with
    each index, the outer one first.
    """

    what: EntryTemplate
    numbers: tuple[int, ...] = ()
    steps: tuple[tuple[int, ...], ...] = ()

    def entries(self, *indices: str) -> list[Entry]:
        rows = zip(*self.steps, strict=True) if self.steps else ((),) * len(self.numbers)
        return self.what.entries(
            [
                _index_expression(a, list(zip(row, indices, strict=False)))
                for a, row in zip(self.numbers, rows, strict=True)
            ]
        )

    def beside(self, other: TemplateInstance) -> TemplateInstance:
        """The piece in the body of a repeat whose next round has the other in its place."""
        return self._replace(
            steps=(
                *self.steps,
                tuple(b - a for a, b in zip(self.numbers, other.numbers, strict=True)),
            )
        )


def reroll_loops(pieces: Sequence[TemplateInstance], *indices: str) -> list[Entry]:
    """The pieces' entries, regular runs of them as `repeat`; those of a long body as repeats inside
    it, where there is a second index.
    """
    found: list[Entry] = []
    inner = bool(pieces and pieces[0].steps)
    index, runs, k = (
        indices[-1 if inner else 0],
        _RepeatFinder(pieces, wide=not inner and len(indices) > 1),
        0,
    )
    while k < len(pieces):
        size, times = runs.longest(k)
        if times == 1:
            found += pieces[k].entries(*indices)
        else:
            body = [
                one.beside(two)
                for one, two in zip(
                    pieces[k : k + size], pieces[k + size : k + 2 * size], strict=True
                )
            ]
            long = size > _MAX_SHORT_BODY
            found += repeat_entries(
                times,
                reroll_loops(body, *indices)
                if long
                else [e for one in body for e in one.entries(*indices)],
                index,
            )
        k += size * times
    return found


def _index_expression(base: int, terms: Sequence[tuple[int, str]]) -> str:
    """A number as an expression over the indices of repeats, from its steps over each."""
    terms = [(step, index) for step, index in terms if step]
    if not terms:
        return str(base)
    if len(terms) > 1:
        return f"({' + '.join([str(base), *(index if step == 1 else f'{step} * {index}' for step, index in terms)])})"
    ((step, index),) = terms
    if step == 1:
        return index if base == 0 else f"({index} + {base})"
    return f"({base} - {index})" if step == -1 else f"({base} + {step} * {index})"


class _RepeatFinder:
    """Where the same pieces follow each other in blocks of a size, their numbers in equal steps;
    looked up, not searched, for each start.

    ``same[s][k]``: from k on so many pieces are those s places on; ``steady[s][k]``: and as far
    from them in number as from those s places before.
    """

    def __init__(self, pieces: Sequence[TemplateInstance], wide: bool = False) -> None:
        self.count = len(pieces)
        kinds, numbers = _template_ids(pieces), _pack_rows(_number_rows(pieces))
        sizes = [
            *range(1, min(_MAX_SHORT_BODY, self.count // 2) + 1),
            *(_likely_long_bodies(kinds) if wide else ()),
        ]
        self.best = [(1, 1)] * self.count
        if sizes:
            times = np.array([self._times(kinds, numbers, size) for size in sizes])
            saved = np.where(times > 2, (times - 1) * np.array(sizes)[:, None], 0)
            places, starts = saved.argmax(axis=0), np.flatnonzero(saved.max(axis=0) > 1)
            rounds = times[places[starts], starts].tolist()
            for k, place, n in zip(starts.tolist(), places[starts].tolist(), rounds, strict=True):
                self.best[k] = sizes[place], n

    def _times(self, kinds: IntArray, numbers: IntArray, size: int) -> IntArray:
        """Of each start the blocks of a size that follow each other."""
        found = np.ones(self.count, dtype=np.int64)
        apart = numbers[size:] - numbers[:-size]
        same = kinds[size:] == kinds[:-size]
        steady = np.zeros_like(same)
        equal = apart[size:] == apart[:-size]
        steady[size:] = same[size:] & (equal if equal.ndim == 1 else equal.all(axis=1))
        first, further = _run_lengths(same), _run_lengths(steady)
        starts = np.flatnonzero(first >= size)
        begun = starts[starts + size < len(further)]
        found[starts] = 2
        found[begun] += further[begun + size] // size
        return found

    def longest(self, start: int) -> tuple[int, int]:
        """(length of the body, rounds) of the repeat from ``start`` on that saves the most entries;
        (1, 1) where none does.
        """
        return self.best[start]


def _likely_long_bodies(kinds: IntArray) -> list[int]:
    """Longer bodies that are worth a look: at their distance most pieces are the same."""
    count = len(kinds)
    sizes = range(_MAX_SHORT_BODY + 1, min(count // 3, _MAX_LONG_BODY) + 1)
    alike = [(int(np.count_nonzero(kinds[size:] == kinds[:-size])), -size) for size in sizes]
    return [
        -size for same, size in sorted(alike, reverse=True)[:_LONG_BODIES_TRIED] if 2 * same > count
    ]


def _run_lengths(flags: BoolArray) -> IntArray:
    """From each place on, how many are true without a gap."""
    places = np.arange(len(flags), dtype=np.int64)
    gaps = np.where(flags, len(flags), places)
    return np.minimum.accumulate(gaps[::-1])[::-1] - places


def _template_ids(pieces: Sequence[TemplateInstance]) -> IntArray:
    """A number for each template, the same for equal ones; most come again as the same object."""
    known: dict[Hashable, int] = {}
    seen: dict[tuple[int, Hashable], int] = {}
    found = []
    for k, (what, numbers, steps) in enumerate(pieces):
        if len(numbers) > _MAX_NUMBERS:
            found.append(-1 - k)
            continue
        number = seen.get((id(what), steps))
        if number is None:
            number = seen[id(what), steps] = known.setdefault((what.key(), steps), len(known))
        found.append(number)
    return np.array(found, dtype=np.int64)


def _pack_rows(numbers: IntArray) -> IntArray:
    """A number for each row where one holds them all: differences of two rows are equal where those
    of their numbers are.

    Each number is a digit in a base in which differences, of either sign, have a digit of their
    own.
    """
    if not numbers.size or numbers.shape[1] == 1:
        return (
            numbers.reshape(len(numbers), -1)[:, 0]
            if numbers.size
            else np.zeros(len(numbers), dtype=np.int64)
        )
    base = 4 * int(np.abs(numbers).max()) + 3
    if base ** numbers.shape[1] >= 2**62:
        return numbers
    return numbers @ np.array([base**k for k in range(numbers.shape[1])], dtype=np.int64)


def _number_rows(pieces: Sequence[TemplateInstance]) -> IntArray:
    """A row for each piece, filled up with zeros."""
    kept = [one.numbers if len(one.numbers) <= _MAX_NUMBERS else () for one in pieces]
    width = max(map(len, kept), default=0)
    filled = [(0,) * (width - n) for n in range(width + 1)]
    return np.array([row + filled[len(row)] for row in kept], dtype=np.int64).reshape(
        len(pieces), width
    )
