"""What else holds evidence: NCCL RAS as JSON, Kineto traces, distsim's own traces and boards."""

from __future__ import annotations

import re
from typing import Any

from distsim.hang_doctor.model.evidence import MAX_RANKS, Evidence
from distsim.hang_doctor.model.evidence_records import (
    CallState,
    EvidenceCall,
    ProcessEnd,
    StackFrame,
    ToolReport,
)
from distsim.hang_doctor.model.operation_names import P2P_OPS, operation_family
from distsim.real.shared.progress_file import ProgressSnapshot, RankPhase
from distsim.trace.model import NEVER, Trace

_MAX_EVENTS = 2_000_000


def is_ras_json(data: object) -> bool:
    return (
        isinstance(data, dict)
        and isinstance(data.get("communicators"), list)
        and ("nccl_version" in data or "ras" in data)
    )


def read_ras_json(evidence: Evidence, data: dict[str, Any], source: str) -> set[int]:
    """Counts of calls by kind, for every rank of every communicator. Numbers of ranks are those of
    the communicator.
    """
    seen: set[int] = set()
    largest = max(
        (non_negative_int(c.get("size")) for c in data["communicators"] if isinstance(c, dict)),
        default=0,
    )
    for comm in data["communicators"]:
        if isinstance(comm, dict) and non_negative_int(comm.get("size")) == largest:
            seen |= _read_communicator(evidence, comm, source)
    return seen


def _read_communicator(evidence: Evidence, comm: dict[str, Any], source: str) -> set[int]:
    size = non_negative_int(comm.get("size"))
    key = evidence.add_group(
        f"comm {comm.get('hash')}",
        "",
        tuple(range(size)) if 0 < size < MAX_RANKS else None,
        size=size,
    )
    totals: dict[int, dict[str, int]] = {}
    for rank in _as_list(comm.get("ranks")):
        number = non_negative_int(rank.get("rank"), -1) if isinstance(rank, dict) else -1
        counts = rank.get("collective_counts") if isinstance(rank, dict) else None
        if 0 <= number < MAX_RANKS and isinstance(counts, dict):
            totals[number] = {str(k): non_negative_int(v) for k, v in counts.items()}
            evidence.records_of(number, source)
            evidence.add_progress(number, key, sum(totals[number].values()), -1, source)
    for rank in _as_list(comm.get("missing_ranks")):
        number = non_negative_int(rank.get("rank"), -1) if isinstance(rank, dict) else -1
        if 0 <= number < MAX_RANKS:
            dead = isinstance(rank.get("status"), dict) and bool(
                rank["status"].get("considered_dead")
            )
            evidence.tool_reports.append(
                ToolReport(
                    "NCCL RAS",
                    (number,),
                    "is considered dead" if dead else "does not answer",
                    source,
                )
            )
    for kind in sorted({k for counts in totals.values() for k in counts}):
        _report_count_difference(
            evidence,
            key,
            kind,
            {rank: counts.get(kind, 0) for rank, counts in totals.items()},
            source,
        )
    return set(totals)


def _report_count_difference(
    evidence: Evidence, key: str, kind: str, counts: dict[int, int], source: str
) -> None:
    low, high = min(counts.values()), max(counts.values())
    if low != high:
        behind = tuple(sorted(r for r, n in counts.items() if n < high))
        text = f"on {evidence.groups[key].label}: at {kind} {low} where others are at {high}"
        evidence.tool_reports.append(ToolReport("NCCL RAS", behind, text, source))


def _as_list(given: Any) -> list[Any]:
    return given if isinstance(given, list) else []


def non_negative_int(value: Any, otherwise: int = 0) -> int:
    return value if type(value) is int and 0 <= value < 2**62 else otherwise


# --- Kineto ---


def is_kineto(data: object) -> bool:
    return isinstance(data, dict) and isinstance(data.get("traceEvents"), list)


def read_kineto(
    evidence: Evidence, data: dict[str, Any], rank: int | None, source: str
) -> int | None:
    """The collectives of a profile, in order. A profile tells what was called, never what hangs."""
    info = data.get("distributedInfo")
    told = non_negative_int(info.get("rank"), -1) if isinstance(info, dict) else -1
    who = told if 0 <= told < MAX_RANKS else rank
    if who is None:
        return None
    if isinstance(info, dict):
        evidence.world = max(
            evidence.world, min(non_negative_int(info.get("world_size")), MAX_RANKS)
        )
    evidence.records_of(who, source)
    order = 0
    numbers: dict[str, int] = {}
    for event in data["traceEvents"][:_MAX_EVENTS]:
        if (
            isinstance(event, dict)
            and event.get("name") == "record_param_comms"
            and isinstance(event.get("args"), dict)
        ):
            order += _kineto_call(evidence, event["args"], who, order, numbers, source)
    return who


