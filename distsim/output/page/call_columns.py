"""The calls of a run as columns of small numbers, for `distsim.output.page.data_encoding`; the page
unpacks them in `decode.js`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np

from distsim.output.page.data_encoding import Numbers, zigzag_deltas, zigzag_encoded
from distsim.trace.model import Trace

#: Columns that are written plus one, because -1 means no value.
_PLAIN_COLUMNS = ("op", "group", "peer", "dtype", "reduce_op", "place", "queue", "name", "part")


def encoded_call_columns(trace: Trace, more: dict[str, Numbers]) -> dict[str, Numbers]:
    """All columns of the page's table of calls. ``more``: further columns with numbers of -1 or
    more, one per row.
    """
    found = {"rank": np.bincount(trace["rank"], minlength=trace.world_size).astype(np.int64)}
    found |= {name: trace[name].astype(np.int64) + 1 for name in _PLAIN_COLUMNS}
    found |= {name: zigzag_encoded(trace[name]) for name in ("tag",)}
    found |= {name: zigzag_deltas(trace[name]) for name in ("nbytes", "iteration", "position")}
    found["match"] = zigzag_deltas(_renumbered_matches(trace["match"].astype(np.int64)))
    ended = trace["ended_by"].astype(np.int64)
    found["ended_by"] = np.where(ended < 0, 0, 1 + zigzag_encoded(ended - trace["position"]))
    found |= _time_columns(trace)
    return found | {name: numbers + 1 for name, numbers in more.items()}


def _time_columns(trace: Trace) -> dict[str, Numbers]:
    """``posted`` as differences; the other times as 1 + the difference to an earlier time of the
    same row, or 0 for never.
    """
    posted, returned, started, finished = (
        trace[f"{n}_ns"].astype(np.int64) for n in ("posted", "returned", "started", "finished")
    )
    from_start = np.where(started >= 0, started, posted)
    return {
        "posted": zigzag_deltas(posted),
        "returned": np.where(returned < 0, 0, 1 + zigzag_encoded(returned - posted)),
        "started": np.where(started < 0, 0, 1 + zigzag_encoded(started - posted)),
        "finished": np.where(finished < 0, 0, 1 + zigzag_encoded(finished - from_start)),
    }


def _renumbered_matches(match: Numbers) -> Numbers:
    """Match numbers, renumbered in order of first use so that they are small; -1 stays."""
    inside = match >= 0
    values, first, inverse = np.unique(match[inside], return_index=True, return_inverse=True)
    order = np.empty(len(values), dtype=np.int64)
    order[np.argsort(first, kind="stable")] = np.arange(len(values))
    dense = np.full(len(match), -1, dtype=np.int64)
    dense[inside] = order[inverse]
    return dense


class InternTable:
    """Assigns numbers to values, in order of first use."""

    def __init__(self) -> None:
        self._index: dict[Hashable, int] = {}

    def add(self, thing: Hashable) -> int:
        """The number of a value; a new value gets the next number."""
        return self._index.setdefault(thing, len(self._index))

    def __len__(self) -> int:
        return len(self._index)

    def things(self, shown: Callable[[object], object] = lambda thing: thing) -> list[object]:
        """All values in the order of their numbers, each as ``shown`` returns it."""
        return [shown(thing) for thing in self._index]
