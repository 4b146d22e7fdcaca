"""What makes the order of events matter: calls that meet and do not fit, with what a back end makes
of them, and all else in which an order of arrival decides something. Where nothing does, local
clocks are exact."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import combinations
from typing import NamedTuple, Protocol

import numpy as np

from distsim.backends.profile import BackendProfile, MismatchedCalls, MismatchOutcome
from distsim.common.arrays import IntArray, sorted_union, sorted_unique
from distsim.common.errors import UsageError
from distsim.operations.core.resolved_call import ResolvedCall
from distsim.operations.registry import OPERATIONS
from distsim.semantics.classes.representatives import FoldingError
from distsim.semantics.form.completion import CollectiveNeeds
from distsim.semantics.form.instructions import (
    INVALID_SIGNATURE,
    KIND_COLLECTIVE,
    KIND_RECEIVE,
    KIND_WORK,
    AcquireLock,
    AwaitRendezvous,
    BlockForever,
    CompilationUnit,
    DropRequest,
    ExitRank,
    PartKind,
    PostLaunch,
    WaitForRows,
)
from distsim.semantics.form.linked_program import LinkedProgram

# --- calls that meet and do not fit ---


#: Calls of one meeting that differ in more ways are left to the order of events.
MAX_CALL_KINDS = 8


class RowProperties(Protocol):
    """What is known of rows: a `LinkedProgram` program, or the tables made of it."""

    profile: BackendProfile

    @property
    def signature(self) -> Sequence[int] | IntArray: ...
    @property
    def tag(self) -> Sequence[int] | IntArray: ...
    @property
    def nbytes(self) -> Sequence[int] | IntArray: ...
    def call(self, row: int) -> ResolvedCall: ...


#: So many comparisons of differing calls of a collective are made: some tens of seconds (15 us each
#: on one core of a server, measured in one run of 500 ranks).
MOST_COMPARED = 1 << 22
_COMPARE_US = 15


class RowMismatch(NamedTuple):
    """Rows that met and differ: in which fields, and the profile's word for what follows."""

    rows: tuple[int, ...]
    fields: tuple[str, ...]
    outcome: str


def find_mismatch(
    of: RowProperties, rows: Sequence[int], instance: int
) -> tuple[tuple[str, ...], MismatchOutcome] | None:
    """In what calls that met differ, and what comes of it; None where they fit. ``instance``: of a
    collective, -1 for a send and its receive. Of a collective ``rows`` may be those that have come
    so far."""
    signatures = [of.signature[row] for row in rows]
    if INVALID_SIGNATURE in signatures:
        return ("splits",), MismatchOutcome("wrong-data")
    calls, is_message = tuple([of.call(row) for row in rows]), instance < 0
    fields = differing_fields(calls, signatures, is_message)
    if is_message and of.tag[rows[0]] != of.tag[rows[1]]:
        fields += ("tag",)
    if not fields:
        return None
    return fields, of.profile.mismatch(
        MismatchedCalls(fields, calls, tuple(int(of.nbytes[row]) for row in rows), is_message)
    )


def differing_fields(
    calls: tuple[ResolvedCall, ...], signatures: Sequence[int], is_message: bool
) -> tuple[str, ...]:
    """The words in which calls that met differ (`agreement` of their rows); those of one operation
    and one signature agree.

    Operations that agree pair by pair (all_to_all) are compared so, whoever else is missing: gloo's
    parts travel between two (run).
    """
    unlike = {
        (call.op, signature): call for call, signature in zip(calls, signatures, strict=True)
    }.values()
    said = [
        OPERATIONS[c.op].agreement(c)
        if is_message
        else {"op": c.op, **OPERATIONS[c.op].agreement(c)}
        for c in unlike
    ]
    names = dict.fromkeys(name for words in said for name in words)
    fields = tuple(
        name for name in names if any(words.get(name) != said[0].get(name) for words in said)
    )
    row = OPERATIONS[calls[0].op]
    if not row.pairwise or "op" in fields:
        return fields
    uneven = "numel" in fields or "numel" not in said[0]
    fields = tuple(name for name in fields if name not in ("numel", "splits"))
    return (
        (*fields, "splits")
        if uneven and row.mismatched_pairs(sorted(calls, key=lambda c: c.group_rank))
        else fields
    )


