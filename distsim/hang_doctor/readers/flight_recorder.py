"""Flight Recorder dumps, as pickles and as JSON, of nccl and gloo, from 2.0 to today's version.

Keys and quirks: PyTorch's FlightRecorder; gloo leaves ``state`` at scheduled for ever, and its
``pg_config`` is wrong with two groups.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

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

#: Entries of a dump that are read, the latest of them: many times what a ring in use holds.
_MAX_ENTRIES = 100_000
#: Frames of a call that are kept.
_MAX_FRAMES = 64
_P2P_NAME = re.compile(r"^(send|recv)\s+(\d+)?\s*(?:->|<-)\s*(\d+|\?)$")


def is_flight_recorder(data: object) -> bool:
    """Does this look like a dump's top level?"""
    return (
        isinstance(data, dict)
        and isinstance(data.get("version"), str)
        and ("entries" in data or "pg_status" in data or "pg_config" in data)
    )


def read_flight_recorder(
    evidence: Evidence, data: dict[str, object], rank: int, source: str
) -> str:
    """Take a dump of a rank into the evidence; what could not be read of it, or nothing."""
    entries = data.get("entries") or []
    if not isinstance(entries, list):
        return "its entries are no list"
    lost, entries = (
        max(len(entries) - _MAX_ENTRIES, 0),
        _drop_destroyed_groups(entries[-_MAX_ENTRIES:]),
    )
    evidence.records_of(rank, source).recorded |= not _is_recorder_off(data, entries)
    lapped = lost > 0 or (bool(entries) and int_field(entries[0], "record_id") > 0)
    evidence.records_of(rank, source).lost_oldest_calls |= lapped
    gloo = any(
        str(e.get("profiling_name", "")).startswith("gloo") for e in entries if isinstance(e, dict)
    )
    evidence.records_of(rank, source).records_messages = bool(entries) and not gloo
    titles = (str(e.get("profiling_name", "")) for e in entries if isinstance(e, dict))
    evidence.records_of(rank, source).backend = next(
        (title.partition(":")[0][:40] for title in titles if ":" in title), ""
    )
    evidence.records_of(rank, source).longest_timeout_ns = (
        max((int_field(e, "timeout_ms") for e in entries), default=0) * 10**6
    )
    groups = _DumpGroups(evidence, _named_groups(evidence, data, entries))
    pairs = {
        str(e.get("pg_id")): key
        for e in entries
        if isinstance(e, dict) and (key := groups.key(e)) is not None
    }
    status = data.get("pg_status") if isinstance(data.get("pg_status"), dict) else {}
    idle = _idle_groups(status, entries)
    found = UnbatchedCalls(entries, lapped)
    for name in found.uneven:
        evidence.add_group(name, members=groups.named.get(name), sure=False)
        evidence.add_note(
            f"on group {name} batches of messages took numbers of collectives (torch before 2.6), and the first of them are no "
            "longer recorded: its calls can't be told by number"
        )
    calls = [
        _evidence_call(groups, op, rank, source, idle, order)
        for order, op in enumerate(found.operations)
    ]
    for call in calls:
        if call is not None:
            evidence.add_call(call)
    _check_rank(groups, rank, found.operations, source)
    unread = calls.count(None) + sum(not isinstance(e, dict) for e in entries)
    _read_status(evidence, rank, status, pairs, entries, source)
    told = [f"{unread} of its entries are damaged"] if unread else []
    if _is_recorder_off(data, entries):
        told.append(
            "no call is in it: the recorder was off (TORCH_FR_BUFFER_SIZE=0), or was asked for no calls"
        )
    return "; ".join([f"only its latest {_MAX_ENTRIES} entries are read", *told] if lost else told)


def _drop_destroyed_groups(entries: list[object]) -> list[object]:
    """Without calls on groups that were destroyed and made anew: a process then counts again from
    the start, under another local number.
    """
    numbers = [
        (_group_name(e)[0], str(e.get("pg_id"))) if isinstance(e, dict) else ("", "")
        for e in entries
    ]
    latest = dict(numbers)
    return [
        e
        for e, (name, number) in zip(entries, numbers, strict=True)
        if latest[name] == number or not isinstance(e, dict)
    ]


def _is_recorder_off(data: dict[str, object], entries: list[object]) -> bool:
    """Was nothing recorded, though there may have been calls? A recorder that is on knows its
    groups before their first call.
    """
    status = data.get("pg_status")
    made = isinstance(status, dict) and any(
        int_field(given, "last_enqueued_collective") > 0 for given in status.values()
    )
    return not entries and (made or not data.get("pg_config"))


