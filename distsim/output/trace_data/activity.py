"""What each rank does when: the kinds of time that the timeline shows, as spans of a rank's
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from distsim.backends import BACKEND_PROFILES
from distsim.operations.registry import COMPUTE_OPS
from distsim.output.trace_data.time_spans import (
    NO_SPANS,
    Ints,
    Mask,
    TimeSpans,
    exclusive_layers,
    merged_spans,
    spans_without,
)
from distsim.trace.model import Trace

_NO_TRANSFER_OPS = ("sleep", "wait", "wait_stream", "synchronize", "exit", "fail")
_WAIT_OPS = ("wait", "wait_stream", "synchronize")
#: Streams that have a track of their own at most; the last one takes what is left.
MAX_STREAMS = 4


class RankActivity(NamedTuple):
    """Of one rank, or of several together. ``work`` and ``backward`` are computes (backward passes
    apart).

    ``exposed`` is what moves while nothing is computed, by queue where queues overlap; ``hidden``
    what moves beside compute. ``waiting`` is what is left of the time in calls. ``computes`` and
    ``moves`` are the rows that have a bar.
    """

    many: int
    work: TimeSpans
    backward: TimeSpans
    exposed: Mapping[str, TimeSpans]
    hidden: Mapping[str, TimeSpans]
    waiting: TimeSpans
    computes: Ints
    moves: Ints

    def kinds(self) -> tuple[tuple[TimeSpans, ...], ...]:
        """Work, backward, exposed, hidden and waiting: the spans of each."""
        return (
            (self.work,),
            (self.backward,),
            tuple(self.exposed.values()),
            tuple(self.hidden.values()),
            (self.waiting,),
        )


class ActivityReader:
    """Reads the trace once, and gives each rank's `RankActivity`. ``groups``: only what moves in
    these is told, all when None.
    """

    def __init__(self, trace: Trace, end_ns: int, groups: tuple[int, ...] | None = None) -> None:
        self.trace, self.end_ns = trace, end_ns
        names = trace.tables.get("name", [])
        self._is_backward = np.array([*(str(n).startswith("backward") for n in names), False])
        self._compute, self._quiet = trace.ops(*COMPUTE_OPS), trace.ops(*_NO_TRANSFER_OPS)
        self._sleep, self._waits = trace.ops("sleep"), trace.ops(*_WAIT_OPS)
        profile = BACKEND_PROFILES.get(str(trace.header.get("backend")))
        self._ahead = profile is not None and profile.device
        self._chosen = (
            np.ones(len(trace), dtype=bool) if groups is None else np.isin(trace["group"], groups)
        )

    def __call__(self, rows: Ints, many: int = 1) -> RankActivity:
        """``rows``: those of one rank, or of ``many``, which are told as one."""
        trace = self.trace
        rows = rows[trace["posted_ns"][rows] >= 0]
        lay = self._laid(rows, many)
        posted, returned, started, finished = (
            trace[f"{n}_ns"][rows] for n in ("posted", "returned", "started", "finished")
        )
        till, ran, over = (
            np.where(finished >= 0, finished, self.end_ns),
            started >= 0,
            finished >= 0,
        )
        compute = self._compute[rows]
        does = compute & ran
        back = (
            does & self._is_backward[trace["name"][rows]]
            if "name" in trace.columns
            else np.zeros(len(rows), dtype=bool)
        )
        moves = (
            ((trace["match"][rows] >= 0) | trace.ops("put", "get")[rows])
            & ~compute
            & ~self._quiet[rows]
            & ran
            & over
            & self._chosen[rows]
        )
        calls = ~compute & ~self._sleep[rows]
        waiting = [lay(calls, posted, np.where(returned >= 0, returned, self.end_ns))]
        if self._ahead:
            waiting.append(
                lay(calls & ~self._waits[rows], posted, np.where(ran & over, started, self.end_ns))
            )
        busy, streams = (
            lay(does, started, till),
            self._streams(rows, moves, lay(moves, started, finished), many),
        )
        whole = _concatenated_spans(tuple(streams.values()))
        _, alone, waits = exclusive_layers([busy, whole, _concatenated_spans(tuple(waiting))])
        exposed = (
            {"": alone}
            if len(streams) == 1
            else {name: spans_without(spans, busy) for name, spans in streams.items()}
        )
        hidden = {name: spans_without(spans, exposed[name]) for name, spans in streams.items()}
        period = self.end_ns + 1
        work, backward = exclusive_layers(
            [lay(does & ~back, started, till), lay(back, started, till)]
        )
        return RankActivity(
            many,
            work.back(period),
            backward.back(period),
            {n: s.back(period) for n, s in exposed.items()},
            {n: s.back(period) for n, s in hidden.items()},
            waits.back(period),
            rows[does],
            rows[moves],
        )

    def _laid(self, rows: Ints, many: int) -> Callable[[Mask, Ints, Ints], TimeSpans]:
        """Spans of some of the rows, with the ranks laid end to end, so that spans of two ranks
        never touch.
        """
        offset = (
            self.trace["rank"][rows].astype(np.int64) * (self.end_ns + 1)
            if many > 1
            else np.zeros(len(rows), dtype=np.int64)
        )
        return lambda some, starts, ends: TimeSpans((starts + offset)[some], (ends + offset)[some])

    def _streams(
        self, rows: Ints, moves: Mask, spans: TimeSpans, many: int
    ) -> dict[str, TimeSpans]:
        """By queue where two of them overlap, else all in one, under an empty name; so too where it
        is of many ranks.
        """
        whole = merged_spans(spans)
        queue = self.trace["queue"][rows[moves]]
        apart = {
            int(q): merged_spans(TimeSpans(spans.starts[queue == q], spans.ends[queue == q]))
            for q in dict.fromkeys(queue.tolist())
        }
        if many > 1 or len(apart) < 2 or whole.total == sum(one.total for one in apart.values()):
            return {"": whole}
        named = {self.trace.text("queue", q): one for q, one in apart.items()}
        names = list(named)
        shown = {name: named[name] for name in names[: MAX_STREAMS - 1]}
        rest = names[MAX_STREAMS - 1 :]
        if rest:
            last = rest[0] if len(rest) == 1 else f"and {len(rest)} more"
            shown[last] = merged_spans(_concatenated_spans(tuple(named[name] for name in rest)))
        return shown


def _concatenated_spans(parts: tuple[TimeSpans, ...]) -> TimeSpans:
    """All of them in one column, as they are."""
    if not parts:
        return NO_SPANS
    return TimeSpans(
        np.concatenate([p.starts for p in parts]), np.concatenate([p.ends for p in parts])
    )
