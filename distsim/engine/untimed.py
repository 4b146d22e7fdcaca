"""Does a program surely complete under a back end? A pass without a clock, for programs too large to be simulated for the answer.

A program is run under rules at least as strict as the back end's; what completes so completes there, for constraints only ever delay
(no receive is open to any source, so who meets whom is fixed beforehand). For gloo and mpi: every send waits for its receive, every
collective for all its members. For nccl: every launch of a rank waits for the one before it, whatever its stream, and the host for
every launch, unless buffers let a send go ahead; first uses of communicators meet (N8). What does not pass may complete all the same:
then an engine must tell.

The loop is flat, on lists of integers: it runs a million calls a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from distsim.engine.flat import Flat, of_row, varies
from distsim.ops.table import OPS
from distsim.profiles import Profile
from distsim.program.records import Code, CodeCall, Program, at

ISEND, IRECV, SEND, RECV, BATCH, START, JOIN, WAIT = range(8)
_ONE = {"isend": ISEND, "irecv": IRECV, "send": SEND, "recv": RECV}


def surely_completes(program: Program, profile: Profile) -> bool:
    """True only where the program completes; False where it may or may not.

    For programs that the fast engines run (`engine.choice.why_not_fast` is None)."""
    if any(op not in _KNOWN for op in {call.op for code in program.codes for call in _distinct(code)}):
        return False
    try:
        return _Pass(program, profile).run()
    except _Unlike:
        return False


class _Unlike(Exception):
    """Calls meet that may not fit."""


_KNOWN = {name for name, row in OPS.items() if row.kind in ("p2p", "collective", "batch", "wait")} | {
    "compute", "assign", "sleep", "synchronize", "wait_stream", "destroy_process_group", "init_process_group"}  # fmt: skip


def _distinct(code: Code) -> list[CodeCall]:
    return list({id(call): call for call in code.calls}.values())


def flatten(code: Code, serial: bool) -> list[Flat]:
    """(kind, a, b, signature) of each call that others can see. a: port, group port, parts, or what a wait is for. Vectors stay."""
    flat: list[Flat] = []
    index: list[int] = []
    known: dict[int, Flat | None] = {}
    for position, call in enumerate(code.calls):
        index.append(len(flat))
        if call.waits and not serial:
            flat.append((WAIT, tuple(_waited(code, position - d, len(flat) - index[position - d]) for d in call.waits), 0, 0))
        elif not call.waits:
            if id(call) not in known:
                known[id(call)] = _one(call, serial)
            found = known[id(call)]
            if found is not None:
                flat.append(found)
    return flat


def _one(call: CodeCall, serial: bool) -> Flat | None:
    kind = OPS[call.op].kind
    if kind == "p2p":
        way = SEND if serial and call.op == "isend" else RECV if serial and call.op == "irecv" else _ONE[call.op]
        return (way, call.port, 0, call.signature)
    if kind == "batch":
        parts = tuple((_ONE[part.op], part.port, part.signature) for part in call.parts)
        return (BATCH, parts, serial or not call.is_async, 0)
    if kind == "collective":
        return (START if call.is_async and not serial else JOIN, call.group, 0, call.signature)
    return None


def _waited(code: Code, position: int, distance: int) -> tuple[Any, ...]:
    """(distance back to the flat call, its kind, its port or parts)."""
    call = code.calls[position]
    if call.parts:
        return distance, BATCH, tuple((_ONE[part.op], part.port, 0) for part in call.parts)
    if call.port >= 0:
        return distance, _ONE[call.op], call.port
    return distance, START, call.group


class _Pass:
    def __init__(self, program: Program, profile: Profile) -> None:
        self.program, self.serial = program, profile.device
        self.meets = profile.device and program.options.get("init") != "eager"
        self.lazy, self.tags = self.meets, profile.tags
        self.channels: dict[tuple[Any, ...], int] = {}
        self.said: list[tuple[set[Any], set[Any]]] = []  # of each channel: what its sends say of themselves, and its receives
        self.ends: list[tuple[int, int]] = []  # of each channel: sender, receiver
        self.lanes: dict[Any, int] = {}
        self.members: list[int] = []  # of each lane: how many come
        codes = [flatten(code, self.serial) for code in program.codes]
        vary = [varies(calls) for calls in codes]
        size = program.world_size
        self.code: list[list[Flat]] = []
        self.out: list[list[int]] = []
        self.into: list[list[int]] = []
        self.lane: list[list[int]] = []
        self.comm: list[list[tuple[int, int]]] = []  # of each port: lanes where its communicator is met, unbatched and batched
        for rank in range(size):
            code, row, number = program.code(rank), program.row_of[rank], program.code_of[rank]
            if code.guards is not None:
                raise _Unlike  # each rank makes calls of its own
            self.code.append(of_row(codes[number], vary[number], code, row))
            self._ports(rank, code, row)
        self.mixed = self._mixed_channels()
        #: How many messages may be ahead of their receives, by channel.
        self.window = [_window(profile, program, nbytes) for nbytes in self.largest]
        self.sent, self.received = [0] * len(self.ends), [0] * len(self.ends)
        self.send_waits, self.recv_waits = [-1] * len(self.ends), [-1] * len(self.ends)
        self.count: list[dict[int, int]] = [{} for _ in range(size)]
        self.arrived: list[list[int]] = [[] for _ in self.members]
        self.signatures: list[list[Any]] = [[] for _ in self.members]
        self.joiners: dict[tuple[int, int], list[int]] = {}
        self.met: list[set[int]] = [set() for _ in range(size)]
        self.made: list[list[Any]] = [[-1] * len(calls) for calls in self.code]
        self.position, self.ready = [0] * size, list[int]()

    def _ports(self, rank: int, code: Code, row: int) -> None:
        out, into, comm = [], [], []
        for port in code.ports:
            group, peer, tag = at(code.groups[port.group], row), at(port.peer, row), at(port.tag, row)
            out.append(self._channel(group, rank, peer, tag))
            into.append(self._channel(group, peer, rank, tag))
            pair = self._lane(("pair", group, min(rank, peer), max(rank, peer)), 2)
            comm.append((pair, self._lane(("group", group), self.program.groups[group].size)))
        self.out.append(out)
        self.into.append(into)
        self.comm.append(comm)
        groups = [at(v, row) for v in code.groups]
        self.lane.append([self._lane(("calls", g), self.program.groups[g].size) for g in groups])
        for g in groups:
            self._lane(("group", g), self.program.groups[g].size)

    def _channel(self, group: int, src: int, dst: int, tag: int) -> int:
        key = (group, src, dst, tag if self.tags else 0)
        if key not in self.channels:
            self.channels[key] = len(self.ends)
            self.ends.append((src, dst))
            self.said.append((set(), set()))
        return self.channels[key]

    def _lane(self, key: Any, size: int) -> int:
        if key not in self.lanes:
            self.lanes[key] = len(self.members)
            self.members.append(size)
        return self.lanes[key]

    def _mixed_channels(self) -> dict[int, tuple[list[Any], list[Any]]]:
        """Channels whose messages are not all alike: their posts are kept, in order, to be compared at the end."""
        self.largest = [0] * len(self.ends)
        for rank in range(self.program.world_size):
            for call, batched in _messages(self.program.code(rank)):
                sends = OPS[call.op].direction == "send"
                channel = (self.out if sends else self.into)[rank][call.port]
                self.said[channel][not sends].add(self._words(rank, call.port, call.signature, batched))
                self.largest[channel] = max(self.largest[channel], at(call.nbytes, self.program.row_of[rank]) if sends else 0)
        if self.lazy and any(len({words[2] for words in (*one, *other)}) > 1 for one, other in self.said):
            raise _Unlike  # in a batch and outside: on two communicators
        return {c: ([], []) for c, (one, other) in enumerate(self.said) if len(one | other) > 1}

    def _words(self, rank: int, port: int, signature: Any, batched: bool) -> tuple[Any, ...]:
        """What both sides of a message must agree on."""
        code, row = self.program.code(rank), self.program.row_of[rank]
        return at(signature, row), 0 if self.tags else at(code.ports[port].tag, row), batched and self.lazy

    def _like(self) -> bool:
        return all(a == b for one, other in self.mixed.values() for a, b in zip(one, other, strict=False))

    # --- the pass ---
    def run(self) -> bool:
        size = self.program.world_size
        for rank in range(size):
            self._go(rank)
            while self.ready:
                self._go(self.ready.pop())
        return all(self.position[rank] >= len(self.code[rank]) for rank in range(size)) and self._like()

    def _go(self, rank: int) -> None:
        """Run one rank until it blocks. A call is looked at again from its beginning; what it has posted is in ``made``."""
        sent, received, send_waits, recv_waits = self.sent, self.received, self.send_waits, self.recv_waits
        code, made, ready, ends, meets = self.code[rank], self.made[rank], self.ready, self.ends, self.meets
        out, into, mixed = self.out[rank], self.into[rank], self.mixed
        window, position = self.window, self.position[rank]
        for position in range(self.position[rank], len(code)):
            kind, a, b, signature = code[position]
            if kind <= RECV:
                if meets and not self._meet(rank, a, 0):
                    break
                sends = kind in (SEND, ISEND)
                c = out[a] if sends else into[a]
                k = made[position]
                if k < 0:
                    if c in mixed:
                        mixed[c][not sends].append(self._words(rank, a, signature, False))
                    if sends:
                        made[position] = k = sent[c]
                        sent[c] = k + 1
                        if recv_waits[c] == k:
                            ready.append(ends[c][1])
                    else:
                        made[position] = k = received[c]
                        received[c] = k + 1
                        if send_waits[c] == k:
                            ready.append(ends[c][0])
                if kind >= SEND:
                    if sends:
                        k -= window[c]
                        if received[c] <= k:
                            send_waits[c] = k
                            break
                    elif sent[c] <= k:
                        recv_waits[c] = k
                        break
            elif kind in (JOIN, START):
                if meets and not self._meet_group(rank, a):
                    break
                if not self._join(rank, position, self.lane[rank][a], signature) and kind == JOIN:
                    break
            elif kind == BATCH:
                if meets and a and not self._meet(rank, a[0][1], 1):
                    break
                if made[position] == -1:
                    made[position] = [self._post(rank, *part) for part in a]
                if b and not self._batch_done(rank, a, made[position]):
                    break
            elif not self._waited(rank, position, a):
                break
        else:
            position = len(code)
        self.position[rank] = position

    def _post(self, rank: int, way: int, port: int, signature: Any) -> int:
        if self.mixed and (c := (self.out if way == ISEND else self.into)[rank][port]) in self.mixed:
            self.mixed[c][way != ISEND].append(self._words(rank, port, signature, True))
        if way == ISEND:
            c = self.out[rank][port]
            k = self.sent[c]
            self.sent[c] = k + 1
            if self.recv_waits[c] == k:
                self.ready.append(self.ends[c][1])
            return k
        c = self.into[rank][port]
        k = self.received[c]
        self.received[c] = k + 1
        if self.send_waits[c] == k:
            self.ready.append(self.ends[c][0])
        return k

    def _message_done(self, rank: int, way: int, port: int, k: int) -> bool:
        """The k-th message of a port has met; else the rank is noted as waiting for it."""
        if way in (ISEND, SEND):
            c = self.out[rank][port]
            k -= self.window[c]
            if self.received[c] > k:
                return True
            self.send_waits[c] = k
        else:
            c = self.into[rank][port]
            if self.sent[c] > k:
                return True
            self.recv_waits[c] = k
        return False

    def _batch_done(self, rank: int, parts: tuple[tuple[int, int, Any], ...], numbers: list[int]) -> bool:
        return all(self._message_done(rank, way, port, k) for (way, port, _), k in zip(parts, numbers, strict=True))

    def _waited(self, rank: int, position: int, requests: tuple[tuple[Any, ...], ...]) -> bool:
        for distance, kind, what in requests:
            k = self.made[rank][position - distance]
            if kind == BATCH:
                done = self._batch_done(rank, what, k)
            elif kind == START:
                done = self._all_came(rank, self.lane[rank][what], k)
            else:
                done = self._message_done(rank, kind, what, k)
            if not done:
                return False
        return True

    # --- collectives and meetings ---
    def _join(self, rank: int, position: int, lane: int, signature: Any) -> bool:
        """Come to the next call of a lane, once; True when all have come."""
        n = self.made[rank][position]
        if n < 0:
            n = self.made[rank][position] = self.count[rank].get(lane, 0)
            self.count[rank][lane] = n + 1
            self._arrive(lane, n, signature)
        return self._all_came(rank, lane, n)

    def _arrive(self, lane: int, n: int, signature: Any) -> None:
        arrived = self.arrived[lane]
        if n == len(arrived):
            arrived.append(1)
            self.signatures[lane].append(signature)
        else:
            arrived[n] += 1
            if signature != self.signatures[lane][n]:
                raise _Unlike
        if arrived[n] == self.members[lane]:
            self.ready.extend(self.joiners.pop((lane, n), ()))

    def _all_came(self, rank: int, lane: int, n: int) -> bool:
        if self.arrived[lane][n] == self.members[lane]:
            return True
        self.joiners.setdefault((lane, n), []).append(rank)
        return False

    def _meet(self, rank: int, port: int, batched: int) -> bool:
        return self._meet_on(rank, self.comm[rank][port][batched])

    def _meet_group(self, rank: int, port: int) -> bool:
        group = at(self.program.code(rank).groups[port], self.program.row_of[rank])
        return self._meet_on(rank, self.lanes["group", group])

    def _meet_on(self, rank: int, lane: int) -> bool:
        """First use of a communicator (N8): True when all its members have come to theirs."""
        if lane not in self.met[rank]:
            self.met[rank].add(lane)
            self._arrive(lane, 0, 0)
        elif self.arrived[lane][0] == self.members[lane]:
            return True
        return self._all_came(rank, lane, 0)


def _window(profile: Profile, program: Program, nbytes: int) -> int:
    """How many messages of a size a sender may have sent that no receive has met."""
    if not profile.credit(nbytes, 0, program.options):
        return 0
    low, high = 1, 1 << 40
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if profile.credit(nbytes, (middle - 1) * nbytes, program.options) else (low, middle - 1)
    return low


def _messages(code: Code) -> Iterator[tuple[CodeCall, bool]]:
    """The distinct messages of a code, and whether they travel in a batch."""
    for call in _distinct(code):
        if OPS[call.op].kind == "p2p":
            yield call, False
        yield from ((part, True) for part in call.parts)
