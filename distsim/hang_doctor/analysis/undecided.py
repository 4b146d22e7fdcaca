"""What is said if no cause was found: which ranks are blocked, or why the files do not show it.

"No rank waits" is a strong claim. It holds only if complete records of all ranks show it. Logs show
timeouts only, Gloo records no messages, a stack shows no wait in C++, and files may be missing.
"""

from __future__ import annotations

from collections import Counter

from distsim.hang_doctor.analysis.hang_cause import CauseLine, HangCause
from distsim.hang_doctor.analysis.stack_position import user_frame
from distsim.hang_doctor.analysis.wait_chains import activity_text
from distsim.hang_doctor.analysis.wait_state import JobWaitState
from distsim.hang_doctor.model.evidence_records import ProcessEnd, RankEvidence
from distsim.hang_doctor.model.phrases import ranks_text, verb_form

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
    if not_given:
        have = verb_form(tuple(job.ranks), "has", "have")
        text = f"{known} {have} finished all recorded calls, and nothing is known of "
        return text + ranks_text(not_given)
    if any(one.stacks for one in records):
        run = verb_form(tuple(job.ranks), "runs", "run")
        wait = verb_form(tuple(job.ranks), "waits", "wait")
        return f"{known} {run} host code, or {wait} where a stack does not show it"
    if any(one.recorded and not one.records_messages for one in records):
        have = verb_form(tuple(job.ranks), "has", "have")
        return f"{known} {have} finished all recorded collectives; Gloo records no messages"
    return f"of {known} they show the last finished calls, but no call that is open"


# --- processes of unknown rank ---


def errors_of_unknown_ranks(job: JobWaitState) -> list[HangCause]:
    """Errors in logs that do not say which rank wrote them."""
    ends = job.evidence.orphan_ends
    if not ends:
        return []
    # The error of a process that failed by itself comes before the consequences of it.
    end = min(ends, key=lambda one: one.follows)
    count = Counter(one.text for one in ends)[end.text]
    who = "a process" if count == 1 else f"{count} processes"
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


def _lines(end: ProcessEnd) -> list[CauseLine]:
    frame = user_frame(end.frames)
    return [] if frame is None else [CauseLine((), "raised the error", frame)]
