"""The hub: hears all ranks, lets calls meet, and tells waits when they end. What it does in a
silence: `distsim.script_capture.hub.quiescence`.
"""

from __future__ import annotations

import select
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from distsim.backends.profile import BackendProfile
from distsim.script_capture.hub.call_cache import (
    CachedCallFrame,
    cached_call_frame,
    replay_cached_calls,
)
from distsim.script_capture.hub.call_templates import call_from_template, register_template
from distsim.script_capture.hub.collective_results import CallContribution
from distsim.script_capture.hub.matching import CallMatcher, RankCall
from distsim.script_capture.hub.quiescence import QuiescenceHandler
from distsim.script_capture.hub.state import (
    HubConnection,
    HubEvent,
    PendingReply,
    ProcessExit,
    RankProcess,
)
from distsim.script_capture.protocol.wire import READ_SIZE, PayloadReader, SharedMemoryRegions
from distsim.script_capture.rank.store_client import StoreServer, StoreValueError

#: Seconds of silence after which the hub looks whether all are stuck; it doubles up to the second
#: number.
_FIRST_PAUSE_S: Final = 0.002
_MAX_PAUSE_S: Final = 0.1


class Hub:
    """``profile``: whose rules say which messages meet; ``choose`` takes another once the first
    group's back end is known.
    """

    def __init__(
        self,
        listener: socket.socket,
        regions: SharedMemoryRegions,
        profile: BackendProfile,
        choose: Callable[[str], BackendProfile] | None = None,
    ) -> None:
        self.choose = choose
        self.listener, self.matching, self.shelf = (
            listener,
            CallMatcher(regions, profile),
            StoreServer(),
        )
        self.members: dict[int, RankProcess] = {}  # by pid
        self.ranks: dict[int, RankProcess] = {}
        self.world = 0
        self.past: list[
            tuple[int, dict[int, RankProcess]]
        ] = []  # worlds that ended before: sizes and ranks
        self.progress = self.polls = 0
        self.silence = QuiescenceHandler(self)
        self._epoll = select.epoll()
        self._lines: dict[int, HubConnection] = {}
        self._meetings: dict[int, list[tuple[RankProcess, int]]] = defaultdict(list)
        self._epoll.register(listener.fileno(), select.EPOLLIN)
        self._handlers: dict[
            str, Callable[[RankProcess, list[Any], PayloadReader, PendingReply | None], None]
        ] = {
            "call": self._call,
            "again": self._again,
            "shape": lambda member, message, *_: register_template(member, message),
            "wait": self._wait,
            "waited": self._event,
            "dropped": self._dropped,
            "poll": self._poll,
            "future": self._future,
            "store": self._store,
            "meet": self._meet,
            "mark": self._event,
            "rank": self._rank,
            "site": self._site,
            "group": self._group,
            "read": self._read,
            "heard": RankProcess.heard,
            "threads": RankProcess.threads,
            "end": self._end,
            "ended": self._event,
            "lane": lambda member, message, *_: setattr(member, "lane", message[1]),
            "killed": self._killed,
        }

    def expect(self, pid: int, rank: int) -> None:
        """A process that was started; ``rank``: which one it is, -1 where it starts the ranks
        itself.
        """
        self.members[pid] = RankProcess(pid, planned=rank)

    # --- the loop ---
    def run(self, deadline_s: float | None = None, reap: Callable[[], None] = lambda: None) -> str:
        """Until all have ended ("ended"), nothing can go on ("stalled"), or time is over
        ("late").
        """
        pause, started, quiet_since = _FIRST_PAUSE_S, time.monotonic(), time.monotonic()
        while True:
            heard = self.listen(pause)
            if heard and not self.silence.asking.over(self.progress):
                pause, quiet_since = _FIRST_PAUSE_S, time.monotonic()
                self.silence.interrupted(quiet_since)
                continue
            reap()
            if self._all_ended():
                return "ended"
            came = self.silence.after(time.monotonic() - quiet_since)
            if came == "stalled":
                return "stalled"
            if came == "moved":
                pause, quiet_since = _FIRST_PAUSE_S, time.monotonic()
            elif deadline_s is not None and time.monotonic() - started > deadline_s:
                return "late"
            else:
                pause = min(pause * 1.5, _MAX_PAUSE_S)

    def living(self) -> list[RankProcess]:
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
        self._lines[sock.fileno()] = HubConnection(sock)
        self._epoll.register(sock.fileno(), select.EPOLLIN)

    def _hear(self, line: HubConnection) -> None:
        try:
            data = line.socket.recv(READ_SIZE, socket.MSG_DONTWAIT)
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
            elif type(message) is CachedCallFrame:
                replay_cached_calls(self, message, line.member, blob)
            else:
                blobs = PayloadReader(blob)
                for said in message:
                    self._take(line.member, said, blobs)

    def _close(self, line: HubConnection) -> None:
        self._epoll.unregister(line.socket.fileno())
        del self._lines[line.socket.fileno()]
        line.socket.close()
        if line.member is not None and line.kind == "out":
            line.member.gone = True

    def _introduce(self, line: HubConnection, message: list[Any]) -> None:
        member = line.member = self.members.setdefault(message[1], RankProcess(message[1]))
        line.frames.learnt = lambda message: cached_call_frame(member, message)
        member.opens(line, message)

    def _take(self, member: RankProcess, message: list[Any], blobs: PayloadReader) -> None:
        question = None
        if message[0] == "ask":
            question = PendingReply(member.lines[message[1]])
            question.line.owed = question
            message = message[2:]
        verb = message[0]
        if verb not in ("poll", "heard", "site", "threads", "lane") and not (
            verb == "store" and message[3] == "check"
        ):
            self.progress += 1
            self.polls = 0
        self._handlers[verb](member, message, blobs, question)

    # --- what ranks say ---
    def _rank(
        self,
        member: RankProcess,
        message: list[Any],
        blobs: PayloadReader,
        question: PendingReply | None,
    ) -> None:
        rank, world = message[1], message[2]
        assert question is not None
        self._next_world(member)
        taken = rank in self.ranks and self.ranks[rank] is not member and not self.ranks[rank].ended
        if fault := rank_conflict(rank, world, self.world, taken):
            question.refuse("error", f"distsim capture: {fault}")
            return
        self.world = world
        member.rank = rank
        self.ranks[rank] = member
        question.answer(["ok"])

    def _next_world(self, member: RankProcess) -> None:
        """Where all ranks of a world have ended and another process becomes one, a script has
        started its next.
        """
        if (
            self.ranks
            and all(m.ended is not None or m.gone for m in self.ranks.values())
            and member not in self.ranks.values()
        ):
            self.past.append((self.world, self.ranks))
            self.ranks, self.world, self.shelf = {}, 0, StoreServer()
            self.matching = CallMatcher(self.matching.regions, self.matching.profile)
            self._meetings.clear()

    def _site(self, member: RankProcess, message: list[Any], *_: object) -> None:
        member.sites[message[1]] = tuple(message[2:])

    def _group(self, member: RankProcess, message: list[Any], *_: object) -> None:
        number, facts = message[1], message[2:]
        key = (facts[0], tuple(facts[1]))
        count = member.made[key] = member.made.get(key, 0) + 1
        member.group_instances[number] = self.matching.team(facts, count)
        if self.choose is not None:
            self.matching.profile, self.choose = self.choose(facts[2]), None
            self.matching.matcher.specific_first = self.matching.profile.specific_first

    def _call(
        self,
        member: RankProcess,
        message: list[Any],
        blobs: PayloadReader,
        question: PendingReply | None,
    ) -> None:
        _, number, site, group, op, peer, tag, is_async, facts, pieces, *batch = message
        payloads = [blobs.take(p[0]) if len(p) == 1 else p for p in pieces]
        call = RankCall(
            member.rank,
            number,
            op,
            member.group_instances[group],
            peer,
            tag,
            CallContribution(payloads, facts),
        )
        member.note(
            HubEvent(
                number, "call", site, call=call, is_async=is_async, batch=batch[0] if batch else 0
            )
        )
        self._post(member, call, site, question)

    def _again(
        self,
        member: RankProcess,
        message: list[Any],
        blobs: PayloadReader,
        question: PendingReply | None,
    ) -> None:
        shape, call = call_from_template(member, message[1], blobs)
        member.note(
            HubEvent(
                call.number,
                "call",
                shape.site,
                call=call,
                is_async=shape.is_async,
                waited=shape.waited,
            )
        )
        self._post(member, call, shape.site, question)

    def _post(
        self, member: RankProcess, call: RankCall, site: int, question: PendingReply | None
    ) -> None:
        call.limit_ns = call.side.extra.get("timeout_ns")
        member.calls[call.number] = call
        if question is not None:
            member.asks(question, call, site)
            question.limit_ns = call.limit_ns
        for done in self.matching.post(call):
            if done is not call or question is not None:  # else nobody asks yet
                self.tell(done)

    def _wait(
        self,
        member: RankProcess,
        message: list[Any],
        blobs: PayloadReader,
        question: PendingReply | None,
    ) -> None:
        _, number, site, target, limit = message
        member.note(HubEvent(number, "wait", site, targets=(target,)))
        call = member.calls[target]
        assert question is not None
        member.asks(question, call, site)
        question.limit_ns = limit
        if call.done:
            self.tell(call)

    def tell(self, call: RankCall) -> None:
        """A call is done: whoever waits for it goes on."""
        member = self.ranks[call.rank]
        question = member.waiting.pop(call.number, None)
        if question is not None:
            question.result(call)
            self.matching.forget(call)
        elif call.number in member.futures and member.notices is not None:
            member.futures.discard(call.number)
            member.unread_notices += 1
            member.notices.result(call, "done")
            self.matching.forget(call)

    def _event(self, member: RankProcess, message: list[Any], *_: object) -> None:
        kind = message[0]
        if kind == "mark":
            _, number, site, op, group, facts = message
            member.note(
                HubEvent(number, op, site, team=member.group_instances.get(group), facts=facts)
            )
        else:
            member.note(HubEvent(message[1], "wait", message[2], targets=tuple(message[3])))

    def _dropped(self, member: RankProcess, message: list[Any], *_: object) -> None:
        member.note(HubEvent(message[1], "drop", 0, targets=(message[2],)))
        call = member.calls.get(message[2])
        if call is not None:
            self.matching.release(call)

    def _read(self, member: RankProcess, message: list[Any], *_: object) -> None:
        self.matching.release(member.calls[message[1]])

    def _poll(
        self,
        member: RankProcess,
        message: list[Any],
        blobs: PayloadReader,
        question: PendingReply | None,
    ) -> None:
        assert question is not None
        call = member.calls[message[1]]
        if call.done:
            self.polls = 0
            question.result(call)
        else:
            question.poll, question.site = call, message[3]
            member.waiting[message[2]] = question

    def _future(self, member: RankProcess, message: list[Any], *_: object) -> None:
        _, target, number, site, in_backward = message
        member.futures.add(target)
        if in_backward:
            member.note(HubEvent(number, "future", site, targets=(target,)))
        if member.calls[target].done:
            self.tell(member.calls[target])

    def _store(
        self,
        member: RankProcess,
        message: list[Any],
        blobs: PayloadReader,
        question: PendingReply | None,
    ) -> None:
        _, number, site, verb, space, *given = message
        assert question is not None
        if verb in ("wait", "pop"):
            question.keys, question.space, question.site, question.limit_ns = (
                given[0],
                space,
                site,
                given[1],
            )
            question.pops = verb == "pop"
            member.waiting[number] = question
        else:
            try:
                found = self.shelf.do(verb, space, given)
            except StoreValueError as error:
                question.refuse("store", str(error))
                return
            if verb == "check" and not found:
                self.silence.asking.heard(
                    member, replace(question, keys=given[0], space=space, site=site), self.progress
                )
            self.progress += verb == "check" and bool(found)
            question.answer(["ok", found])
        self._serve_store()

    def _serve_store(self) -> None:
        for member in self.members.values():
            for number, question in list(member.waiting.items()):
                if question.keys is None:
                    continue
                if (
                    found := self.shelf.found(question.space, question.keys, question.pops)
                ) is not None:
                    del member.waiting[number]
                    question.answer(["ok", found])

    def _meet(
        self,
        member: RankProcess,
        message: list[Any],
        blobs: PayloadReader,
        question: PendingReply | None,
    ) -> None:
        """The world comes to be: all its ranks wait for each other, each time."""
        _, number, site, op, parties, facts = message
        member.note(HubEvent(number, op, site, facts=facts))
        assert question is not None
        count = member.made[op] = member.made.get(op, 0) + 1
        question.site, question.meeting = site, op
        member.waiting[number] = question
        there = self._meetings[count]
        there.append((member, number))
        if {m.rank for m, _ in there} >= set(parties):
            for other, asked in there:
                other.waiting.pop(asked).answer(["ok"])

    def _end(
        self,
        member: RankProcess,
        message: list[Any],
        blobs: PayloadReader,
        question: PendingReply | None,
    ) -> None:
        """A process says how it ends."""
        _, how, code, text, site, trace, refused = message
        member.ended = ProcessExit(how, code, text, tuple(site), trace, refused)
        if question is not None:
            question.answer(["ok"])

    def _killed(self, member: RankProcess, message: list[Any], *_: object) -> None:
        """Of a process that the script started: a signal ended it."""
        child = self.members.get(message[1])
        if child is not None:
            child.ended = child.ended or ProcessExit(*message[2:5])

    def close(self) -> None:
        for line in list(self._lines.values()):
            with suppress(OSError):
                line.socket.close()
        self._epoll.close()
        self.listener.close()


def rank_conflict(rank: int, world: int, known: int, taken: bool) -> str:
    """Why a process can't be this rank of this world; "" where it can. ``known``: the world's size,
    0 before anybody said it.
    """
    if known not in (0, world):
        return f"rank {rank} says that the world has {world} ranks, others said {known}"
    if not 0 <= rank < world:
        return f"rank {rank} is outside a world of {world}"
    if not taken:
        return ""
    return f"two processes say that they are rank {rank}; one that a rank starts can't make a world of its own here"
