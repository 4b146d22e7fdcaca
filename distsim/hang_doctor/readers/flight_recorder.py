"""Read dumps of PyTorch's Flight Recorder (NCCL and Gloo, format version 2.0 to today's).

A dump contains the latest calls of one rank, the members of its groups (``pg_config``) and counters
of their calls (``pg_status``). Keys and quirks are those of PyTorch's FlightRecorder: Gloo leaves
``state`` at "scheduled" for ever, and its ``pg_config`` is wrong with two groups. A dump does not
contain its rank; the rank is read from the file's name and checked here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeGuard

from distsim.hang_doctor.model.evidence import MAX_RANKS, Evidence
from distsim.hang_doctor.model.evidence_records import (
    MAX_CALL_NUMBER,
    UNKNOWN_NUMBER,
    CallState,
    EvidenceCall,
    StackFrame,
    int_field,
)
from distsim.hang_doctor.model.operation_names import operation_family
from distsim.hang_doctor.readers.coalesced_calls import (
    RecordedOperation,
    UnbatchedCalls,
    counts_messages,
)
from distsim.hang_doctor.readers.torchcomms import has_one_counter, with_numbers_by_group

#: Only the latest entries are read; ring buffers in use hold far fewer.
_MAX_ENTRIES = 100_000
#: Frames of a call that are kept.
_MAX_FRAMES = 64
_MAX_TENSORS = 65536
_MAX_DIMENSIONS = 64
#: A dump has few different names of calls.
_CACHED_NAMES = 4096
#: ``send 0->1``, ``recv 1<-0``, ``recv 1<-?``.
_P2P_NAME = re.compile(r"^(send|recv)\s+(?:(\d+)\s*)?(?:->|<-)\s*(\d+|\?)$")


def is_flight_recorder(data: object) -> bool:
    """Whether this looks like the top level of a dump."""
    if not isinstance(data, dict) or not isinstance(data.get("version"), str):
        return False
    return any(key in data for key in ("entries", "pg_status", "pg_config"))


def read_flight_recorder(
    evidence: Evidence, data: dict[str, object], rank: int, source: str
) -> str:
    """Enter the dump of a rank; return what could not be read of it, or an empty text."""
    all_entries = data.get("entries") or []
    if not isinstance(all_entries, list):
        return "the entries are not a list"
    is_cut = len(all_entries) > _MAX_ENTRIES
    entries = _drop_destroyed_groups(all_entries[-_MAX_ENTRIES:])
    # The recorder numbers its entries from 0.
    lost_oldest_calls = is_cut or (bool(entries) and int_field(entries[0], "record_id") > 0)
    if has_one_counter(entries):
        entries = with_numbers_by_group(entries, lost_oldest_calls)
        # The counters of the groups are of the same kind, so they cannot be compared either.
        data = {**data, "pg_status": {}}
    dump = _Dump(evidence, rank, source, data, entries, lost_oldest_calls)
    dump.describe_rank()
    unread_count = dump.read_calls() + sum(not isinstance(entry, dict) for entry in entries)
    dump.read_status()

    problems = []
    if is_cut:
        problems.append(f"only the latest {_MAX_ENTRIES} entries are read")
    if unread_count:
        problems.append(f"damaged entries: {unread_count}")
    if dump.is_recorder_off:
        problems.append(
            "the dump contains no calls: the recorder was off (TORCH_FR_BUFFER_SIZE=0), or the "
            "dump was requested without calls"
        )
    return "; ".join(problems)


class _Dump:
    """One dump while it is being read into the evidence."""

    def __init__(
        self,
        evidence: Evidence,
        rank: int,
        source: str,
        data: dict[str, object],
        entries: list[object],
        lost_oldest_calls: bool,
    ) -> None:
        self.evidence = evidence
        self.rank = rank
        self.source = source
        self.raw_entries = entries
        #: The entries that are not damaged.
        self.entries = [entry for entry in entries if isinstance(entry, dict)]
        self.lost_oldest_calls = lost_oldest_calls
        status = data.get("pg_status")
        #: The counters of the groups, by local number.
        self.status: dict[Any, Any] = status if isinstance(status, dict) else {}
        self.is_recorder_off = _is_recorder_off(data, entries)
        self.is_gloo = any(_profiling_name(entry).startswith("gloo") for entry in self.entries)
        self.groups = _DumpGroups(evidence, _members_by_group_name(evidence, data, self.entries))
        self.stacks = _DumpStacks(evidence)

    def describe_rank(self) -> None:
        """Enter what the dump contains about its rank as a whole."""
        records = self.evidence.records_of(self.rank, self.source)
        records.recorded |= not self.is_recorder_off
        records.lost_oldest_calls |= self.lost_oldest_calls
        records.records_messages = bool(self.raw_entries) and not self.is_gloo
        records.backend = self._backend()
        timeouts_ms = [int_field(entry, "timeout_ms") for entry in self.raw_entries]
        records.longest_timeout_ns = max(timeouts_ms, default=0) * 10**6

    def _backend(self) -> str:
        for entry in self.entries:
            backend, colon, _ = _profiling_name(entry).partition(":")
            if colon:
                return backend[:40]
        return ""

    def read_calls(self) -> int:
        """Enter all calls; return how many entries are unusable."""
        for entry in self.entries:
            self.groups.key(entry)  # groups in order of their first entry
        idle_groups = self._idle_groups()
        recording = UnbatchedCalls(self.raw_entries, self.lost_oldest_calls)
        for name in recording.uneven:
            self.evidence.add_group(name, members=self.groups.named.get(name), sure=False)
            self.evidence.add_note(
                f"group {name}: batches of messages share the numbers of collectives (torch before "
                "2.6), and the first batches are no longer recorded, so calls cannot be compared "
                "by number"
            )
        records = self.evidence.records_of(self.rank, self.source)
        unusable_count = 0
        for order, operation in enumerate(recording.operations):
            call = self._call(operation, idle_groups, order)
            if call is None:
                unusable_count += 1
            else:
                records.calls.append(call)
        _check_rank(self.groups, self.rank, recording.operations, self.source)
        return unusable_count

    def _call(
        self, operation: RecordedOperation, idle_groups: set[str], order: int
    ) -> EvidenceCall | None:
        """The call in an entry; None if the entry is damaged."""
        entry = operation.entry
        text = entry.get("profiling_name")
        group = self.groups.key(entry)
        if not isinstance(text, str) or group is None:
            return None
        backend, _, name = text.rpartition(":")
        message = _message_of(text)
        is_message = bool(entry.get("is_p2p")) or message is not None
        input_sizes = _sizes(entry.get("input_sizes"))
        return EvidenceCall(
            self.rank,
            group,
            _call_number(entry, is_message),
            message[1] if message else operation_family(name),
            _call_state(entry, backend, idle_groups),
            p2p=is_message,
            peer=_peer(message, self.groups.members(group)),
            started=entry.get("state") == "started",
            sizes=input_sizes,
            elements_in=_elements(input_sizes),
            elements_out=_elements(_sizes(entry.get("output_sizes"))),
            dtype=_dtype(entry),
            frames=self.stacks.stack(entry.get("frames")),
            at_ns=max(int_field(entry, "time_created_ns", 1 << 63), 0),
            order=order,
            source=self.source,
            batched=operation.batched,
        )

    def _idle_groups(self) -> set[str]:
        """Local numbers of Gloo groups on which every enqueued call has completed.

        Gloo sets ``retired`` of an entry a little later than the counters.
        """
        if not self.is_gloo:
            return set()
        return {str(key) for key, counters in self.status.items() if _is_idle(counters)}

    def read_status(self) -> None:
        """Enter the counters of NCCL groups.

        Gloo's counters include messages, and so do those of NCCL groups that carry messages. There
        only the entries count.
        """
        if self.is_gloo:
            return
        keys = {}
        with_messages = set()
        for entry in self.entries:
            key = self.groups.key(entry)
            if key is not None:
                keys[str(entry.get("pg_id"))] = key
            if counts_messages(entry):
                with_messages.add(str(entry.get("pg_id")))
        for number, counters in self.status.items():
            group = keys.get(str(number))
            if group is not None and str(number) not in with_messages:
                enqueued = int_field(counters, "last_enqueued_collective")
                completed = int_field(counters, "last_completed_collective")
                self.evidence.add_progress(self.rank, group, enqueued, completed, self.source)


def _profiling_name(entry: dict[str, object]) -> str:
    return str(entry.get("profiling_name", ""))


def _is_idle(counters: object) -> bool:
    enqueued = int_field(counters, "last_enqueued_collective")
    return 0 < enqueued == int_field(counters, "last_completed_collective")


def _drop_destroyed_groups(entries: list[object]) -> list[object]:
    """The entries without calls on groups that were destroyed and created again.

    A new group counts from the start again, under another local number.
    """
    local_groups = [_local_group(entry) for entry in entries]
    latest_number = dict(local_groups)
    kept = []
    for entry, (name, number) in zip(entries, local_groups, strict=True):
        # Entries without a group name are of unknown groups, which must not be compared.
        if not name or latest_number[name] == number:
            kept.append(entry)
    return kept


def _local_group(entry: object) -> tuple[str, str]:
    """The name and the local number of an entry's group; empty for a damaged entry."""
    if not isinstance(entry, dict):
        return "", ""
    return _group_name(entry)[0], str(entry.get("pg_id"))


