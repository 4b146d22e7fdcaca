"""Which message each any-source receive takes in an event-driven run: the first to arrive.

Key idea: for each box (the queues of one receiver) only the oldest any-source receive can take a
message, so there is at most one best candidate per box. It changes only when the box changes;
boxes that have changed are marked, and only they are examined again.

A *schedule* (the counterexample that ``distsim check`` writes) can name the message for a receive.
Such a receive waits for that message, even if others arrive earlier.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush
from typing import NamedTuple

from distsim.backends.message_matching import ANY_SENDER
from distsim.common.errors import UsageError
from distsim.engine.run_record import CallKey
from distsim.program.model import Program
from distsim.semantics.ordered.state import RunState
from distsim.semantics.ordered.transitions import TransitionRules

#: The message that each any-source receive must take.
ReceiveSchedule = Mapping[CallKey, CallKey]

_REGENERATE_HINT = "run `distsim check FILE --format json` to write a new schedule for this file"


class _TakeCandidate(NamedTuple):
    """A message that a receive may take. The least candidate is taken first.

    The order of the fields is the order of comparison: time, then the rank of the sender.
    """

    arrived_ns: int
    sender: int
    receive: int
    send: int


class MessageArrivals:
    """When messages arrive, and which of them any-source receives may take.

    - ``arrived``: by row of a send, when its data (or the notice of it) are at the receiver; -1
      while it has not been sent.
    - ``fresh``: any-source receives that were posted just now.
    - ``changed``: boxes to examine again.
    - ``_best``: the present candidate of each box. ``_heap`` also contains candidates that are
      out of date: those that differ from ``_best``.
    """

    def __init__(self, rules: TransitionRules, state: RunState, follow: ReceiveSchedule) -> None:
        self.rules, self.state = rules, state
        self.scheduled_send: dict[int, int] = {}
        for receive, send in follow.items():
            receive_row = _row_of_call(rules.program, rules.base, receive)
            self.scheduled_send[receive_row] = _row_of_call(rules.program, rules.base, send)
        self.arrived = [-1] * rules.linked.rows
        self.fresh: list[int] = []
        self.changed: dict[int, None] = {}
        self._best: dict[int, _TakeCandidate] = {}
        self._heap: list[tuple[_TakeCandidate, int]] = []

    def may_take(self, now: int) -> bool:
        """Whether some receive may take a message that has arrived.

        The answer may be wrong in one direction: the first candidate may be out of date.
        """
        self._examine_changed_boxes()
        return bool(self._heap) and self._heap[0][0].arrived_ns <= now

    def _examine_changed_boxes(self) -> None:
        while self.changed:
            box, _ = self.changed.popitem()
            best = self._best_of(box)
            if best is None:
                self._best.pop(box, None)
            elif self._best.get(box) != best:
                self._best[box] = best
                heappush(self._heap, (best, box))

    def first(self, now: int) -> int:
        """The message that is taken first, or -1 if none has arrived.

        Of messages that arrive at one instant, it is the one from the lowest rank.
        """
        self._examine_changed_boxes()
        heap = self._heap
        while heap and self._best.get(heap[0][1]) != heap[0][0]:
            heappop(heap)  # out of date: its box has changed since
        if not heap:
            return -1
        candidate, _ = heap[0]
        return candidate.send if candidate.arrived_ns <= now else -1

    def waiting_for(self, receive: int, now: int) -> int:
        """The first message that arrived before a receive was posted (``now``), or -1."""
        best = self._best_of(self.rules.box[receive])
        if best is None or best.receive != receive:
            return -1
        return best.send if best.arrived_ns < now else -1

    def check(self) -> None:
        """Raise if a receive could take a message, but still waits for the one in its schedule."""
        if not self.scheduled_send:
            return
        for take in self.state.matcher.takes():
            if self.scheduled_send.get(take.receive, take.send) != take.send:
                rank = self.rules.rank_of[take.receive]
                raise UsageError(
                    f"the schedule does not match the program: rank {rank} never gets the message "
                    "that it must take",
                    _REGENERATE_HINT,
                )

    def _best_of(self, box: int) -> _TakeCandidate | None:
        """The message that the oldest any-source receive of a box takes first, if there is one."""
        matcher, arrived = self.state.matcher, self.arrived
        queues = matcher.boxes.get(box)
        if queues is None or ANY_SENDER not in queues.receives:
            return None
        number, receive = queues.receives[ANY_SENDER][0]
        has_named = len(queues.receives) > 1
        scheduled = self.scheduled_send.get(receive)
        best: _TakeCandidate | None = None
        for sender, sends in queues.sends.items():
            # Messages of one sender do not overtake each other: only its first can be taken.
            send = sends[0]
            if scheduled is not None and send != scheduled:
                continue
            # A receive that names this sender may have the right to its message.
            if has_named and matcher.named_first(queues, sender, number):
                continue
            if best is None or (arrived[send], sender) < best[:2]:
                best = _TakeCandidate(arrived[send], sender, receive, send)
        return best


def _row_of_call(program: Program, base: list[int], call: CallKey) -> int:
    """The row of a call that a schedule names. Raises UsageError if there is no such call."""
    rank, position, part = call
    calls = program.code(rank).calls if 0 <= rank < program.world_size else []
    has_call = 0 <= position < len(calls)
    if not has_call or not -1 <= part < len(calls[position].parts):
        raise UsageError(
            f"the schedule names call {position} of rank {rank}, which does not exist",
            _REGENERATE_HINT,
        )
    return base[rank] + program.code(rank).offsets[position] + 1 + part
