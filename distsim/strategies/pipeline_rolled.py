"""Entries of a rank one after the other, regular runs of them written as `repeat`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.strategies.base import Entry
from distsim.strategies.layers import repeated

#: Repeats are looked for up to so many entries long.
_LONGEST_BODY = 24
#: A piece that names more copies is taken as equal to none.
_MOST_NUMBERS = 8

Flags = NDArray[np.bool_]
Numbers = NDArray[np.int64]


class Template(ABC):
    """An entry without the numbers of the copies that it names; equal ones may become one in a repeat."""

    @abstractmethod
    def entries(self, numbers: Sequence[str]) -> list[Entry]:
        """The entries with numbers, or expressions, put in."""

    def key(self) -> Hashable:
        """The same for templates that are equal."""
        return self


class Piece(NamedTuple):
    """A template and the copies that it names."""

    what: Template
    numbers: tuple[int, ...] = ()

    def entries(self) -> list[Entry]:
        return self.what.entries([str(n) for n in self.numbers])


def rolled(pieces: Sequence[Piece], index: str) -> list[Entry]:
    """The pieces' entries, regular runs of them as `repeat`."""
    found: list[Entry] = []
    runs = _Runs(pieces)
    k = 0
    while k < len(pieces):
        size, times = runs.longest(k)
        if times == 1:
            found += pieces[k].entries()
        else:
            bodies = zip(pieces[k : k + size], pieces[k + size : k + 2 * size], strict=True)
            steps = [e for one, two in bodies for e in one.what.entries(_texts(one.numbers, two.numbers, index))]
            found += repeated(times, steps, index)
        k += size * times
    return found


def _texts(first: Sequence[int], second: Sequence[int], index: str) -> list[str]:
    """The numbers of a repeat's body as expressions over its index, from those of the first two rounds."""
    found = []
    for a, b in zip(first, second, strict=True):
        step = b - a
        if step == 0:
            found.append(str(a))
        elif step == 1:
            found.append(index if a == 0 else f"({index} + {a})")
        else:
            found.append(f"({a} - {index})" if step == -1 else f"({a} + {step} * {index})")
    return found


class _Runs:
    """Where the same pieces follow each other in blocks of a size, their numbers in equal steps; looked up, not searched, for each start.

    ``same[s][k]``: from k on so many pieces are those s places on; ``steady[s][k]``: and as far from them in number as from those s
    places before.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.count = len(pieces)
        self.longest_body = min(_LONGEST_BODY, self.count // 2)
        kinds, numbers = _kinds(pieces), _numbers(pieces)
        self.times: list[list[int]] = []
        for size in range(1, self.longest_body + 1):
            self.times.append(self._times(kinds, numbers, size).tolist())

    def _times(self, kinds: Numbers, numbers: Numbers, size: int) -> Numbers:
        """Of each start the blocks of a size that follow each other."""
        found = np.ones(self.count, dtype=np.int64)
        apart = numbers[size:] - numbers[:-size]
        same = kinds[size:] == kinds[:-size]
        steady = np.zeros_like(same)
        steady[size:] = same[size:] & (apart[size:] == apart[:-size]).all(axis=1)
        first, further = _lengths(same), _lengths(steady)
        starts = np.flatnonzero(first >= size)
        begun = starts[starts + size < len(further)]
        found[starts] = 2
        found[begun] += further[begun + size] // size
        return found

    def longest(self, start: int) -> tuple[int, int]:
        """(length of the body, rounds) of the repeat from ``start`` on that saves the most entries; (1, 1) where none does."""
        best, saved = (1, 1), 1
        for size in range(1, min(self.longest_body, (self.count - start) // 2) + 1):
            times = self.times[size - 1][start]
            if (times - 1) * size > saved and times > 2:
                best, saved = (size, times), (times - 1) * size
        return best


def _lengths(flags: Flags) -> Numbers:
    """From each place on, how many are true without a gap."""
    places = np.arange(len(flags), dtype=np.int64)
    gaps = np.where(flags, len(flags), places)
    return np.minimum.accumulate(gaps[::-1])[::-1] - places


def _kinds(pieces: Sequence[Piece]) -> Numbers:
    """A number for each template, the same for equal ones."""
    known: dict[Hashable, int] = {}
    found = [
        known.setdefault(one.what.key(), len(known)) if len(one.numbers) <= _MOST_NUMBERS else -1 - k
        for k, one in enumerate(pieces)
    ]
    return np.array(found, dtype=np.int64)


def _numbers(pieces: Sequence[Piece]) -> Numbers:
    """A row for each piece, filled up with zeros."""
    width = max((len(one.numbers) for one in pieces if len(one.numbers) <= _MOST_NUMBERS), default=0)
    rows = [(*one.numbers, *[0] * (width - len(one.numbers))) if len(one.numbers) <= _MOST_NUMBERS else (0,) * width for one in pieces]
    return np.array(rows, dtype=np.int64).reshape(len(pieces), width)
