"""What makes the order of events matter: calls that meet and do not fit, with what a back end makes of them, and all else in which an
order of arrival decides something. Where nothing does, local clocks are exact."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import combinations
from typing import NamedTuple, Protocol

import numpy as np

from distsim.arrays import distinct, union
from distsim.errors import UsageError
from distsim.ops.records import Call
from distsim.ops.table import OPS
from distsim.profiles.record import Meeting, Mishap, Profile
from distsim.semantics.conditions import Needs
from distsim.semantics.form import (
    KIND_COLLECTIVE,
    KIND_RECEIVE,
    KIND_WORK,
    ODD,
    Drop,
    Leave,
    Lock,
    Meet,
    PartKind,
    Post,
    Stuck,
    Unit,
    Wait,
)
from distsim.semantics.link import IntArray, Linked
from distsim.semantics.section import Unfold

# --- calls that meet and do not fit ---


#: Calls of one meeting that differ in more ways are left to the order of events.
MOST_KINDS = 8


class Rows(Protocol):
    """What is known of rows: a `Linked` program, or the tables made of it."""

    profile: Profile

    @property
    def signature(self) -> Sequence[int] | IntArray: ...
    @property
    def tag(self) -> Sequence[int] | IntArray: ...
    @property
    def nbytes(self) -> Sequence[int] | IntArray: ...
    def call(self, row: int) -> Call: ...


#: So many comparisons of differing calls of a collective are made: some tens of seconds (15 us each on one core of a server, measured
#: in one run of 500 ranks).
MOST_COMPARED = 1 << 22
_COMPARE_US = 15


class Misfit(NamedTuple):
    """Rows that met and differ: in which fields, and the profile's word for what follows."""

    rows: tuple[int, ...]
    fields: tuple[str, ...]
    outcome: str


def judge(of: Rows, rows: Sequence[int], instance: int) -> tuple[tuple[str, ...], Mishap] | None:
    """In what calls that met differ, and what comes of it; None where they fit. ``instance``: of a collective, -1 for a send and its
    receive. Of a collective ``rows`` may be those that have come so far."""
    signatures = [of.signature[row] for row in rows]
    if ODD in signatures:
        return ("splits",), Mishap("wrong-data")
    calls, is_message = tuple([of.call(row) for row in rows]), instance < 0
    fields = differences(calls, signatures, is_message)
    if is_message and of.tag[rows[0]] != of.tag[rows[1]]:
        fields += ("tag",)
    if not fields:
        return None
    return fields, of.profile.mismatch(Meeting(fields, calls, tuple(int(of.nbytes[row]) for row in rows), is_message))


def differences(calls: tuple[Call, ...], signatures: Sequence[int], is_message: bool) -> tuple[str, ...]:
    """The words in which calls that met differ (`agreement` of their rows); those of one operation and one signature agree.

    Operations that agree pair by pair (all_to_all) are compared so, whoever else is missing: gloo's parts travel between two (run).
    """
    unlike = {(call.op, signature): call for call, signature in zip(calls, signatures, strict=True)}.values()
    said = [OPS[c.op].agreement(c) if is_message else {"op": c.op, **OPS[c.op].agreement(c)} for c in unlike]
    names = dict.fromkeys(name for words in said for name in words)
    fields = tuple(name for name in names if any(words.get(name) != said[0].get(name) for words in said))
    row = OPS[calls[0].op]
    if not row.pairwise or "op" in fields:
        return fields
    uneven = "numel" in fields or "numel" not in said[0]
    fields = tuple(name for name in fields if name not in ("numel", "splits"))
    return (*fields, "splits") if uneven and row.cross_faults(sorted(calls, key=lambda c: c.group_rank)) else fields


