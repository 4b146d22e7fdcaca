"""What every buffer holds after a run, and whose contributions it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from distsim.values.lineage import Content, FlatArray, LineageGraph, TensorContribution
from distsim.values.numbers import format_content, matches_expected, numbers_of_content

#: A buffer of a run: (rank, label). The label is the tensor's name, or ``name@copy`` from the
#: second copy on.
RankBufferKey = tuple[int, str]


@dataclass(slots=True, eq=False)
class BufferState:
    """A buffer at one moment. ``version`` counts its writes, ``row`` is the trace row of the last
    one (-1: none).
    """

    shape: tuple[int, ...]
    dtype: str
    content: Content
    version: int = 0
    row: int = -1


class ElementRange(NamedTuple):
    """Elements ``start`` to ``stop`` (excluded) of a buffer, with the contributions in each of
    them.
    """

    start: int
    stop: int
    counts: Counter[TensorContribution]


class LineageViolation(NamedTuple):
    """A contribution that is not exactly once in some elements of a buffer.

    ``times`` is how often it is there. ``row`` is the trace row where it broke: the call that added
    it once more, or, where it is missing, the buffer's last write (-1: never written).
    """

    rank: int
    label: str
    start: int
    stop: int
    source: TensorContribution
    times: int
    row: int


class BufferSnapshot(NamedTuple):
    """What a call read or wrote: the buffers' contents then."""

    contents: tuple[Content, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @property
    def text(self) -> str:
        return ", ".join(
            format_content(c, s, d)
            for c, s, d in zip(self.contents, self.shapes, self.dtypes, strict=True)
        )


@dataclass(eq=False)
class BufferValues:
    """The outcome of `compute_values`. Lookups by (rank, label) raise KeyError for a buffer that
    the program does not have.
    """

    graph: LineageGraph
    buffers: Mapping[RankBufferKey, BufferState]
    #: What a declared tensor that no call touched holds; raises KeyError.
    initial: Callable[[int, str], BufferState]
    limit_elements: int
    seen: Mapping[tuple[int, int, int, str], BufferSnapshot] = field(default_factory=dict)

    def state(self, rank: int, label: str) -> BufferState:
        found = self.buffers.get(
            (rank, label.removesuffix("@0"))
        )  # the first copy goes by the bare name
        return self.initial(rank, label) if found is None else found

    # --- numbers ---
    def text(self, rank: int, label: str) -> str:
        """The short form of what a buffer holds: `[5, 7, 9]`, `2.0 (×1048576)`, `?`."""
        state = self.state(rank, label)
        return format_content(state.content, state.shape, state.dtype)

    def array(self, rank: int, label: str) -> FlatArray | None:
        """The numbers in the tensor's shape (uniform tensors as a broadcast view), None where any
        is unknown.
        """
        state = self.state(rank, label)
        numbers = numbers_of_content(state.content, state.dtype, self.limit_elements)
        if numbers is None:
            return None
        return (
            np.broadcast_to(numbers.reshape(()), state.shape)
            if numbers.size == 1
            else numbers.reshape(state.shape)
        )

    def agrees(self, rank: int, label: str, expected: object) -> bool:
        """Does the buffer hold what `expect` says: a number for all elements, ``?`` for unknown, or
        a list of them?
        """
        state = self.state(rank, label)
        return matches_expected(state.content, state.dtype, expected)

    @cached_property
    def final(self) -> dict[RankBufferKey, str]:
        """The short form of every named buffer that a call of the run touched."""
        return {
            key: format_content(s.content, s.shape, s.dtype)
            for key, s in sorted(self.buffers.items(), key=_by_name)
        }

    @cached_property
    def at_call(self) -> dict[tuple[int, int, str], str]:
        """(rank, position, "in" or "out") -> short form of what the call read or wrote. Filled when
        `at_calls` was asked for.
        """
        found: dict[tuple[int, int, str], str] = {}
        for (rank, position, _, side), seen in self.seen.items():
            before = found.get((rank, position, side))
            found[rank, position, side] = seen.text if before is None else f"{before}, {seen.text}"
        return found

    @cached_property
    def at_part(self) -> dict[tuple[int, int, int, str], str]:
        """(rank, position, part, side) -> short form, for the parts of batches."""
        return {key: seen.text for key, seen in self.seen.items() if key[2] >= 0}

    # --- lineage ---
    def stretches(self, rank: int, label: str) -> tuple[ElementRange, ...]:
        """The buffer's elements by history."""
        found, at = [], 0
        for piece in self.state(rank, label).content:
            found.append(ElementRange(at, at + piece.numel, self.graph.counts(piece.node)))
            at += piece.numel
        return tuple(found)

    def lineage(self, rank: int, label: str) -> Counter[TensorContribution]:
        """How often each contribution is in the buffer; where elements differ, the most often that
        any one has it.
        """
        total: Counter[TensorContribution] = Counter()
        for stretch in self.stretches(rank, label):
            total |= stretch.counts
        return total

    def origins(
        self, rank: int, label: str, element: int
    ) -> Counter[tuple[TensorContribution, int]]:
        """The very elements that were summed up to one (flat) element: ((rank, tensor, version),
        element) -> how often.
        """
        at = element
        for piece in self.state(rank, label).content:
            if at < piece.numel:
                return self.graph.origins(piece.node, piece.start + at)
            at -= piece.numel
        raise IndexError(f"{label} on rank {rank} has no element {element}")

    def breaches(
        self, rank: int, label: str, sources: Iterable[TensorContribution]
    ) -> tuple[LineageViolation, ...]:
        """Where a buffer does not hold each of ``sources`` exactly once, and the call where that
        broke.
        """
        state, wanted = self.state(rank, label), tuple(sources)
        found, at = [], 0
        for piece in state.content:
            counts = self.graph.counts(piece.node)
            for source in wanted:
                if counts[source] != 1:
                    row = (
                        state.row
                        if counts[source] == 0
                        else self.graph.nodes[self.graph.first_with(piece.node, source)].row
                    )
                    found.append(
                        LineageViolation(
                            rank, label, at, at + piece.numel, source, counts[source], row
                        )
                    )
            at += piece.numel
        return tuple(found)

    def exactly_once(
        self, label: str, ranks: Iterable[int], sources: Iterable[TensorContribution]
    ) -> bool:
        """Does the buffer, on each of ``ranks``, hold each of ``sources`` exactly once in every
        element, and nothing else?
        """
        wanted = Counter(dict.fromkeys((TensorContribution(*s) for s in sources), 1))
        return all(s.counts == wanted for rank in ranks for s in self.stretches(rank, label))


def _by_name(item: tuple[RankBufferKey, BufferState]) -> tuple[str, int, int]:
    (rank, label), _ = item
    name, _, copy = label.partition("@")
    return name, int(copy or 0), rank
