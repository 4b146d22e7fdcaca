"""Which row of a data-flow picture each call stands in: an untimed walk, so that time runs down and arrows don't run up.

A rank's calls stand below each other. The calls of a collective share a row, as do a blocking send and its receive. Other
receives stand no higher than their send, except where only the other order exists (an irecv posted before the send that waits
for it).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from distsim.ops.records import Call


@dataclass(eq=False)
class Event:
    """A call that is drawn. ``match`` is -1 when it met nobody; ``partners`` are the other drawn calls of its match."""

    lane: int
    rank: int
    position: int
    part: int
    call: Call
    kind: str
    match: int
    done: bool
    nbytes: int = 0
    differs: bool = False
    partners: list[Event] = field(default_factory=list)
    requests: list[Event] = field(default_factory=list)  # a wait's
    row: int = -1

    @property
    def id(self) -> str:
        return f"r{self.rank}_{self.position}" + (f"_{self.part}" if self.part >= 0 else "")

    @property
    def sends(self) -> bool:
        return self.kind == "p2p" and "send" in self.call.op

    @property
    def receives(self) -> bool:
        return self.kind == "p2p" and "recv" in self.call.op

    @property
    def red(self) -> bool:
        """It waits in vain, or what it met does not fit."""
        return self.differs or (not self.done and self.kind in ("p2p", "collective", "wait", "batch"))


def join(events: Sequence[Event]) -> None:
    """Make partners of the events that share a match, and of those who wait in the same collective for a missing rank."""
    by_match: dict[Hashable, list[Event]] = {}
    made: Counter[tuple[int, int]] = Counter()
    for event in events:
        key: Hashable = event.match if event.match >= 0 else None
        if event.kind == "collective":
            lane = (event.rank, event.call.group.id)
            key = key if event.match >= 0 else (event.call.op, event.call.group.id, made[lane])
            made[lane] += 1
        if key is not None:
            by_match.setdefault(key, []).append(event)
    for met in by_match.values():
        for event in met:
            event.partners = [other for other in met if other is not event]


def assign_rows(lanes: Sequence[Sequence[Event]]) -> int:
    """Give every event its row; returns the number of rows."""
    return _Rows(lanes).run()


class _Rows:
    def __init__(self, lanes: Sequence[Sequence[Event]]) -> None:
        self.lanes = lanes
        self.next_event = [0] * len(lanes)
        self.next_row = [0] * len(lanes)
        self.taken: set[tuple[int, int]] = set()

    def run(self) -> int:
        while any(i < len(lane) for i, lane in zip(self.next_event, self.lanes, strict=True)):
            if not sum(self._advance(lane) for lane in range(len(self.lanes))):
                self._force()
        return max((row for _, row in self.taken), default=-1) + 1

    def _head(self, lane: int) -> Event | None:
        i = self.next_event[lane]
        return self.lanes[lane][i] if i < len(self.lanes[lane]) else None

    def _advance(self, lane: int) -> bool:
        """Place the lane's next event if all that should stand above or beside it can."""
        event = self._head(lane)
        if event is None:
            return False
        place = _PLACES.get(event.kind, _Rows._alone)
        return place(self, event)

    def _alone(self, event: Event) -> bool:
        return self._put([event], 0)

    def _collective(self, event: Event) -> bool:
        party = [event, *event.partners]
        return all(self._head(e.lane) is e for e in party) and self._put(party, 0)

    def _message(self, event: Event) -> bool:
        other = event.partners[0] if event.partners else None
        if other is None:
            return self._put([event], 0)
        if event.receives:
            return other.row >= 0 and self._put([event], other.row)
        if event.call.op == "isend" or other.row >= 0:
            return self._put([event], 0)
        return self._head(other.lane) is other and self._put([event, other], 0)

    def _wait(self, event: Event) -> bool:
        sends = [other for request in event.requests for other in request.partners if request.receives]
        return all(s.row >= 0 for s in sends) and self._put([event], max((s.row for s in sends), default=0))

    def _force(self) -> None:
        """Nothing fits: place the highest of the next events alone. Requests first, they never block."""
        heads = [event for lane in range(len(self.lanes)) if (event := self._head(lane)) is not None]
        first = min(heads, key=lambda e: (not e.call.is_async and e.part < 0, self.next_row[e.lane], e.lane))
        self._put([first], 0)

    def _put(self, events: Sequence[Event], least: int) -> bool:
        """Events in one row, with nothing between them."""
        lanes = [e.lane for e in events]
        span = range(min(lanes), max(lanes) + 1)
        row = max(least, *(self.next_row[lane] for lane in lanes))
        while any((lane, row) in self.taken for lane in span):
            row += 1
        self.taken.update((lane, row) for lane in span)
        for event in events:
            event.row = row
            self.next_row[event.lane] = row + 1
            self.next_event[event.lane] += 1
        return True


_PLACES: Mapping[str, Callable[[_Rows, Event], bool]] = {
    "collective": _Rows._collective,
    "p2p": _Rows._message,
    "wait": _Rows._wait,
}
