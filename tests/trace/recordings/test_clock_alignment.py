"""Clocks are shifted only if the recordings contradict causality, and then found again."""

from __future__ import annotations

import numpy as np

from distsim.trace.recordings.clock_alignment import align_clocks

MS = 1e6


def meetings(offsets: list[float]) -> dict[object, dict[int, tuple[float, float]]]:
    """Twenty collectives of ranks that arrive at random; each clock runs ahead by its offset."""
    random = np.random.default_rng(2)
    found: dict[object, dict[int, tuple[float, float]]] = {}
    for number in range(20):
        starts = number * 100 * MS + random.uniform(0, 20 * MS, len(offsets))
        end = starts.max() + MS
        found[number] = {
            rank: (start + offset, end + random.uniform(0, 0.1 * MS) + offset)
            for rank, (start, offset) in enumerate(zip(starts, offsets, strict=True))
        }
    return found


def test_clocks_that_agree_are_kept():
    aligned = align_clocks(meetings([0, 0, 0]), [0, 1, 2])

    assert set(aligned.offsets_ns.values()) == {0.0}
    assert aligned.worst_ns == 0


def test_clocks_an_hour_apart_are_found_within_half_a_millisecond():
    hour = 3600e9
    aligned = align_clocks(meetings([0, hour, -hour]), [0, 1, 2])

    assert abs(aligned.offsets_ns[1] + hour) < 0.5 * MS
    assert abs(aligned.offsets_ns[2] - hour) < 0.5 * MS
    assert aligned.worst_ns < 0.5 * MS
