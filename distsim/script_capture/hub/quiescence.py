"""What the hub does when no rank says anything: the only place where time passes.

If every process is blocked (`distsim.script_capture.protocol.blocked_threads`), nothing but time
can change that. So the hub lets happen, at once, what time would bring about: a receive from any
source takes a message, a poll is answered "not yet", or the shortest timeouts expire. If there is
nothing of the kind, the program hangs. A hang is therefore detected immediately, and no timeout has
to be waited for.

Processes that only sleep now and then never count as blocked. For them the same things happen after
a longer silence, but timeouts expire by the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Literal, NamedTuple

from distsim.backends.gloo import monitored_barrier_error
from distsim.backends.profile import BackendProfile
from distsim.script_capture.hub.matching import RankCall
from distsim.script_capture.hub.state import HubState, PendingReply, RankProcess
from distsim.script_capture.hub.store_polling import (
    StorePollTracker,
    all_blocked_or_asleep,
    process_snapshots,
    request_held_calls,
)

#: Seconds of silence after which time passes although some process sleeps now and then.
_LONG_QUIET_S: Final = 0.3
#: So many polls in a row answered "not yet", without any progress, are a hang.
_MAX_POLLS: Final = 400
#: Seconds of silence after which processes are asked for calls that they have not sent yet, and
#: between two such requests if others make progress.
_HELD_CALLS_DELAY_S: Final = 0.01
_HELD_CALLS_INTERVAL_S: Final = 0.05
#: After every so many seconds of silence, processes are asked which threads run no user code.
_IDLE_THREADS_INTERVAL_S: Final = 1.0
_MAX_IDLE_THREADS_REQUESTS: Final = 20
#: Seconds for which the hub listens between two snapshots of the processes.
_SNAPSHOT_INTERVAL_S: Final = 0.0005


class TimedWait(NamedTuple):
    """A wait that has a timeout: its number in `RankProcess.waiting`."""

    timeout_ns: int
    process: RankProcess
    number: int


class QuiescenceHandler:
    """Decides what happens in silence.

    ``listen`` handles messages that arrive within so many seconds, and returns whether there were
    any. ``store_polls`` tracks processes that poll the store. ``ranks_before_timeout`` has the
    ranks as they were before the first timeout expired.
    """

    def __init__(self, state: HubState, listen: Callable[[float], bool]) -> None:
        self.state = state
        self.listen = listen
        self.store_polls = StorePollTracker()
        self.ranks_before_timeout: dict[int, RankProcess] | None = None
        self._idle_threads_requests = 0
        self._next_request_s = 0.0

    def after_message(self, now_s: float) -> None:
        """Ask for calls that were not sent yet, now and then, although there is no silence.

        Otherwise a rank could wait for such a call for as long as others are busy.
        """
        if now_s > self._next_request_s:
            self._request_held_calls()

    def after_silence(self, quiet_s: float) -> Literal["moved", "stalled", "busy"]:
        """What follows from so many seconds of silence.

        "moved": something happened that only needed time. "stalled": nothing can happen any more.
        "busy": some process is at work.
        """
        if quiet_s > _HELD_CALLS_DELAY_S:
            self._request_held_calls()
        if self._all_blocked(quiet_s):
            if self._advance_time():
                return "moved"
            self._record_loops_as_waits()
            return "stalled"
        if quiet_s <= _LONG_QUIET_S:
            return "busy"
        if not all_blocked_or_asleep(self.state.running_processes()):
            return "busy"
        return "moved" if self._advance_by_clock() else "busy"

    def _request_held_calls(self) -> bool:
        self._next_request_s = time.monotonic() + _HELD_CALLS_INTERVAL_S
        state = self.state
        return request_held_calls(
            state.processes.values(), state.running_processes(), state.progress
        )

    def _all_blocked(self, quiet_s: float) -> bool:
        """Whether no process can run: two equal snapshots, with no message in between."""
        state = self.state
        polling = self.store_polls.polling_loops(state.progress)
        # A process that only polls the store does not wait for the hub.
        expected_to_wait = [
            process
            for process in state.running_processes()
            if process.pid not in polling or process.waiting
        ]
        if not expected_to_wait and not polling:
            return False
        if not all(process.is_waiting() for process in expected_to_wait):
            return False
        if self._request_held_calls():
            return False
        self._request_idle_threads(expected_to_wait, quiet_s)

        progress = state.progress
        before = process_snapshots(state.running_processes(), polling)
        if any(snapshot is None for snapshot in before):
            return False
        has_message = self.listen(_SNAPSHOT_INTERVAL_S)
        # With polling loops, the message may be one of their questions, which is no progress.
        if has_message and (not polling or state.progress != progress):
            return False
        if before != process_snapshots(state.running_processes(), polling):
            return False
        return all(process.is_waiting() for process in expected_to_wait)

    def _request_idle_threads(self, processes: Iterable[RankProcess], quiet_s: float) -> None:
        """Ask which threads run no user code: a library's own thread may never block."""
        next_request_s = _IDLE_THREADS_INTERVAL_S * (1 + self._idle_threads_requests)
        if quiet_s <= next_request_s or self._idle_threads_requests >= _MAX_IDLE_THREADS_REQUESTS:
            return
        self._idle_threads_requests += 1
        for process in processes:
            process.notify("threads")

    def _advance_time(self) -> bool:
        """All are blocked: let the first thing happen that time would bring about, if any.

        The order matters: a message that can be received comes before an unsuccessful poll, and
        both come before a timeout.
        """
        state = self.state
        received = state.matcher.match_any_source()
        if received:
            for call in received:
                state.deliver(call)
            return True
        polls = sorted((process.rank, number) for process, number in self._open_polls())
        if polls and state.polls < _MAX_POLLS:
            state.polls += 1
            rank, number = polls[0]
            state.ranks[rank].waiting.pop(number).reply(["not yet"])
            return True
        waits = list(waits_with_timeout(state.running_processes(), state.matcher.profile))
        waits.sort(
            key=lambda wait: (wait.timeout_ns, wait.process.rank, wait.process.pid, wait.number)
        )
        for wait in waits:
            if wait.timeout_ns == waits[0].timeout_ns:
                self._expire(wait)
        return bool(waits)

    def _advance_by_clock(self) -> bool:
        """Some process sleeps: let everything happen that needs no more than time.

        Only timeouts expire that have passed on the clock. Returns whether anything happened.
        """
        state = self.state
        received = state.matcher.match_any_source()
        for call in received:
            state.deliver(call)
        polls = list(self._open_polls())
        for process, number in polls:
            process.waiting.pop(number).reply(["not yet"])
        now = time.monotonic()
        expired = []
        for wait in waits_with_timeout(state.running_processes(), state.matcher.profile):
            waited_s = now - wait.process.waiting[wait.number].since
            if waited_s * 1e9 > wait.timeout_ns:
                expired.append(wait)
        for wait in expired:
            self._expire(wait)
        return bool(received or polls or expired)

    def _open_polls(self) -> Iterator[tuple[RankProcess, int]]:
        """Polls of calls that are not done: the process, and the poll's number."""
        for process in self.state.running_processes():
            for number, pending in process.waiting.items():
                if pending.polled_call is not None:
                    yield process, number

    def _expire(self, wait: TimedWait) -> None:
        """Let a timeout expire. The state before the first one is kept: it explains the rest."""
        if self.ranks_before_timeout is None:
            self.ranks_before_timeout = {
                rank: process.snapshot() for rank, process in self.state.ranks.items()
            }
        pending = wait.process.waiting.pop(wait.number)
        kind = "error" if pending.keys is None else "store"
        text = timeout_message(pending, wait.process.rank, wait.timeout_ns)
        pending.reply_error(kind, text)

    def _record_loops_as_waits(self) -> None:
        """Treat a process that polls for a call or for a key in a loop as one that waits for it."""
        for check in self.store_polls.polling_loops(self.state.progress).values():
            if not check.process.waiting:
                check.process.waiting[0] = check.question
        for process in self.state.ranks.values():
            process.record_polls_as_waits()


