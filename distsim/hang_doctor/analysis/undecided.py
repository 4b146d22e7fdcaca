"""What is said if no cause was found: which ranks are blocked, or why the files do not show it.

"No rank waits" is a strong claim. It holds only if complete records of all ranks show it. Logs show
timeouts only, Gloo records no messages, a stack shows no wait in C++, and files may be missing.
"""

from __future__ import annotations

from collections import Counter

from distsim.hang_doctor.analysis.hang_cause import CauseLine, HangCause
from distsim.hang_doctor.analysis.stack_position import stack_position, user_frame
from distsim.hang_doctor.analysis.wait_chains import activity_text, position_text
from distsim.hang_doctor.analysis.wait_state import JobWaitState
from distsim.hang_doctor.model.evidence_records import ProcessEnd, RankEvidence
from distsim.hang_doctor.model.phrases import process_state_text, ranks_text, verb_form

#: The same limit as in ``diagnosis``.
_MAX_LISTED_RANKS = 1 << 16
_MAX_ERROR_LENGTH = 160


def cause_not_found(job: JobWaitState) -> list[HangCause]:
    """A statement of what is unknown; empty if the records show that no rank waits."""
    if not job.ranks:
        return []
    waits = list(job.all_waits())
    if waits:
        ranks = tuple(dict.fromkeys(wait.rank for wait in waits))
        ops = " or ".join(dict.fromkeys(wait.call.op or "a call" for wait in waits))
        are = verb_form(ranks, "is", "are")
        title = f"{ranks_text(ranks)} {are} blocked in {ops}; these files do not show why"
        return [_cause("blocked", title, job, ranks)]
    if _is_known_to_be_over(job):
        return []
    ranks = tuple(job.ranks)
    if not any(map(_has_activity, job.evidence.ranks.values())):
        title = f"no call and no stack of {ranks_text(ranks)} is known{_what_is_known_instead(job)}"
        return [_cause("undecided", title, job, ranks)]
    title = f"the cause is not in these files: {_what_is_missing(job)}"
    return [_cause("undecided", title, job, ranks)]


def _cause(kind: str, title: str, job: JobWaitState, ranks: tuple[int, ...]) -> HangCause:
    lines = []
    for rank in ranks:
        state = job.ranks[rank]
        if state.reported_frame is not None:
            lines.append(CauseLine((rank,), activity_text(state), state.reported_frame))
    return HangCause(
        "blocked" if kind == "blocked" else "undecided",
        "unknown",
        title,
        ranks=ranks,
        lines=lines,
    )


def _is_known_to_be_over(job: JobWaitState) -> bool:
    """Whether complete records of all ranks show that no rank waits."""
    if job.later_ends or _ranks_not_given(job):
        return False
    return all(_is_complete(records) for records in job.evidence.ranks.values())


def _is_complete(records: RankEvidence) -> bool:
    if any(end.clean for end in records.ends):
        return True
    # A stack was taken because the process hung. Gloo records no messages, and a recorder without
    # any call does not show which library it is.
    has_messages = records.records_messages or not records.calls
    return records.recorded and has_messages and not records.stacks


def _has_activity(records: RankEvidence) -> bool:
    """Whether anything shows what the rank did."""
    return bool(records.calls or records.status or records.stacks or records.ends)


def _what_is_known_instead(job: JobWaitState) -> str:
    if any(records.processes for records in job.evidence.ranks.values()):
        return ", only the state of each process"
    return ""


def _ranks_not_given(job: JobWaitState) -> tuple[int, ...]:
    expected = set(range(min(job.evidence.world, _MAX_LISTED_RANKS)))
    for group in job.evidence.groups.values():
        expected.update(group.members or ())
    return tuple(sorted(expected - set(job.ranks)))


def _what_is_missing(job: JobWaitState) -> str:
    """Why the files do not show the cause."""
    not_given = _ranks_not_given(job)
    known = ranks_text(job.ranks)
    records = job.evidence.ranks.values()
    if not_given and any(one.calls or one.status for one in records):
        have = verb_form(tuple(job.ranks), "has", "have")
        return (
            f"{known} {have} finished all recorded calls, and nothing is known of "
            f"{ranks_text(not_given)}"
        )
    if any(one.stacks for one in records):
        run = verb_form(tuple(job.ranks), "runs", "run")
        wait = verb_form(tuple(job.ranks), "waits", "wait")
        return f"{known} {run} host code, or {wait} where a stack does not show it"
    if any(one.recorded and not one.records_messages for one in records):
        have = verb_form(tuple(job.ranks), "has", "have")
        return f"{known} {have} finished all recorded collectives; Gloo records no messages"
    return f"of {known} they show the last finished calls, but no call that is open"


# --- processes of unknown rank ---


def activity_of_unknown_ranks(job: JobWaitState) -> list[HangCause]:
    """What processes of unknown rank do, if no rank is known at all."""
    if job.ranks:
        return []
    evidence = job.evidence
    positions = [stack_position(stack) for stack in evidence.orphans if stack.main]
    texts = [position_text(position) for position in positions]
    texts += [process_state_text(one) for one in evidence.orphan_processes if not one.stacks]
    if not texts:
        return []
    shown = "; ".join(
        f"{_processes(count)} of unknown rank: {text}"
        for text, count in Counter(texts).most_common()
    )
    is_waiting = any(position.may_wait_for_ranks for position in positions)
    return [
        HangCause(
            "blocked" if is_waiting else "undecided",
            "unknown",
            shown,
            lines=[
                CauseLine((), position_text(position), position.frame) for position in positions
            ],
        )
    ]


def errors_of_unknown_ranks(job: JobWaitState) -> list[HangCause]:
    """Errors in logs that do not say which rank wrote them."""
    ends = job.evidence.orphan_ends
    if not ends:
        return []
    # The error of a process that failed by itself comes before the consequences of it.
    end = min(ends, key=lambda one: one.follows)
    count = Counter(one.text for one in ends)[end.text]
    who = _processes(count)
    text = end.text[:_MAX_ERROR_LENGTH]
    if end.follows:
        title = f"{who} of unknown rank gave up waiting for another rank: {text}"
        detail = "the cause is a rank that had exited or had not made this call: see its log"
    else:
        title = f"{who} of unknown rank failed: {text}"
        detail = "the log does not show which rank it was, or whether others hung before"
    return [
        HangCause(
            "consequence" if end.follows else "crash",
            "unknown",
            title,
            lines=_lines(end),
            details=[detail],
        )
    ]


def _processes(count: int) -> str:
    return "a process" if count == 1 else f"{count} processes"


def _lines(end: ProcessEnd) -> list[CauseLine]:
    frame = user_frame(end.frames)
    return [] if frame is None else [CauseLine((), "raised the error", frame)]
