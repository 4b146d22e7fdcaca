"""Detect unordered accesses to memory that another rank puts to or gets from (DS404).

Key idea: vector clocks (C. Fidge, 1988; F. Mattern, 1989). Each call knows which calls of other
ranks are over before it: those before a signal or message that it has waited for, and those before
a collective whose data it has. Two accesses to one memory, of which one writes and one comes from
another rank, race if neither is known to be over before the other begins. The calls of one rank
are ordered by its program.

One order of events suffices. What a call knows follows from the matches, which the program fixes:
nccl, the only backend with one-sided operations, has no receives from any source. So the walk
may visit the ranks in any order that respects the waits.

Limits: accesses are compared per tensor (name and copy), not per byte. Local races of one rank's
requests are found by `buffer_races`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.checker.detectors.buffer_races import BufferKey, BufferUseWalk, buffer_label
from distsim.checker.matching.channel_layout import ChannelLayout
from distsim.checker.wording import aligned_columns, call_words, location_text, parenthesised
from distsim.common.records import dataclass
from distsim.findings.finding_types import Finding
from distsim.operations.registry import OPERATIONS
from distsim.program.code import CodeCall, at_row
from distsim.program.model import Program
from distsim.semantics.form.instructions import PartKind

_VectorClock = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class OneSidedRace:
    """Two accesses to ``label`` on rank ``owner``, each (rank, position).

    ``one`` comes first in the order examined. ``writes``: whether the second one writes.
    """

    label: str
    owner: int
    one: tuple[int, int]
    other: tuple[int, int]
    writes: bool

    @property
    def ranks(self) -> tuple[int, ...]:
        """The owner of the memory and the two ranks that access it."""
        return tuple(sorted({self.owner, self.one[0], self.other[0]}))


class _Touch(NamedTuple):
    """One access of a call. ``owner``: whose buffer it is; ``remote``: that is another rank's."""

    owner: int
    buffer: BufferKey
    writes: bool
    remote: bool


@dataclass(slots=True)
class _MemoryAccess:
    rank: int
    position: int
    number: int  # of the rank's calls
    writes: bool
    remote: bool


def uses_one_sided_calls(program: Program) -> bool:
    """Whether any call accesses another rank's memory."""
    for code in program.codes:
        if any(OPERATIONS[call.op].kind == "remote" for call in code.distinct_calls()):
            return True
    return False


def find_one_sided_races(
    program: Program, layout: ChannelLayout, reached: Sequence[int]
) -> tuple[OneSidedRace, ...]:
    """One race per pair of places and tensor, among calls up to position ``reached[rank]``."""
    if not uses_one_sided_calls(program):
        return ()
    found: dict[tuple[int, int, str], OneSidedRace] = {}
    for race in _HappensBefore(program, layout, reached).races():
        sites = sorted(program.code_call(*use).site for use in (race.one, race.other))
        found.setdefault((sites[0], sites[1], race.label.partition("@")[0]), race)
    return tuple(found.values())