class Misfits:
    """The meetings of a linked program in which calls may differ. Where ``why_ordered`` is None all of them go on as if they fitted, in
    whatever order they come; what came of them is told by `met`."""

    def __init__(self, linked: Linked) -> None:
        self.linked = linked
        self.receives = bad_pairs(linked)
        unlike, uneven = bad_instances(linked)
        self.instances, self.uneven = union(unlike, uneven), frozenset(uneven.tolist())
        if linked.program.stands_for is not None and self.instances.size:
            raise Unfold  # what comes of it goes by how many say what, and where they stand
        refuse_too_many(linked, self.instances.tolist())
        self.early = frozenset(Needs(linked).early.tolist())
        self._judged: dict[tuple[int, ...], tuple[tuple[str, ...], Mishap] | None] = {}
        self._pairs: dict[tuple[object, ...], tuple[tuple[str, ...], Mishap] | None] = {}

    def why_ordered(self) -> str | None:
        """The reason why the order of events must be followed: what does not fit ends a process, or halts others."""
        if any(found is not None and found[1].crash for _, found in self._messages(self.receives.tolist())):
            return "messages do not fit"
        return None if all(map(self._goes_on, self.instances.tolist())) else "collectives do not fit"

    def met(self, posted: Sequence[int] | IntArray) -> Iterator[Misfit]:
        """What met and differs, of the rows that were posted: messages by their receives, then collectives."""
        here = [row for row in self.receives.tolist() if posted[row] >= 0 and posted[self.linked.mate[row]] >= 0]
        for rows, found in self._messages(here):
            if found is not None:
                yield Misfit(rows, found[0], found[1].outcome)
        for instance in self.instances.tolist():
            came = [row for row in self.linked.rows_of[instance].tolist() if posted[row] >= 0]
            whole = len(came) == len(self.linked.members[instance])
            if whole or len(set(self.linked.signature[came].tolist())) > 1 or (instance in self.uneven and len(came) > 1):
                found = self._judge(tuple(came), instance)
                if found is not None:
                    yield Misfit(tuple(came), found[0], found[1].outcome)

    def _judge(self, rows: tuple[int, ...], instance: int) -> tuple[tuple[str, ...], Mishap] | None:
        if rows not in self._judged:
            self._judged[rows] = judge(self.linked, rows, instance)
        return self._judged[rows]

    def _messages(self, receives: Iterable[int]) -> Iterator[tuple[tuple[int, int], tuple[tuple[str, ...], Mishap] | None]]:
        """(send and receive, what comes of them); those of one code that say the same are judged once."""
        linked = self.linked
        for receive in receives:
            rows = int(linked.mate[receive]), receive
            key = tuple((id(linked.code_call(row)), *(int(c[row]) for c in (linked.signature, linked.tag, linked.nbytes)))
                        for row in rows)  # fmt: skip
            if key not in self._pairs:
                self._pairs[key] = judge(linked, rows, -1)
            yield rows, self._pairs[key]

    def _goes_on(self, instance: int) -> bool:
        """Neither all calls of a collective nor any two that differ stop anybody, and nobody leaves before all have come."""
        linked, rows = self.linked, tuple(self.linked.rows_of[instance].tolist())
        if not self.early.isdisjoint(rows):
            return False
        kinds = {(int(linked.signature[row]), int(linked.nbytes[row])): row for row in rows}
        if len(kinds) > MOST_KINDS:
            return False
        for those in (rows, *combinations(kinds.values(), 2)):
            found = self._judge(those, instance)
            if found is not None and (found[1].crash or found[1].hangs):
                return False
        return True


def refuse_too_many(linked: Linked, instances: Iterable[int]) -> None:
    """Raise UsageError where calls differ in so many ways that comparing each with all who came before has no end: the number of
    different calls times that of the members, over all collectives (`MOST_COMPARED`)."""
    compared = sum(len(distinct(linked.signature[rows])) * len(rows) for rows in map(linked.rows_of.__getitem__, instances)
                   if len(rows) ** 2 > MOST_COMPARED)  # fmt: skip
    if compared > MOST_COMPARED:
        seconds = compared * _COMPARE_US / 1e6
        raise UsageError(
            f"calls of one collective differ from rank to rank: {compared:,} comparisons, about {seconds / 60:,.0f} min, "
            f"where {MOST_COMPARED:,} are allowed",
            "let the members agree (root, sizes, dtype, operation), or look at the same program with fewer ranks: `world:`",
        )


def bad_pairs(linked: Linked) -> IntArray:
    """The receives whose message, if both come, is not what they expect."""
    receives = np.flatnonzero((linked.kind == PartKind.RECEIVE) & (linked.mate >= 0))
    sends = linked.mate[receives]
    differ = (linked.signature[receives] != linked.signature[sends]) | (linked.tag[receives] != linked.tag[sends])
    found: IntArray = receives[differ]
    return found


def bad_instances(linked: Linked) -> tuple[IntArray, IntArray]:
    """(instances whose calls differ in what they say, instances of pairwise calls whose parts may not fit one another)."""
    rows = np.flatnonzero((linked.kind == PartKind.COLLECTIVE) & (linked.instance >= 0))
    count = len(linked.members)
    low, high = np.full(count, np.iinfo(np.int64).max), np.full(count, np.iinfo(np.int64).min)
    np.minimum.at(low, linked.instance[rows], linked.signature[rows])
    np.maximum.at(high, linked.instance[rows], linked.signature[rows])
    unlike = np.flatnonzero((low < high) | ((low == ODD) & (high == ODD)))
    return unlike, distinct(np.concatenate([np.zeros(0, dtype=np.int64), *_uneven(linked)]))


