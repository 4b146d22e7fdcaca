"""The diagnosis of `distsim doctor` as plain data for JSON; the keys are an interface."""

from __future__ import annotations

from distsim.hang_doctor.analysis.diagnosis import Diagnosis
from distsim.hang_doctor.analysis.hang_cause import HangCause
from distsim.hang_doctor.analysis.wait_state import EvidenceWait
from distsim.hang_doctor.model.evidence_records import EvidenceGroup, InputFile, StackFrame


def doctor_json(diagnosis: Diagnosis) -> dict[str, object]:
    """The diagnosis with its evidence: causes, waits, ranks, groups and input files."""
    evidence = diagnosis.evidence
    statuses = diagnosis.standing.ranks
    waits = [_wait_json(rank, wait) for rank, status in statuses.items() for wait in status.waits]
    return {
        "schema_version": 1,
        "culprits": list(diagnosis.culprits),
        "causes": [_cause_json(cause) for cause in diagnosis.causes],
        "waits": waits,
        "ranks": [_rank_json(diagnosis, rank) for rank in statuses],
        "groups": [_group_json(group) for group in evidence.groups.values()],
        "last_common": diagnosis.common,
        "ranks_without_data": list(diagnosis.absent),
        "disagree": evidence.disputes,
        "notes": evidence.notes,
        "collect": diagnosis.collect,
        "files": [_file_json(file) for file in evidence.files],
    }


def _group_json(group: EvidenceGroup) -> dict[str, object]:
    return {
        "name": group.name,
        "description": group.desc,
        "members": list(group.members) if group.members else None,
        "members_certain": group.sure,
    }


def _file_json(file: InputFile) -> dict[str, object]:
    return {
        "path": file.path,
        "kind": file.kind,
        "ranks": list(file.ranks),
        "problem": file.problem,
        "rank_of_name": file.rank_of_name,
    }


def _wait_json(rank: int, wait: EvidenceWait) -> dict[str, object]:
    return {
        "rank": rank,
        "op": wait.call.op,
        "group": wait.call.group,
        "call": wait.call.number,
        "peer": wait.call.peer,
        "for": list(wait.missing),
        "ranks_without_data": list(wait.silent),
        "known": not wait.open_ended,
        "line": _place(wait.frame),
    }


def _cause_json(cause: HangCause) -> dict[str, object]:
    lines = [
        {
            "ranks": list(ranks),
            "what": activity,
            "line": _place(frame),
            "function": frame.name if frame else None,
        }
        for ranks, activity, frame in cause.lines
    ]
    return {
        "kind": cause.kind,
        "grade": cause.grade,
        "title": cause.title,
        "culprits": list(cause.culprits),
        "ranks": list(cause.ranks),
        "group": cause.group,
        "call": cause.number,
        "lines": lines,
        "details": cause.details,
    }


def _rank_json(diagnosis: Diagnosis, rank: int) -> dict[str, object]:
    evidence = diagnosis.evidence.ranks[rank]
    status = diagnosis.standing.ranks[rank]
    return {
        "rank": rank,
        "line": _place(status.frame),
        "ended": status.end.text if status.end else None,
        "calls": len(evidence.calls),
        "last": {
            key: {"enqueued": counters.enqueued, "completed": counters.completed}
            for key, counters in evidence.status.items()
        },
        "from": list(evidence.sources),
    }


def _place(frame: StackFrame | None) -> str | None:
    return frame.place if frame else None