def _named_groups(
    evidence: Evidence, data: dict[str, object], entries: list[object]
) -> dict[str, tuple[int, ...]]:
    """Members by a group's name, where the dump is to be believed; the empty name stands for the
    only group there is.
    """
    config = data.get("pg_config")
    found: dict[str, tuple[int, ...]] = {}
    for key, given in config.items() if isinstance(config, dict) else ():
        members = _parse_ranks(given.get("ranks")) if isinstance(given, dict) else None
        if members is None:
            continue
        name = str(given.get("name") or key)
        if name:
            found[name] = members
            evidence.add_group(name, str(given.get("desc") or ""), members)
            continue
        names = {_group_name(e)[0] for e in entries if isinstance(e, dict)}
        if len(names) == 1 and members:
            found[names.pop()] = members
    return found


def _parse_ranks(given: object) -> tuple[int, ...] | None:
    """``"[0, 1]"`` or a list; None where nothing is said."""
    if isinstance(given, str):
        parts = re.findall(r"\d{1,9}", given)[:MAX_RANKS]
    elif isinstance(given, (list, tuple)):
        parts = [p for p in given if isinstance(p, int) and not isinstance(p, bool)]
    else:
        return None
    members = tuple(int(p) for p in parts)
    return members if members and max(members) < MAX_RANKS else None


def _group_name(entry: dict[str, object]) -> tuple[str, str]:
    given = entry.get("process_group")
    if (
        isinstance(given, (list, tuple))
        and len(given) == 2
        and all(isinstance(p, str) for p in given)
    ):
        return given[0], given[1]
    return (f"pg {entry.get('pg_id')}" if isinstance(entry.get("pg_id"), int) else ""), ""


@dataclass
class _DumpGroups:
    """The groups of one dump. ``named``: members by name."""

    evidence: Evidence
    named: dict[str, tuple[int, ...]]
    keys: dict[tuple[str, str, bool], str] = field(default_factory=dict)

    def key(self, entry: dict[str, object]) -> str | None:
        """The key of an entry's group among all evidence, None where it names none."""
        (name, desc), sure = (
            _group_name(entry),
            isinstance(entry.get("process_group"), (list, tuple)),
        )
        if not name:
            return None
        if (name, desc, sure) not in self.keys:
            self.keys[name, desc, sure] = self.evidence.add_group(
                name, desc, self.named.get(name), sure
            )
        return self.keys[name, desc, sure]

    def members(self, key: str) -> tuple[int, ...] | None:
        return self.evidence.groups[key].members


def _check_rank(
    groups: _DumpGroups, rank: int, operations: list[RecordedOperation], source: str
) -> None:
    """Whose a file is, its name alone says. Its groups and its messages have to agree."""
    strange = next((name for name, members in groups.named.items() if rank not in members), None)
    own = {told for op in operations if (told := _rank_in_message(groups, op)) is not None}
    if strange is not None:
        why = f"its group {strange} has ranks {list(groups.named[strange])[:8]}"
    elif own and own != {rank}:
        why = f"its messages are of rank {min(own - {rank})}"
    else:
        return
    groups.evidence.disputed_ranks.add(rank)
    groups.evidence.disputes.append(
        f"{source} is of rank {rank} by its name, and {why}: it is of another rank, or of another job"
    )


def _rank_in_message(groups: _DumpGroups, op: RecordedOperation) -> int | None:
    message = _P2P_NAME.match(str(op.entry.get("profiling_name")).rpartition(":")[2])
    members = (
        groups.members(key)
        if message is not None and (key := groups.key(op.entry)) is not None
        else None
    )
    if message is None or members is None or message[2] is None or int(message[2]) >= len(members):
        return None
    return members[int(message[2])]


def _idle_groups(status: Any, entries: list[Any]) -> set[str]:
    """Local numbers of groups on which all that was enqueued is completed: gloo's ``retired`` comes
    a little later.
    """
    found = set()
    for key, given in status.items():
        enqueued, completed = (
            int_field(given, "last_enqueued_collective"),
            int_field(given, "last_completed_collective"),
        )
        if enqueued > 0 and enqueued == completed:
            found.add(str(key))
    return (
        found
        if any(
            str(e.get("profiling_name", "")).startswith("gloo")
            for e in entries
            if isinstance(e, dict)
        )
        else set()
    )