def _kineto_call(
    evidence: Evidence,
    args: dict[str, object],
    rank: int,
    order: int,
    numbers: dict[str, int],
    source: str,
) -> int:
    op = args.get("Collective name")
    if not isinstance(op, str) or op in ("wait", "init"):
        return 0
    name = args.get("Process Group Name")
    key = (
        evidence.add_group(str(name), str(args.get("Process Group Description") or ""))
        if name is not None
        else evidence.add_group("", sure=False)
    )
    numbers[key] = numbers.get(key, 0) + 1
    number = non_negative_int(args.get("Seq"), -1)
    kind = operation_family(op)
    evidence.add_call(
        EvidenceCall(
            rank,
            key,
            number,
            kind,
            "done",
            kind in P2P_OPS,
            None,
            True,
            None,
            non_negative_int(args.get("In msg nelems"), -1),
            non_negative_int(args.get("Out msg nelems"), -1),
            str(args.get("dtype") or ""),
            order=order,
            source=source,
        )
    )
    return 1


# --- distsim's own ---


def read_distsim_trace(evidence: Evidence, trace: Trace, source: str) -> set[int]:
    """A recording: numbered as torch numbers, collectives by group and messages by rank."""
    members = {
        str(name): tuple(r for r in ranks if type(r) is int)
        for name, ranks in trace.header.get("groups", ())
    }
    named = [str(name) for name, _ in trace.header.get("groups", ())]
    evidence.world = max(evidence.world, trace.world_size)
    numbers: dict[tuple[int, str, bool], int] = {}
    seen = set(range(trace.world_size))
    for rank in seen:
        evidence.records_of(rank, source).recorded = evidence.records_of(
            rank, source
        ).records_messages = True
    for order, row in enumerate(trace.rows()):
        if (
            row.op in ("compute", "wait", "sleep", "assign", "new_group", "wait_stream")
            or row.part >= 0
            or row.posted_ns == NEVER
        ):
            continue
        once = named.count(row.group) <= 1
        key = evidence.add_group(
            row.group,
            "default_pg" if row.group == "world" else "",
            members.get(row.group) if once else None,
            once,
        )
        p2p = operation_family(row.op) in P2P_OPS
        number = numbers[row.rank, key, p2p] = numbers.get((row.rank, key, p2p), 0) + 1
        state: CallState = "done" if row.finished_ns != NEVER else "waiting"
        frame = StackFrame(row.op, row.place.file, row.place.line)
        evidence.add_call(
            EvidenceCall(
                row.rank,
                key,
                number,
                operation_family(row.op),
                state,
                p2p,
                row.peer if p2p else None,
                row.started_ns != NEVER,
                None,
                -1,
                -1,
                row.dtype,
                (frame,) if row.place.line else (),
                row.posted_ns,
                order,
                source,
                row.tag if p2p else None,
            )
        )
    for end in trace.header.get("ends") or ():
        if end[0] in seen and end[1] not in ("blocked", "ended"):
            evidence.add_end(
                end[0],
                ProcessEnd(
                    "killed" if end[1] in ("killed", "crashed") else "raised",
                    str(end[1]),
                    False,
                    source=source,
                ),
            )
    return seen


def read_progress_file(evidence: Evidence, board: ProgressSnapshot, source: str) -> None:
    """A progress board: how far a rank of `run --real` came. Its call's number is the position in
    the program, not on a group.
    """
    evidence.records_of(board.rank, source)
    if board.phase == RankPhase.RAISED:
        follows = bool(re.search(r"Connection closed|Timed out|timed out", board.message))
        evidence.add_end(
            board.rank, ProcessEnd("raised", board.message or "raised", follows, source=source)
        )
    elif board.phase == RankPhase.STRUCK:
        evidence.add_end(
            board.rank,
            ProcessEnd("killed", "killed by a fault of the scenario", False, source=source),
        )
    elif board.phase in (RankPhase.WRITING, RankPhase.ENDED):
        evidence.add_end(
            board.rank,
            ProcessEnd(
                "exited", "came to the end of its program", False, source=source, clean=True
            ),
        )
    elif board.phase == RankPhase.IN_CALL:
        evidence.notes.append(f"rank {board.rank}'s board: in call {board.position} of its program")
    elif board.phase == RankPhase.RUNNING:
        evidence.notes.append(
            f"rank {board.rank}'s board: between calls {board.position - 1} and {board.position} of its program"
        )
