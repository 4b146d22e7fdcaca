"""Operations that a rank issued as one batch (``batch_isend_irecv``, a coalescing manager), given
back the state that they share.

ProcessGroupNCCL records each operation of a batch without a state that could change, and after them
one entry, ``nccl:coalesced``, whose state is that of all (``pointToPoint``, ``collective`` and
``endCoalescing``; torch 2.4 to 2.13). All of them have the same pair of numbers. The last entry is
marked as a collective also where its batch has messages alone. Before torch 2.6 a batch of messages
took a number of the collectives as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from distsim.hang_doctor.model.evidence_records import UNKNOWN_NUMBER, int_field

DumpEntry = dict[str, object]
#: What an entry says of its tensors.
_TENSOR_KEYS = ("input_sizes", "input_dtypes", "output_sizes", "output_dtypes")


@dataclass(slots=True)
class RecordedOperation:
    """An entry with the state of its batch. ``batched``: it was in one."""

    entry: DumpEntry
    batched: bool = False


@dataclass
class _BatchGroup:
    """What was seen of one process group: operations that may be of a batch, their numbers, and the
    last number of a collective.
    """

    collective: int
    members: list[RecordedOperation] = field(default_factory=list)
    numbers: tuple[int, int] = (UNKNOWN_NUMBER, UNKNOWN_NUMBER)
    taken: int = 0  # numbers of collectives that batches of messages took


class UnbatchedCalls:
    """``operations`` of a recording. ``uneven``: names of groups whose collectives have other
    numbers on each rank, because batches of messages took some of them, and the recording does not
    go back to all of those.
    """

    def __init__(self, entries: Sequence[object], lapped: bool) -> None:
        """``lapped``: the first entries of the recording are lost."""
        self.uneven: set[str] = set()
        self._lapped = lapped
        self._gone: set[int] = set()
        self._groups: dict[str, _BatchGroup] = {}
        taken = [self._take(entry) for entry in entries if isinstance(entry, dict)]
        found = [op for op in taken if op is not None]
        self.operations = [op for op in found if id(op) not in self._gone]

    def _take(self, entry: DumpEntry) -> RecordedOperation | None:
        name = _group_name(entry)
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = _BatchGroup(UNKNOWN_NUMBER if self._lapped else 0)
        numbers = _sequence_numbers(entry)
        if not _ends_batch(entry):
            return self._add(group, entry, numbers)
        members = _batch_members(group, numbers)
        group.members = []
        if not members:
            # Before version 2.7 nothing else is recorded of coalesced collectives; the end of
            # messages that are lost has an old number.
            lost = numbers[0] <= group.collective or group.collective < 0
            return None if lost else self._add(group, entry, numbers)
        if is_message(members[0].entry):
            self._taken(group, entry, numbers[0])
        else:
            self._gone |= {id(op) for op in members[1:]}
            combined = _combined_entry([op.entry for op in members])
            members[0].entry = members[0].entry | combined
        state = {key: entry[key] for key in ("state", "retired") if key in entry}
        for op in members:
            op.entry = op.entry | state
            op.batched = True
        return None

    def _add(
        self, group: _BatchGroup, entry: DumpEntry, numbers: tuple[int, int]
    ) -> RecordedOperation:
        if group.taken:
            entry = {**entry, "collective_seq_id": numbers[0] - group.taken}
        op = RecordedOperation(entry)
        if numbers != group.numbers:
            group.members, group.numbers = [], numbers
        group.members.append(op)
        if not is_message(entry):
            group.collective = max(group.collective, numbers[0])
        return op

    def _taken(self, group: _BatchGroup, entry: DumpEntry, number: int) -> None:
        """A batch of messages with a new number of a collective took that number."""
        if 0 <= group.collective < number:
            group.taken += 1
            if self._lapped:
                self.uneven.add(_group_name(entry))
        group.collective = max(group.collective, number)


def is_message(entry: object) -> bool:
    """Is this entry a send or a receive?"""
    return isinstance(entry, dict) and (
        bool(entry.get("is_p2p")) or _operation_name(entry).startswith(("send ", "recv "))
    )


def counts_messages(entry: object) -> bool:
    """Has the group of this entry carried messages? Then the counters of its status are of messages
    and collectives in turn.
    """
    return is_message(entry) or int_field(entry, "p2p_seq_id") > 0


def _ends_batch(entry: DumpEntry) -> bool:
    """Whether this is the entry after a batch."""
    name = _operation_name(entry)
    if not name.endswith("coalesced"):
        return False
    if name == "coalesced":
        return True
    # A coalesced call of the fast path has sizes; it is an operation of its own.
    has_sizes = bool(entry.get("input_sizes") or entry.get("output_sizes"))
    return name.endswith("_coalesced") and not has_sizes


def _batch_members(group: _BatchGroup, numbers: tuple[int, int]) -> list[RecordedOperation]:
    """The operations right before with the same numbers; of one kind, that of the last."""
    if numbers != group.numbers or not group.members:
        return []
    kind = is_message(group.members[-1].entry)
    return list(takewhile(lambda op: is_message(op.entry) == kind, reversed(group.members)))[::-1]


def _combined_entry(entries: list[DumpEntry]) -> DumpEntry:
    """What one entry says of the tensors and operations of all."""
    names = dict.fromkeys(_operation_name(entry) for entry in entries)
    backend = str(entries[0].get("profiling_name")).rpartition(":")[0]
    tensors = {
        key: [value for entry in entries for value in _as_sequence(entry.get(key))]
        for key in _TENSOR_KEYS
    }
    return {"profiling_name": f"{backend}:{' + '.join(names)}", **tensors}


def _operation_name(entry: DumpEntry) -> str:
    return str(entry.get("profiling_name")).rpartition(":")[2]


def _sequence_numbers(entry: DumpEntry) -> tuple[int, int]:
    number = int_field(entry, "collective_seq_id")
    return (number if number >= 0 else int_field(entry, "seq_id")), int_field(entry, "p2p_seq_id")


def _group_name(entry: DumpEntry) -> str:
    given = entry.get("process_group")
    return (
        str(given[0]) if isinstance(given, (list, tuple)) and given else f"pg {entry.get('pg_id')}"
    )


def _as_sequence(given: object) -> Sequence[object]:
    return given if isinstance(given, (list, tuple)) else ()
