"""Calls that match and differ, and what a backend makes of them.

Key idea: matches are fixed by the program, except where the order of events matters, so most
mismatches are known before a run. `find_mismatch` compares any set of calls that met; the ordered
driver asks it during the run. `ProgramMismatches` finds all that may differ in a linked program,
and says whether they are harmless enough for local clocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple, Protocol

import numpy as np

from distsim.backends.profile import BackendProfile, MismatchedCalls, MismatchOutcome
from distsim.common.arrays import IntArray, sorted_union, sorted_unique
from distsim.common.errors import UsageError
from distsim.operations.core.resolved_call import ResolvedCall
from distsim.operations.registry import OPERATIONS
from distsim.semantics.classes.representatives import FoldingError
from distsim.semantics.form.collective_needs import CollectiveNeeds
from distsim.semantics.form.instructions import INVALID_SIGNATURE, PartKind
from distsim.semantics.form.linked_program import LinkedProgram

#: The calls of one collective that differ in more ways are left to the ordered driver.
MAX_CALL_KINDS = 8
#: The maximum number of comparisons of differing calls of collectives: some tens of seconds.
MOST_COMPARED = 1 << 22
#: The time of one comparison on one core of a server, measured in one run of 500 ranks.
_COMPARE_US = 15


class RowProperties(Protocol):
    """What is known of rows: implemented by a `LinkedProgram` and by the tables made of it."""

    profile: BackendProfile

    @property
    def signature(self) -> Sequence[int] | IntArray:
        """By row, a number that is equal for calls that agree."""

    @property
    def tag(self) -> Sequence[int] | IntArray:
        """By row, the tag of a message."""

    @property
    def nbytes(self) -> Sequence[int] | IntArray:
        """By row, the size in bytes."""

    def call(self, row: int) -> ResolvedCall:
        """The resolved call of a row."""


class RowMismatch(NamedTuple):
    """Rows that matched and differ in ``fields``; ``outcome``: the profile's word."""

    rows: tuple[int, ...]
    fields: tuple[str, ...]
    outcome: str


#: The fields in which calls differ, and what follows.
_FoundMismatch = tuple[tuple[str, ...], MismatchOutcome]


# --- comparing calls ---
def find_mismatch(
    rows_of: RowProperties, rows: Sequence[int], instance: int
) -> _FoundMismatch | None:
    """How calls that met differ, and what follows; None if they agree.

    ``instance``: of a collective; -1 for a send and its receive. For a collective, ``rows`` may be
    those that have arrived so far.
    """
    signatures = [rows_of.signature[row] for row in rows]
    if INVALID_SIGNATURE in signatures:
        return ("splits",), MismatchOutcome("wrong-data")
    calls = tuple([rows_of.call(row) for row in rows])
    is_message = instance < 0
    fields = differing_fields(calls, signatures, is_message)
    if is_message and rows_of.tag[rows[0]] != rows_of.tag[rows[1]]:
        fields += ("tag",)
    if not fields:
        return None
    nbytes = tuple(int(rows_of.nbytes[row]) for row in rows)
    return fields, rows_of.profile.mismatch(MismatchedCalls(fields, calls, nbytes, is_message))


def differing_fields(
    calls: tuple[ResolvedCall, ...], signatures: Sequence[int], is_message: bool
) -> tuple[str, ...]:
    """The names of the fields in which calls that met differ (`agreement` of their operations).

    Operations that agree pair by pair (all_to_all) are compared so even if other ranks are missing:
    gloo's parts travel between two ranks (run).
    """
    # Calls of one operation and one signature agree, so one of each is enough.
    distinct = {
        (call.op, signature): call for call, signature in zip(calls, signatures, strict=True)
    }.values()
    agreements = [_agreement(call, is_message) for call in distinct]
    fields = tuple(name for name in _names_of(agreements) if _differs(agreements, name))
    operation = OPERATIONS[calls[0].op]
    if not operation.pairwise or "op" in fields:
        return fields
    may_be_uneven = "numel" in fields or "numel" not in agreements[0]
    fields = tuple(name for name in fields if name not in ("numel", "splits"))
    if may_be_uneven and operation.mismatched_pairs(sorted(calls, key=lambda c: c.group_rank)):
        return (*fields, "splits")
    return fields


