"""Spans of time as columns: what a rank does when, each instant of one kind, and how much of a
stretch each kind takes.

A span is half open, in nanoseconds. Spans of one column are sorted and disjoint once they went
through `merged`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


class TimeSpans(NamedTuple):
    """From ``starts[i]`` to ``ends[i]``."""

    starts: Ints
    ends: Ints

    def back(self, period: int) -> TimeSpans:
        """Spans of ranks that were laid end to end, ``period`` ns each, as times of each rank
        again.
        """
        begun = self.starts // period * period
        return TimeSpans(self.starts - begun, self.ends - begun)

    @property
    def total(self) -> int:
        return int((self.ends - self.starts).sum())


NO_SPANS = TimeSpans(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def merged_spans(spans: TimeSpans) -> TimeSpans:
    """Sorted, disjoint, nothing empty; spans that touch become one."""
    keep = spans.starts < spans.ends
    starts, ends = spans.starts[keep], spans.ends[keep]
    if not len(starts):
        return NO_SPANS
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    first = np.flatnonzero(np.concatenate([[True], starts[1:] > reach[:-1]]))
    return TimeSpans(starts[first], np.concatenate([reach[first[1:] - 1], reach[-1:]]))


def spans_within(spans: TimeSpans, start: int, end: int) -> TimeSpans:
    """What of the spans lies between two instants."""
    return TimeSpans(np.clip(spans.starts, start, end), np.clip(spans.ends, start, end))


def exclusive_layers(layers: Sequence[TimeSpans]) -> list[TimeSpans]:
    """The same layers without what an earlier one covers already: each instant is of the first
    layer that has it.
    """
    whole = [merged_spans(layer) for layer in layers]
    edges = np.unique(
        np.concatenate([side for layer in whole for side in layer] or [NO_SPANS.starts])
    )
    kind = np.full(max(len(edges) - 1, 0), len(whole), dtype=np.int64)
    for number in range(len(whole) - 1, -1, -1):
        depth = np.zeros(len(edges) + 1, dtype=np.int64)
        depth[np.searchsorted(edges, whole[number].starts)] += 1
        depth[np.searchsorted(edges, whole[number].ends)] -= 1
        kind[np.cumsum(depth)[: len(kind)] > 0] = number
    return [
        merged_spans(TimeSpans(edges[:-1][kind == number], edges[1:][kind == number]))
        for number in range(len(whole))
    ]


def spans_without(layer: TimeSpans, other: TimeSpans) -> TimeSpans:
    """What of a layer lies outside another."""
    return exclusive_layers([other, layer])[1] if len(other.starts) else merged_spans(layer)


def covered_shares(spans: TimeSpans, edges: Floats, many: int = 1) -> Floats:
    """How much of each stretch between neighbouring ``edges`` (ns) the spans cover, 0 to 1; of an
    empty stretch nothing.

    ``many``: of how many ranks the spans are, each rank's disjoint; told is the mean.
    """
    wide = np.diff(edges)
    covered = _elapsed_sums(spans.starts, edges) - _elapsed_sums(spans.ends, edges)
    found: Floats = np.diff(covered) / np.where(wide > 0, wide, 1.0) / many
    return np.clip(found, 0.0, 1.0)


def _elapsed_sums(instants: Ints, edges: Floats) -> Floats:
    """How long ago the instants were at each edge, added up."""
    ordered = np.sort(instants)
    count = np.searchsorted(ordered, edges)
    found: Floats = count * edges - np.concatenate([[0], np.cumsum(ordered)])[count]
    return found