def _evidence_call(
    groups: _DumpGroups,
    op: RecordedOperation,
    rank: int,
    source: str,
    idle: set[str],
    order: int,
) -> EvidenceCall | None:
    entry = op.entry
    text = entry.get("profiling_name")
    group = groups.key(entry)
    if not isinstance(text, str) or group is None:
        return None
    backend, _, rest = text.rpartition(":")
    message = _P2P_NAME.match(rest)
    p2p = bool(entry.get("is_p2p")) or message is not None
    number = int_field(entry, "p2p_seq_id" if p2p else "collective_seq_id")
    if not p2p and number < 0:
        number = int_field(entry, "seq_id")  # before version 2.2
    sizes = _sizes(entry.get("input_sizes"))
    return EvidenceCall(
        rank,
        group,
        number,
        message[1] if message else operation_family(rest),
        _call_state(entry, backend, idle),
        p2p,
        _peer(message, groups.members(group)),
        entry.get("state") == "started",
        sizes,
        _elements(sizes),
        _elements(_sizes(entry.get("output_sizes"))),
        _dtype(entry),
        _stack_frames(groups.evidence, entry.get("frames")),
        max(int_field(entry, "time_created_ns", 1 << 63), 0),
        order,
        source,
        batched=op.batched,
    )


def _call_state(entry: dict[str, object], backend: str, idle: set[str]) -> CallState:
    state, retired = entry.get("state"), bool(entry.get("retired"))
    if state == "completed":
        return "done"
    if "gloo" in backend:
        if retired:
            return "over"
        return "over" if str(entry.get("pg_id")) in idle else "waiting"
    return "waiting" if state in ("scheduled", "started") else "unknown"


def _peer(message: re.Match[str] | None, members: tuple[int, ...] | None) -> int | None:
    """The other global rank of a message: the text has ranks of the group, receiver left in ``recv
    3<-0``.
    """
    if message is None or message[3] == "?":
        return None
    local = int(message[3])
    if members is None:
        return local
    return members[local] if local < len(members) else None


def _sizes(given: object) -> tuple[tuple[int, ...], ...] | None:
    if not isinstance(given, (list, tuple)) or len(given) > 65536:
        return None
    found = []
    for shape in given:
        if (
            not isinstance(shape, (list, tuple))
            or len(shape) > 64
            or not all(type(n) is int and 0 <= n < MAX_CALL_NUMBER for n in shape)
        ):
            return None
        found.append(tuple(shape))
    return tuple(found)


def _elements(sizes: tuple[tuple[int, ...], ...] | None) -> int:
    if sizes is None:
        return UNKNOWN_NUMBER
    total = 0
    for shape in sizes:
        product = 1
        for n in shape:
            product *= n
        total += product
    return total


def _dtype(entry: dict[str, object]) -> str:
    given = entry.get("input_dtypes") or entry.get("output_dtypes")
    return str(given[0])[:40] if isinstance(given, (list, tuple)) and given else ""


def _stack_frames(evidence: Evidence, given: object) -> tuple[StackFrame, ...]:
    """The stack of a call, one object for all calls that have it."""
    if not isinstance(given, (list, tuple)):
        return ()
    found = tuple(
        StackFrame(
            str(frame.get("name", ""))[:200], str(frame.get("filename", ""))[:400], frame["line"]
        )
        for frame in given[:_MAX_FRAMES]
        if isinstance(frame, dict) and isinstance(frame.get("line"), int)
    )
    key = tuple(frame[:3] for frame in found)
    return evidence.call_stacks.setdefault(key, found)


def _read_status(
    evidence: Evidence,
    rank: int,
    status: Any,
    pairs: dict[str, str],
    entries: list[Any],
    source: str,
) -> None:
    """The counters of nccl. Those of gloo count messages too, and those of nccl where there are
    any: there the entries alone speak.
    """
    if any(
        str(e.get("profiling_name", "")).startswith("gloo") for e in entries if isinstance(e, dict)
    ):
        return
    carried = {str(e.get("pg_id")) for e in entries if isinstance(e, dict) and counts_messages(e)}
    for key, given in status.items():
        group = pairs.get(str(key))
        if group is not None and str(key) not in carried:
            evidence.add_progress(
                rank,
                group,
                int_field(given, "last_enqueued_collective"),
                int_field(given, "last_completed_collective"),
                source,
            )
