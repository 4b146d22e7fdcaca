"""The hub: receives the messages of all ranks, matches calls and answers waits.

One thread, one `epoll`. Each message has a handler here; the messages are listed in
`distsim.script_capture.protocol.message_types`. What happens when no message arrives is in
`distsim.script_capture.hub.quiescence`, the fast path for repeated calls in
`distsim.script_capture.hub.call_cache`.
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
    call_from_template,
    register_template,
    replay_cached_calls,
)
from distsim.script_capture.hub.collective_results import CallContribution
from distsim.script_capture.hub.matching import RankCall
from distsim.script_capture.hub.quiescence import QuiescenceHandler
from distsim.script_capture.hub.state import (
    HubConnection,
    HubEvent,
    HubState,
    PendingReply,
    RankProcess,
    ValueReport,
)
from distsim.script_capture.hub.store_server import StoreValueError
from distsim.script_capture.protocol.message_types import CallOrigin, ProcessExit
from distsim.script_capture.protocol.wire import (
    READ_SIZE,
    BadFrame,
    BadIntroduction,
    PayloadReader,
    SharedMemoryRegions,
    is_same_user,
    parse_introduction,
)

#: Seconds of silence after which the hub checks whether all processes are blocked. The pause grows
#: up to the second number while some process is at work.
_FIRST_PAUSE_S: Final = 0.002
_MAX_PAUSE_S: Final = 0.1
_PAUSE_GROWTH: Final = 1.5
_SEND_BUFFER_BYTES: Final = 1 << 20
#: Messages that do not count as progress: the program is where it was before.
_VERBS_WITHOUT_PROGRESS: Final = frozenset({"poll", "heard", "site", "threads", "thread"})

#: Handles one message. The pending reply is None if the sender does not wait for one.
_Handler = Callable[[RankProcess, list[Any], PayloadReader, PendingReply | None], None]


class Hub:
    """Sockets and message handlers around one `HubState`.

    Messages are matched by the rules of ``profile``. If ``choose_profile`` is given, it chooses
    another profile once the backend of the first group is known.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        regions: SharedMemoryRegions,
        profile: BackendProfile,
        choose_profile: Callable[[str], BackendProfile] | None = None,
    ) -> None:
        self.listener = listener
        self._token = token
        self.state = HubState(regions, profile)
        self.quiescence = QuiescenceHandler(self.state, self.listen)
        self._choose_profile = choose_profile
        self._connections: dict[int, HubConnection] = {}  # by descriptor
        #: Start-up calls that wait, by how many start-up calls their ranks have made.
        self._startup_waits: dict[int, list[tuple[RankProcess, int]]] = defaultdict(list)
        self._epoll = select.epoll()
        self._epoll.register(listener.fileno(), select.EPOLLIN)
        self._handlers: dict[str, _Handler] = {
            "call": self._on_call,
            "dropped": self._on_dropped,
            "end": self._on_end,
            "event": self._on_event,
            "future": self._on_future,
            "group": self._on_group,
            "heard": self._on_heard,
            "killed": self._on_killed,
            "meet": self._on_meet,
            "poll": self._on_poll,
            "rank": self._on_rank,
            "read": self._on_read,
            "repeat": self._on_repeat,
            "site": self._on_site,
            "store": self._on_store,
            "streams": self._on_streams,
            "template": self._on_template,
            "thread": self._on_thread,
            "values": self._on_values,
            "threads": self._on_threads,
            "wait": self._on_wait,
            "waited": self._on_waited,
        }

    def expect(self, pid: int, rank: int) -> None:
        """Register a process that was started as ``rank``; -1 if it starts the ranks itself."""
        self.state.processes[pid] = RankProcess(pid, planned=rank)

    # --- the loop ---
    def run(self, deadline_s: float | None = None, reap: Callable[[], None] = lambda: None) -> str:
        """Run until all processes have ended ("ended"), none can run ("stalled"), or "late".

        ``reap`` is called in silence, to note which processes have ended.
        """
        started = quiet_since = time.monotonic()
        pause_s = _FIRST_PAUSE_S
        store_polls = self.quiescence.store_polls
        while True:
            # A message that is only a polling loop's next question does not interrupt a silence.
            has_message = self.listen(pause_s)
            if has_message and not store_polls.polling_loops(self.state.progress):
                pause_s = _FIRST_PAUSE_S
                quiet_since = time.monotonic()
                self.quiescence.after_message(quiet_since)
                continue
            reap()
            if self._all_ended():
                return "ended"
            outcome = self.quiescence.after_silence(time.monotonic() - quiet_since)
            if outcome == "stalled":
                return "stalled"
            if outcome == "moved":
                pause_s = _FIRST_PAUSE_S
                quiet_since = time.monotonic()
            elif deadline_s is not None and time.monotonic() - started > deadline_s:
                return "late"
            else:
                pause_s = min(pause_s * _PAUSE_GROWTH, _MAX_PAUSE_S)

    def _all_ended(self) -> bool:
        """Whether all processes have ended; False before the first was started."""
        processes = self.state.processes.values()
        return bool(processes) and all(process.disconnected for process in processes)

    def listen(self, seconds: float) -> bool:
        """Handle what has arrived, or arrives within so many seconds. Returns whether it did.

        The connections of other users do not count: they must not interrupt a silence.
        """
        ready = self._epoll.poll(seconds)
        has_message = False
        for descriptor, _ in ready:
            connection = self._connections.get(descriptor)
            if connection is not None:
                self._receive(connection)
                has_message = True
            elif descriptor == self.listener.fileno():
                has_message |= self._accept()
        return has_message

    def _accept(self) -> bool:
        """Accept a connection of the same user; its first message says whose it is."""
        sock, _ = self.listener.accept()
        if not is_same_user(sock):
            sock.close()
            return False
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._connections[sock.fileno()] = HubConnection(sock)
        self._epoll.register(sock.fileno(), select.EPOLLIN)
        return True

    def _receive(self, connection: HubConnection) -> None:
        """Handle what one read gives; `epoll` reports the connection again if there is more."""
        try:
            data = connection.socket.recv(READ_SIZE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:  # the process was killed
            data = b""
        if not data:
            self._close_connection(connection)
            return
        try:
            if connection.process is None:
                data = self._introduce(connection, data)
            self._handle_frames(connection, data)
        except (BadIntroduction, BadFrame):
            # Only this connection is affected, so that a stranger cannot disturb the ranks.
            self._close_connection(connection)

    def _handle_frames(self, connection: HubConnection, data: bytes) -> None:
        """Handle each frame that the data complete."""
        if not data:
            return
        assert connection.process is not None
        for message, blob in connection.decoder.feed(data):
            if type(message) is CachedCallFrame:
                replay_cached_calls(self.state, message, connection.process, blob)
            else:
                blobs = PayloadReader(blob)
                for submessage in message:
                    self._handle(connection.process, submessage, blobs)

    def _close_connection(self, connection: HubConnection) -> None:
        """A process closes its out connection only by ending: from here on it does not count."""
        self._epoll.unregister(connection.socket.fileno())
        del self._connections[connection.socket.fileno()]
        connection.socket.close()
        if connection.process is not None and connection.kind == "out":
            connection.process.disconnected = True

    def _introduce(self, connection: HubConnection, data: bytes) -> bytes:
        """Handle the first message of a connection. Returns the bytes behind it."""
        connection.introduction += data
        parsed = parse_introduction(connection.introduction, self._token)
        if parsed is None:
            return b""
        connection.introduction = b""
        message, rest = parsed
        pid = message[1]
        process = self.state.processes.setdefault(pid, RankProcess(pid))
        connection.process = process
        # Not the function itself: a test replaces it.
        connection.decoder.on_repeated = lambda repeated: cached_call_frame(process, repeated)
        process.register_connection(connection, message)
        return rest

    def _handle(self, process: RankProcess, message: list[Any], blobs: PayloadReader) -> None:
        """Call the handler of a message, and count progress."""
        pending = None
        if message[0] == "ask":
            connection = process.connections[message[1]]
            pending = connection.pending = PendingReply(connection)
            message = message[2:]
        verb = message[0]
        is_store_check = verb == "store" and message[3] == "check"
        if verb not in _VERBS_WITHOUT_PROGRESS and not is_store_check:
            self.state.progress += 1
            self.state.polls = 0
        self._handlers[verb](process, message, blobs, pending)

    # --- start-up ---
    def _on_rank(
        self,
        process: RankProcess,
        message: list[Any],
        blobs: PayloadReader,
        pending: PendingReply | None,
    ) -> None:
        """A process joins the world."""
        _, rank, world_size = message
        state = self.state
        assert pending is not None
        if self._starts_next_world(process):
            state.start_next_world()
            self._startup_waits.clear()
        holder = state.ranks.get(rank)
        is_taken = holder is not None and holder is not process and not holder.ended
        conflict = rank_conflict(rank, world_size, state.world_size, is_taken)
        if conflict:
            pending.reply_error("error", f"distsim capture: {conflict}")
            return
        state.world_size = world_size
        process.rank = rank
        state.ranks[rank] = process
        pending.reply(["ok"])

    def _starts_next_world(self, process: RankProcess) -> bool:
        """Whether all ranks of the current world have ended and the process is none of them."""
        ranks = list(self.state.ranks.values())
        if not ranks or process in ranks:
            return False
        return all(rank.ended is not None or rank.disconnected for rank in ranks)

    def _on_meet(
        self,
        process: RankProcess,
        message: list[Any],
        blobs: PayloadReader,
        pending: PendingReply | None,
    ) -> None:
        """A start-up call, which returns once all ranks have made it equally often."""
        _, number, site, op, ranks, facts = message
        process.add_event(HubEvent(number, op, site, facts=facts))
        assert pending is not None
        pending.site = site
        pending.startup_op = op
        process.waiting[number] = pending
        waits = self._startup_waits[process.next_count(op)]
        waits.append((process, number))
        if {waiting.rank for waiting, _ in waits} >= set(ranks):
            for waiting, wait_number in waits:
                waiting.waiting.pop(wait_number).reply(["ok"])

    # --- definitions: what later messages refer to by number ---
    def _on_site(self, process: RankProcess, message: list[Any], *_: object) -> None:
        """Defines the number of a call site."""
        _, number, file, line, function, via = message
        process.sites[number] = CallOrigin(file, line, function, via)

    def _on_group(self, process: RankProcess, message: list[Any], *_: object) -> None:
        """Defines the number of a group. Its ranks share it by name, ranks and generation."""
        _, number, *facts = message
        name, ranks, backend = facts[:3]
        generation = process.next_count((name, tuple(ranks)))
        process.groups[number] = self.state.matcher.group(facts, generation)
        if self._choose_profile is not None:
            self.state.matcher.use_profile(self._choose_profile(backend))
            self._choose_profile = None

    def _on_template(self, process: RankProcess, message: list[Any], *_: object) -> None:
        register_template(process, message)

    def _on_thread(self, process: RankProcess, message: list[Any], *_: object) -> None:
        """The messages from here on are those of another thread."""
        process.thread = message[1]

    # --- calls ---
    def _on_call(
        self,
        process: RankProcess,
        message: list[Any],
        blobs: PayloadReader,
        pending: PendingReply | None,
    ) -> None:
        """A posted call; with a pending reply, its rank waits for it at once."""
        _, number, site, group, op, peer, tag, is_async, facts, pieces, *batch = message
        payloads = [blobs.take(piece[0]) if len(piece) == 1 else piece for piece in pieces]
        contribution = CallContribution(payloads, facts)
        call = RankCall(process.rank, number, op, process.groups[group], peer, tag, contribution)
        event = HubEvent(number, "call", site, call=call, is_async=is_async)
        if batch:
            event.batch = batch[0]
        process.add_event(event)
        self._post(process, call, site, pending)

    def _on_repeat(
        self,
        process: RankProcess,
        message: list[Any],
        blobs: PayloadReader,
        pending: PendingReply | None,
    ) -> None:
        """As `_on_call`, for a call that has a template."""
        template, call = call_from_template(process, message[1], blobs)
        event = HubEvent(
            call.number,
            "call",
            template.site,
            call=call,
            is_async=template.is_async,
            waited=template.waited,
        )
        process.add_event(event)
        self._post(process, call, template.site, pending)

    def _post(
        self, process: RankProcess, call: RankCall, site: int, pending: PendingReply | None
    ) -> None:
        """Match a call, and send the results of all calls that are done because of it."""
        call.timeout_ns = call.contribution.extra.get("timeout_ns")
        process.calls[call.number] = call
        if pending is not None:
            process.wait_for(pending, call, site)
            pending.timeout_ns = call.timeout_ns
        for done in self.state.matcher.post(call):
            # The call itself may be done before any thread waits for it.
            if done is not call or pending is not None:
                self.state.deliver(done)

    # --- waits ---
    def _on_wait(
        self,
        process: RankProcess,
        message: list[Any],
        blobs: PayloadReader,
        pending: PendingReply | None,
    ) -> None:
        """A wait for an earlier call; without a timeout it takes that of the group."""
        _, number, site, target, timeout_ns = message
        process.add_event(HubEvent(number, "wait", site, targets=(target,)))
        call = process.calls[target]
        assert pending is not None
        process.wait_for(pending, call, site)
        pending.timeout_ns = timeout_ns
        if call.done:
            self.state.deliver(call)

    def _on_waited(self, process: RankProcess, message: list[Any], *_: object) -> None:
        """A wait that needed no reply."""
        _, number, site, targets = message
        process.add_event(HubEvent(number, "wait", site, targets=tuple(targets)))

    def _on_poll(
        self,
        process: RankProcess,
        message: list[Any],
        blobs: PayloadReader,
        pending: PendingReply | None,
    ) -> None:
        """A poll of a call that is not done is answered in silence, see `quiescence`."""
        _, target, number, site = message
        assert pending is not None
        call = process.calls[target]
        if call.done:
            self.state.polls = 0
            pending.reply_result(call)
        else:
            pending.polled_call = call
            pending.site = site
            process.waiting[number] = pending

    def _on_future(self, process: RankProcess, message: list[Any], *_: object) -> None:
        """A future was requested.

        Only a future for which C++ waits is an event: for others, the script reports its wait.
        """
        _, target, number, site, in_backward = message
        process.futures.add(target)
        if in_backward:
            process.add_event(HubEvent(number, "future", site, targets=(target,)))
        if process.calls[target].done:
            self.state.deliver(process.calls[target])

    def _on_dropped(self, process: RankProcess, message: list[Any], *_: object) -> None:
        """The script has lost a request, and will never read its result."""
        _, number, target = message
        process.add_event(HubEvent(number, "drop", 0, targets=(target,)))
        call = process.calls.get(target)
        if call is not None:
            self.state.matcher.release(call)

    def _on_read(self, process: RankProcess, message: list[Any], *_: object) -> None:
        """The rank has copied a result from shared memory."""
        self.state.matcher.release(process.calls[message[1]])

    # --- other events ---
    def _on_event(self, process: RankProcess, message: list[Any], *_: object) -> None:
        """Something that needs no match: it only becomes part of the program."""
        _, number, site, kind, group, facts = message
        process.add_event(
            HubEvent(number, kind, site, group=process.groups.get(group), facts=facts)
        )

    def _on_streams(self, process: RankProcess, message: list[Any], *_: object) -> None:
        """What CUDA streams did since the last call, and which stream is current from here on."""
        _, number, site, steps, current = message
        if steps:
            process.add_event(HubEvent(number, "streams", site, facts={"steps": steps}))
        process.streams[process.thread] = current

    def _on_values(self, process: RankProcess, message: list[Any], *_: object) -> None:
        """Checksums for `--check-values`."""
        _, site, kind, owner, ranks, step, entries = message
        place = process.sites[site]
        checksums = tuple((name, value) for name, value in entries)
        report = ValueReport(kind, owner, tuple(ranks), step, place, checksums)
        process.values.append(report)

    def _on_heard(self, process: RankProcess, *_: object) -> None:
        """A notice has been handled; until then, the process does not count as waiting."""
        process.unread_notices -= 1

    def _on_threads(self, process: RankProcess, message: list[Any], *_: object) -> None:
        """The threads that run no user code, and need not be blocked in a hang."""
        process.idle_threads = frozenset(message[1])

    def _on_end(
        self,
        process: RankProcess,
        message: list[Any],
        blobs: PayloadReader,
        pending: PendingReply | None,
    ) -> None:
        """A process reports how it ends."""
        _, how, code, text, site, trace, refused = message
        process.ended = ProcessExit(how, code, text, CallOrigin(*site), trace, refused)
        if pending is not None:
            pending.reply(["ok"])

    def _on_killed(self, process: RankProcess, message: list[Any], *_: object) -> None:
        """A process reports that a signal ended a process that it had started."""
        child = self.state.processes.get(message[1])
        if child is not None and not child.ended:
            how, code, text = message[2:5]
            child.ended = ProcessExit(how, code, text)

    # --- the store ---
    def _on_store(
        self,
        process: RankProcess,
        message: list[Any],
        blobs: PayloadReader,
        pending: PendingReply | None,
    ) -> None:
        """An operation of the store. Waits are answered once the keys exist."""
        _, number, site, verb, space, *arguments = message
        assert pending is not None
        if verb in ("wait", "pop"):
            pending.keys, pending.timeout_ns = arguments
            pending.space = space
            pending.site = site
            pending.pops = verb == "pop"
            process.waiting[number] = pending
        else:
            try:
                found = self.state.store.execute(verb, space, arguments)
            except StoreValueError as error:
                pending.reply_error("store", str(error))
                return
            if verb == "check":
                if found:
                    self.state.progress += 1
                else:
                    question = replace(pending, keys=arguments[0], space=space, site=site)
                    self.quiescence.store_polls.add(process, question, self.state.progress)
            pending.reply(["ok", found])
        self._answer_store_waits()

    def _answer_store_waits(self) -> None:
        """Answer waits for keys that exist now."""
        for process in self.state.processes.values():
            for number, pending in list(process.waiting.items()):
                if pending.keys is None:
                    continue
                read = self.state.store.pop if pending.pops else self.state.store.values
                found = read(pending.space, pending.keys)
                if found is not None:
                    del process.waiting[number]
                    pending.reply(["ok", found])

    def close(self) -> None:
        """Close all connections."""
        for connection in list(self._connections.values()):
            with suppress(OSError):
                connection.socket.close()
        self._epoll.close()
        self.listener.close()


def rank_conflict(rank: int, world_size: int, known_size: int, is_taken: bool) -> str:
    """Why a process cannot be this rank of this world; "" if it can.

    ``known_size`` is the size that other ranks named, 0 for the first rank.
    """
    if known_size not in (0, world_size):
        return f"rank {rank} has world size {world_size}, other ranks have {known_size}"
    if not 0 <= rank < world_size:
        return f"rank {rank} is outside the world of {world_size} ranks"
    if not is_taken:
        return ""
    return (
        f"two processes claim rank {rank}; a process that a rank starts cannot create a world of"
        " its own under distsim capture"
    )