def _uneven(linked: Linked) -> list[IntArray]:
    """The instances of calls that agree pair by pair, and whose parts are not all of one size."""
    known: dict[int, bool] = {}
    found = []
    for unit, parts, rows in linked.parts(PartKind.COLLECTIVE):
        call = parts[0].call
        if OPS[call.op].pairwise:
            if id(call) not in known:
                agreed = OPS[call.op].agreement(linked.program.resolve(unit.ranks[0], call))
                known[id(call)] = "numel" not in agreed or isinstance(call.signature, np.ndarray)
            if known[id(call)]:
                found.append(linked.instance[rows].reshape(-1))
    return found


# --- does any order of arrival decide something? ---


def why_ordered(linked: Linked, misfits: Misfits | None = None) -> str | None:
    """The reason why the order of events must be followed, None where it does not matter. ``misfits``: those of the program, if they are
    at hand."""
    if linked.open_boxes.size:
        return "a receive is open to any source"
    if any(fault.kind not in ("slow", "late", "absent") for fault in linked.program.faults):
        return "a rank fails"
    if any(fault.kind == "absent" for fault in linked.program.faults) and linked.profile.peer_death == "raises":
        return "a rank is missing"
    why = next((why for unit in linked.units if (why := _of_unit(linked, unit)) is not None), None)
    return why or (misfits or Misfits(linked)).why_ordered()


def _of_unit(linked: Linked, unit: Unit) -> str | None:
    last = unit.instructions[-1]
    if isinstance(last, Leave) and last.gone:
        return "a rank leaves early"
    for instruction in unit.instructions:
        if isinstance(instruction, Drop):
            return "a request is dropped"
        if isinstance(instruction, Stuck):
            return "a call is invalid"
        if isinstance(instruction, Meet) and (instruction.uneven or instruction.lost):
            return "the ranks made different groups"
    return _queue_fills(unit) or (_lock_contended(unit) if linked.profile.lock else None)


def _queue_fills(unit: Unit) -> str | None:
    """Do more launches of a queue stand open at once than its workers run?"""
    opened: dict[Hashable, set[int]] = {}
    of: dict[int, Hashable] = {}
    for instruction in unit.instructions:
        if isinstance(instruction, Post) and instruction.launch.pooled:
            queue = instruction.launch.queue
            assert queue is not None
            there = opened.setdefault(queue.key, set())
            if len(there) >= queue.width:
                return "a queue of collectives fills up"
            there.add(instruction.launch.row)
            of[instruction.launch.row] = queue.key
        elif isinstance(instruction, Wait):
            for row in instruction.rows:
                if row in of:
                    opened[of[row]].discard(row)
    return None


def _lock_contended(unit: Unit) -> str | None:
    """Does an asynchronous collective run beside what takes the lock as well: messages, a wait for one, a call of the host's own?"""
    opened: set[int] = set()
    for instruction in unit.instructions:
        if isinstance(instruction, Post) and instruction.launch.pooled:
            opened.add(instruction.launch.row)
        elif isinstance(instruction, Wait):
            opened.difference_update(instruction.rows)
        elif opened and (isinstance(instruction, Lock) or _is_message(instruction) or _is_host_s(instruction)):
            return "the process's one lock decides who comes first"
    return None


def _is_message(instruction: object) -> bool:
    return isinstance(instruction, Post) and instruction.launch.parts[0].kind <= KIND_RECEIVE


def _is_host_s(instruction: object) -> bool:
    """A collective that no worker runs, as a new_group."""
    return (
        isinstance(instruction, Post) and instruction.launch.queue is None and instruction.launch.parts[0].kind is KIND_COLLECTIVE
    )


def leaves_open(linked: Linked) -> bool:
    """Does a rank leave before its end with requests that it never saw finished? Then it matters who came before."""
    for unit in linked.units:
        last = unit.instructions[-1]
        if isinstance(last, Leave) and last.gone:
            waited = {row for i in unit.instructions if isinstance(i, Wait) for row in i.rows}
            if any(part.row not in waited for launch in unit.launches for part in launch.parts if part.kind is not KIND_WORK):
                return True
    return False