class ProgramMismatches:
    """The meetings of a linked program in which calls may differ. Where ``why_order_matters`` is
    None all of them go on as if they fitted, in whatever order they come; what came of them is told
    by `met`."""

    def __init__(self, linked: LinkedProgram) -> None:
        self.linked = linked
        self.receives = mismatched_receives(linked)
        unlike, uneven = suspect_instances(linked)
        self.instances, self.uneven = sorted_union(unlike, uneven), frozenset(uneven.tolist())
        if linked.program.representative_of is not None and self.instances.size:
            raise FoldingError  # what comes of it goes by how many say what, and where they stand
        refuse_too_many_comparisons(linked, self.instances.tolist())
        self.early = frozenset(CollectiveNeeds(linked).early.tolist())
        self._judged: dict[tuple[int, ...], tuple[tuple[str, ...], MismatchOutcome] | None] = {}
        self._pairs: dict[tuple[object, ...], tuple[tuple[str, ...], MismatchOutcome] | None] = {}

    def why_ordered(self) -> str | None:
        """The reason why the order of events must be followed: what does not fit ends a process, or
        halts others.
        """
        if any(
            found is not None and found[1].crash
            for _, found in self._messages(self.receives.tolist())
        ):
            return "messages do not fit"
        return (
            None if all(map(self._goes_on, self.instances.tolist())) else "collectives do not fit"
        )

    def met(self, posted: Sequence[int] | IntArray) -> Iterator[RowMismatch]:
        """What met and differs, of the rows that were posted: messages by their receives, then
        collectives.
        """
        here = [
            row
            for row in self.receives.tolist()
            if posted[row] >= 0 and posted[self.linked.mate[row]] >= 0
        ]
        for rows, found in self._messages(here):
            if found is not None:
                yield RowMismatch(rows, found[0], found[1].outcome)
        for instance in self.instances.tolist():
            came = [row for row in self.linked.rows_of[instance].tolist() if posted[row] >= 0]
            whole = len(came) == len(self.linked.members[instance])
            if (
                whole
                or len(set(self.linked.signature[came].tolist())) > 1
                or (instance in self.uneven and len(came) > 1)
            ):
                found = self._judge(tuple(came), instance)
                if found is not None:
                    yield RowMismatch(tuple(came), found[0], found[1].outcome)

    def _judge(
        self, rows: tuple[int, ...], instance: int
    ) -> tuple[tuple[str, ...], MismatchOutcome] | None:
        if rows not in self._judged:
            self._judged[rows] = find_mismatch(self.linked, rows, instance)
        return self._judged[rows]

    def _messages(
        self, receives: Iterable[int]
    ) -> Iterator[tuple[tuple[int, int], tuple[tuple[str, ...], MismatchOutcome] | None]]:
        """(send and receive, what comes of them); those of one code that say the same are judged
        once.
        """
        linked = self.linked
        for receive in receives:
            rows = int(linked.mate[receive]), receive
            key = tuple(
                (
                    id(linked.code_call(row)),
                    *(int(c[row]) for c in (linked.signature, linked.tag, linked.nbytes)),
                )
                for row in rows
            )
            if key not in self._pairs:
                self._pairs[key] = find_mismatch(linked, rows, -1)
            yield rows, self._pairs[key]

    def _goes_on(self, instance: int) -> bool:
        """Neither all calls of a collective nor any two that differ stop anybody, and nobody leaves
        before all have come.
        """
        linked, rows = self.linked, tuple(self.linked.rows_of[instance].tolist())
        if not self.early.isdisjoint(rows):
            return False
        kinds = {(int(linked.signature[row]), int(linked.nbytes[row])): row for row in rows}
        if len(kinds) > MAX_CALL_KINDS:
            return False
        for those in (rows, *combinations(kinds.values(), 2)):
            found = self._judge(those, instance)
            if found is not None and (found[1].crash or found[1].hangs):
                return False
        return True


def refuse_too_many_comparisons(linked: LinkedProgram, instances: Iterable[int]) -> None:
    """Raise UsageError where calls differ in so many ways that comparing each with all who came
    before has no end: the number of different calls times that of the members, over all collectives
    (`MOST_COMPARED`)."""
    compared = sum(
        len(sorted_unique(linked.signature[rows])) * len(rows)
        for rows in map(linked.rows_of.__getitem__, instances)
        if len(rows) ** 2 > MOST_COMPARED
    )
    if compared > MOST_COMPARED:
        seconds = compared * _COMPARE_US / 1e6
        raise UsageError(
            f"calls of one collective differ from rank to rank: {compared:,} comparisons, about {seconds / 60:,.0f} min, "
            f"where {MOST_COMPARED:,} are allowed",
            "let the members agree (root, sizes, dtype, operation), or look at the same program with fewer ranks: `world:`",
        )


def mismatched_receives(linked: LinkedProgram) -> IntArray:
    """The receives whose message, if both come, is not what they expect."""
    receives = np.flatnonzero((linked.kind == PartKind.RECEIVE) & (linked.mate >= 0))
    sends = linked.mate[receives]
    differ = (linked.signature[receives] != linked.signature[sends]) | (
        linked.tag[receives] != linked.tag[sends]
    )
    found: IntArray = receives[differ]
    return found


def suspect_instances(linked: LinkedProgram) -> tuple[IntArray, IntArray]:
    """(instances whose calls differ in what they say, instances of pairwise calls whose parts may
    not fit one another).
    """
    rows = np.flatnonzero((linked.kind == PartKind.COLLECTIVE) & (linked.instance >= 0))
    count = len(linked.members)
    low, high = np.full(count, np.iinfo(np.int64).max), np.full(count, np.iinfo(np.int64).min)
    np.minimum.at(low, linked.instance[rows], linked.signature[rows])
    np.maximum.at(high, linked.instance[rows], linked.signature[rows])
    unlike = np.flatnonzero(
        (low < high) | ((low == INVALID_SIGNATURE) & (high == INVALID_SIGNATURE))
    )
    return unlike, sorted_unique(
        np.concatenate([np.zeros(0, dtype=np.int64), *_instances_of_uneven_parts(linked)])
    )


