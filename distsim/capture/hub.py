"""The hub: hears all ranks, lets calls meet, and tells waits when they end. What it does in a silence: `distsim.capture.silence`."""

from __future__ import annotations

import select
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from distsim.capture.data import Side
from distsim.capture.loops import Plan, planned, run
from distsim.capture.matching import Matching, Posted
from distsim.capture.members import Event, Failure, Line, Member, Question
from distsim.capture.repeats import call_of, learn
from distsim.capture.silence import Silence
from distsim.capture.store import NoNumber, Shelf
from distsim.capture.wire import READ, Blobs, Regions
from distsim.profiles.record import Profile

#: Seconds of silence after which the hub looks whether all are stuck; it doubles up to the second number.
_SOON: Final = 0.002
_LATER: Final = 0.1


class Hub:
    """``profile``: whose rules say which messages meet; ``choose`` takes another once the first group's back end is known."""

    def __init__(
        self, listener: socket.socket, regions: Regions, profile: Profile, choose: Callable[[str], Profile] | None = None
    ) -> None:
        self.choose = choose
        self.listener, self.matching, self.shelf = listener, Matching(regions, profile), Shelf()
        self.members: dict[int, Member] = {}  # by pid
        self.ranks: dict[int, Member] = {}
        self.world = 0
        self.past: list[tuple[int, dict[int, Member]]] = []  # worlds that ended before: sizes and ranks
        self.progress = self.polls = 0
        self.silence = Silence(self)
        self._epoll = select.epoll()
        self._lines: dict[int, Line] = {}
        self._meetings: dict[int, list[tuple[Member, int]]] = defaultdict(list)
        self._epoll.register(listener.fileno(), select.EPOLLIN)
        self._handlers: dict[str, Callable[[Member, list[Any], Blobs, Question | None], None]] = {
            "call": self._call, "again": self._again, "shape": lambda member, message, *_: learn(member, message),
            "wait": self._wait, "waited": self._event, "dropped": self._dropped, "poll": self._poll,
            "future": self._future, "store": self._store, "meet": self._meet, "mark": self._event, "rank": self._rank,
            "site": self._site, "group": self._group, "read": self._read, "heard": Member.heard, "threads": Member.threads,
            "end": self._end, "ended": self._event, "lane": lambda member, message, *_: setattr(member, "lane", message[1]),
            "killed": self._killed,
        }  # fmt: skip

    def expect(self, pid: int, rank: int) -> None:
        """A process that was started; ``rank``: which one it is, -1 where it starts the ranks itself."""
        self.members[pid] = Member(pid, planned=rank)

    # --- the loop ---
    def run(self, deadline_s: float | None = None, reap: Callable[[], None] = lambda: None) -> str:
        """Until all have ended ("ended"), nothing can go on ("stalled"), or time is over ("late")."""
        pause, started, quiet_since = _SOON, time.monotonic(), time.monotonic()
        while True:
            heard = self.listen(pause)
            if heard and not self.silence.asking.over(self.progress):
                pause, quiet_since = _SOON, time.monotonic()
                self.silence.interrupted(quiet_since)
                continue
            reap()
            if self._all_ended():
                return "ended"
            came = self.silence.after(time.monotonic() - quiet_since)
            if came == "stalled":
                return "stalled"
            if came == "moved":
                pause, quiet_since = _SOON, time.monotonic()
            elif deadline_s is not None and time.monotonic() - started > deadline_s:
                return "late"
            else:
                pause = min(pause * 1.5, _LATER)

    def living(self) -> list[Member]:
        """Who counts: the ranks once all are there, else every process that was started."""
        if self.world and len(self.ranks) == self.world:
            return [m for m in self.ranks.values() if not m.over]
        return [m for m in self.members.values() if not m.over]

    def _all_ended(self) -> bool:
        return bool(self.members) and all(m.over for m in self.members.values())

    def listen(self, wait_s: float) -> bool:
        """Hear what is there, or comes within so many seconds. Was there anything?"""
        ready = self._epoll.poll(wait_s)
        for fd, _ in ready:
            line = self._lines.get(fd)
            if line is not None:
                self._hear(line)
            elif fd == self.listener.fileno():
                self._accept()
        return bool(ready)

    def _accept(self) -> None:
        sock, _ = self.listener.accept()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self._lines[sock.fileno()] = Line(sock)
        self._epoll.register(sock.fileno(), select.EPOLLIN)

    def _hear(self, line: Line) -> None:
        try:
            data = line.socket.recv(READ, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(line)
            return
        for message, blob in line.frames.feed(data):
            if line.member is None:
                self._introduce(line, message)
            elif type(message) is Plan:
                run(self, message, line.member, blob)
            else:
                blobs = Blobs(blob)
                for said in message:
                    self._take(line.member, said, blobs)

    def _close(self, line: Line) -> None:
        self._epoll.unregister(line.socket.fileno())
        del self._lines[line.socket.fileno()]
        line.socket.close()
        if line.member is not None and line.kind == "out":
            line.member.gone = True

    def _introduce(self, line: Line, message: list[Any]) -> None:
        member = line.member = self.members.setdefault(message[1], Member(message[1]))
        line.frames.learnt = lambda message: planned(member, message)
        member.opens(line, message)

    def _take(self, member: Member, message: list[Any], blobs: Blobs) -> None:
        question = None
        if message[0] == "ask":
            question = Question(member.lines[message[1]])
            question.line.owed = question
            message = message[2:]
        verb = message[0]
        if verb not in ("poll", "heard", "site", "threads", "lane") and not (verb == "store" and message[3] == "check"):
            self.progress += 1
            self.polls = 0
        self._handlers[verb](member, message, blobs, question)

    # --- what ranks say ---
    def _rank(self, member: Member, message: list[Any], blobs: Blobs, question: Question | None) -> None:
        rank, world = message[1], message[2]
        assert question is not None
        self._next_world(member)
        taken = rank in self.ranks and self.ranks[rank] is not member and not self.ranks[rank].ended
        if fault := no_place(rank, world, self.world, taken):
            question.refuse("error", f"distsim capture: {fault}")
            return
        self.world = world
        member.rank = rank
        self.ranks[rank] = member
        question.answer(["ok"])

    def _next_world(self, member: Member) -> None:
        """Where all ranks of a world have ended and another process becomes one, a script has started its next."""
        if self.ranks and all(m.ended is not None or m.gone for m in self.ranks.values()) and member not in self.ranks.values():
            self.past.append((self.world, self.ranks))
            self.ranks, self.world, self.shelf = {}, 0, Shelf()
            self.matching = Matching(self.matching.regions, self.matching.profile)
            self._meetings.clear()

    def _site(self, member: Member, message: list[Any], *_: object) -> None:
        member.sites[message[1]] = tuple(message[2:])

    def _group(self, member: Member, message: list[Any], *_: object) -> None:
        number, facts = message[1], message[2:]
        key = (facts[0], tuple(facts[1]))
        count = member.made[key] = member.made.get(key, 0) + 1
        member.teams[number] = self.matching.team(facts, count)
        if self.choose is not None:
            self.matching.profile, self.choose = self.choose(facts[2]), None
            self.matching.matcher.specific_first = self.matching.profile.specific_first

    def _call(self, member: Member, message: list[Any], blobs: Blobs, question: Question | None) -> None:
        _, number, site, group, op, peer, tag, is_async, facts, pieces, *batch = message
        payloads = [blobs.take(p[0]) if len(p) == 1 else p for p in pieces]
        call = Posted(member.rank, number, op, member.teams[group], peer, tag, Side(payloads, facts))
        member.note(Event(number, "call", site, call=call, is_async=is_async, batch=batch[0] if batch else 0))
        self._post(member, call, site, question)

    def _again(self, member: Member, message: list[Any], blobs: Blobs, question: Question | None) -> None:
        shape, call = call_of(member, message[1], blobs)
        member.note(Event(call.number, "call", shape.site, call=call, is_async=shape.is_async, waited=shape.waited))
        self._post(member, call, shape.site, question)

    def _post(self, member: Member, call: Posted, site: int, question: Question | None) -> None:
        call.limit_ns = call.side.extra.get("timeout_ns")
        member.calls[call.number] = call
        if question is not None:
            member.asks(question, call, site)
            question.limit_ns = call.limit_ns
        for done in self.matching.post(call):
            if done is not call or question is not None:  # else nobody asks yet
                self.tell(done)

    def _wait(self, member: Member, message: list[Any], blobs: Blobs, question: Question | None) -> None:
        _, number, site, target, limit = message
        member.note(Event(number, "wait", site, targets=(target,)))
        call = member.calls[target]
        assert question is not None
        member.asks(question, call, site)
        question.limit_ns = limit
        if call.done:
            self.tell(call)

    def tell(self, call: Posted) -> None:
        """A call is done: whoever waits for it goes on."""
        member = self.ranks[call.rank]
        question = member.waiting.pop(call.number, None)
        if question is not None:
            question.result(call)
            self.matching.forget(call)
        elif call.number in member.futures and member.notices is not None:
            member.futures.discard(call.number)
            member.unheard += 1
            member.notices.result(call, "done")
            self.matching.forget(call)

    def _event(self, member: Member, message: list[Any], *_: object) -> None:
        kind = message[0]
        if kind == "mark":
            _, number, site, op, group, facts = message
            member.note(Event(number, op, site, team=member.teams.get(group), facts=facts))
        else:
            member.note(Event(message[1], "wait", message[2], targets=tuple(message[3])))

    def _dropped(self, member: Member, message: list[Any], *_: object) -> None:
        member.note(Event(message[1], "drop", 0, targets=(message[2],)))
        call = member.calls.get(message[2])
        if call is not None:
            self.matching.release(call)

    def _read(self, member: Member, message: list[Any], *_: object) -> None:
        self.matching.release(member.calls[message[1]])

    def _poll(self, member: Member, message: list[Any], blobs: Blobs, question: Question | None) -> None:
        assert question is not None
        call = member.calls[message[1]]
        if call.done:
            self.polls = 0
            question.result(call)
        else:
            question.poll, question.site = call, message[3]
            member.waiting[message[2]] = question

    def _future(self, member: Member, message: list[Any], *_: object) -> None:
        _, target, number, site, in_backward = message
        member.futures.add(target)
        if in_backward:
            member.note(Event(number, "future", site, targets=(target,)))
        if member.calls[target].done:
            self.tell(member.calls[target])

    def _store(self, member: Member, message: list[Any], blobs: Blobs, question: Question | None) -> None:
        _, number, site, verb, space, *given = message
        assert question is not None
        if verb in ("wait", "pop"):
            question.keys, question.space, question.site, question.limit_ns = given[0], space, site, given[1]
            question.pops = verb == "pop"
            member.waiting[number] = question
        else:
            try:
                found = self.shelf.do(verb, space, given)
            except NoNumber as error:
                question.refuse("store", str(error))
                return
            if verb == "check" and not found:
                self.silence.asking.heard(member, replace(question, keys=given[0], space=space, site=site), self.progress)
            self.progress += verb == "check" and bool(found)
            question.answer(["ok", found])
        self._serve_store()

    def _serve_store(self) -> None:
        for member in self.members.values():
            for number, question in list(member.waiting.items()):
                if question.keys is None:
                    continue
                if (found := self.shelf.found(question.space, question.keys, question.pops)) is not None:
                    del member.waiting[number]
                    question.answer(["ok", found])

    def _meet(self, member: Member, message: list[Any], blobs: Blobs, question: Question | None) -> None:
        """The world comes to be: all its ranks wait for each other, each time."""
        _, number, site, op, parties, facts = message
        member.note(Event(number, op, site, facts=facts))
        assert question is not None
        count = member.made[op] = member.made.get(op, 0) + 1
        question.site, question.meeting = site, op
        member.waiting[number] = question
        there = self._meetings[count]
        there.append((member, number))
        if {m.rank for m, _ in there} >= set(parties):
            for other, asked in there:
                other.waiting.pop(asked).answer(["ok"])

    def _end(self, member: Member, message: list[Any], blobs: Blobs, question: Question | None) -> None:
        """A process says how it ends."""
        _, how, code, text, site, trace, refused = message
        member.ended = Failure(how, code, text, tuple(site), trace, refused)
        if question is not None:
            question.answer(["ok"])

    def _killed(self, member: Member, message: list[Any], *_: object) -> None:
        """Of a process that the script started: a signal ended it."""
        child = self.members.get(message[1])
        if child is not None:
            child.ended = child.ended or Failure(*message[2:5])

    def close(self) -> None:
        for line in list(self._lines.values()):
            with suppress(OSError):
                line.socket.close()
        self._epoll.close()
        self.listener.close()


def no_place(rank: int, world: int, known: int, taken: bool) -> str:
    """Why a process can't be this rank of this world; "" where it can. ``known``: the world's size, 0 before anybody said it."""
    if known not in (0, world):
        return f"rank {rank} says that the world has {world} ranks, others said {known}"
    if not 0 <= rank < world:
        return f"rank {rank} is outside a world of {world}"
    if not taken:
        return ""
    return f"two processes say that they are rank {rank}; one that a rank starts can't make a world of its own here"