def _is_recorder_off(data: dict[str, object], entries: list[object]) -> bool:
    """Whether nothing was recorded, although there may have been calls.

    A recorder that is on knows its groups before their first call.
    """
    if entries:
        return False
    if not data.get("pg_config"):
        return True
    status = data.get("pg_status")
    if not isinstance(status, dict):
        return False
    return any(int_field(counters, "last_enqueued_collective") > 0 for counters in status.values())


def _members_by_group_name(
    evidence: Evidence, data: dict[str, object], entries: list[dict[str, object]]
) -> dict[str, tuple[int, ...]]:
    """The members of the groups that the dump lists.

    A dump of Gloo does not name its groups (``pg_config`` has an empty name). If its entries are of
    one group only, the members belong to that group; otherwise the list is not reliable.
    """
    config = data.get("pg_config")
    if not isinstance(config, dict):
        return {}
    found: dict[str, tuple[int, ...]] = {}
    for key, given in config.items():
        members = _parse_ranks(given.get("ranks")) if isinstance(given, dict) else None
        if members is None:
            continue
        name = str(given.get("name") or key)
        if name:
            found[name] = members
            evidence.add_group(name, str(given.get("desc") or ""), members)
            continue
        names = {_group_name(entry)[0] for entry in entries}
        if len(names) == 1:
            found[names.pop()] = members
    return found