class _HappensBefore:
    """Walks the calls of all ranks in a possible order, with a vector clock for each rank."""

    def __init__(self, program: Program, layout: ChannelLayout, reached: Sequence[int]) -> None:
        self.program, self.linked = program, layout.linked
        size = program.world_size
        self.calls: list[list[tuple[int, CodeCall]]] = []
        for rank in range(size):
            made = self._calls_made(rank)
            self.calls.append([(at, call) for at, call in made if at <= reached[rank]])
        self.clock: list[_VectorClock] = [np.zeros(size, dtype=np.int64) for _ in range(size)]
        self.clock_at_post: dict[int, _VectorClock] = {}  # row -> its rank's clock when posted
        self.at = [0] * size  # by rank, the next call to visit
        self.uses: dict[tuple[int, BufferKey], list[_MemoryAccess]] = {}
        self._signals: dict[int, int] = {}  # channel -> the newest signal
        # Signal -> the one before it on its channel. A channel has room for one signal, so a signal
        # also shows its sender that the previous one was taken.
        self._after: dict[int, int] = {}
        self._walks: dict[int, BufferUseWalk] = {}

    def _calls_made(self, rank: int) -> Iterator[tuple[int, CodeCall]]:
        code, row = self.program.code(rank), self.program.row_of[rank]
        for position in code.positions(row):
            call = code.calls[position]
            if call.invalid is not None and call.invalid.rows[row]:
                return
            yield position, call

    def races(self) -> Iterator[OneSidedRace]:
        """Advance rank by rank, each until it needs a call that is not posted yet."""
        # A hanging program stops moving before its end. Calls behind the hang never run, so they
        # cannot race.
        moved = True
        while moved:
            moved = False
            for rank in range(self.program.world_size):
                while self.at[rank] < len(self.calls[rank]):
                    position, call = self.calls[rank][self.at[rank]]
                    # Post before waiting: a rank blocked in a collective has arrived there, and the
                    # other members must be able to see it.
                    self._post(rank, position, call)
                    needed = self._needed(rank, position, call)
                    if any(row not in self.clock_at_post for row in needed):
                        break
                    for row in needed:
                        np.maximum(self.clock[rank], self.clock_at_post[row], out=self.clock[rank])
                    yield from self._use(rank, position, call)
                    self.at[rank], moved = self.at[rank] + 1, True

    # --- order ---
    def _rows(self, rank: int, position: int, call: CodeCall) -> list[int]:
        first = self.linked.base[rank] + self.program.code(rank).offsets[position]
        return [first + 1 + part for part in range(len(call.parts))] if call.parts else [first]

    def _post(self, rank: int, position: int, call: CodeCall) -> None:
        rows = self._rows(rank, position, call)
        # A blocked rank is visited again; its call is posted once.
        if rows[0] not in self.clock_at_post:
            self.clock[rank][rank] += 1
            self.clock_at_post |= dict.fromkeys(rows, self.clock[rank].copy())
            if OPERATIONS[call.op].signals and OPERATIONS[call.op].direction == "send":
                channel = int(self.linked.channel[rows[0]])
                if channel in self._signals:
                    self._after[rows[0]] = self._signals[channel]
                self._signals[channel] = rows[0]

    def _needed(self, rank: int, position: int, call: CodeCall) -> list[int]:
        """Rows of other ranks that are posted before the call is over."""
        code, found = self.program.code(rank), list[int]()
        for distance in call.waits:
            found += self._before(rank, position - distance, code.calls[position - distance])
        operation = OPERATIONS[call.op]
        if operation.kind == "batch":
            waits = not call.handled
        else:
            waits = not operation.nonblocking and not call.is_async
        return found + (self._before(rank, position, call) if waits else [])

    def _before(self, rank: int, position: int, call: CodeCall) -> list[int]:
        found, linked = list[int](), self.linked
        for row in self._rows(rank, position, call):
            if linked.kind[row] == PartKind.RECEIVE and linked.mate[row] >= 0:
                found.append(int(linked.mate[row]))
            elif row in self._after:  # its cell is empty: the signal before was taken
                found.append(int(linked.mate[self._after[row]]))
            elif linked.kind[row] == PartKind.COLLECTIVE:
                found += self._givers(row, call)
        return found

    def _givers(self, row: int, call: CodeCall) -> list[int]:
        """The rows of a collective whose data a member receives."""
        rows = [int(r) for r in self.linked.rows_of[int(self.linked.instance[row])]]
        if OPERATIONS[call.op].kind != "collective":
            return rows
        # A broadcast orders its members after the root only: they may return before each other has
        # arrived. So a collective is no barrier unless every member gives data to every other.
        members = self.linked.whole[int(self.linked.instance[row])]
        takes = OPERATIONS[call.op].takes_from(
            len(members),
            max(int(self.linked.root[row]), 0),
            members.index(int(self.linked.rank[row])),
        )
        if takes is None:
            return rows
        return [row for row in rows if members.index(int(self.linked.rank[row])) in takes]

    # --- uses ---
    def _use(self, rank: int, position: int, call: CodeCall) -> Iterator[OneSidedRace]:
        here, number = self.program.row_of[rank], int(self.clock[rank][rank])
        for owner, key, writes, remote in self._touches(rank, here, call):
            access = _MemoryAccess(rank, position, number, writes, remote)
            earlier = self.uses.setdefault((owner, key), [])
            for use in earlier:
                # `number` counts the calls of the earlier rank. If this rank's clock is behind it,
                # nothing that this rank waited for implies that the use is over.
                if _may_conflict(use, access) and use.number > self.clock[rank][use.rank]:
                    first = (use.rank, use.position)
                    yield OneSidedRace(buffer_label(key), owner, first, (rank, position), writes)
            # A newer access of the same rank and kind replaces the older one.
            kind = (rank, writes, remote)
            kept = [use for use in earlier if (use.rank, use.writes, use.remote) != kind]
            earlier[:] = [*kept, access]

    def _touches(self, rank: int, here: int, call: CodeCall) -> Iterator[_Touch]:
        """The accesses of a call to buffers: its own, and that to another rank's memory."""
        if rank not in self._walks:
            self._walks[rank] = BufferUseWalk(self.program, self.program.code(rank), here)
        for part in call.parts or (call,):
            for buffer, writes in self._walks[rank].touches(part):
                if buffer.name:
                    key = (buffer.name, int(at_row(buffer.index, here)))
                    yield _Touch(rank, key, writes, remote=False)
        if OPERATIONS[call.op].kind == "remote" and call.endpoint >= 0:
            puts = OPERATIONS[call.op].gives == "all"
            buffer = call.fields["outputs" if puts else "inputs"][0]
            peer = int(at_row(self.program.code(rank).endpoints[call.endpoint].peer, here))
            if buffer.name:
                key = (buffer.name, int(at_row(buffer.index, here)))
                yield _Touch(peer, key, writes=puts, remote=True)


def _may_conflict(one: _MemoryAccess, other: _MemoryAccess) -> bool:
    """Whether two accesses to one buffer race if nothing orders them."""
    if one.rank == other.rank or not (one.remote or other.remote):
        return False
    return one.writes or other.writes


def one_sided_race_findings(program: Program, races: Sequence[OneSidedRace]) -> tuple[Finding, ...]:
    """DS404, one per race."""
    found = []
    for race in races:
        calls, places = (
            [program.call(*use) for use in (race.one, race.other)],
            [program.place(*use) for use in (race.one, race.other)],
        )
        does = "writes" if race.writes else "reads"
        one_line, other_line = (parenthesised(location_text(place)) for place in places)
        head = (
            f"{calls[1].op} on rank {race.other[0]}{other_line} {does} {race.label} of rank "
            f"{race.owner}, but it may run before or after the {calls[0].op} of rank {race.one[0]}"
            f"{one_line}"
        )
        rows = [
            (f"rank {use[0]}", call_words(call), location_text(place))
            for use, call, place in zip((race.one, race.other), calls, places, strict=True)
        ]
        advice = (
            f"call `put_signal` after the {calls[0].op} and `wait_signal` before the "
            f"{calls[1].op}, or put a barrier between them"
        )
        found.append(
            Finding(
                "DS404",
                "error",
                "\n".join([head, *aligned_columns(rows)]),
                race.ranks,
                (),
                (advice,),
                tuple(dict.fromkeys(places)),
            )
        )
    return tuple(found)


__all__ = [
    "OneSidedRace",
    "uses_one_sided_calls",
    "one_sided_race_findings",
    "find_one_sided_races",
]