def timeout_of(pending: PendingReply, profile: BackendProfile) -> int | None:
    """The timeout of a wait in ns, None if it never expires.

    The wait's own timeout comes first. That of its group counts only if the script set it and the
    backend then raises.
    """
    if pending.timeout_ns is not None or pending.call is None:
        return pending.timeout_ns
    return pending.call.group.timeout_ns if profile.timed_out == "raises" else None


def waits_with_timeout(
    processes: Iterable[RankProcess], profile: BackendProfile
) -> Iterator[TimedWait]:
    """The waits of these processes that can time out."""
    for process in processes:
        for number, pending in process.waiting.items():
            timeout_ns = timeout_of(pending, profile)
            if timeout_ns is not None:
                yield TimedWait(timeout_ns, process, number)


def timeout_message(pending: PendingReply, rank: int, timeout_ns: int) -> str:
    """The text that gloo raises when a wait times out (ProcessGroupGloo.cpp, unbound_buffer.cc)."""
    call = pending.call
    timeout_ms = timeout_ns // 10**6
    if pending.keys is not None:
        return f"wait timeout after {timeout_ms}ms, keys: {', '.join(pending.keys)}"
    if call is not None and call.op == "monitored_barrier" and call.collective is not None:
        arrived = {
            group_rank
            for group_rank, other in call.collective.arrived.items()
            if other.op == call.op  # a rank that called something else has not arrived
        }
        return _monitored_barrier_message(call, arrived, rank, timeout_ns)
    op = call.op if call is not None else "operation"
    return f"[distsim] Timed out waiting {timeout_ms}ms for {op} to complete"


def _monitored_barrier_message(
    call: RankCall, arrived: set[int], rank: int, timeout_ns: int
) -> str:
    """Group rank 0 names the missing ranks; the others only know whether group rank 0 arrived."""
    ranks = call.group.ranks
    timeout_ms = timeout_ns // 10**6
    if rank == ranks[0]:
        if not timeout_ms:
            return f"Rank {rank} timed out in monitoredBarrier after 0 ms."
        missing = [r for group_rank, r in enumerate(ranks) if group_rank not in arrived]
        wait_all_ranks = bool(call.contribution.extra.get("wait_all_ranks"))
        return monitored_barrier_error(rank, missing, wait_all_ranks, timeout_ns)
    if 0 not in arrived:
        return f"Rank {rank} timed out in monitoredBarrier after {timeout_ms} ms."
    return (
        f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting"
        f" for send/recv from rank {ranks[0]}. Please check rank {ranks[0]} logs for faulty rank."
    )
