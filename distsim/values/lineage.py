"""Which contributions each element of a buffer contains, and how often.

Key idea: a graph has one node per write. It records what was combined; contributions are counted
only on demand. A buffer's content is a sequence of *pieces*. A piece is a range of elements with
one history: consecutive elements of what one node wrote. Moving data moves pieces and creates no
node. Combining data creates one node, shared by all ranks that get the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

#: A flat array with one entry per element, or a single entry if all elements are equal (uniform).
FlatArray = NDArray[np.generic]
#: None: unknown.
Numbers = FlatArray | None
#: An element of a node's result: (node, element).
ElementRef = tuple[int, int]


class TensorContribution(NamedTuple):
    """The ``version``-th write of a tensor by its own rank (0: its initial content)."""

    rank: int
    tensor: str
    version: int


class LineageNode(NamedTuple):
    """One write.

    A leaf has ``own`` and no parents. Otherwise element i is made of element ``start + i`` of each
    parent ``(node, start)``. ``row`` is the trace row of the call that wrote; if several ranks
    wrote the same, that of the first. It is -1 for initial content.
    """

    kind: str
    own: TensorContribution | None
    parents: tuple[ElementRef, ...]
    row: int


class ContentPiece(NamedTuple):
    """``numel`` elements from ``start`` on of what node ``node`` wrote, with their numbers."""

    numel: int
    node: int
    start: int
    numbers: Numbers


Content = tuple[ContentPiece, ...]


def numel_of(content: Content) -> int:
    """The number of elements of a content."""
    return sum(piece.numel for piece in content)


def slice_content(content: Content, start: int, stop: int) -> Content:
    """Elements ``start`` to ``stop`` (excluded) of a content, as far as it has them."""
    if start == 0 and len(content) == 1 and content[0].numel == stop:
        return content
    pieces: list[ContentPiece] = []
    offset = 0
    for piece in content:
        low = max(start - offset, 0)
        high = min(stop - offset, piece.numel)
        if low < high:
            numbers = piece.numbers
            if numbers is not None and numbers.size > 1:
                numbers = numbers[low:high]
            pieces.append(ContentPiece(high - low, piece.node, piece.start + low, numbers))
        offset += piece.numel
    return tuple(pieces)


def concatenate_contents(contents: Sequence[Content]) -> Content:
    """Contents one after the other. Pieces are joined again where one continues the other."""
    pieces: list[ContentPiece] = []
    for content in contents:
        for piece in content:
            last = pieces[-1] if pieces else None
            if last is not None and _continues(last, piece):
                numel = last.numel + piece.numel
                pieces[-1] = ContentPiece(numel, last.node, last.start, last.numbers)
            else:
                pieces.append(piece)
    return tuple(pieces)


def _continues(last: ContentPiece, piece: ContentPiece) -> bool:
    """Whether a piece continues the last one, so that the two can be joined."""
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
    """Cut contents at each other's borders, up to the end of the shortest.

    The result has one tuple per range between borders: the piece of each content there.
    """
    if all(len(c) == 1 and c[0].numel == contents[0][0].numel for c in contents):
        return [tuple(content[0] for content in contents)]
    end = min(numel_of(content) for content in contents)
    borders = {0, end}
    for content in contents:
        ends_of_pieces = np.cumsum([piece.numel for piece in content]).tolist()
        borders.update(int(border) for border in ends_of_pieces if border < end)
    return [_pieces_between(contents, low, high) for low, high in pairwise(sorted(borders))]


def _pieces_between(contents: Sequence[Content], low: int, high: int) -> tuple[ContentPiece, ...]:
    """The piece of each content between two adjacent borders."""
    return tuple(slice_content(content, low, high)[0] for content in contents)


class LineageGraph:
    """All nodes of one run. Equal combinations are one node.

    A node is created after its parents, so parents have lower numbers.
    """

    def __init__(self) -> None:
        self.nodes: list[LineageNode] = []
        self._combined: dict[tuple[str, tuple[ElementRef, ...]], int] = {}
        self._counts: dict[int, Counter[TensorContribution]] = {}

    def leaf(self, kind: str, own: TensorContribution, row: int) -> int:
        """Add a node for data that a rank itself wrote; its number."""
        self.nodes.append(LineageNode(kind, own, (), row))
        return len(self.nodes) - 1

    def combine(self, kind: str, parents: tuple[ElementRef, ...], row: int) -> int:
        """The number of the node that combines parts of other nodes; it is created if necessary."""
        number = self._combined.setdefault((kind, parents), len(self.nodes))
        if number == len(self.nodes):
            self.nodes.append(LineageNode(kind, None, parents, row))
        return number

    def counts(self, node: int) -> Counter[TensorContribution]:
        """How often each contribution is in what a node wrote.

        The result is cached: do not change it. The graph can be deep, hence a stack instead of
        recursion.
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
        """The elements of leaves that make up one element of a node's result, with their counts."""
        found: Counter[tuple[TensorContribution, int]] = Counter()
        times: Counter[ElementRef] = Counter({(node, element): 1})
        # Parents have lower numbers than their children. So the count of the element with the
        # highest node in the heap is complete.
        heap = [(-node, element)]
        while heap:
            negative, position = heappop(heap)
            count = times.pop((-negative, position))
            current = self.nodes[-negative]
            if current.own is not None:
                found[current.own, position] += count
            for parent, start in current.parents:
                if (parent, start + position) not in times:
                    heappush(heap, (-parent, start + position))
                times[parent, start + position] += count
        return found

    def first_with(self, node: int, source: TensorContribution) -> int:
        """The node that first had a contribution more than once, among a node and its ancestors.

        None of its own parents has the contribution more than once. If several parents of a node
        do, the search follows the first of them.
        """
        while True:
            repeated = [p for p, _ in self.nodes[node].parents if self.counts(p)[source] > 1]
            if not repeated:
                return node
            node = repeated[0]