def _parse_ranks(given: object) -> tuple[int, ...] | None:
    """Ranks written as ``"[0, 1]"`` or as a list; None if there are none."""
    if isinstance(given, str):
        parts = re.findall(r"\d{1,9}", given)[:MAX_RANKS]
    elif isinstance(given, (list, tuple)):
        parts = [p for p in given if isinstance(p, int) and not isinstance(p, bool)]
    else:
        return None
    members = tuple(int(p) for p in parts)
    return members if members and max(members) < MAX_RANKS else None


def _group_name(entry: dict[str, object]) -> tuple[str, str]:
    """Name and description of an entry's group; older versions record its local number only."""
    given = entry.get("process_group")
    if isinstance(given, (list, tuple)) and len(given) == 2:
        name, desc = given
        if isinstance(name, str) and isinstance(desc, str):
            return name, desc
    number = entry.get("pg_id")
    return (f"pg {number}" if isinstance(number, int) else ""), ""


@dataclass
class _DumpGroups:
    """The groups of one dump. ``named``: members by name."""

    evidence: Evidence
    named: dict[str, tuple[int, ...]]
    #: By what an entry says of its group.
    keys: dict[tuple[object, object], str | None] = field(default_factory=dict)

    def key(self, entry: dict[str, object]) -> str | None:
        """The key of an entry's group among all evidence, None if the entry names no group."""
        given = entry.get("process_group")
        if isinstance(given, list):
            given = tuple(given)
        recorded = (given, entry.get("pg_id"))
        try:
            return self.keys[recorded]
        except KeyError:
            found = self.keys[recorded] = self._added(entry)
            return found
        except TypeError:  # not hashable: a damaged entry
            return self._added(entry)

    def _added(self, entry: dict[str, object]) -> str | None:
        name, desc = _group_name(entry)
        if not name:
            return None
        sure = isinstance(entry.get("process_group"), (list, tuple))
        return self.evidence.add_group(name, desc, self.named.get(name), sure)

    def members(self, key: str) -> tuple[int, ...] | None:
        return self.evidence.groups[key].members


def _check_rank(
    groups: _DumpGroups, rank: int, operations: list[RecordedOperation], source: str
) -> None:
    """Check the rank in the file's name, its only source, against the groups and messages."""
    reason = _contradiction_of_rank(groups, rank, operations)
    if reason is None:
        return
    groups.evidence.disputed_ranks.add(rank)
    groups.evidence.disputes.append(
        f"{source} is of rank {rank} by its name, but {reason}: it belongs to another rank or to "
        "another job"
    )


def _contradiction_of_rank(
    groups: _DumpGroups, rank: int, operations: list[RecordedOperation]
) -> str | None:
    for name, members in groups.named.items():
        if rank not in members:
            return f"its group {name} has only ranks {list(members)[:8]}"
    ranks_in_messages = (_rank_in_message(groups, operation) for operation in operations)
    others = {other for other in ranks_in_messages if other is not None} - {rank}
    if others:
        return f"its messages are of rank {min(others)}"
    return None


