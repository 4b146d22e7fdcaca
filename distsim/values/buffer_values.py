"""The result of the values pass: the numbers and the lineage of every buffer after a run.

Key idea: the pass (`distsim.values.propagation`) leaves contents and a lineage graph. Texts, arrays
and counts of contributions are derived from them only when they are asked for.
"""

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
    """The present state of a buffer.

    ``version`` counts its writes. ``row`` is the trace row of the last write (-1: none).
    """

    shape: tuple[int, ...]
    dtype: str
    content: Content
    version: int = 0
    row: int = -1


class ElementRange(NamedTuple):
    """Elements ``start`` to ``stop`` (excluded) of a buffer, which have the same contributions.

    ``counts``: how often each contribution is in each of these elements.
    """

    start: int
    stop: int
    counts: Counter[TensorContribution]


class LineageViolation(NamedTuple):
    """A contribution that some elements of a buffer do not contain exactly once.

    ``times``: how often they contain it. ``row``: the trace row of the call that added it once too
    often or, if it is missing, of the buffer's last write (-1: never written).
    """

    rank: int
    label: str
    start: int
    stop: int
    source: TensorContribution
    times: int
    row: int


class BufferSnapshot(NamedTuple):
    """What a call read or wrote: the contents of its buffers at that time."""

    contents: tuple[Content, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @property
    def text(self) -> str:
        """The short form of all buffers, in the order of the call."""
        buffers = zip(self.contents, self.shapes, self.dtypes, strict=True)
        return ", ".join(format_content(*buffer) for buffer in buffers)


@dataclass(eq=False)
class BufferValues:
    """The result of `compute_values`.

    Lookups by (rank, label) raise KeyError if the program has no such buffer. ``seen``: what calls
    read and wrote, by (rank, position, part, "in" or "out"); empty unless it was asked for.
    """

    graph: LineageGraph
    buffers: Mapping[RankBufferKey, BufferState]
    #: The state of a declared tensor that no call used. Raises KeyError.
    initial: Callable[[int, str], BufferState]
    limit_elements: int
    seen: Mapping[tuple[int, int, int, str], BufferSnapshot] = field(default_factory=dict)

    def state(self, rank: int, label: str) -> BufferState:
        """The state of a buffer."""
        # The first copy has the bare name as its label.
        state = self.buffers.get((rank, label.removesuffix("@0")))
        return self.initial(rank, label) if state is None else state

    # --- numbers ---
    def text(self, rank: int, label: str) -> str:
        """The short form of a buffer's numbers: `[5, 7, 9]`, `2.0 (×1048576)`, `?`."""
        state = self.state(rank, label)
        return format_content(state.content, state.shape, state.dtype)

    def array(self, rank: int, label: str) -> FlatArray | None:
        """The numbers in the tensor's shape; None if any is unknown.

        The array of a uniform tensor is a broadcast view: it is read-only.
        """
        state = self.state(rank, label)
        numbers = numbers_of_content(state.content, state.dtype, self.limit_elements)
        if numbers is None:
            return None
        if numbers.size == 1:
            return np.broadcast_to(numbers.reshape(()), state.shape)
        return numbers.reshape(state.shape)

    def agrees(self, rank: int, label: str, expected: object) -> bool:
        """Whether a buffer has the values that a scenario expects.

        ``expected``: a number for all elements, ``?`` for unknown, or a list of these.
        """
        state = self.state(rank, label)
        return matches_expected(state.content, state.dtype, expected)

    @cached_property
    def final(self) -> dict[RankBufferKey, str]:
        """The short form of every named buffer that a call of the run used."""
        return {
            key: format_content(s.content, s.shape, s.dtype)
            for key, s in sorted(self.buffers.items(), key=_by_name)
        }

    @cached_property
    def at_call(self) -> dict[tuple[int, int, str], str]:
        """(rank, position, "in" or "out") -> the short form of what the call read or wrote.

        The parts of a batch are joined. Empty unless ``at_calls`` was requested.
        """
        texts: dict[tuple[int, int, str], str] = {}
        for (rank, position, _, side), snapshot in self.seen.items():
            before = texts.get((rank, position, side))
            text = snapshot.text
            texts[rank, position, side] = text if before is None else f"{before}, {text}"
        return texts

    @cached_property
    def at_part(self) -> dict[tuple[int, int, int, str], str]:
        """(rank, position, part, side) -> the short form, for the parts of batches."""
        return {
            (rank, position, part, side): snapshot.text
            for (rank, position, part, side), snapshot in self.seen.items()
            if part >= 0
        }

    # --- lineage ---
    def stretches(self, rank: int, label: str) -> tuple[ElementRange, ...]:
        """The elements of a buffer in ranges with one history each."""
        ranges: list[ElementRange] = []
        start = 0
        for piece in self.state(rank, label).content:
            stop = start + piece.numel
            ranges.append(ElementRange(start, stop, self.graph.counts(piece.node)))
            start = stop
        return tuple(ranges)

    def lineage(self, rank: int, label: str) -> Counter[TensorContribution]:
        """How often each contribution is in a buffer: the maximum over its elements."""
        maximum: Counter[TensorContribution] = Counter()
        for element_range in self.stretches(rank, label):
            maximum |= element_range.counts
        return maximum

    def origins(
        self, rank: int, label: str, element: int
    ) -> Counter[tuple[TensorContribution, int]]:
        """The elements that one (flat) element of a buffer is made of, and how often each.

        The keys are ((rank, tensor, version), element).
        """
        offset = element
        for piece in self.state(rank, label).content:
            if offset < piece.numel:
                return self.graph.origins(piece.node, piece.start + offset)
            offset -= piece.numel
        raise IndexError(f"{label} on rank {rank} has no element {element}")

    def breaches(
        self, rank: int, label: str, sources: Iterable[TensorContribution]
    ) -> tuple[LineageViolation, ...]:
        """Where a buffer does not contain each of ``sources`` once, and the calls that broke it."""
        state = self.state(rank, label)
        wanted = tuple(sources)
        violations: list[LineageViolation] = []
        start = 0
        for piece in state.content:
            stop = start + piece.numel
            counts = self.graph.counts(piece.node)
            for source in wanted:
                times = counts[source]
                if times == 1:
                    continue
                row = state.row
                if times > 1:
                    row = self.graph.nodes[self.graph.first_with(piece.node, source)].row
                violations.append(LineageViolation(rank, label, start, stop, source, times, row))
            start = stop
        return tuple(violations)

    def exactly_once(
        self, label: str, ranks: Iterable[int], sources: Iterable[TensorContribution]
    ) -> bool:
        """Whether every element of a buffer contains each of ``sources`` once and nothing else.

        This must hold on each of ``ranks``.
        """
        wanted = Counter(dict.fromkeys((TensorContribution(*source) for source in sources), 1))
        for rank in ranks:
            if any(part.counts != wanted for part in self.stretches(rank, label)):
                return False
        return True


def _by_name(item: tuple[RankBufferKey, BufferState]) -> tuple[str, int, int]:
    """Sorts by tensor, copy and rank; copies in the order of their numbers, not of their texts."""
    (rank, label), _ = item
    name, _, copy = label.partition("@")
    return name, int(copy or 0), rank
