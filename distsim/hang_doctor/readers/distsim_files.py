"""distsim's own files: traces of simulated and real runs, and the progress files of real runs."""

from __future__ import annotations

import re
from collections import Counter
from typing import Literal

from distsim.hang_doctor.model.evidence import Evidence
from distsim.hang_doctor.model.evidence_records import (
    CallState,
    EvidenceCall,
    ProcessEnd,
    StackFrame,
)
from distsim.hang_doctor.model.operation_names import P2P_OPS, operation_family
from distsim.real.shared.progress_file import ProgressSnapshot, RankPhase, parse_snapshot
from distsim.trace.model import NEVER, Trace, TraceCall

#: Operations that do not communicate by themselves.
_LOCAL_OPS = ("compute", "wait", "sleep", "assign", "new_group", "wait_stream")
_CONNECTION_ERROR = re.compile(r"Connection closed|Timed out|timed out")


# --- traces ---


def read_distsim_trace(evidence: Evidence, trace: Trace, source: str) -> set[int]:
    """Enter the calls of a trace; return its ranks.

    Calls are numbered as torch numbers them: collectives by rank and group, messages likewise.
    """
    evidence.world = max(evidence.world, trace.world_size)
    ranks = set(range(trace.world_size))
    for rank in ranks:
        records = evidence.records_of(rank, source)
        records.recorded = True
        records.records_messages = True

    groups = _TraceGroups(evidence, trace)
    numbers: dict[tuple[int, str, bool], int] = {}
    for order, row in enumerate(trace.rows()):
        # A row with a part is one message of a batch; its call has a row of its own.
        if row.op in _LOCAL_OPS or row.part >= 0 or row.posted_ns == NEVER:
            continue
        key = groups.key(row.group)
        is_message = operation_family(row.op) in P2P_OPS
        count = numbers.get((row.rank, key, is_message), 0) + 1
        numbers[row.rank, key, is_message] = count
        evidence.add_call(_call(row, key, count, order, source))
    _read_ends(evidence, trace, source)
    return ranks


class _TraceGroups:
    """The groups of a trace, entered into the evidence when a call uses them."""

    def __init__(self, evidence: Evidence, trace: Trace) -> None:
        self._evidence = evidence
        self._members: dict[str, tuple[int, ...]] = {}
        self._names: Counter[str] = Counter()
        for name, ranks in trace.header.get("groups", ()):
            self._members[str(name)] = tuple(rank for rank in ranks if type(rank) is int)
            self._names[str(name)] += 1

    def key(self, name: str) -> str:
        # Several groups of one name: which of them a call is on, is unknown.
        is_unique = self._names[name] <= 1
        return self._evidence.add_group(
            name,
            "default_pg" if name == "world" else "",
            self._members.get(name) if is_unique else None,
            is_unique,
        )


def _call(row: TraceCall, key: str, number: int, order: int, source: str) -> EvidenceCall:
    op = operation_family(row.op)
    is_message = op in P2P_OPS
    state: CallState = "waiting" if row.finished_ns == NEVER else "done"
    frame = StackFrame(row.op, row.place.file, row.place.line)
    return EvidenceCall(
        row.rank,
        key,
        number,
        op,
        state,
        p2p=is_message,
        peer=row.peer if is_message else None,
        started=row.started_ns != NEVER,
        dtype=row.dtype,
        frames=(frame,) if row.place.line else (),
        at_ns=row.posted_ns,
        order=order,
        source=source,
        tag=row.tag if is_message else None,
    )


def _read_ends(evidence: Evidence, trace: Trace, source: str) -> None:
    """Enter the ranks that ended abnormally."""
    for rank, end, *_ in trace.header.get("ends") or ():
        if rank not in range(trace.world_size) or end in ("blocked", "ended"):
            continue
        kind: Literal["killed", "raised"] = "raised"
        if end in ("killed", "crashed"):
            kind = "killed"
        evidence.add_end(rank, ProcessEnd(kind, str(end), False, source=source))


# --- progress files ---


def progress_snapshot(data: bytes, rank: int) -> ProgressSnapshot | None:
    """The content of a progress file, None if it is none."""
    try:
        return parse_snapshot(data, rank)
    except ValueError:
        return None


def read_progress_file(evidence: Evidence, snapshot: ProgressSnapshot, source: str) -> None:
    """Enter how far a rank of `run --real` has come.

    Its position counts all calls of the program, not those on a group, so it is only noted.
    """
    rank = snapshot.rank
    evidence.records_of(rank, source)
    end = _end_in_phase(snapshot, source)
    if end is not None:
        evidence.add_end(rank, end)
    elif snapshot.phase == RankPhase.IN_CALL:
        evidence.notes.append(
            f"rank {rank}'s progress file: in call {snapshot.position} of its program"
        )
    elif snapshot.phase == RankPhase.RUNNING:
        evidence.notes.append(
            f"rank {rank}'s progress file: between calls {snapshot.position - 1} and "
            f"{snapshot.position} of its program"
        )


def _end_in_phase(snapshot: ProgressSnapshot, source: str) -> ProcessEnd | None:
    if snapshot.phase == RankPhase.RAISED:
        is_consequence = bool(_CONNECTION_ERROR.search(snapshot.message))
        return ProcessEnd("raised", snapshot.message or "raised", is_consequence, source=source)
    if snapshot.phase == RankPhase.STRUCK:
        return ProcessEnd("killed", "killed by an injected fault", False, source=source)
    if snapshot.phase in (RankPhase.WRITING, RankPhase.ENDED):
        return ProcessEnd(
            "exited", "reached the end of its program", False, source=source, clean=True
        )
    return None
