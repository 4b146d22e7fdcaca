"""The one-pass driver: runs a program without a clock, each rank as far as it gets.

Without a receive from any source the matching is fixed by the program, so every order of events ends in the same standstill and
a single pass is exact (with one, see `explore`). Then counters are enough: the k-th send of a channel meets the k-th receive. The
loop is written flat, on lists of integers, because it runs millions of calls a second; `distsim.semantics` holds the rules in explicit
form, and a property test compares the two.
"""

from __future__ import annotations

from typing import Any

from distsim.check.instructions import (
    ALL,
    CAME,
    IRECV,
    ISEND,
    JOIN_ASYNC,
    LEAVE,
    LOCAL,
    POST,
    RECV,
    ROOT,
    SEND,
    TAKEN,
    WAIT_JOIN,
    WAIT_RECV,
    WAIT_SEND,
    Condition,
    Instruction,
    RankCodes,
    Reading,
)  # fmt: skip
from distsim.check.layout import Layout


class Pass:
    """One run over a program under one reading: `run`, then look at what it left.

    ``sent[c]``, ``received[c]``: messages and receives posted on channel c. ``count[m]``: calls of member m on its lane;
    ``arrived[lane][n]``: members that have come to the lane's n-th call. ``position[rank]`` and ``status[rank]``: where each
    rank is, "" while it is blocked.
    """

    def __init__(self, layout: Layout, reading: Reading) -> None:
        program = layout.program
        self.layout, self.reading = layout, reading
        codes = RankCodes(layout, reading)
        self.codes: list[list[Instruction]] = [codes.of(rank) for rank in range(program.world_size)]
        channels, lanes = len(layout.chan_src), len(layout.lane_ranks)
        self.sent, self.received = [0] * channels, [0] * channels
        self.send_waits, self.recv_waits = (
            [-1] * channels,
            [-1] * channels,
        )  # the message that a blocked sender, receiver waits for
        self.count = [0] * len(layout.lane_of)
        self.arrived: list[list[int]] = [[] for _ in range(lanes)]
        self.signatures: list[list[int]] = [[] for _ in range(lanes)]
        self.unlike: set[tuple[int, int]] = set()  # (lane, n) where signatures differ
        self.joiners: dict[tuple[int, int], list[int]] = {}  # (lane, n) -> ranks that wait for all
        self.root_waits: dict[tuple[int, int, int], list[int]] = {}  # (lane, n, root) -> ranks that wait for the root
        self.made: list[list[Any]] = [[-1] * len(code) for code in self.codes]  # what each call posted: its k, n, or one per part
        self.position = [0] * program.world_size
        self.status = [""] * program.world_size
        self.message = [""] * program.world_size
        self.ready: list[int] = []
        self._member_of = {(lane, rank): m for m, (lane, rank) in enumerate(zip(layout.lane_of, layout.rank_of, strict=True))}

    def run(self, absent: frozenset[int] = frozenset()) -> Pass:
        """Run every rank that is not absent until no one can go on."""
        ranks = range(self.layout.program.world_size)
        for rank in sorted(absent):
            self.status[rank] = "absent"
        starts_late = bool(absent) and not self._init_is_written()
        if starts_late:  # init_process_group, where the file does not write it, stands before the first call
            return self
        ready = self.ready
        for rank in ranks:
            if rank in absent:
                continue
            self._go(rank, resumed=False)
            while ready:
                self._go(ready.pop(), resumed=True)
        return self

    def _init_is_written(self) -> bool:
        return "init_process_group" in self.layout.lane_names

    def _go(self, rank: int, resumed: bool) -> None:
        """Run one rank until it blocks or leaves. A resumed rank has what the call it stands in waited for."""
        sent, received, send_waits, recv_waits = self.sent, self.received, self.send_waits, self.recv_waits
        sources, targets, ready = self.layout.chan_src, self.layout.chan_dst, self.ready
        code, made = self.codes[rank], self.made[rank]
        out, into = self.layout.send_chan[rank], self.layout.recv_chan[rank]
        at = self.position[rank]
        if resumed and code[at][0] < LOCAL:
            at, resumed = at + 1, False
        while True:
            op, a, b = code[at]
            if op in (ISEND, SEND):
                c = out[a]
                made[at] = k = sent[c]
                sent[c] = k + 1
                if recv_waits[c] == k:
                    ready.append(targets[c])
                if op == SEND and received[c] <= k:
                    send_waits[c] = k
                    break
            elif op in (IRECV, RECV):
                c = into[a]
                made[at] = k = received[c]
                received[c] = k + 1
                if send_waits[c] == k:
                    ready.append(sources[c])
                if op == RECV and sent[c] <= k:
                    recv_waits[c] = k
                    break
            elif op == WAIT_RECV:
                c, k = into[b], made[at - a]
                if sent[c] <= k:
                    recv_waits[c] = k
                    break
            elif op == WAIT_SEND:
                c, k = out[b], made[at - a]
                if received[c] <= k:
                    send_waits[c] = k
                    break
            elif op == LOCAL:
                pass
            elif op < LOCAL:
                if self._join(rank, at, op, a, b):
                    break
            elif op == LEAVE:
                self.status[rank], self.message[rank] = a, b
                break
            else:
                if op == POST and not resumed:
                    made[at] = self._post(rank, at, a)
                resumed = False
                if self._blocks(rank, at, b):
                    break
            at += 1
        self.position[rank] = at

    def _join(self, rank: int, at: int, op: int, a: int, b: Any) -> bool:
        """JOIN, JOIN_ASYNC and WAIT_JOIN; True when the rank blocks."""
        made = self.made[rank]
        if op == WAIT_JOIN:
            member, n = self.layout.member[rank][b], made[at - a]
            if n < 0:
                return False
        else:
            member = self.layout.member[rank][a]
            made[at] = n = self._arrive(rank, member, b)
        lane = self.layout.lane_of[member]
        if op == JOIN_ASYNC or self.arrived[lane][n] == len(self.layout.lane_ranks[lane]):
            return False
        self.joiners.setdefault((lane, n), []).append(rank)
        return True

    def _arrive(self, rank: int, member: int, signature: Any) -> int:
        """The member comes to the next call of its lane; returns the call's number there."""
        lane, n = self.layout.lane_of[member], self.count[member]
        self.count[member] = n + 1
        arrived = self.arrived[lane]
        if signature.__class__ is list:
            signature = signature[self.layout.program.row_of[rank]]
        if n == len(arrived):
            arrived.append(1)
            self.signatures[lane].append(signature)
        else:
            arrived[n] += 1
            if signature != self.signatures[lane][n]:
                self.unlike.add((lane, n))
        if arrived[n] == len(self.layout.lane_ranks[lane]):
            self.ready.extend(self.joiners.pop((lane, n), ()))
        if self.root_waits:
            self.ready.extend(self.root_waits.pop((lane, n, rank), ()))
        return n

    def _post(self, rank: int, at: int, posts: tuple[tuple[int, int, Any], ...]) -> list[int]:
        """Post the messages, receives or the collective of a POST; returns what `made` keeps of each."""
        out, into = self.layout.send_chan[rank], self.layout.recv_chan[rank]
        made = []
        for kind, where, signature in posts:
            if kind == TAKEN:
                c = out[where]
                k = self.sent[c]
                self.sent[c] = k + 1
                if self.recv_waits[c] == k:
                    self.ready.append(self.layout.chan_dst[c])
            elif kind == CAME:
                c = into[where]
                k = self.received[c]
                self.received[c] = k + 1
                if self.send_waits[c] == k:
                    self.ready.append(self.layout.chan_src[c])
            else:
                k = self._arrive(rank, self.layout.member[rank][where], signature)
            made.append(k)
        return made

    def _blocks(self, rank: int, at: int, conditions: tuple[Condition, ...]) -> bool:
        """True when a condition is not met; the rank is then registered with it and looks again when it comes true."""
        if not self._may_block(rank, at, conditions):
            return False
        for condition in conditions:
            if not self.met(rank, at, condition):
                self._register(rank, at, condition)
                return True
        return False

    def _may_block(self, rank: int, at: int, conditions: tuple[Condition, ...]) -> bool:
        """False when all conditions are about messages, and met: the common case, looked at first."""
        out, into, made = self.layout.send_chan[rank], self.layout.recv_chan[rank], self.made[rank]
        for kind, distance, where, part in conditions:
            if kind > CAME:
                return True
            k = made[at - distance]
            if k.__class__ is list:
                k = k[part]
            if (self.received[out[where]] if kind == TAKEN else self.sent[into[where]]) <= k:
                return True
        return False

    def number(self, rank: int, at: int, condition: Condition) -> int:
        """What the request of a condition is called: k on its channel, n on its lane, or its ticket. -1: never posted."""
        kept = self.made[rank][at - condition[1]]
        return int(kept[max(condition[3], 0)]) if isinstance(kept, list) else int(kept)

    def met(self, rank: int, at: int, condition: Condition) -> bool:
        """A condition of the call at position ``at`` holds."""
        kind, _, where, _ = condition
        k = self.number(rank, at, condition)
        if k < 0:
            return True
        if kind in (ALL, ROOT):
            lane, root = self.scope(rank, condition)
            if root is None:
                return self.arrived[lane][k] == len(self.layout.lane_ranks[lane])
            return root < 0 or self.has_come(lane, k, root)
        if kind == TAKEN:
            return self.received[self.layout.send_chan[rank][where]] > k
        return self.sent[self.layout.recv_chan[rank][where]] > k

    def has_come(self, lane: int, n: int, rank: int) -> bool:
        """A rank has made the n-th call of a lane."""
        member = self._member_of.get((lane, rank))
        return member is not None and self.count[member] > n

    def scope(self, rank: int, condition: Condition) -> tuple[int, int | None]:
        """(lane, whom a collective's condition waits for there): None everybody, -1 nobody, else this root."""
        kind, _, where, _ = condition
        if kind == ALL:
            return self.layout.lane_of[self.layout.member[rank][where]], None
        slot, root, root_leaves = where
        if isinstance(root, list):
            root = root[self.layout.program.row_of[rank]]
        lane = self.layout.lane_of[self.layout.member[rank][slot]]
        if rank == root:
            return lane, -1 if root_leaves else None
        return lane, -1 if root_leaves is False else root

    def _register(self, rank: int, at: int, condition: Condition) -> None:
        kind, _, where, _ = condition
        k = self.number(rank, at, condition)
        if kind in (ALL, ROOT):
            lane, root = self.scope(rank, condition)
            if root is None:
                self.joiners.setdefault((lane, k), []).append(rank)
            else:
                self.root_waits.setdefault((lane, k, root), []).append(rank)
        elif kind == TAKEN:
            self.send_waits[self.layout.send_chan[rank][where]] = k
        else:
            self.recv_waits[self.layout.recv_chan[rank][where]] = k
