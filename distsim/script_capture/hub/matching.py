"""Who meets whom among calls of running ranks, under the most permissive reading of the contract.

A message is buffered, so its sender never waits. The k-th collective of a group meets the k-th; a
member may go on as soon as those have come whose data end with it. What does not fit never meets.
All that a back end adds, `distsim.semantics` judges afterwards.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from distsim.backends.message_matching import ANY_SENDER, MessageMatcher
from distsim.backends.profile import BackendProfile
from distsim.operations.registry import OPERATIONS
from distsim.script_capture.hub.collective_results import (
    CallContribution,
    CollectiveExecutor,
    Payload,
)
from distsim.script_capture.protocol.wire import SharedMemoryRegions, free_payload


@dataclass(eq=False)
class GroupInstance:
    """A process group as ranks share it. ``generation``: how many of this name and these ranks a
    rank had made before.
    """

    name: str
    ranks: tuple[int, ...]
    backend: str
    generation: int
    timeout_ns: int | None = None
    title: str = ""
    is_world: bool = False
    calls: dict[tuple[str, int], CollectiveInstance] = field(default_factory=dict)
    counts: dict[tuple[str, int], int] = field(
        default_factory=dict
    )  # collectives by device and rank


@dataclass(eq=False, slots=True)
class RankCall:
    """A call that a rank made. ``outs``: what it gets, once that is settled."""

    rank: int
    number: int
    op: str
    team: GroupInstance
    peer: int
    tag: int
    side: CallContribution
    outs: list[list[Payload]] | None = None
    source: int = -1
    gathering: CollectiveInstance | None = None
    origin: RankCall | None = None  # of a receive: the send that it took
    limit_ns: int | None = None
    waits: bool = False  # its rank is in a wait for it
    met: int = 0  # with which calls it met: they have the same number; 0 before all have come

    @property
    def on(self) -> str:
        """The device of its tensors, where its group has a back end for each; calls on different
        ones never meet.
        """
        extra = self.side.extra
        return str(extra.get("on", "")) if extra else ""

    @property
    def done(self) -> bool:
        return self.outs is not None


@dataclass(eq=False)
class CollectiveInstance:
    """One collective: who has come, by group rank."""

    there: dict[int, RankCall] = field(default_factory=dict)
    reduced: dict[Hashable, list[list[Payload]]] = field(default_factory=dict)
    readers: int = 0
    settled: int = 0


class CallMatcher:
    """The state. ``post`` returns the calls that are done now. ``meetings``: how many there
    were.
    """

    def __init__(self, regions: SharedMemoryRegions, profile: BackendProfile) -> None:
        self.regions, self.profile, self.mover = regions, profile, CollectiveExecutor(regions)
        self.matcher = MessageMatcher(profile.specific_first)
        self.items: list[RankCall] = []
        self.meetings = 0
        self.group_instances: dict[Hashable, GroupInstance] = {}

    def team(self, facts: Sequence[Any], generation: int) -> GroupInstance:
        """The group of a name, its ranks and how often this rank made it. ``facts``: as `patches`
        says them.
        """
        name, ranks, backend, timeout_ns, title, is_world = facts
        key = (name, tuple(ranks), generation)
        if key not in self.group_instances:
            self.group_instances[key] = GroupInstance(
                name, tuple(ranks), backend, generation, timeout_ns, title, is_world
            )
        return self.group_instances[key]

    def post(self, call: RankCall) -> list[RankCall]:
        """Add a call. Returns all that are done by it."""
        return self._message(call) if OPERATIONS[call.op].kind == "p2p" else self._collective(call)

    # --- messages ---
    def _box(self, call: RankCall, receiver: int) -> Hashable:
        return (id(call.team), receiver, call.tag if self.profile.tags else 0, call.on)

    def post_receive(self, call: RankCall) -> list[RankCall]:
        """`post` of a receive that names its sender. Where nothing is on its way there it waits,
        and that is all.
        """
        box = self._box(call, call.rank)
        if box in self.matcher.boxes:
            return self.post(call)
        self.matcher.receive(box, call.peer, len(self.items))
        self.items.append(call)
        return []

    def match_waiting_receive(self, call: RankCall) -> RankCall | None:
        """The receive that takes this message at once, if there is but that one: they have met.
        Else the send is to be posted.
        """
        box = self._box(call, call.peer)
        place = self.matcher.boxes.get(box)
        if (
            place is None
            or place.sends
            or len(place.receives) != 1
            or len(waiting := place.receives.get(call.rank, [])) != 1
        ):
            return None
        del self.matcher.boxes[box]
        self.meetings += 1
        taker = self.items[waiting[0][1]]
        taker.met = call.met = self.meetings
        taker.source, call.outs = call.rank, []
        return taker

    def _message(self, call: RankCall) -> list[RankCall]:
        item = len(self.items)
        self.items.append(call)
        if call.op == "isend":
            box = self._box(call, call.peer)
            self.matcher.send(box, call.rank, item)
            call.outs = []
            return [call, *self._met(box, call.rank)]
        box = self._box(call, call.rank)
        self.matcher.receive(box, call.peer if call.peer >= 0 else ANY_SENDER, item)
        if call.peer < 0 and len(call.team.ranks) == 2:  # only one can be meant
            return [*self._takes(box), *self._meetings(box)]
        return self._met(box, call.peer) if call.peer >= 0 else []

    def _met(self, box: Hashable, sender: int) -> list[RankCall]:
        """What a send or a receive that names its sender settles: at most one message of that
        sender.
        """
        pair = self.matcher.meet(box, sender)
        return [] if pair is None else [self._hand_over(*pair)]

    def _meetings(self, box: Hashable) -> list[RankCall]:
        found: list[RankCall] = []
        place = self.matcher.boxes.get(box)
        while place is not None:
            pair = None
            for sender in sorted(place.sends):
                pair = self.matcher.meet(box, sender)
                if pair is not None:
                    break
            if pair is None:
                break
            found.append(self._hand_over(*pair))
            place = self.matcher.boxes.get(box)
        return found

    def _takes(self, box: Hashable) -> list[RankCall]:
        if box not in self.matcher.boxes or not (takes := self.matcher.takes_of(box)):
            return []
        return [
            self._hand_over(*self.matcher.take(box, min(self.items[t.send].rank for t in takes)))
        ]

    def match_any_source(self) -> list[RankCall]:
        """At a standstill: the receive from any source of the lowest rank takes the message of the
        lowest.
        """
        open_boxes = [box for box in self.matcher.boxes if self.matcher.takes_of(box)]
        if not open_boxes:
            return []
        receiver = {
            box: self.items[self.matcher.takes_of(box)[0].receive].rank for box in open_boxes
        }
        box = min(open_boxes, key=lambda b: (receiver[b], self.matcher.takes_of(b)[0].receive))
        return [*self._takes(box), *self._meetings(box)]

    def _hand_over(self, send: int, receive: int) -> RankCall:
        giver, taker = self.items[send], self.items[receive]
        taker.outs, taker.source, taker.origin = [[giver.side.payloads[0]]], giver.rank, giver
        self.meetings += 1
        taker.met = giver.met = self.meetings
        return taker

    # --- collectives ---
    def _collective(self, call: RankCall) -> list[RankCall]:
        team = call.team
        k = team.counts.get((call.on, call.rank), 0)
        team.counts[call.on, call.rank] = k + 1
        gathering = call.gathering = team.calls.setdefault((call.on, k), CollectiveInstance())
        gathering.there[team.ranks.index(call.rank)] = call
        if len(gathering.there) == len(team.ranks):
            self.meetings += 1
            for each in gathering.there.values():
                each.met = self.meetings
        done = self._gone(gathering, call)
        for one in done:
            self._settle(one)
        if gathering.settled == len(team.ranks):
            del team.calls[call.on, k]
        return done

    def _gone(self, gathering: CollectiveInstance, call: RankCall) -> list[RankCall]:
        """Who may go on now that this one has come."""
        there, size = gathering.there, len(call.team.ranks)
        if OPERATIONS[call.op].root_field is None and all(
            c.op == call.op for c in there.values()
        ):  # all need all
            whole = len(there) == size and all(
                calls_agree(call, c) for c in there.values() if c is not call
            )
            return [there[k] for k in range(size)] if whole else []
        return [c for me, c in sorted(there.items()) if not c.done and self._may_go(c, me)]

    def _may_go(self, call: RankCall, me: int) -> bool:
        """All have come whose data end here, with a call that fits."""
        team, there = call.team, call.gathering.there if call.gathering else {}
        root = team.ranks.index(call.peer) if call.peer in team.ranks else 0
        needed = OPERATIONS[call.op].takes_from(len(team.ranks), root, me)
        others = range(len(team.ranks)) if needed is None else needed
        return all(k in there and calls_agree(call, there[k]) for k in others)

    def _settle(self, call: RankCall) -> None:
        gathering, team = call.gathering, call.team
        assert gathering is not None
        me, root = (
            team.ranks.index(call.rank),
            team.ranks.index(call.peer) if call.peer in team.ranks else 0,
        )
        key = 0 if call.op.startswith("all_reduce") else (me,)
        if key not in gathering.reduced:
            sides: list[Any] = [
                gathering.there[k].side if k in gathering.there else None
                for k in range(len(team.ranks))
            ]
            gathering.reduced[key] = self.mover.outputs(call.op, sides, me, root)
        call.outs = gathering.reduced[key]
        gathering.settled += 1
        gathering.readers += uses_shared_memory(call.outs)
        self._tidy(gathering, len(team.ranks))

    # --- memory ---
    def release(self, call: RankCall) -> None:
        """A rank has read its result, or will never."""
        if call.origin is not None:
            for payload in call.origin.side.payloads:
                if not isinstance(payload, bytes):
                    free_payload(self.regions, payload)
        elif call.gathering is not None and call.done and uses_shared_memory(call.outs or []):
            call.gathering.readers -= 1
            self._tidy(call.gathering, len(call.team.ranks))

    def forget(self, call: RankCall) -> None:
        """Its result was told: small ones need not be kept."""
        if uses_shared_memory(call.outs or []):
            return
        if call.origin is not None:
            call.origin.side.payloads, call.origin = (), None
        call.outs = []

    def _tidy(self, gathering: CollectiveInstance, size: int) -> None:
        if gathering.settled < size or gathering.readers:
            return
        for call in list(gathering.there.values()):
            for payload in call.side.payloads:
                if not isinstance(payload, bytes):
                    free_payload(self.regions, payload)
            call.side.payloads, call.gathering = (), None


def uses_shared_memory(outs: Sequence[Sequence[Payload]]) -> bool:
    """Does a result lie in shared memory, in part?"""
    for out in outs:
        for payload in out:
            if not isinstance(payload, bytes):
                return True
    return False


def calls_agree(one: RankCall, other: RankCall) -> bool:
    """Can two calls of a collective be one? What they must agree on is what the operation's row
    says.
    """
    if one.op != other.op or one.peer != other.peer:
        return False
    row, mine, theirs = OPERATIONS[one.op], one.side, other.side
    if row.gives == "none":
        return True
    if mine.dtype != theirs.dtype or mine.extra.get("reduce_op") != theirs.extra.get("reduce_op"):
        return False
    if one.op in ("all_to_all", "all_to_all_single", "all_gather") or (
        row.root_field is not None and not row.reduces
    ):
        return True
    return [prod(s) for s in mine.ins] == [prod(s) for s in theirs.ins]
