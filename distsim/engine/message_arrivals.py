"""Which message each any-source receive takes in an event-driven run: the first to arrive."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush

from distsim.backends.message_matching import ANY_SENDER
from distsim.common.errors import UsageError
from distsim.engine.run_record import CallKey
from distsim.program.model import Program
from distsim.semantics.ordered.state import RunState
from distsim.semantics.ordered.transitions import TransitionRules

#: The message that each any-source receive must take.
ReceiveSchedule = Mapping[CallKey, CallKey]

_REGENERATE_HINT = "`distsim check FILE --format json` writes it anew, for this file"
#: (when it arrived, from whom, the receive, the message): the least is taken first.
_TakeCandidate = tuple[int, int, int, int]


class MessageArrivals:
    """When messages arrive, and what the open receives may take of them; looked at again only for
    boxes that have changed.

    ``arrived``: of a message row, when its data, or the notice of it, is at the receiver; -1 while
    it is not on its way. ``fresh``: receives from any source that were posted just now.
    ``changed``: boxes to be looked at.
    """

    def __init__(self, rules: TransitionRules, state: RunState, follow: ReceiveSchedule) -> None:
        self.rules, self.state = rules, state
        self.follow = {
            _row_of_call(rules.program, rules.base, receive): _row_of_call(
                rules.program, rules.base, send
            )
            for receive, send in follow.items()
        }
        self.arrived = [-1] * rules.linked.rows
        self.fresh: list[int] = []
        self.changed: dict[int, None] = {}
        self._best: dict[int, _TakeCandidate] = {}
        self._heap: list[tuple[_TakeCandidate, int]] = []

    def may_take(self, now: int) -> bool:
        """Some receive may take what is there; it may also have taken it."""
        self._look()
        return bool(self._heap) and self._heap[0][0][0] <= now

    def _look(self) -> None:
        """See again to the boxes that have changed."""
        while self.changed:
            box, _ = self.changed.popitem()
            best = self._best_of(box)
            if best is None:
                self._best.pop(box, None)
            elif self._best.get(box) != best:
                self._best[box] = best
                heappush(self._heap, (best, box))

    def first(self, now: int) -> int:
        """The message that is taken first (at one instant: that of the lowest rank), -1 while none
        is there.
        """
        self._look()
        heap = self._heap
        while heap and self._best.get(heap[0][1]) != heap[0][0]:
            heappop(heap)  # of a box that has changed since
        return heap[0][0][3] if heap and heap[0][0][0] <= now else -1

    def waiting_for(self, receive: int, now: int) -> int:
        """The first message that arrived before a receive was posted, or -1."""
        best = self._best_of(self.rules.box[receive])
        if best is None:
            return -1
        arrived, _, taker, send = best
        return send if taker == receive and arrived < now else -1

    def check(self) -> None:
        """Raise where a receive still waits for a message that its schedule names, although it
        could take another.
        """
        if not self.follow:
            return
        for take in self.state.matcher.takes():
            if self.follow.get(take.receive, take.send) != take.send:
                rank = self.rules.rank_of[take.receive]
                raise UsageError(
                    f"the schedule does not fit: rank {rank} never gets the message "
                    "that it must take",
                    _REGENERATE_HINT,
                )

    def _best_of(self, box: int) -> _TakeCandidate | None:
        """What the oldest receive from any source of a box takes first, of what the schedule, if
        there is one, lets it take.
        """
        queues, arrived = self.state.matcher.boxes.get(box), self.arrived
        if queues is None or ANY_SENDER not in queues.receives:
            return None
        number, receive = queues.receives[ANY_SENDER][0]
        has_named, scheduled = len(queues.receives) > 1, self.follow.get(receive)
        best: _TakeCandidate | None = None
        for sender, sends in queues.sends.items():
            send = sends[0]
            if scheduled is not None and send != scheduled:
                continue
            if has_named and self.state.matcher.named_first(queues, sender, number):
                continue
            if best is None or (arrived[send], sender) < best[:2]:
                best = (arrived[send], sender, receive, send)
        return best


def _row_of_call(program: Program, base: list[int], call: CallKey) -> int:
    """The row of a call that a schedule names."""
    rank, position, part = call
    calls = program.code(rank).calls if 0 <= rank < program.world_size else []
    if not 0 <= position < len(calls) or not -1 <= part < len(calls[position].parts):
        raise UsageError(
            f"the schedule names call {position} of rank {rank}, which is not there",
            _REGENERATE_HINT,
        )
    return base[rank] + program.code(rank).offsets[position] + 1 + part
