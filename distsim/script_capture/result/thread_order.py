"""Calls of a rank's threads in one order, which is what a program has.

Threads do not wait for each other's calls. So where the run came through there is an order that
does: each call where all had come whom it is for, on every rank. It is one of many.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, Literal

from distsim.operations.registry import OPERATIONS
from distsim.script_capture.hub.matching import RankCall
from distsim.script_capture.hub.state import HubEvent, RankProcess, with_separate_waits

#: Where a call stands that its thread had not to wait for, as a small message: where it met its
#: other side ("met"), or was made ("early"). "apart": as they were made, and nobody waits before
#: all are. A number: so, but for the waits of the thread of that number.
ThreadOrder = Literal["met", "early", "apart"] | int
_NEVER: Final = 1 << 62
#: Threads of a rank that are looked at one by one.
_MAX_THREADS: Final = 8


def is_multithreaded(member: RankProcess) -> bool:
    """Did several of its threads do something?"""
    return len({e.lane for e in member.events if e.kind != "drop"}) > 1


def calling_threads(members: Iterable[RankProcess]) -> list[int]:
    """The threads that made calls."""
    return sorted({e.lane for m in members for e in m.events if e.kind == "call"})[:_MAX_THREADS]


def events_in_order(members: Sequence[RankProcess], order: ThreadOrder) -> list[list[HubEvent]]:
    """By rank what it did, one after the other, up to where its threads stand."""
    made = [with_separate_waits(m.events) for m in members]
    if not any(map(is_multithreaded, members)):
        return made
    made = [
        _without_unfinished(member, events) for member, events in zip(members, made, strict=True)
    ]
    ends = _ThreadSchedule(members, made, order).run() if order in ("met", "early") else {}
    return [
        _ordered_thread_events(rank, member, events, order, ends)
        if is_multithreaded(member)
        else events
        for rank, (member, events) in enumerate(zip(members, made, strict=True))
    ]


def _without_unfinished(member: RankProcess, events: list[HubEvent]) -> list[HubEvent]:
    """What a thread was in when its rank ended came to nothing."""
    if member.ended is None or not is_multithreaded(member):
        return events
    over = [q.event.wait() for q in member.waiting.values() if q.event is not None]
    gone = {n for e in over for n in (e.number, *e.targets)}
    return [e for e in events if e.number not in gone]


def _ordered_thread_events(
    rank: int,
    member: RankProcess,
    events: list[HubEvent],
    order: ThreadOrder,
    ends: Mapping[tuple[int, int], int],
) -> list[HubEvent]:
    if order in ("met", "early"):
        waits = [
            q.event.wait()
            for q in member.waiting.values()
            if q.event is not None and member.ended is None
        ]
        stands = {e.number: e for e in waits}
        events = sorted(events, key=lambda e: (ends[rank, e.number], e.lane, e.number))
        return _with_final_wait(events, stands) if len(stands) > 1 else events
    late = {
        e.number: e
        for e in events
        if e.lane != order and (e.kind == "wait" or _is_blocking_call(e))
    }
    return _with_final_wait(
        _isolate_thread(events, order) if isinstance(order, int) else events, late
    )


def _is_blocking_call(event: HubEvent) -> bool:
    return event.kind == "call" and not event.is_async


class _ThreadEvents:
    """A thread of a rank. ``at``: how far it has come."""

    def __init__(self, rank: int) -> None:
        self.rank, self.at, self.events = rank, 0, list[HubEvent]()

    def ahead(self) -> list[HubEvent]:
        """What it does next: a call and the wait for it are one."""
        here, then = self.events[self.at], self.events[self.at + 1 : self.at + 2]
        waits = here.kind == "call" and any(
            e.kind == "wait" and here.number in e.targets for e in then
        )
        return [here, *then] if waits else [here]


class _ThreadSchedule:
    """How it goes if every thread goes on as soon as those have come whom it waits for."""

    def __init__(
        self, members: Sequence[RankProcess], made: Sequence[Sequence[HubEvent]], order: ThreadOrder
    ) -> None:
        self.members, self.order = members, order
        self.ends: dict[tuple[int, int], int] = {}
        self.lanes: dict[tuple[int, int], _ThreadEvents] = {}
        self._missing: dict[int, int] = {}  # by meeting: calls that have not come
        self._come: set[int] = set()
        self._met: dict[int, int] = {0: 0}
        for rank, events in enumerate(made):
            for event in events:
                self.lanes.setdefault((rank, event.lane), _ThreadEvents(rank)).events.append(event)
                if event.call is not None:
                    self._missing[event.call.met] = self._missing.get(event.call.met, 0) + 1

    def run(self) -> dict[tuple[int, int], int]:
        """By rank and number: when an event is over. Threads that stand come last."""
        while sum(self._goes(lane) for lane in self.lanes.values()):
            pass
        for lane in self.lanes.values():
            for event in lane.events[lane.at :]:
                self.ends[lane.rank, event.number] = _NEVER
        return self.ends

    def _goes(self, lane: _ThreadEvents) -> bool:
        """Let a thread go on. Did it come to anything?"""
        before = lane.at, len(self._come)
        while lane.at < len(lane.events):
            parts = lane.ahead()
            for event in parts:
                self._comes(event.call)
            needed = _required_matches(parts, self.members[lane.rank].calls, self.order)
            if not needed <= self._met.keys():
                break
            over = max((self._met[n] for n in needed), default=len(self._met))
            self.ends.update({(lane.rank, e.number): over for e in parts})
            lane.at += len(parts)
        return before != (lane.at, len(self._come))

    def _comes(self, call: RankCall | None) -> None:
        if call is None or not call.met or id(call) in self._come:
            return
        self._come.add(id(call))
        self._missing[call.met] -= 1
        if not self._missing[call.met]:
            self._met[call.met] = len(self._met)


def _required_matches(
    parts: Sequence[HubEvent], calls: Mapping[int, RankCall], order: ThreadOrder
) -> set[int]:
    """The meetings that a thread waits for here."""
    waited = [calls[t] for e in parts if e.kind == "wait" for t in e.targets if t in calls]
    waited += [e.call for e in parts if e.call is not None and _is_blocking_call(e)]
    return {c.met if c.done else -1 for c in waited if not (order == "early" and _needs_no_peer(c))}


def _needs_no_peer(call: RankCall) -> bool:
    """Need it nobody to have come?"""
    row = OPERATIONS[call.op]
    root = call.team.ranks.index(call.peer) if call.peer in call.team.ranks else 0
    me = call.team.ranks.index(call.rank)
    return call.op == "isend" or (
        row.kind == "collective"
        and set(row.takes_from(len(call.team.ranks), root, me) or (-1,)) <= {me}
    )


def _isolate_thread(events: Iterable[HubEvent], lane: int) -> list[HubEvent]:
    """A thread's waits right before what it did next; what the others called as early as the order
    within a group allows.
    """
    events = list(events)
    own = {_ordering_key(e) for e in events if e.lane == lane and e.kind == "call"}
    found: list[HubEvent] = []
    held: list[HubEvent] = []
    made = 0  # behind the last group that was made
    for event in events:
        if event.lane != lane and event.kind == "call" and _ordering_key(event) not in own:
            found.insert(made, event)
            made += 1
            continue
        if event.lane == lane and event.kind != "drop":
            found += held
            held = []
        if event.lane == lane and event.kind == "wait":
            held.append(event)
        elif event.lane == lane and _is_blocking_call(event):
            found.append(replace(event, is_async=True))
            held.append(
                HubEvent(event.number, "wait", event.site, targets=(event.number,), lane=event.lane)
            )
        else:
            found.append(event)
            made = made if event.kind in ("call", "wait", "drop", "future") else len(found)
    return found + held


def _ordering_key(event: HubEvent) -> tuple[int, str]:
    """Calls of one way meet in the order in which they are made."""
    call = event.call
    return (
        (0, "")
        if call is None
        else (id(call.team), call.op if OPERATIONS[call.op].kind == "p2p" else "")
    )


def _with_final_wait(events: Iterable[HubEvent], late: Mapping[int, HubEvent]) -> list[HubEvent]:
    """These calls as requests, and one wait for all of them at the end."""
    found = [
        replace(e, is_async=True) if e.number in late else e
        for e in events
        if e.number not in late or e.kind == "call"
    ]
    targets = tuple(
        t for e in late.values() for t in (e.targets if e.kind == "wait" else (e.number,))
    )
    first = next(iter(late.values()), None)
    if first is None:
        return found
    return [
        *found,
        HubEvent(
            max(e.number for e in found), "wait", first.site, targets=targets, lane=first.lane
        ),
    ]
