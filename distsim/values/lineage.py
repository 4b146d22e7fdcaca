"""Whose contribution, how often: a graph with one node per write, counted only on demand.

A buffer's content is a row of *pieces*. A piece is a stretch of elements with one history: elements ``start`` … of what one
node wrote. Moving data moves pieces and makes no node; combining data makes one node, shared by all ranks that get the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

#: A flat array with one entry per element, or a single entry that stands for all of them.
Array = NDArray[np.generic]
#: None: not known.
Numbers = Array | None
#: An element of a node's result: (node, element).
Point = tuple[int, int]


class Contribution(NamedTuple):
    """The ``version``-th write of a tensor by its own rank (0: what it held at the start)."""

    rank: int
    tensor: str
    version: int


class Node(NamedTuple):
    """One write. A leaf has ``own`` and no parents; else element i comes from element ``start + i`` of each parent.

    ``row`` is the trace row of the call that wrote (of the first party, where several wrote the same), -1 at the start.
    """

    kind: str
    own: Contribution | None
    parents: tuple[Point, ...]
    row: int


class Piece(NamedTuple):
    """``numel`` elements: ``start`` … of node ``node``, with their numbers."""

    numel: int
    node: int
    start: int
    numbers: Numbers


Content = tuple[Piece, ...]


def numel_of(content: Content) -> int:
    return sum(piece.numel for piece in content)


def cut(content: Content, start: int, stop: int) -> Content:
    """Elements ``start`` to ``stop`` (excluded) of a content; what lies beyond its end is left out."""
    if start == 0 and len(content) == 1 and content[0].numel == stop:
        return content
    found, at = [], 0
    for piece in content:
        low, high = max(start - at, 0), min(stop - at, piece.numel)
        if low < high:
            numbers = piece.numbers
            if numbers is not None and numbers.size > 1:
                numbers = numbers[low:high]
            found.append(Piece(high - low, piece.node, piece.start + low, numbers))
        at += piece.numel
    return tuple(found)


def join(contents: Sequence[Content]) -> Content:
    """Contents one after the other; neighbours with one history and one number become one piece again."""
    found: list[Piece] = []
    for content in contents:
        for piece in content:
            last = found[-1] if found else None
            if last is not None and last.node == piece.node and last.start + last.numel == piece.start and _same(last, piece):
                found[-1] = Piece(last.numel + piece.numel, last.node, last.start, last.numbers)
            else:
                found.append(piece)
    return tuple(found)


def _same(a: Piece, b: Piece) -> bool:
    if a.numbers is None or b.numbers is None:
        return a.numbers is b.numbers
    return a.numbers.size == b.numbers.size == 1 and a.numel > 1 < b.numel and a.numbers.tobytes() == b.numbers.tobytes()


def align(contents: Sequence[Content]) -> list[tuple[Piece, ...]]:
    """Cut contents at each other's borders: columns of pieces of equal length, as far as the shortest content goes."""
    if all(len(c) == 1 and c[0].numel == contents[0][0].numel for c in contents):
        return [tuple(c[0] for c in contents)]
    end = min(numel_of(c) for c in contents)
    borders = {0, end}
    for content in contents:
        borders.update(int(b) for b in np.cumsum([p.numel for p in content]) if b < end)
    marks = sorted(borders)
    return [tuple(cut(c, a, b)[0] for c in contents) for a, b in pairwise(marks)]


class Graph:
    """All nodes of one run. Equal combinations are one node."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._combined: dict[tuple[str, tuple[Point, ...]], int] = {}
        self._counts: dict[int, Counter[Contribution]] = {}

    def leaf(self, kind: str, own: Contribution, row: int) -> int:
        self.nodes.append(Node(kind, own, (), row))
        return len(self.nodes) - 1

    def combine(self, kind: str, parents: tuple[Point, ...], row: int) -> int:
        number = self._combined.setdefault((kind, parents), len(self.nodes))
        if number == len(self.nodes):
            self.nodes.append(Node(kind, None, parents, row))
        return number

    def counts(self, node: int) -> Counter[Contribution]:
        """How often each contribution is in what a node wrote. Counted once per node; do not change the answer."""
        todo = [node]
        while todo:
            top = todo[-1]
            if top in self._counts:
                todo.pop()
                continue
            own, parents = self.nodes[top].own, self.nodes[top].parents
            missing = [p for p, _ in parents if p not in self._counts]
            if missing:
                todo += missing
                continue
            total: Counter[Contribution] = Counter() if own is None else Counter({own: 1})
            for parent, _ in parents:
                total.update(self._counts[parent])
            self._counts[todo.pop()] = total
        return self._counts[node]

    def origins(self, node: int, element: int) -> Counter[tuple[Contribution, int]]:
        """The very elements that make up one element of a node's result, and how often each is in it."""
        found: Counter[tuple[Contribution, int]] = Counter()
        times: Counter[Point] = Counter({(node, element): 1})
        heap = [(-node, element)]  # parents have lower numbers, so a point is complete when it is the highest left
        while heap:
            negative, at = heappop(heap)
            often, here = times.pop((-negative, at)), self.nodes[-negative]
            if here.own is not None:
                found[here.own, at] += often
            for parent, start in here.parents:
                if (parent, start + at) not in times:
                    heappush(heap, (-parent, start + at))
                times[parent, start + at] += often
        return found

    def first_with(self, node: int, source: Contribution) -> int:
        """The node on the way down that has a contribution more than once while none of its parents has."""
        while True:
            worse = [p for p, _ in self.nodes[node].parents if self.counts(p)[source] > 1]
            if not worse:
                return node
            node = worse[0]
