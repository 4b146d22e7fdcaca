"""When no rank says anything: whether all stand still, what only time would bring about then, and
time-outs that pass.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final, Literal

from distsim.backends.gloo import monitored_barrier_error
from distsim.backends.profile import BackendProfile
from distsim.script_capture.hub.state import PendingReply, RankProcess
from distsim.script_capture.hub.store_polling import (
    StorePollTracker,
    all_blocked_or_asleep,
    process_snapshots,
    request_held_calls,
)

if TYPE_CHECKING:
    from distsim.script_capture.hub.event_loop import Hub

#: Seconds of silence after which what time would decide is decided, although some process is not
#: done with its sleeps.
_LONG_QUIET_S: Final = 0.3
#: As many answers "not yet" in a row, to ranks that only ask, are a standstill.
_MAX_POLLS: Final = 400
#: Seconds of silence after which ranks are asked for calls that they have not said; between two
#: such questions where others go on.
_HELD_CALLS_DELAY_S: Final = 0.01
_HELD_CALLS_INTERVAL_S: Final = 0.05
#: Seconds after which threads are asked whether a line of the user's runs in them.
_IDLE_THREADS_INTERVAL_S: Final = 1.0


class QuiescenceHandler:
    """Of one hub. ``asking``: who asks again and again for a key; ``stood``: the ranks before the
    first time-out passed.
    """

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.asking = StorePollTracker()
        self.stood: dict[int, RankProcess] | None = None
        self._asked_threads, self._next_ask_s = 0, 0.0

    def interrupted(self, now_s: float) -> None:
        """Somebody said something. Who may hold calls back is asked for them all the same, now and
        then.
        """
        if now_s > self._next_ask_s:
            self._ask_held()

    def after(self, quiet_s: float) -> Literal["moved", "stalled", "busy"]:
        """What comes of so many seconds of silence: something happens that waited for nothing else,
        nothing can go on, or somebody is at work."""
        if quiet_s > _HELD_CALLS_DELAY_S:
            self._ask_held()
        if self._is_still(quiet_s):
            if self._decide():
                return "moved"
            self._stand()
            return "stalled"
        return (
            "moved"
            if quiet_s > _LONG_QUIET_S
            and all_blocked_or_asleep(self.hub.living())
            and self._go_on()
            else "busy"
        )

    def _ask_held(self) -> bool:
        self._next_ask_s = time.monotonic() + _HELD_CALLS_INTERVAL_S
        return request_held_calls(self.hub.members.values(), self.hub.living(), self.hub.progress)

    def _is_still(self, quiet_s: float) -> bool:
        asked = self.asking.over(self.hub.progress)
        living = [m for m in self.hub.living() if m.pid not in asked or m.waiting]
        if not (living or asked) or not all(m.is_waiting() for m in living):
            return False
        if self._ask_held():
            return False
        if (
            quiet_s > _IDLE_THREADS_INTERVAL_S * (1 + self._asked_threads)
            and self._asked_threads < 20
        ):
            self._asked_threads += 1
            for member in living:
                member.ask("threads")
        looks, progress = process_snapshots(self.hub.living(), asked), self.hub.progress
        if any(found is None for found in looks):
            return False
        if self.hub.listen(0.0005) and (not asked or self.hub.progress != progress):
            return False
        return looks == process_snapshots(self.hub.living(), asked) and all(
            m.is_waiting() for m in living
        )

    def _decide(self) -> bool:
        """All stand still: let the one thing happen that time would bring about. False where there
        is none.
        """
        hub = self.hub
        taken = hub.matching.match_any_source()
        if taken:
            for call in taken:
                hub.tell(call)
            return True
        polling = sorted(
            (m.rank, n) for m in hub.living() for n, q in m.waiting.items() if q.poll is not None
        )
        if polling and hub.polls < _MAX_POLLS:
            hub.polls += 1
            hub.ranks[polling[0][0]].waiting.pop(polling[0][1]).answer(["not yet"])
            return True
        waits = sorted(
            waits_with_timeout(hub.living(), hub.matching.profile),
            key=lambda wait: (wait[0], wait[1].rank, wait[1].pid, wait[2]),
        )
        for limit_ns, member, number in waits:
            if limit_ns == waits[0][0]:
                self._expire(limit_ns, member, number)
        return bool(waits)

    def _go_on(self) -> bool:
        """Who needs no more than time goes on. Time-outs pass that are over on the clock."""
        hub = self.hub
        taken = hub.matching.match_any_source()
        for call in taken:
            hub.tell(call)
        polling = [(m, n) for m in hub.living() for n, q in m.waiting.items() if q.poll is not None]
        for member, number in polling:
            member.waiting.pop(number).answer(["not yet"])
        now = time.monotonic()
        waits = waits_with_timeout(hub.living(), hub.matching.profile)
        late = [(limit, m, n) for limit, m, n in waits if (now - m.waiting[n].since) * 1e9 > limit]
        for limit, member, number in late:
            self._expire(limit, member, number)
        return bool(taken or polling or late)

    def _expire(self, limit_ns: int, member: RankProcess, number: int) -> None:
        """A time-out passes. How all stood before is kept: that is what there is to explain."""
        if self.stood is None:
            self.stood = {r: m.snapshot() for r, m in self.hub.ranks.items()}
        question = member.waiting.pop(number)
        question.refuse(
            "store" if question.keys is not None else "error",
            timeout_message(question, member.rank, limit_ns),
        )

    def _stand(self) -> None:
        """Who asks again and again whether a call is done, or a key is there, waits for it."""
        for each in self.asking.over(self.hub.progress).values():
            if not each.member.waiting:
                each.member.waiting[0] = each.question
        for member in self.hub.ranks.values():
            member.record_polls_as_waits()


def timeout_of(question: PendingReply, profile: BackendProfile) -> int | None:
    """A wait's own time-out in ns; else that of its group, where the script gave one and the back
    end then raises.
    """
    if question.limit_ns is not None or question.call is None:
        return question.limit_ns
    return question.call.team.timeout_ns if profile.timed_out == "raises" else None


def waits_with_timeout(
    members: Iterable[RankProcess], profile: BackendProfile
) -> Iterator[tuple[int, RankProcess, int]]:
    """Waits that have a time-out, in ns: whose, and under which number."""
    for member in members:
        for number, question in member.waiting.items():
            limit = timeout_of(question, profile)
            if limit is not None:
                yield limit, member, number


def timeout_message(question: PendingReply, rank: int, limit_ns: int) -> str:
    """What gloo says of a wait that outlasts its time-out (ProcessGroupGloo.cpp,
    unbound_buffer.cc).
    """
    call, ms = question.call, limit_ns // 10**6
    if question.keys is not None:
        return f"wait timeout after {ms}ms, keys: {', '.join(question.keys)}"
    if call is None or call.op != "monitored_barrier" or call.gathering is None:
        return f"[distsim] Timed out waiting {ms}ms for {call.op if call is not None else 'operation'} to complete"
    ranks = call.team.ranks
    there = {
        k for k, other in call.gathering.there.items() if other.op == call.op
    }  # elsewhere is not here
    if rank == ranks[0] and not ms:
        return f"Rank {rank} timed out in monitoredBarrier after 0 ms."
    if rank == ranks[0]:
        missing = [r for k, r in enumerate(ranks) if k not in there]
        return monitored_barrier_error(
            rank, missing, bool(call.side.extra.get("wait_all_ranks")), limit_ns
        )
    if 0 not in there:
        return f"Rank {rank} timed out in monitoredBarrier after {ms} ms."
    return (
        f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank"
        f" {ranks[0]}. Please check rank {ranks[0]} logs for faulty rank."
    )
