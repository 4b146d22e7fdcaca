"""The activity of ranks over time: computing, communicating and waiting, as spans.

The spans of a rank are computed from its rows of the trace by set operations on columns
(`distsim.output.trace_data.time_spans`), without a loop over calls. Several ranks are handled at
once by laying them end to end on one axis of time.
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
#: Streams with a track of their own; the last one takes all others.
MAX_STREAMS = 4


class RankActivity(NamedTuple):
    """The activity of one rank, or of ``many`` ranks together.

    The categories are those of `distsim.analysis.timeline`, so shares of the time are equal in
    pictures and reports. ``backward``: backward passes; ``work``: all other computes. ``exposed``:
    transfers while nothing is computed, by queue if queues overlap; ``hidden``: transfers during
    computes. ``host``: work of the host of a device backend, such as launches, while its device
    does nothing. ``waiting``: the rest of the time in calls. ``computes`` and ``moves``: the rows
    with a bar.
    """

    many: int
    work: TimeSpans
    backward: TimeSpans
    exposed: Mapping[str, TimeSpans]
    hidden: Mapping[str, TimeSpans]
    host: TimeSpans
    waiting: TimeSpans
    computes: Ints
    moves: Ints

    def kinds(self) -> tuple[tuple[TimeSpans, ...], ...]:
        """Work, backward, exposed, hidden, waiting and host: the spans of each."""
        return (
            (self.work,),
            (self.backward,),
            tuple(self.exposed.values()),
            tuple(self.hidden.values()),
            (self.waiting,),
            (self.host,),
        )


class ActivityReader:
    """Reads a trace once and gives the `RankActivity` of ranks.

    ``groups``: only transfers of these groups count; None: all.
    """

    def __init__(self, trace: Trace, end_ns: int, groups: tuple[int, ...] | None = None) -> None:
        self.trace = trace
        self.end_ns = end_ns
        names = trace.tables.get("name", [])
        self._is_backward = np.array([*(str(n).startswith("backward") for n in names), False])
        self._compute = trace.ops(*COMPUTE_OPS)
        self._quiet = trace.ops(*_NO_TRANSFER_OPS)
        self._sleep = trace.ops("sleep")
        self._waits = trace.ops(*_WAIT_OPS)
        profile = BACKEND_PROFILES.get(str(trace.header.get("backend")))
        # On a device backend a call returns before its work starts; the rank's stream then waits.
        self._ahead = profile is not None and profile.device
        on_host = trace.rows_with_text("queue", frozenset(("host",))) & self._compute
        self._host_work = on_host & self._ahead
        if groups is None:
            self._chosen = np.ones(len(trace), dtype=bool)
        else:
            self._chosen = np.isin(trace["group"], groups)

    def __call__(self, rows: Ints, many: int = 1) -> RankActivity:
        """The activity in ``rows``: those of one rank, or of ``many`` ranks together."""
        trace = self.trace
        rows = rows[trace["posted_ns"][rows] >= 0]
        lay = self._laid(rows, many)
        posted, returned, started, finished = (
            trace[f"{n}_ns"][rows] for n in ("posted", "returned", "started", "finished")
        )
        # Whatever has not ended lasts until the end of the run.
        until = np.where(finished >= 0, finished, self.end_ns)
        has_started = started >= 0
        has_finished = finished >= 0

        is_compute = self._compute[rows]
        on_host = self._host_work[rows] & has_started
        computes = is_compute & has_started & ~on_host
        backward_rows = np.zeros(len(rows), dtype=bool)
        if "name" in trace.columns:
            backward_rows = computes & self._is_backward[trace["name"][rows]]
        busy = lay(computes, started, until)

        communicates = (trace["match"][rows] >= 0) | trace.ops("put", "get")[rows]
        moves = communicates & ~is_compute & ~self._quiet[rows]
        moves &= has_started & has_finished & self._chosen[rows]
        streams = self._streams(rows, moves, lay(moves, started, finished), many)

        calls = ~is_compute & ~self._sleep[rows]
        in_calls = [lay(calls, posted, np.where(returned >= 0, returned, self.end_ns))]
        if self._ahead:
            start_of_work = np.where(has_started & has_finished, started, self.end_ns)
            in_calls.append(lay(calls & ~self._waits[rows], posted, start_of_work))

        all_transfers = _concatenated_spans(tuple(streams.values()))
        on_host_spans = lay(on_host, started, until)
        _, alone, host, waits = exclusive_layers(
            [busy, all_transfers, on_host_spans, _concatenated_spans(tuple(in_calls))]
        )
        if len(streams) == 1:
            exposed = {"": alone}
        else:
            exposed = {name: spans_without(spans, busy) for name, spans in streams.items()}
        hidden = {name: spans_without(spans, exposed[name]) for name, spans in streams.items()}
        period = self.end_ns + 1
        work, backward = exclusive_layers(
            [lay(computes & ~backward_rows, started, until), lay(backward_rows, started, until)]
        )
        return RankActivity(
            many,
            work.back(period),
            backward.back(period),
            {n: s.back(period) for n, s in exposed.items()},
            {n: s.back(period) for n, s in hidden.items()},
            host.back(period),
            waits.back(period),
            rows[computes],
            rows[moves],
        )

    def _laid(self, rows: Ints, many: int) -> Callable[[Mask, Ints, Ints], TimeSpans]:
        """A function that gives the spans of some of the rows, with the ranks laid end to end.

        A rank takes one nanosecond more than the run, so that spans of two ranks never touch.
        """
        offset = np.zeros(len(rows), dtype=np.int64)
        if many > 1:
            offset = self.trace["rank"][rows].astype(np.int64) * (self.end_ns + 1)
        return lambda some, starts, ends: TimeSpans((starts + offset)[some], (ends + offset)[some])

    def _streams(
        self, rows: Ints, moves: Mask, spans: TimeSpans, many: int
    ) -> dict[str, TimeSpans]:
        """The transfers by queue, if queues overlap; else all of them under an empty name.

        Transfers of many ranks are never split.
        """
        union = merged_spans(spans)
        queue = self.trace["queue"][rows[moves]]
        by_queue: dict[int, TimeSpans] = {}
        for number in dict.fromkeys(queue.tolist()):
            own = queue == number
            by_queue[int(number)] = merged_spans(TimeSpans(spans.starts[own], spans.ends[own]))
        queues_overlap = union.total != sum(own.total for own in by_queue.values())
        if many > 1 or len(by_queue) < 2 or not queues_overlap:
            return {"": union}
        named = {self.trace.text("queue", number): own for number, own in by_queue.items()}
        names = list(named)
        streams = {name: named[name] for name in names[: MAX_STREAMS - 1]}
        others = names[MAX_STREAMS - 1 :]
        if others:
            last = others[0] if len(others) == 1 else f"and {len(others)} more"
            joined = _concatenated_spans(tuple(named[name] for name in others))
            streams[last] = merged_spans(joined)
        return streams


def _concatenated_spans(parts: tuple[TimeSpans, ...]) -> TimeSpans:
    """All spans in one column, not merged."""
    if not parts:
        return NO_SPANS
    starts = np.concatenate([part.starts for part in parts])
    ends = np.concatenate([part.ends for part in parts])
    return TimeSpans(starts, ends)


def pass_letter(label: str) -> str:
    """The letter of a pass in pipeline schedules; empty for other labels.

    F: forward; B: backward; I and W: the halves of a backward pass that compute the gradients of
    the input and of the weights.
    """
    for word, letter in (
        ("forward", "F"),
        ("backward input", "I"),
        ("backward weight", "W"),
        ("backward", "B"),
    ):
        if label.startswith(word):
            return letter
    return ""


def has_passes(trace: Trace) -> bool:
    """Whether some rank makes forward and backward passes, as a pipeline's do."""
    names = trace.tables.get("name", [])
    kinds = {pass_letter(str(name)) for name in names}
    return "F" in kinds and not kinds.isdisjoint("BIW")