def _instances_of_uneven_parts(linked: LinkedProgram) -> list[IntArray]:
    """The instances of calls that agree pair by pair, and whose parts are not all of one size."""
    known: dict[int, bool] = {}
    found = []
    for unit, parts, rows in linked.parts(PartKind.COLLECTIVE):
        call = parts[0].call
        if OPERATIONS[call.op].pairwise:
            if id(call) not in known:
                agreed = OPERATIONS[call.op].agreement(linked.program.resolve(unit.ranks[0], call))
                known[id(call)] = "numel" not in agreed or isinstance(call.signature, np.ndarray)
            if known[id(call)]:
                found.append(linked.instance[rows].reshape(-1))
    return found


# --- does any order of arrival decide something? ---


def why_order_matters(
    linked: LinkedProgram, misfits: ProgramMismatches | None = None
) -> str | None:
    """The reason why the order of events must be followed, None where it does not matter.
    ``misfits``: those of the program, if they are at hand."""
    if linked.open_boxes.size:
        return "a receive is open to any source"
    if any(fault.kind not in ("slow", "late", "absent") for fault in linked.program.faults):
        return "a rank fails"
    if (
        any(fault.kind == "absent" for fault in linked.program.faults)
        and linked.profile.peer_death == "raises"
    ):
        return "a rank is missing"
    why = next(
        (
            why
            for unit in linked.units
            if (why := _why_order_matters_in_unit(linked, unit)) is not None
        ),
        None,
    )
    return why or (misfits or ProgramMismatches(linked)).why_ordered()


def _why_order_matters_in_unit(linked: LinkedProgram, unit: CompilationUnit) -> str | None:
    last = unit.instructions[-1]
    if isinstance(last, ExitRank) and last.gone:
        return "a rank leaves early"
    for instruction in unit.instructions:
        if isinstance(instruction, DropRequest):
            return "a request is dropped"
        if isinstance(instruction, BlockForever):
            return "a call is invalid"
        if isinstance(instruction, AwaitRendezvous) and (instruction.uneven or instruction.lost):
            return "the ranks made different groups"
    return _worker_queue_fills(unit) or (_lock_contended(unit) if linked.profile.lock else None)


def _worker_queue_fills(unit: CompilationUnit) -> str | None:
    """Do more launches of a queue stand open at once than its workers run?"""
    opened: dict[Hashable, set[int]] = {}
    of: dict[int, Hashable] = {}
    for instruction in unit.instructions:
        if isinstance(instruction, PostLaunch) and instruction.launch.pooled:
            queue = instruction.launch.queue
            assert queue is not None
            there = opened.setdefault(queue.key, set())
            if len(there) >= queue.width:
                return "a queue of collectives fills up"
            there.add(instruction.launch.row)
            of[instruction.launch.row] = queue.key
        elif isinstance(instruction, WaitForRows):
            for row in instruction.rows:
                if row in of:
                    opened[of[row]].discard(row)
    return None


def _lock_contended(unit: CompilationUnit) -> str | None:
    """Does an asynchronous collective run beside what takes the lock as well: messages, a wait for
    one, a call of the host's own?
    """
    opened: set[int] = set()
    for instruction in unit.instructions:
        if isinstance(instruction, PostLaunch) and instruction.launch.pooled:
            opened.add(instruction.launch.row)
        elif isinstance(instruction, WaitForRows):
            opened.difference_update(instruction.rows)
        elif opened and (
            isinstance(instruction, AcquireLock)
            or _is_message(instruction)
            or _is_host_collective(instruction)
        ):
            return "the process's one lock decides who comes first"
    return None


def _is_message(instruction: object) -> bool:
    return isinstance(instruction, PostLaunch) and instruction.launch.parts[0].kind <= KIND_RECEIVE


def _is_host_collective(instruction: object) -> bool:
    """A collective that no worker runs, as a new_group."""
    return (
        isinstance(instruction, PostLaunch)
        and instruction.launch.queue is None
        and instruction.launch.parts[0].kind is KIND_COLLECTIVE
    )


def exits_with_open_requests(linked: LinkedProgram) -> bool:
    """Does a rank leave before its end with requests that it never saw finished? Then it matters
    who came before.
    """
    for unit in linked.units:
        last = unit.instructions[-1]
        if isinstance(last, ExitRank) and last.gone:
            waited = {
                row for i in unit.instructions if isinstance(i, WaitForRows) for row in i.rows
            }
            if any(
                part.row not in waited
                for launch in unit.launches
                for part in launch.parts
                if part.kind is not KIND_WORK
            ):
                return True
    return False