def _agreement(call: ResolvedCall, is_message: bool) -> Mapping[str, object]:
    """What the calls must agree on. A send and a receive are different operations by nature."""
    agreement = OPERATIONS[call.op].agreement(call)
    return agreement if is_message else {"op": call.op, **agreement}


def _names_of(agreements: Sequence[Mapping[str, object]]) -> dict[str, None]:
    return dict.fromkeys(name for agreement in agreements for name in agreement)


def _differs(agreements: Sequence[Mapping[str, object]], name: str) -> bool:
    first = agreements[0].get(name)
    return any(agreement.get(name) != first for agreement in agreements)


# --- mismatches of a program ---
class ProgramMismatches:
    """The matches of a linked program whose calls may differ.

    - ``receives``: of messages; ``instances``: of collectives.
    - ``uneven``: those instances of pairwise operations whose parts may not fit one another.
    - ``early``: rows of collectives in which some members may finish before all have arrived.

    If `why_order_matters` is None, all of them continue as if they agreed, in whatever order they
    arrive, and `in_run` returns what they lead to.
    """

    def __init__(self, linked: LinkedProgram) -> None:
        self.linked = linked
        self.receives = mismatched_receives(linked)
        differing, uneven = suspect_instances(linked)
        self.instances = sorted_union(differing, uneven)
        self.uneven = frozenset(uneven.tolist())
        if linked.program.representative_of is not None and self.instances.size:
            # The consequence depends on how many ranks differ, and on their group ranks.
            raise FoldingError
        refuse_too_many_comparisons(linked, self.instances.tolist())
        self.partial_wait_rows = frozenset(CollectiveNeeds(linked).partial_wait_rows.tolist())
        # Results by rows, and for messages by what the rows have in common with those of a loop.
        self._by_rows: dict[tuple[int, ...], _FoundMismatch | None] = {}
        self._by_message_kind: dict[tuple[object, ...], _FoundMismatch | None] = {}

    def why_order_matters(self) -> str | None:
        """The reason why the order of events must be followed: a mismatch ends a process, or stops
        other ranks.
        """
        for _, found in self._messages(self.receives.tolist()):
            if found is not None and found[1].stops_ranks:
                return "messages do not fit"
        if not all(map(self._is_harmless, self.instances.tolist())):
            return "collectives do not fit"
        return None

    def in_run(self, posted: Sequence[int] | IntArray) -> Iterator[RowMismatch]:
        """What matched and differs in a run, given when rows were posted (-1: never).

        Messages come first, by their receives, then collectives.
        """
        mate = self.linked.mate
        received = [row for row in self.receives.tolist() if posted[row] >= 0]
        received = [row for row in received if posted[mate[row]] >= 0]
        for rows, found in self._messages(received):
            if found is not None:
                yield RowMismatch(rows, found[0], found[1].outcome)
        for instance in self.instances.tolist():
            rows_of_instance = self.linked.rows_of[instance].tolist()
            arrived = tuple(row for row in rows_of_instance if posted[row] >= 0)
            if self._may_differ(instance, arrived):
                found = self._find(arrived, instance)
                if found is not None:
                    yield RowMismatch(arrived, found[0], found[1].outcome)

    def _may_differ(self, instance: int, arrived: tuple[int, ...]) -> bool:
        """Whether the rows that have arrived can differ at all; complete instances always may."""
        if len(arrived) == len(self.linked.members[instance]):
            return True
        if instance in self.uneven and len(arrived) > 1:
            return True
        return len(set(self.linked.signature[list(arrived)].tolist())) > 1

    def _find(self, rows: tuple[int, ...], instance: int) -> _FoundMismatch | None:
        if rows not in self._by_rows:
            self._by_rows[rows] = find_mismatch(self.linked, rows, instance)
        return self._by_rows[rows]

    def _messages(
        self, receives: Iterable[int]
    ) -> Iterator[tuple[tuple[int, int], _FoundMismatch | None]]:
        """((send, receive), their mismatch) for messages given by their receives.

        Messages of the same calls with equal signatures, tags and sizes are compared only once.
        """
        for receive in receives:
            send = int(self.linked.mate[receive])
            key = (self._message_kind(send), self._message_kind(receive))
            if key not in self._by_message_kind:
                self._by_message_kind[key] = find_mismatch(self.linked, (send, receive), -1)
            yield (send, receive), self._by_message_kind[key]

    def _message_kind(self, row: int) -> tuple[int, int, int, int]:
        linked = self.linked
        return (
            id(linked.code_call(row)),
            int(linked.signature[row]),
            int(linked.tag[row]),
            int(linked.nbytes[row]),
        )

    def _is_harmless(self, instance: int) -> bool:
        """Whether a collective's mismatch stops no rank, in whatever order its members arrive.

        Neither all of its calls together nor any two that differ may stop a rank, and no member may
        finish before all have arrived.
        """
        linked = self.linked
        rows = tuple(linked.rows_of[instance].tolist())
        if not self.partial_wait_rows.isdisjoint(rows):
            return False
        row_by_kind = {(int(linked.signature[row]), int(linked.nbytes[row])): row for row in rows}
        if len(row_by_kind) > MAX_CALL_KINDS:
            return False
        for compared in (rows, *combinations(row_by_kind.values(), 2)):
            found = self._find(compared, instance)
            if found is not None and found[1].stops_ranks:
                return False
        return True


