"""Every interleaving of a small program, one event at a time: the contract of tests/data/README.md
written down a second time.

Naive on purpose, and independent of the package: plain lists of calls go in, no partial order, no
symmetry, no counting; only states that were seen are not looked at again. An event is: a rank makes
its next call, a message meets a receive, a blocked rank goes on. If processes end with their
programs, one more: a rank that has made all calls closes, and its open requests are withdrawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

Plain = dict[str, Any]
Id = tuple[int, int, int]  # rank, position, part of a batch (-1)
GIVING_ROOT, TAKING_ROOT = ("broadcast", "scatter"), ("reduce", "gather")
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "barrier",
    "new_group",
    "all_reduce_coalesced",
    *GIVING_ROOT,
    *TAKING_ROOT,
)


class TooLarge(Exception):
    """More states than were allowed."""


class State(NamedTuple):
    """``at``: next call, or the one that waits; ``waits``: it has been made. ``sends`` and
    ``receives`` are open, in the order of posting; ``met``: messages and receives that met;
    ``loose``: requests that are buffered; ``wrong``: receives that took another sender than they
    rely on. ``closed``: ranks whose process has ended; ``withdrawn``: their collectives that were
    open then; ``kept``: collectives that were done before one of the others was withdrawn."""

    at: tuple[int, ...]
    waits: tuple[bool, ...]
    sends: tuple[Id, ...] = ()
    receives: tuple[Id, ...] = ()
    met: frozenset[Id] = frozenset()
    loose: frozenset[Id] = frozenset()
    wrong: frozenset[Id] = frozenset()
    closed: frozenset[int] = frozenset()
    withdrawn: frozenset[Id] = frozenset()
    kept: frozenset[Id] = frozenset()


@dataclass
class Found:
    """What all executions of one reading end in."""

    stuck: dict[tuple[int, ...], set[tuple[int, ...]]] = field(
        default_factory=dict
    )  # blocked ranks -> possible cores
    passed: bool = False
    unfit: set[int] = field(default_factory=set)
    fit: bool = False
    wrong: set[Id] = field(default_factory=set)
    kept: bool = False
    takers: dict[Id, set[int]] = field(default_factory=dict)
    unreceived: set[int] = field(default_factory=set)
    states: int = 0

    def how(self, kind: str) -> str:
        some, none = {
            "mismatch": (bool(self.unfit), self.fit),
            "deadlock": (bool(self.stuck), self.passed),
            "race": (bool(self.wrong), self.kept),
        }[kind]
        return "never" if not some else "sometimes" if none else "always"


class BruteForce:
    """One program under one reading: rendezvous, early, buffered or mixed.

    ``ends``: processes end with their programs, instead of staying until all ranks are done.
    """

    def __init__(
        self,
        programs: Mapping[int, Sequence[Plain]],
        groups: Mapping[str, Sequence[int]],
        reading: str,
        most: int,
        ends: bool = False,
    ) -> None:
        self.programs = [list(programs[r]) for r in sorted(programs)]
        self.size, self.reading, self.most = len(self.programs), reading, most
        self.groups = {
            "world": tuple(range(self.size)),
            **{name: tuple(ranks) for name, ranks in groups.items()},
        }
        self.handles = [self._waited(rank) for rank in range(self.size)]
        self.needs = [
            [self._needed(rank, p) for p in range(len(calls))]
            for rank, calls in enumerate(self.programs)
        ]
        self.lanes = [[self.lane(call) for call in calls] for calls in self.programs]
        self.never_waited = [self._never_waited(rank) if ends else [] for rank in range(self.size)]

    def _waited(self, rank: int) -> dict[int, list[int]]:
        """Position of a wait -> positions of the calls whose requests it waits for."""
        bound: dict[str, int] = {}
        found: dict[int, list[int]] = {}
        for position, call in enumerate(self.programs[rank]):
            if call["op"] == "wait":
                found[position] = [bound.pop(h) for h in call["handles"]]
            elif call.get("handle") is not None:
                bound[call["handle"]] = position
        return found

    def _never_waited(self, rank: int) -> list[Id]:
        """The requests that may be open when the process of a rank ends."""
        waited = {one for needed in self.needs[rank] for one in needed}
        made = [one for p in range(len(self.needs[rank])) for one in self.requests(rank, p)]
        return [one for one in made if one not in waited]

    # --- calls ---
    def call(self, one: Id) -> Plain:
        call = self.programs[one[0]][one[1]]
        return call if one[2] < 0 else call["ops"][one[2]]

    def requests(self, rank: int, position: int) -> list[Id]:
        call = self.programs[rank][position]
        if call["op"] == "batch":
            return [(rank, position, part) for part in range(len(call["ops"]))]
        return [(rank, position, -1)] if call["op"] not in ("wait", "compute") else []

    def needed(self, rank: int, position: int) -> list[Id]:
        """The requests for which a call waits."""
        return self.needs[rank][position]

    def _needed(self, rank: int, position: int) -> list[Id]:
        call = self.programs[rank][position]
        if call["op"] == "wait":
            return [one for p in self.handles[rank][position] for one in self.requests(rank, p)]
        waits = (
            call["op"] not in ("isend", "irecv")
            and not call.get("async")
            and not (call["op"] == "batch" and call.get("handle"))
        )
        return self.requests(rank, position) if waits else []

    def joined(self, state: State, rank: int, group: str) -> list[int]:
        """Positions of the collectives of a group that a rank has made."""
        end = state.at[rank] + state.waits[rank]
        return [p for p, lane in enumerate(self.lanes[rank][:end]) if lane == group]

    @staticmethod
    def lane(call: Plain) -> str | None:
        """Where a collective meets: its group, or the one sequence of new_group calls."""
        if call["op"] == "new_group":
            return "new_group"
        return (call.get("group") or "world") if call["op"] in COLLECTIVES else None

    def members(self, lane: str) -> tuple[int, ...]:
        return self.groups["world"] if lane == "new_group" else self.groups[lane]

    # --- conditions ---
    def lacking(self, state: State, one: Id) -> tuple[tuple[int, ...], bool]:
        """(ranks that have to come before a request is done, is any of them enough)."""
        call = self.call(one)
        if call["op"] in ("send", "isend"):
            return (() if one in state.met or one in state.loose else (call["peer"],)), False
        if call["op"] in ("recv", "irecv"):
            if one in state.met:
                return (), False
            if call["peer"] is not None:
                return (call["peer"],), False
            return tuple(r for r in self.groups[call.get("group") or "world"] if r != one[0]), True
        lane = self.lane(call)
        assert lane is not None
        if one in state.kept:
            return (), False
        number = self.joined(state, one[0], lane).index(one[1])
        missing = tuple(
            r for r in self.members(lane) if not self.takes_part(state, r, lane, number)
        )
        return tuple(
            r
            for r in missing
            if r in self.awaited(call, one, one in state.loose, self.members(lane))
        ), False

    def takes_part(self, state: State, rank: int, lane: str, number: int) -> bool:
        """Whether a rank has made its part of a collective, and has not withdrawn it."""
        made = self.joined(state, rank, lane)
        return len(made) > number and (rank, made[number], -1) not in state.withdrawn

    def awaited(
        self, call: Plain, one: Id, loose: bool, members: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Who must come to a collective before this member may leave."""
        op, root = call["op"], call.get("root")
        if op not in (*GIVING_ROOT, *TAKING_ROOT) or (
            self.reading in ("rendezvous", "mixed") and not loose
        ):
            return members
        if self.reading == "early":
            return members if one[0] == root else (root,)
        gives = (one[0] == root) == (op in GIVING_ROOT)
        if gives:
            return ()
        return members if one[0] == root else (root,)

    def done(self, state: State, one: Id) -> bool:
        return not self.lacking(state, one)[0]

    # --- events ---
    def events(self, state: State, found: Found) -> Iterator[State | None]:
        """States that one event leads to; None where calls meet that do not fit."""
        for rank in range(self.size):
            yield from self._rank_events(state, rank, found)
        for i, receive in enumerate(state.receives):
            for j, send in enumerate(state.sends):
                if self._may_meet(state, i, j):
                    yield self._meet(state, receive, send, found)

    def _rank_events(self, state: State, rank: int, found: Found) -> Iterator[State | None]:
        at = state.at[rank]
        if at == len(self.programs[rank]):
            if self.never_waited[rank] and rank not in state.closed:
                yield self._close(state, rank)
            return
        if not state.waits[rank]:
            yield from self._make(state, rank, at, found)
        elif all(self.done(state, one) for one in self.needed(rank, at)):
            yield state._replace(
                at=_put(state.at, rank, at + 1), waits=_put(state.waits, rank, False)
            )

    def _make(self, state: State, rank: int, at: int, found: Found) -> Iterator[State | None]:
        """The rank makes its next call."""
        requests = self.requests(rank, at)
        sends = tuple(one for one in requests if self.call(one)["op"] in ("send", "isend"))
        receives = tuple(one for one in requests if self.call(one)["op"] in ("recv", "irecv"))
        blocks = bool(self.needed(rank, at))
        made = state._replace(
            at=state.at if blocks else _put(state.at, rank, at + 1),
            waits=_put(state.waits, rank, blocks),
            sends=state.sends + sends,
            receives=state.receives + receives,
        )
        if self._differs(made, rank, at, found):
            yield None
            return
        soft = [
            one
            for one in requests
            if one in sends or self.call(one)["op"] in (*GIVING_ROOT, *TAKING_ROOT)
        ]
        options = {"mixed": (False, True), "buffered": (True,)}.get(self.reading, (False,))
        for chosen in product(options, repeat=len(soft)):
            yield made._replace(
                loose=made.loose | {one for one, loose in zip(soft, chosen, strict=True) if loose}
            )

    def _close(self, state: State, rank: int) -> State:
        """The process of a rank ends: what is done stays done, and what is open is withdrawn."""
        lost = {one for one in self.never_waited[rank] if not self.done(state, one)}
        collectives = [
            (other, p, -1)
            for other, lanes in enumerate(self.lanes)
            for p in range(state.at[other] + state.waits[other])
            if lanes[p] is not None
        ]
        return state._replace(
            sends=tuple(one for one in state.sends if one not in lost),
            receives=tuple(one for one in state.receives if one not in lost),
            closed=state.closed | {rank},
            withdrawn=state.withdrawn | {one for one in collectives if one in lost},
            kept=state.kept | {one for one in collectives if self.done(state, one)},
        )

    def _differs(self, state: State, rank: int, at: int, found: Found) -> bool:
        """The collective just made is not what another member has at its place."""
        call = self.programs[rank][at]
        lane = self.lane(call)
        if lane is None:
            return False
        number = len(self.joined(state, rank, lane)) - 1
        for other in self.members(lane):
            theirs = self.joined(state, other, lane)
            if not self.takes_part(state, other, lane, number):
                continue
            if _said(self.programs[other][theirs[number]]) != _said(call):
                found.unfit.update(self.members(lane))
                return True
        return False

    def _may_meet(self, state: State, i: int, j: int) -> bool:
        """The message is its sender's oldest there, and the receive the oldest that accepts it."""
        receive, send = state.receives[i], state.sends[j]
        if not self._accepts(receive, send):
            return False
        older = any(s[0] == send[0] and self._accepts_box(receive, s) for s in state.sends[:j])
        return not older and not any(self._accepts(r, send) for r in state.receives[:i])

    def _accepts_box(self, receive: Id, send: Id) -> bool:
        wanted, sent = self.call(receive), self.call(send)
        same = (wanted.get("group") or "world") == (sent.get("group") or "world") and wanted[
            "tag"
        ] == sent["tag"]
        return bool(same and sent["peer"] == receive[0])

    def _accepts(self, receive: Id, send: Id) -> bool:
        return self._accepts_box(receive, send) and self.call(receive)["peer"] in (None, send[0])

    def _meet(self, state: State, receive: Id, send: Id, found: Found) -> State | None:
        wanted, sent = self.call(receive), self.call(send)
        if wanted["peer"] is None:
            found.takers.setdefault(receive, set()).add(send[0])
        wrong = state.wrong | (
            {receive} if wanted.get("assume_from") not in (None, send[0]) else set()
        )
        found.wrong |= wrong
        if (wanted["numel"], wanted["dtype"]) != (sent["numel"], sent["dtype"]):
            found.unfit.update((receive[0], send[0]))
            return None
        return state._replace(
            sends=tuple(s for s in state.sends if s != send),
            receives=tuple(r for r in state.receives if r != receive),
            met=state.met | {send, receive},
            wrong=wrong,
        )

    # --- all of it ---
    def explore(self) -> Found:
        """Every execution. Raises TooLarge."""
        first = State((0,) * self.size, (False,) * self.size)
        found, seen, todo = Found(), {first}, [first]
        while todo:
            state = todo.pop()
            later = list(self.events(state, found))
            if not later:
                self._end(state, found)
            for after in later:
                if after is not None and after not in seen:
                    seen.add(after)
                    todo.append(after)
            if len(seen) > self.most:
                raise TooLarge(len(seen))
        found.states = len(seen)
        return found

    def _end(self, state: State, found: Found) -> None:
        found.fit = True
        found.kept = found.kept or not state.wrong
        blocked = tuple(r for r in range(self.size) if state.at[r] < len(self.programs[r]))
        if blocked:
            found.stuck.setdefault(blocked, set()).add(self.core(state, blocked))
        else:
            found.passed = True
            found.unreceived.update(send[0] for send in state.sends)

    def core(self, state: State, blocked: tuple[int, ...]) -> tuple[int, ...]:
        """Ranks on a circle of waiting, and those that wait directly for one who has left."""
        reach: dict[int, set[int]] = {}
        lost = set()
        for rank in blocked:
            reach[rank] = set()
            for one in self.needed(rank, state.at[rank]):
                ranks, any_one = self.lacking(state, one)
                there = [r for r in ranks if r in blocked]
                reach[rank].update(there)
                if (ranks and not there) or (not any_one and len(there) < len(ranks)):
                    lost.add(rank)
        for middle, a, b in product(blocked, repeat=3):
            if middle in reach[a] and b in reach[middle]:
                reach[a].add(b)
        return tuple(r for r in blocked if r in lost or r in reach[r])


def _put(values: tuple[Any, ...], i: int, value: Any) -> tuple[Any, ...]:
    return (*values[:i], value, *values[i + 1 :])


def _said(call: Plain) -> tuple[Any, ...]:
    """What all members have to say alike."""
    op = call["op"]
    if op == "barrier":
        return (op,)
    if op == "new_group":
        return (op, tuple(call["ranks"]))
    said: tuple[Any, ...] = (op, call["numel"], call["dtype"])
    said += (call["root"],) if op in (*GIVING_ROOT, *TAKING_ROOT) else ()
    return said + ((call["reduce_op"],) if op in ("all_reduce", "reduce", "reduce_scatter") else ())
