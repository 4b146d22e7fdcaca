"""Whose contribution, how often: a graph with one node per write, counted only on demand.

A buffer's content is a row of *pieces*. A piece is a stretch of elements with one history: elements
``start`` … of what one node wrote. Moving data moves pieces and makes no node; combining data makes
one node, shared by all ranks that get the result.
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
FlatArray = NDArray[np.generic]
#: None: not known.
Numbers = FlatArray | None
#: An element of a node's result: (node, element).
ElementRef = tuple[int, int]


class TensorContribution(NamedTuple):
    """The ``version``-th write of a tensor by its own rank (0: what it held at the start)."""

    rank: int
    tensor: str
    version: int


class LineageNode(NamedTuple):
    """One write. A leaf has ``own`` and no parents; else element i comes from element ``start + i``
    of each parent.

    ``row`` is the trace row of the call that wrote (of the first party, where several wrote the
    same), -1 at the start.
    """

    kind: str
    own: TensorContribution | None
    parents: tuple[ElementRef, ...]
    row: int


class ContentPiece(NamedTuple):
    """``numel`` elements: ``start`` … of node ``node``, with their numbers."""

    numel: int
    node: int
    start: int
    numbers: Numbers


Content = tuple[ContentPiece, ...]


def numel_of(content: Content) -> int:
    return sum(piece.numel for piece in content)


def slice_content(content: Content, start: int, stop: int) -> Content:
    """Elements ``start`` to ``stop`` (excluded) of a content; what lies beyond its end is left
    out.
    """
    if start == 0 and len(content) == 1 and content[0].numel == stop:
        return content
    found, at = [], 0
    for piece in content:
        low, high = max(start - at, 0), min(stop - at, piece.numel)
        if low < high:
            numbers = piece.numbers
            if numbers is not None and numbers.size > 1:
                numbers = numbers[low:high]
            found.append(ContentPiece(high - low, piece.node, piece.start + low, numbers))
        at += piece.numel
    return tuple(found)


def concatenate_contents(contents: Sequence[Content]) -> Content:
    """Contents one after the other; neighbours with one history and one number become one piece
    again.
    """
    found: list[ContentPiece] = []
    for content in contents:
        for piece in content:
            last = found[-1] if found else None
            if last is not None and _continues(last, piece):
                numel = last.numel + piece.numel
                found[-1] = ContentPiece(numel, last.node, last.start, last.numbers)
            else:
                found.append(piece)
    return tuple(found)


def _continues(last: ContentPiece, piece: ContentPiece) -> bool:
    """Whether a piece is the continuation of the last one, so that the two can be joined."""
    if last.node != piece.node or last.start + last.numel != piece.start:
        return False
    return _has_same_number(last, piece)


def _has_same_number(a: ContentPiece, b: ContentPiece) -> bool:
    """Whether both pieces are unknown, or uniform with the same bits."""
    if a.numbers is None or b.numbers is None:
        return a.numbers is b.numbers
    if a.numbers.size != 1 or b.numbers.size != 1:
        return False
    if a.numel <= 1 or b.numel <= 1:
        return False
    return a.numbers.tobytes() == b.numbers.tobytes()


def align_contents(contents: Sequence[Content]) -> list[tuple[ContentPiece, ...]]:
    """Cut contents at each other's borders: columns of pieces of equal length, as far as the
    shortest content goes.
    """
    if all(len(c) == 1 and c[0].numel == contents[0][0].numel for c in contents):
        return [tuple(c[0] for c in contents)]
    end = min(numel_of(c) for c in contents)
    borders = {0, end}
    for content in contents:
        borders.update(int(b) for b in np.cumsum([p.numel for p in content]) if b < end)
    marks = sorted(borders)
    return [tuple(slice_content(c, a, b)[0] for c in contents) for a, b in pairwise(marks)]


class LineageGraph:
    """All nodes of one run. Equal combinations are one node."""

    def __init__(self) -> None:
        self.nodes: list[LineageNode] = []
        self._combined: dict[tuple[str, tuple[ElementRef, ...]], int] = {}
        self._counts: dict[int, Counter[TensorContribution]] = {}

    def leaf(self, kind: str, own: TensorContribution, row: int) -> int:
        self.nodes.append(LineageNode(kind, own, (), row))
        return len(self.nodes) - 1

    def combine(self, kind: str, parents: tuple[ElementRef, ...], row: int) -> int:
        number = self._combined.setdefault((kind, parents), len(self.nodes))
        if number == len(self.nodes):
            self.nodes.append(LineageNode(kind, None, parents, row))
        return number

    def counts(self, node: int) -> Counter[TensorContribution]:
        """How often each contribution is in what a node wrote. Counted once per node; do not change
        the answer.
        """
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
            total: Counter[TensorContribution] = Counter() if own is None else Counter({own: 1})
            for parent, _ in parents:
                total.update(self._counts[parent])
            self._counts[todo.pop()] = total
        return self._counts[node]

    def origins(self, node: int, element: int) -> Counter[tuple[TensorContribution, int]]:
        """The very elements that make up one element of a node's result, and how often each is in
        it.
        """
        found: Counter[tuple[TensorContribution, int]] = Counter()
        times: Counter[ElementRef] = Counter({(node, element): 1})
        heap = [
            (-node, element)
        ]  # parents have lower numbers, so a point is complete when it is the highest left
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

    def first_with(self, node: int, source: TensorContribution) -> int:
        """The node on the way down that has a contribution more than once while none of its parents
        has.
        """
        while True:
            worse = [p for p, _ in self.nodes[node].parents if self.counts(p)[source] > 1]
            if not worse:
                return node
            node = worse[0]