def refuse_too_many_comparisons(linked: LinkedProgram, instances: Iterable[int]) -> None:
    """Raise UsageError if comparing each call with all that arrived before would take too long.

    The work is the number of different calls times the number of members, over all collectives
    (limit: `MOST_COMPARED`).
    """
    comparisons = 0
    for instance in instances:
        rows = linked.rows_of[instance]
        if len(rows) ** 2 > MOST_COMPARED:
            comparisons += len(sorted_unique(linked.signature[rows])) * len(rows)
    if comparisons > MOST_COMPARED:
        minutes = comparisons * _COMPARE_US / 1e6 / 60
        raise UsageError(
            f"calls of one collective differ from rank to rank: {comparisons:,} comparisons, "
            f"about {minutes:,.0f} min, where {MOST_COMPARED:,} are allowed",
            (
                "pass the same root, sizes, dtype and operation on all members, or use fewer ranks "
                "(`world:`)"
            ),
        )


def mismatched_receives(linked: LinkedProgram) -> IntArray:
    """The receives whose message, if both are posted, is not what they expect."""
    receives = np.flatnonzero((linked.kind == PartKind.RECEIVE) & (linked.mate >= 0))
    sends = linked.mate[receives]
    signatures_differ = linked.signature[receives] != linked.signature[sends]
    tags_differ = linked.tag[receives] != linked.tag[sends]
    mismatched: IntArray = receives[signatures_differ | tags_differ]
    return mismatched


def suspect_instances(linked: LinkedProgram) -> tuple[IntArray, IntArray]:
    """(instances whose calls differ, instances of pairwise calls whose parts may not fit)."""
    rows = np.flatnonzero((linked.kind == PartKind.COLLECTIVE) & (linked.instance >= 0))
    count = len(linked.members)
    lowest = np.full(count, np.iinfo(np.int64).max)
    highest = np.full(count, np.iinfo(np.int64).min)
    np.minimum.at(lowest, linked.instance[rows], linked.signature[rows])
    np.maximum.at(highest, linked.instance[rows], linked.signature[rows])
    all_invalid = (lowest == INVALID_SIGNATURE) & (highest == INVALID_SIGNATURE)
    differing = np.flatnonzero((lowest < highest) | all_invalid)
    uneven = np.concatenate([np.zeros(0, dtype=np.int64), *_instances_of_uneven_parts(linked)])
    return differing, sorted_unique(uneven)


def _instances_of_uneven_parts(linked: LinkedProgram) -> list[IntArray]:
    """The instances of calls that agree pair by pair, and whose parts may differ in size."""
    may_be_uneven: dict[int, bool] = {}  # by call
    instances = []
    for unit, parts, rows in linked.parts(PartKind.COLLECTIVE):
        call = parts[0].call
        operation = OPERATIONS[call.op]
        if not operation.pairwise:
            continue
        if id(call) not in may_be_uneven:
            agreement = operation.agreement(linked.program.resolve(unit.ranks[0], call))
            differs_by_rank = isinstance(call.signature, np.ndarray)
            may_be_uneven[id(call)] = "numel" not in agreement or differs_by_rank
        if may_be_uneven[id(call)]:
            instances.append(linked.instance[rows].reshape(-1))
    return instances
