"""Arithmetic on columns of time spans: union, difference, and the share of an interval.

A span is half open, in nanoseconds. `merged_spans` gives sorted and disjoint spans; the other
functions merge their arguments where they need that.
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
        """The times of each rank, of spans of ranks that were laid end to end.

        ``period``: the length of one rank in ns.
        """
        offset = self.starts // period * period
        return TimeSpans(self.starts - offset, self.ends - offset)

    @property
    def total(self) -> int:
        """The sum of the durations, in ns."""
        return int((self.ends - self.starts).sum())


NO_SPANS = TimeSpans(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def merged_spans(spans: TimeSpans) -> TimeSpans:
    """The union: sorted, disjoint and not empty; spans that touch become one."""
    keep = spans.starts < spans.ends
    starts, ends = spans.starts[keep], spans.ends[keep]
    if not len(starts):
        return NO_SPANS
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    first = np.flatnonzero(np.concatenate([[True], starts[1:] > reach[:-1]]))
    return TimeSpans(starts[first], np.concatenate([reach[first[1:] - 1], reach[-1:]]))


def spans_within(spans: TimeSpans, start: int, end: int) -> TimeSpans:
    """The parts of the spans between two instants."""
    return TimeSpans(np.clip(spans.starts, start, end), np.clip(spans.ends, start, end))


def exclusive_layers(layers: Sequence[TimeSpans]) -> list[TimeSpans]:
    """Each layer without the spans of earlier layers: an instant belongs to its first layer."""
    merged = [merged_spans(layer) for layer in layers]
    all_edges = [NO_SPANS.starts]
    for layer in merged:
        all_edges += [layer.starts, layer.ends]
    edges = np.unique(np.concatenate(all_edges))
    # The layer of each interval between neighbouring edges. Earlier layers overwrite later ones.
    owner = np.full(max(len(edges) - 1, 0), len(merged), dtype=np.int64)
    for number in range(len(merged) - 1, -1, -1):
        depth = np.zeros(len(edges) + 1, dtype=np.int64)
        depth[np.searchsorted(edges, merged[number].starts)] += 1
        depth[np.searchsorted(edges, merged[number].ends)] -= 1
        owner[np.cumsum(depth)[: len(owner)] > 0] = number
    exclusive = []
    for number in range(len(merged)):
        owned = owner == number
        exclusive.append(merged_spans(TimeSpans(edges[:-1][owned], edges[1:][owned])))
    return exclusive


def spans_without(layer: TimeSpans, other: TimeSpans) -> TimeSpans:
    """The parts of a layer outside another one."""
    return exclusive_layers([other, layer])[1] if len(other.starts) else merged_spans(layer)


def covered_shares(spans: TimeSpans, edges: Floats, many: int = 1) -> Floats:
    """The covered share (0 to 1) of each interval between neighbouring ``edges`` (ns).

    ``many``: the number of ranks that the spans are from; the result is their mean. The spans of
    each rank are disjoint. The share of an empty interval is 0.
    """
    wide = np.diff(edges)
    covered = _elapsed_sums(spans.starts, edges) - _elapsed_sums(spans.ends, edges)
    found: Floats = np.diff(covered) / np.where(wide > 0, wide, 1.0) / many
    return np.clip(found, 0.0, 1.0)


def _elapsed_sums(instants: Ints, edges: Floats) -> Floats:
    """At each edge, the sum of the times since all earlier instants."""
    ordered = np.sort(instants)
    count = np.searchsorted(ordered, edges)
    found: Floats = count * edges - np.concatenate([[0], np.cumsum(ordered)])[count]
    return found
