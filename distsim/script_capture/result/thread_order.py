"""Put the calls of a rank's threads into one order, which is what a program has.

Threads do not wait for each other's calls. So if the run completed, there is an order of the calls
that completes: each call at the point where all calls that it needs had arrived, on every rank. It
is one of many.

If that order hangs under the rules of a backend, others are tried (`ThreadOrder`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple

from distsim.operations.registry import OPERATIONS
from distsim.script_capture.hub.matching import RankCall
from distsim.script_capture.hub.state import HubEvent, RankProcess, with_separate_waits

#: Where to place a call for which its thread did not have to wait, such as a small message.
#:
#: - "met": where it matched its partner.
#: - "early": where it was made.
#: - "apart": all calls as they were made, and all waits after all calls.
#: - a number: as "apart", but the waits of the thread of that number stay where they were.
ThreadOrder = Literal["met", "early", "apart"] | int
#: Sorts after all numbers of matches.
_NEVER: Final = 1 << 62
#: `_required_matches` of a call that is not done.
_NOT_DONE: Final = -1
#: Threads that are tried one by one.
_MAX_THREADS: Final = 8


class _EventKey(NamedTuple):
    """An event of any rank."""

    rank: int
    number: int


def is_multithreaded(process: RankProcess) -> bool:
    """Whether several of its threads made calls or waits."""
    kinds_without_call = ("drop", "streams")
    threads = {event.thread for event in process.events if event.kind not in kinds_without_call}
    return len(threads) > 1


def calling_threads(processes: Iterable[RankProcess]) -> list[int]:
    """The threads that made calls, at most `_MAX_THREADS`."""
    threads: set[int] = set()
    for process in processes:
        threads.update(event.thread for event in process.events if event.kind == "call")
    return sorted(threads)[:_MAX_THREADS]


def events_in_order(processes: Sequence[RankProcess], order: ThreadOrder) -> list[list[HubEvent]]:
    """For each rank its events in one order, up to the calls in which its threads are blocked."""
    events_by_rank = [with_separate_waits(process.events) for process in processes]
    if not any(map(is_multithreaded, processes)):
        return events_by_rank
    for rank, process in enumerate(processes):
        if is_multithreaded(process):
            events_by_rank[rank] = _without_unfinished(process, events_by_rank[rank])
    ends: Mapping[_EventKey, int] = {}
    if order in ("met", "early"):
        ends = _ThreadSchedule(processes, events_by_rank, order).run()
    for rank, process in enumerate(processes):
        if is_multithreaded(process):
            events = events_by_rank[rank]
            if order in ("met", "early"):
                events_by_rank[rank] = _ordered_by_end(rank, process, events, ends)
            else:
                events_by_rank[rank] = _with_late_waits(events, order)
    return events_by_rank


def _without_unfinished(process: RankProcess, events: list[HubEvent]) -> list[HubEvent]:
    """Without the calls that a thread was in when its rank ended: they had no effect."""
    if process.ended is None:
        return events
    unfinished: set[int] = set()
    for pending in process.waiting.values():
        if pending.event is not None:
            wait = pending.event.wait()
            unfinished.update((wait.number, *wait.targets))
    return [event for event in events if event.number not in unfinished]


def _ordered_by_end(
    rank: int,
    process: RankProcess,
    events: Sequence[HubEvent],
    ends: Mapping[_EventKey, int],
) -> list[HubEvent]:
    """Events in the order in which they end.

    If several threads are blocked, all their calls become requests with one wait at the end. Only
    so are all of them blocked.
    """
    ordered = sorted(
        events, key=lambda event: (ends[_EventKey(rank, event.number)], event.thread, event.number)
    )
    if process.ended is not None:
        return ordered
    blocked: dict[int, HubEvent] = {}
    for pending in process.waiting.values():
        if pending.event is not None:
            wait = pending.event.wait()
            blocked[wait.number] = wait
    return _with_final_wait(ordered, blocked) if len(blocked) > 1 else ordered


def _with_late_waits(events: list[HubEvent], order: ThreadOrder) -> list[HubEvent]:
    """Events with all waits at the end, except those of the thread ``order``."""
    late: dict[int, HubEvent] = {}
    for event in events:
        if event.thread != order and (event.kind == "wait" or _is_blocking_call(event)):
            late[event.number] = event
    if isinstance(order, int):
        events = _isolate_thread(events, order)
    return _with_final_wait(events, late)


def _is_blocking_call(event: HubEvent) -> bool:
    return event.kind == "call" and not event.is_async


# --- the schedule ---
@dataclass
class _ThreadEvents:
    """The events of one thread; the first ``position`` of them are scheduled."""

    rank: int
    events: list[HubEvent] = field(default_factory=list)
    position: int = 0

    @property
    def is_finished(self) -> bool:
        return self.position == len(self.events)

    def next_step(self) -> list[HubEvent]:
        """The next event; a call and the wait that follows it are one step."""
        event = self.events[self.position]
        following = self.events[self.position + 1 : self.position + 2]
        if event.kind == "call" and following:
            wait = following[0]
            if wait.kind == "wait" and event.number in wait.targets:
                return [event, wait]
        return [event]


class _ThreadSchedule:
    """Schedule the threads of all ranks: each continues once the matches that it needs happened.

    Time is the number of matches so far. A match happens when the last of its calls has arrived.
    """

    def __init__(
        self,
        processes: Sequence[RankProcess],
        events_by_rank: Sequence[Sequence[HubEvent]],
        order: ThreadOrder,
    ) -> None:
        self.processes = processes
        self.order = order
        self.ends: dict[_EventKey, int] = {}
        self._threads: dict[tuple[int, int], _ThreadEvents] = {}
        self._arrived: set[int] = set()  # ids of calls
        #: For each match, how many of its calls have not arrived.
        self._missing: dict[int, int] = {}
        #: For each match that has happened, its time. Calls without a match need none.
        self._match_times: dict[int, int] = {0: 0}
        for rank, events in enumerate(events_by_rank):
            for event in events:
                thread = self._threads.setdefault((rank, event.thread), _ThreadEvents(rank))
                thread.events.append(event)
                if event.call is not None:
                    match = event.call.match_number
                    self._missing[match] = self._missing.get(match, 0) + 1

    def run(self) -> dict[_EventKey, int]:
        """When each event ends; those of blocked threads never."""
        has_progress = True
        while has_progress:
            has_progress = False
            for thread in self._threads.values():
                if self._advance(thread):
                    has_progress = True
        for thread in self._threads.values():
            for event in thread.events[thread.position :]:
                self.ends[_EventKey(thread.rank, event.number)] = _NEVER
        return self.ends

    def _advance(self, thread: _ThreadEvents) -> bool:
        """Advance a thread as far as possible. Returns whether anything happened.

        A step that cannot end yet still makes its call arrive.
        """
        before = (thread.position, len(self._arrived))
        calls = self.processes[thread.rank].calls
        while not thread.is_finished:
            step = thread.next_step()
            for event in step:
                self._arrive(event.call)
            needed = _required_matches(step, calls, self.order)
            if not needed <= self._match_times.keys():
                break
            end = max((self._match_times[match] for match in needed), default=self._now())
            for event in step:
                self.ends[_EventKey(thread.rank, event.number)] = end
            thread.position += len(step)
        return before != (thread.position, len(self._arrived))

    def _now(self) -> int:
        return len(self._match_times)

    def _arrive(self, call: RankCall | None) -> None:
        if call is None or not call.match_number or id(call) in self._arrived:
            return
        self._arrived.add(id(call))
        match = call.match_number
        self._missing[match] -= 1
        if not self._missing[match]:
            self._match_times[match] = self._now()


def _required_matches(
    step: Sequence[HubEvent], calls: Mapping[int, RankCall], order: ThreadOrder
) -> set[int]:
    """The numbers of the matches that a thread waits for in a step."""
    waited: list[RankCall] = []
    for event in step:
        if event.kind == "wait":
            waited += [calls[target] for target in event.targets if target in calls]
        if event.call is not None and _is_blocking_call(event):
            waited.append(event.call)
    if order == "early":
        waited = [call for call in waited if not _needs_no_peer(call)]
    return {call.match_number if call.done else _NOT_DONE for call in waited}


def _needs_no_peer(call: RankCall) -> bool:
    """Whether a call can complete although no other rank has arrived."""
    operation = OPERATIONS[call.op]
    if operation.direction == "send":
        return True
    if operation.kind != "collective":
        return False
    group = call.group
    group_rank = group.group_rank(call.rank)
    needed = operation.takes_from(len(group.ranks), group.root_of(call), group_rank)
    if not needed:  # None means all members
        return False
    return set(needed) <= {group_rank}


# --- other orders ---
def _isolate_thread(events: Iterable[HubEvent], thread: int) -> list[HubEvent]:
    """Move the waits of one thread as late, and the calls of the others as early, as possible.

    A wait of the thread comes right before what the thread did next. Calls of other threads come as
    early as the order within their group, and the creation of groups, allow. If the thread still
    waits for ever, it would so in any order.
    """
    events = list(events)
    own_keys = {
        _ordering_key(event) for event in events if event.thread == thread and event.kind == "call"
    }
    found: list[HubEvent] = []
    waits: list[HubEvent] = []
    insertion = 0  # behind the last creation of a group, and the calls inserted there
    for event in events:
        is_own = event.thread == thread
        if not is_own and event.kind == "call" and _ordering_key(event) not in own_keys:
            found.insert(insertion, event)
            insertion += 1
            continue
        if is_own and event.kind != "drop":
            found += waits
            waits = []
        if is_own and event.kind == "wait":
            waits.append(event)
        elif is_own and _is_blocking_call(event):
            found.append(replace(event, is_async=True))
            waits.append(_wait_for(event))
        else:
            found.append(event)
            if event.kind not in ("call", "wait", "drop", "future"):
                insertion = len(found)
    return found + waits


def _wait_for(call: HubEvent) -> HubEvent:
    return HubEvent(
        call.number,
        "wait",
        call.site,
        targets=(call.number,),
        thread=call.thread,
        stream=call.stream,
    )


def _ordering_key(event: HubEvent) -> tuple[int, str]:
    """Calls with the same key match in the order in which they are made."""
    call = event.call
    if call is None:
        return (0, "")
    # Sends, receives and collectives of a group do not match each other.
    kind = call.op if OPERATIONS[call.op].kind == "p2p" else ""
    return (id(call.group), kind)


def _with_final_wait(events: Iterable[HubEvent], late: Mapping[int, HubEvent]) -> list[HubEvent]:
    """The late calls as requests, and one wait for all that is late at the end."""
    found: list[HubEvent] = []
    for event in events:
        if event.number not in late:
            found.append(event)
        elif event.kind == "call":
            found.append(replace(event, is_async=True))
    if not late:
        return found
    targets: list[int] = []
    for event in late.values():
        targets += event.targets if event.kind == "wait" else (event.number,)
    first = next(iter(late.values()))
    number = max(event.number for event in found)
    wait = HubEvent(number, "wait", first.site, targets=tuple(targets), thread=first.thread)
    return [*found, wait]
