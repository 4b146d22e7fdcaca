"""Activities of the host explain a slow rank or uneven work if they take half of the time lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from distsim.analysis.slow_jobs.activity_hints import activity_hint, uneven_activity_hint
from distsim.trace.recordings.recording import CHECKPOINT, DATA_LOADING, GARBAGE_COLLECTION

MS = 1_000_000
COLLECTS = "Python's garbage collector takes"
SAVES = "Saving a checkpoint takes"
LOADS = "Waiting for the DataLoader takes"


def recorded(*activities: tuple[int, int, str, float]) -> Any:
    """A recording with these activities: rank, step, name, ms."""
    times: dict[tuple[int, int], dict[str, float]] = {}
    for rank, step, name, ms in activities:
        times.setdefault((rank, step), {})[name] = ms * MS
    return SimpleNamespace(activities=times)


SLOW = recorded(
    (0, 0, GARBAGE_COLLECTION, 4),
    (0, 1, GARBAGE_COLLECTION, 8),
    (0, 1, CHECKPOINT, 6),
    (1, 0, GARBAGE_COLLECTION, 2),
    (2, 1, DATA_LOADING, 20),
    (3, 1, DATA_LOADING, 1),
)


@pytest.mark.parametrize(
    ("rank", "peers", "steps", "excess_ms", "start"),
    [
        (0, [1, 2, 3], [0, 1], 11, f"{COLLECTS} 6 ms per step here, and 0 ns on the peers: call"),
        (0, [1, 2, 3], [0, 1], 12, ""),
        (0, [1], [0, 1], 9, f"{COLLECTS} 6 ms per step here, and 1 ms on the peers: call"),
        (0, [1], [0, 1], 10, ""),
        (0, [], [0], 7, f"{COLLECTS} 4 ms per step here, and 0 ns on the peers: call"),
        (0, [], [0], 8, ""),
        (0, [1], [], 0, ""),
        (0, [1], [1], 1, f"{COLLECTS} 8 ms per step here, and 0 ns on the peers: call"),
        (2, [0, 1, 3], [1], 38, f"{LOADS} 20 ms per step here, and 0 ns on the peers: use more"),
        (2, [3], [1], 37, f"{LOADS} 20 ms per step here, and 1 ms on the peers: use more"),
        (2, [3], [1], 38, ""),
        (1, [0], [0], 1, ""),
    ],
)
def test_an_activity_explains_a_rank_if_it_takes_half_of_its_excess_more_than_on_its_peers(
    rank: int, peers: list[int], steps: list[int], excess_ms: float, start: str
) -> None:
    """Of several, the longest is named."""
    hint = activity_hint(SLOW, rank, peers, steps, excess_ms * MS)

    assert hint.startswith(start)
    assert bool(hint) is bool(start)


@pytest.mark.parametrize(
    ("recording", "cost_ms", "start"),
    [
        (recorded((0, 0, CHECKPOINT, 6), (1, 1, CHECKPOINT, 2)), 8, f"{SAVES} 4 ms per step"),
        (recorded((0, 0, CHECKPOINT, 6), (1, 1, CHECKPOINT, 2)), 9, ""),
        (recorded((0, 0, CHECKPOINT, 6), (0, 1, CHECKPOINT, 2)), 1, ""),
        (recorded((0, 0, CHECKPOINT, 6), (1, 1, DATA_LOADING, 6)), 1, ""),
        (
            recorded((0, 0, GARBAGE_COLLECTION, 9), (2, 1, GARBAGE_COLLECTION, 3)),
            5,
            f"{COLLECTS} 6 ms per step, on different ranks in different steps (2 ranks): call",
        ),
        (recorded(), 0, ""),
    ],
)
def test_an_activity_explains_uneven_work_if_it_is_on_different_ranks_in_different_steps(
    recording: Any, cost_ms: float, start: str
) -> None:
    hint = uneven_activity_hint(recording, [0, 1, 2], [0, 1], cost_ms * MS)

    assert hint.startswith(start)
    assert bool(hint) is bool(start)
