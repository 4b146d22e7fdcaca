"""Hints from recorded activities of the host: garbage collection, checkpoints, data loading.

An activity explains a slow rank if its time, beyond that of the peers, is at least half of the
rank's excess. It explains uneven work if it runs on different ranks in different steps, so that in
each step the others wait for one of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distsim.common.units import show_ns
from distsim.trace.recordings.recording import (
    CHECKPOINT,
    DATA_LOADING,
    GARBAGE_COLLECTION,
    Recording,
)

_LEAST_SHARE = 0.5
_FEWEST_RANKS = 2
#: Activity -> (what takes the time, what to do about it).
_TEXTS = {
    GARBAGE_COLLECTION: (
        "Python's garbage collector takes",
        "call `gc.disable()`, and `gc.collect()` in the same step on all ranks",
    ),
    CHECKPOINT: (
        "Saving a checkpoint takes",
        "use `torch.distributed.checkpoint.async_save`, or save in fewer steps",
    ),
    DATA_LOADING: (
        "Waiting for the DataLoader takes",
        "use more workers (`num_workers`), or check the storage of this rank",
    ),
}


def activity_hint(
    recording: Recording, rank: int, peers: Sequence[int], steps: Sequence[int], excess_ns: float
) -> str:
    """What explains the excess of a rank in these steps (indices); empty if nothing does."""
    best, best_excess = "", _LEAST_SHARE * excess_ns
    for activity, (subject, remedy) in _TEXTS.items():
        mine = _mean_time(recording, rank, steps, activity)
        others = [_mean_time(recording, peer, steps, activity) for peer in peers]
        usual = float(np.median(others)) if others else 0.0
        if mine - usual > best_excess:
            best_excess = mine - usual
            best = (
                f"{subject} {show_ns(int(mine))} per step here, and {show_ns(int(usual))} on the "
                f"peers: {remedy}."
            )
    return best


def uneven_activity_hint(
    recording: Recording, ranks: Sequence[int], steps: Sequence[int], cost_ns: float
) -> str:
    """What explains uneven work, given its cost per step; empty if nothing does."""
    for activity in (GARBAGE_COLLECTION, CHECKPOINT):
        times = np.array(
            [[_time(recording, rank, step, activity) for step in steps] for rank in ranks]
        )
        # In each step, the others wait for the rank with the longest activity.
        lost = times.max(axis=0) - np.median(times, axis=0)
        longest = {int(times[:, i].argmax()) for i in np.flatnonzero(lost > 0)}
        if len(longest) < _FEWEST_RANKS or lost.mean() < _LEAST_SHARE * cost_ns:
            continue
        subject, remedy = _TEXTS[activity]
        return (
            f"{subject} {show_ns(int(lost.mean()))} per step, on different ranks in different "
            f"steps ({len(longest)} ranks): {remedy}."
        )
    return ""


def _mean_time(recording: Recording, rank: int, steps: Sequence[int], activity: str) -> float:
    if not steps:
        return 0.0
    return float(np.mean([_time(recording, rank, step, activity) for step in steps]))


def _time(recording: Recording, rank: int, step: int, activity: str) -> float:
    return recording.activities.get((rank, step), {}).get(activity, 0.0)
