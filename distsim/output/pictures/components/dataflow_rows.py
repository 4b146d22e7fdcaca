"""Assigns each call of a data-flow picture to a row, so that time runs down and no arrow runs up.

The assignment replays the calls without times. Calls of one rank are placed below each other. The
calls of a collective share a row, as do a blocking send and its receive. Other receives are never
placed above their send, except where no other order exists (an irecv posted before the send that
waits for it).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from distsim.operations.core.resolved_call import ResolvedCall
from distsim.operations.registry import OPERATIONS


@dataclass(eq=False)
class DrawnCall:
    """A call that is drawn.

    ``match`` is -1 if no call of another rank matched it. ``partners`` are the other drawn calls of
    its match. ``row`` is -1 until the call is placed.
    """

    column: int
    rank: int
    position: int
    part: int
    call: ResolvedCall
    kind: str
    match: int
    done: bool
    nbytes: int = 0
    differs: bool = False
    partners: list[DrawnCall] = field(default_factory=list)
    requests: list[DrawnCall] = field(default_factory=list)  # a wait's
    row: int = -1
    #: Further computes that the box of this call covers, and their duration with it.
    joined: int = 0
    joined_ns: int = 0
    code: int = 0  # ranks of one code make the same calls at the same positions

    @property
    def id(self) -> str:
        """A unique name: the rank, the position and, in a batch, the part."""
        return f"r{self.rank}_{self.position}" + (f"_{self.part}" if self.part >= 0 else "")

    @property
    def sends(self) -> bool:
        """Whether the call sends a message."""
        return OPERATIONS[self.call.op].direction == "send"

    @property
    def receives(self) -> bool:
        """Whether the call receives a message."""
        return OPERATIONS[self.call.op].direction == "recv"

    @property
    def red(self) -> bool:
        """Whether the call never completes, or differs from the calls that it matched."""
        return self.differs or (
            not self.done and self.kind in ("p2p", "collective", "wait", "batch")
        )


def link_partners(events: Sequence[DrawnCall]) -> None:
    """Make partners of the events that share a match, and of those who wait in the same collective
    for a missing rank.
    """
    by_match: dict[Hashable, list[DrawnCall]] = {}
    made: Counter[tuple[int, int]] = Counter()
    for event in events:
        key: Hashable = event.match if event.match >= 0 else None
        if event.kind == "collective":
            column = (event.rank, event.call.group.id)
            key = key if event.match >= 0 else (event.call.op, event.call.group.id, made[column])
            made[column] += 1
        if key is not None:
            by_match.setdefault(key, []).append(event)
    for met in by_match.values():
        for event in met:
            event.partners = [other for other in met if other is not event]


def assign_rows(columns: Sequence[Sequence[DrawnCall]]) -> int:
    """Give every event its row; returns the number of rows.

    Where it costs no more than one row in ten, the same call of ranks that do the same stands
    level.
    """
    rows = _RowAssigner(columns, {}).run()
    events = [event for column in columns for event in column]
    plain = [event.row for event in events]
    for _ in range(3):
        deepest: dict[Hashable, int] = {}
        for event in events:
            deepest[_same_call_key(event)] = max(deepest.get(_same_call_key(event), 0), event.row)
        if all(event.row == deepest[_same_call_key(event)] for event in events):
            break
        for event in events:
            event.row = -1
        level = _RowAssigner(columns, deepest).run()
        if level > rows * 1.1 + 1:
            for event, row in zip(events, plain, strict=True):
                event.row = row
            return rows
    return max((event.row for event in events), default=-1) + 1


def _same_call_key(event: DrawnCall) -> Hashable:
    return (event.code, event.position, event.part)


class _RowAssigner:
    """Replays the calls of all columns without times and gives each call a row.

    ``least``: the smallest row of calls with this key.
    """

    def __init__(
        self, columns: Sequence[Sequence[DrawnCall]], least: Mapping[Hashable, int]
    ) -> None:
        self.columns, self.least = columns, least
        self.next_event = [0] * len(columns)
        self.next_row = [0] * len(columns)
        self.taken: set[tuple[int, int]] = set()

    def run(self) -> int:
        while any(i < len(column) for i, column in zip(self.next_event, self.columns, strict=True)):
            if not sum(self._advance(column) for column in range(len(self.columns))):
                self._force()
        return max((row for _, row in self.taken), default=-1) + 1

    def _head(self, column: int) -> DrawnCall | None:
        i = self.next_event[column]
        return self.columns[column][i] if i < len(self.columns[column]) else None

    def _advance(self, column: int) -> bool:
        """Place the column's next event if every call that must be above it or in its row can."""
        event = self._head(column)
        if event is None:
            return False
        place = _PLACERS.get(event.kind, _RowAssigner._alone)
        return place(self, event)

    def _alone(self, event: DrawnCall) -> bool:
        return self._put([event], 0)

    def _collective(self, event: DrawnCall) -> bool:
        party = [event, *event.partners]
        return all(self._head(e.column) is e for e in party) and self._put(party, 0)

    def _message(self, event: DrawnCall) -> bool:
        other = event.partners[0] if event.partners else None
        if other is None:
            return self._put([event], 0)
        if event.receives:
            return other.row >= 0 and self._put([event], other.row)
        if event.call.op == "isend" or other.row >= 0:
            return self._put([event], 0)
        # A blocking send shares a row with its receive, once the receiver has reached it.
        return self._head(other.column) is other and self._put([event, other], 0)

    def _wait(self, event: DrawnCall) -> bool:
        receives = [request for request in event.requests if request.receives]
        send_rows = [send.row for receive in receives for send in receive.partners]
        if any(row < 0 for row in send_rows):
            return False
        return self._put([event], max(send_rows, default=0))

    def _force(self) -> None:
        """Nothing fits: place the highest of the next events alone. Requests first, they never
        block.
        """
        heads = [
            event
            for column in range(len(self.columns))
            if (event := self._head(column)) is not None
        ]
        first = min(
            heads,
            key=lambda e: (not e.call.is_async and e.part < 0, self.next_row[e.column], e.column),
        )
        self._put([first], 0)

    def _put(self, events: Sequence[DrawnCall], least: int) -> bool:
        """Events in one row, with nothing between them."""
        columns = [e.column for e in events]
        span = range(min(columns), max(columns) + 1)
        row = max(
            least,
            *(self.next_row[column] for column in columns),
            *(self.least.get(_same_call_key(e), 0) for e in events),
        )
        while any((column, row) in self.taken for column in span):
            row += 1
        self.taken.update((column, row) for column in span)
        for event in events:
            event.row = row
            self.next_row[event.column] = row + 1
            self.next_event[event.column] += 1
        return True


_PLACERS: Mapping[str, Callable[[_RowAssigner, DrawnCall], bool]] = {
    "collective": _RowAssigner._collective,
    "p2p": _RowAssigner._message,
    "wait": _RowAssigner._wait,
}