def _rank_in_message(groups: _DumpGroups, operation: RecordedOperation) -> int | None:
    """The global rank of this process by the text of a message (``send 0->1``)."""
    message = _message_of(str(operation.entry.get("profiling_name")))
    if message is None or message[2] is None:
        return None
    key = groups.key(operation.entry)
    members = None if key is None else groups.members(key)
    group_rank = int(message[2])
    if members is None or group_rank >= len(members):
        return None
    return members[group_rank]


@lru_cache(_CACHED_NAMES)
def _message_of(profiling_name: str) -> re.Match[str] | None:
    return _P2P_NAME.match(profiling_name.rpartition(":")[2])


def _call_number(entry: dict[str, object], is_message: bool) -> int:
    if is_message:
        return int_field(entry, "p2p_seq_id")
    number = int_field(entry, "collective_seq_id")
    # Before version 2.2 of the format there was one number for both.
    return number if number >= 0 else int_field(entry, "seq_id")


def _call_state(entry: dict[str, object], backend: str, idle_groups: set[str]) -> CallState:
    state = entry.get("state")
    if state == "completed":
        return "done"
    if "gloo" in backend:
        # Gloo never changes the state; a call that has ended is retired.
        has_ended = bool(entry.get("retired")) or str(entry.get("pg_id")) in idle_groups
        return "over" if has_ended else "waiting"
    return "waiting" if state in ("scheduled", "started") else "unknown"


def _peer(message: re.Match[str] | None, members: tuple[int, ...] | None) -> int | None:
    """The global rank at the other end of a message.

    The text has ranks of the group, with this process on the left (``recv 3<-0``).
    """
    if message is None or message[3] == "?":
        return None
    group_rank = int(message[3])
    if members is None:
        return group_rank
    return members[group_rank] if group_rank < len(members) else None


def _sizes(given: object) -> tuple[tuple[int, ...], ...] | None:
    """The shapes of tensors, None if they are missing or damaged."""
    if not isinstance(given, (list, tuple)) or len(given) > _MAX_TENSORS:
        return None
    shapes = []
    for shape in given:
        if not _is_shape(shape):
            return None
        shapes.append(tuple(shape))
    return tuple(shapes)


def _is_shape(given: object) -> bool:
    if not isinstance(given, (list, tuple)) or len(given) > _MAX_DIMENSIONS:
        return False
    # A loop, because all() with a generator takes twice as long for the usual one or two numbers.
    for number in given:
        if type(number) is not int or not 0 <= number < MAX_CALL_NUMBER:
            return False
    return True


def _elements(sizes: tuple[tuple[int, ...], ...] | None) -> int:
    if sizes is None:
        return UNKNOWN_NUMBER
    return sum(map(math.prod, sizes))


def _dtype(entry: dict[str, object]) -> str:
    given = entry.get("input_dtypes") or entry.get("output_dtypes")
    return str(given[0])[:40] if isinstance(given, (list, tuple)) and given else ""


class _DumpStacks:
    """The stacks of the calls of one dump; calls with equal stacks share one object.

    In a pickle of torch, all calls share the dictionaries of their frames, so most stacks are known
    by the identities of these. The dump must outlive this object.
    """

    def __init__(self, evidence: Evidence) -> None:
        self._by_content = evidence.call_stacks
        self._by_identity: dict[tuple[int, ...], tuple[StackFrame, ...]] = {}

    def stack(self, given: object) -> tuple[StackFrame, ...]:
        if not isinstance(given, (list, tuple)):
            return ()
        shown = given[:_MAX_FRAMES]
        identity = tuple(map(id, shown))
        known = self._by_identity.get(identity)
        if known is None:
            known = self._by_identity[identity] = self._shared(shown)
        return known

    def _shared(self, given: Sequence[object]) -> tuple[StackFrame, ...]:
        frames = [frame for frame in given if _is_frame(frame)]
        key = tuple(_frame_key(frame) for frame in frames)
        known = self._by_content.get(key)
        if known is None:
            known = self._by_content[key] = tuple(_stack_frame(frame) for frame in frames)
        return known


def _frame_key(frame: dict[str, Any]) -> tuple[str, str, int]:
    return str(frame.get("name", "")), str(frame.get("filename", "")), frame["line"]


def _is_frame(given: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(given, dict) and isinstance(given.get("line"), int)


def _stack_frame(given: dict[str, Any]) -> StackFrame:
    name = str(given.get("name", ""))[:200]
    file = str(given.get("filename", ""))[:400]
    return StackFrame(name, file, given["line"])
