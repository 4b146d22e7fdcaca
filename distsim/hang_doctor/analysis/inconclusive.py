"""Hangs in which the records show no rank to be behind: what is known nevertheless.

Each function describes one kind of incomplete evidence. None of them blames a rank, except where
another tool (monitored_barrier) has proved which one is missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from distsim.hang_doctor.analysis.hang_cause import CauseLine, HangCause
from distsim.hang_doctor.analysis.stack_position import is_library_file, user_frame
from distsim.hang_doctor.analysis.wait_chains import activity_text
from distsim.hang_doctor.analysis.wait_state import EvidenceWait, JobWaitState, RankWaitState
from distsim.hang_doctor.model.evidence_records import (
    CauseGrade,
    EvidenceCall,
    RankEvidence,
    ToolReport,
)
from distsim.hang_doctor.model.operation_names import is_known_operation
from distsim.hang_doctor.model.phrases import call_text, may_hide_a_wait, ranks_text, verb_form

#: A position in a library's own sources, as Gloo and c10d print it before an error.
_SOURCE_PREFIX: Final = re.compile(r"\[/?[^\s\[]*?\.(?:cc|cpp|h|hpp):\d+\] *")
_MAX_FINISHED_ELSEWHERE: Final = 4
_MAX_TOOL_REPORTS: Final = 6
_MAX_CALLS_IN_TITLE: Final = 4
_MAX_ERROR_LENGTH: Final = 160


def activity_lines(job: JobWaitState, ranks: Iterable[int]) -> list[CauseLine]:
    """What these ranks do, and at which line, where that is known."""
    lines = []
    for rank in ranks:
        state = job.ranks.get(rank)
        if state is not None and state.reported_frame is not None:
            lines.append(CauseLine((rank,), activity_text(state), state.reported_frame))
    return lines


# --- recorded calls ---


def finished_elsewhere(job: JobWaitState) -> list[HangCause]:
    """A rank is in a call that another member has finished.

    Then calls that do not belong together have met, or the other rank returned early.
    """
    found = []
    for wait in job.all_waits():
        finished = _members_that_finished(job, wait.call)
        if finished:
            found.append(_finished_elsewhere_cause(job, wait, finished))
    return found[:_MAX_FINISHED_ELSEWHERE]


def _members_that_finished(job: JobWaitState, call: EvidenceCall) -> tuple[int, ...]:
    if call.p2p or call.number < 0 or not job.evidence.groups[call.group].sure:
        return ()
    others = [member for member in job.members_of(call.group) if member != call.rank]
    return tuple(
        member for member in others if job.last_finished(member, call.group) >= call.number
    )


def _finished_elsewhere_cause(
    job: JobWaitState, wait: EvidenceWait, finished: tuple[int, ...]
) -> HangCause:
    call = wait.call
    have = verb_form(finished, "has", "have")
    return HangCause(
        "finished_elsewhere",
        "suspected",
        f"rank {wait.rank} is still in {call_text(job.evidence, call)}, which "
        f"{ranks_text(finished)} {have} finished",
        ranks=(wait.rank, *finished),
        lines=[CauseLine((wait.rank,), call.op or "a call", wait.frame)],
        details=[
            "a collective that needs all members cannot end on some of them only, unless their "
            "calls differed (order, size or group) or the connection broke",
            "these records do not show which rank is wrong",
        ],
        group=call.group,
        number=call.number,
    )


def missing_evidence(job: JobWaitState) -> list[HangCause]:
    """Ranks wait in a call for members about which no file was given."""
    waits_by_call: dict[tuple[str, int], list[EvidenceWait]] = {}
    for wait in job.all_waits():
        waits_by_call.setdefault((wait.call.group, wait.call.number), []).append(wait)
    causes = []
    for (group, _), waits in waits_by_call.items():
        # On a group with a local name, the other ranks may be on another group.
        if group and not job.evidence.groups[group].sure:
            continue
        silent = {rank for wait in waits for rank in wait.silent}
        if silent:
            causes.append(_missing_evidence_cause(job, waits, tuple(sorted(silent))))
    return sorted(causes, key=lambda cause: (cause.number, cause.group))


def _missing_evidence_cause(
    job: JobWaitState, waits: list[EvidenceWait], silent: tuple[int, ...]
) -> HangCause:
    call = waits[0].call
    inside = tuple(sorted({wait.rank for wait in waits}))
    wait_verb = verb_form(inside, "waits", "wait")
    they_are = verb_form(silent, "it is", "they are")
    have = verb_form(silent, "has", "have")
    their = verb_form(silent, "its", "their")
    # A rank may have a stack, or a log without calls.
    is_mentioned = any(rank in job.ranks for rank in silent)
    lack = "no file shows the calls of" if is_mentioned else "no file was given for"
    return HangCause(
        "missing_files",
        "unknown",
        f"{ranks_text(inside)} {wait_verb} in {call_text(job.evidence, call)}; "
        f"{lack} {ranks_text(silent)}",
        ranks=inside,
        lines=[CauseLine(inside, call.op, waits[0].frame)],
        details=[
            f"these files do not show whether {they_are} behind, {have} exited, or only {their} "
            "files are missing"
        ],
        group=call.group,
        number=call.number,
    )


def waits_of_unknown_members(job: JobWaitState) -> list[HangCause]:
    """Ranks are in calls whose group or members are unknown, listed by call."""
    waits_by_call: dict[tuple[str, int, str], list[EvidenceWait]] = {}
    for wait in job.all_waits():
        if _has_unknown_members(wait):
            call = wait.call
            waits_by_call.setdefault((call.group, call.number, call.op), []).append(wait)
    if not waits_by_call:
        return []
    texts: list[str] = []
    lines: list[CauseLine] = []
    all_ranks: set[int] = set()
    for waits in waits_by_call.values():
        ranks = tuple(wait.rank for wait in waits)
        call = waits[0].call
        verb = verb_form(ranks, "waits", "wait")
        texts.append(f"{ranks_text(ranks)} {verb} in {call_text(job.evidence, call)}")
        lines.append(CauseLine(ranks, call.op or "a call", waits[0].frame))
        all_ranks.update(ranks)

    title = "; ".join(texts[:_MAX_CALLS_IN_TITLE])
    if len(texts) > _MAX_CALLS_IN_TITLE:
        title += f"; and {len(texts) - _MAX_CALLS_IN_TITLE} more"
    details = ["these files do not show the other members of the group or their progress"]
    has_unsure_group = any(not job.evidence.groups[key].sure for key, _, _ in waits_by_call)
    if has_unsure_group and not job.evidence.disputes:
        details.append(
            "the log names no group, or a number that differs between processes, so the calls of "
            "two ranks may be on two groups"
        )
    ranks_of_cause = tuple(sorted(all_ranks))
    return [
        HangCause(
            "unknown_members", "unknown", title, ranks=ranks_of_cause, lines=lines, details=details
        )
    ]


def _has_unknown_members(wait: EvidenceWait) -> bool:
    """Whether a recorded wait leads to no rank at all. (`stacks_only` covers waits from stacks.)"""
    if wait.call.source == "its stack":
        return False
    return wait.open_ended and not wait.missing and not wait.silent


def consequence_errors(job: JobWaitState) -> list[HangCause]:
    """Ranks failed only in consequence of another rank's end, or of waiting for it."""
    errors: dict[int, str] = {}
    for rank, state in job.ranks.items():
        if state.end is not None and state.end.follows:
            errors[rank] = state.end.text
    if not errors:
        return []
    ranks = tuple(errors)
    error = _first_sentence(errors[ranks[0]])
    return [
        HangCause(
            "consequence",
            "unknown",
            f"{ranks_text(ranks)} failed because of another rank: {error}",
            ranks=ranks,
            lines=activity_lines(job, ranks),
            details=[
                "the cause is another rank, which exited earlier or never arrived: see its log"
            ],
        )
    ]


def _first_sentence(error: str) -> str:
    """The first sentence of an error, without the position in the library's own sources."""
    text = _SOURCE_PREFIX.sub("", error)
    return text.partition(". ")[0][:_MAX_ERROR_LENGTH]


# --- conclusions of other tools ---


def tool_reports(job: JobWaitState) -> list[HangCause]:
    """What other tools concluded, in their name; those that name ranks first."""
    found = []
    for report in [*job.evidence.tool_reports, *_count_differences(job)]:
        if report.tool == "monitored_barrier":
            found.append(_monitored_barrier_cause(job, report))
        # NCCL's errors at a connection are the subject of `connection_mismatches`.
        elif report.tool != "NCCL":
            found.append(_reported_cause(job, report))
    found.sort(key=lambda cause: (cause.grade != "proved", not cause.ranks))
    return found[:_MAX_TOOL_REPORTS]


def _count_differences(job: JobWaitState) -> list[ToolReport]:
    """Ranks of the largest communicators that finished fewer calls of a kind than others.

    The ranks of smaller communicators are not those of the job.
    """
    counts = job.evidence.tool_counts
    largest = max((key.size for key in counts), default=0)
    found = []
    for key, by_rank in counts.items():
        lowest, highest = min(by_rank.values()), max(by_rank.values())
        if key.size != largest or lowest == highest:
            continue
        behind = tuple(sorted(rank for rank, count in by_rank.items() if count < highest))
        text = f"finished {key.calls} up to call {lowest}, others up to call {highest}"
        found.append(ToolReport(key.tool, behind, text, ""))
    return found


def _monitored_barrier_cause(job: JobWaitState, report: ToolReport) -> HangCause:
    """The barrier proves which ranks did not arrive, but not that they are the cause.

    Ranks whose own waits are known were themselves blocked by others.
    """
    is_blocked = any(rank in job.ranks and job.ranks[rank].waits for rank in report.ranks)
    return HangCause(
        "behind",
        "proved",
        f"{ranks_text(report.ranks)} did not arrive at a monitored_barrier before its timeout",
        culprits=() if is_blocked else report.ranks,
        ranks=report.ranks,
        lines=activity_lines(job, report.ranks),
    )


def _reported_cause(job: JobWaitState, report: ToolReport) -> HangCause:
    subject = f"{ranks_text(report.ranks)} " if report.ranks else ""
    reliability = _reliability_of(report)
    return HangCause(
        "tool_report",
        "suspected" if report.ranks else "unknown",
        f"{report.tool} reports: {subject}{report.text}",
        ranks=report.ranks,
        lines=activity_lines(job, report.ranks),
        details=[reliability] if reliability else [],
    )


def _reliability_of(report: ToolReport) -> str:
    """How far a conclusion of a tool can be trusted; empty if its text says it."""
    if "does not answer" in report.text or "is considered dead" in report.text:
        return (
            "a process that does not answer has exited, is stopped, or its node failed: check it "
            "first"
        )
    for word, text in _RELIABILITY.items():
        if word in report.tool:
            return text
    return ""


_RELIABILITY: Final = {
    "desync": "its numbers mix the groups of a job, so this is no proof",
    "RAS": (
        "it lists the smaller set of ranks and counts each communicator separately, so this is a "
        "hint and no proof"
    ),
    "analyzer": (
        "it compares all ranks with one of them, so it may name the correct ranks: give doctor the "
        "dumps themselves"
    ),
    "Inspector": (
        "it writes finished calls at intervals, so a small difference may be only the interval"
    ),
}


# --- stacks without recordings ---


class _CallPlace(NamedTuple):
    op: str
    place: str


def stacks_only(job: JobWaitState) -> list[HangCause]:
    """Which ranks are in a communication call, and which are elsewhere, by their stacks alone.

    This proves little, because a stack names no group.
    """
    inside: dict[_CallPlace, list[int]] = {}
    outside: list[RankWaitState] = []
    for state in job.ranks.values():
        position = state.position
        if position is None or position.frame is None:
            continue
        if position.may_wait_for_ranks:
            place = _CallPlace(position.op, position.frame.place)
            inside.setdefault(place, []).append(state.rank)
        else:
            outside.append(state)
    if not inside:
        return []
    by_size = dict(sorted(inside.items(), key=lambda item: -len(item[1])))
    lines = [
        CauseLine(tuple(ranks), place.op, job.ranks[ranks[0]].frame)
        for place, ranks in by_size.items()
    ]
    lines += [CauseLine((state.rank,), _outside_text(state), state.frame) for state in outside]
    if outside:
        cause = _some_ranks_elsewhere(by_size, outside, lines)
    elif len(by_size) > 1:
        cause = _different_calls(job, by_size, lines)
    else:
        cause = _all_ranks_at_one_call(job, by_size, lines)
    moved = [rank for rank, records in job.evidence.ranks.items() if _has_moved(records)]
    if moved:
        their = verb_form(moved, "its", "their")
        cause.details.append(
            f"the stacks of {ranks_text(moved)} differ, so they are of different moments: give "
            f"doctor only {their} latest ones"
        )
    return [cause]


def _has_moved(records: RankEvidence) -> bool:
    """Whether the main thread is at different lines of the user's code in different files."""
    line_by_file: dict[str, int] = {}
    for stack in records.stacks:
        frame = user_frame(stack.frames) if stack.main else None
        if frame is not None and not is_library_file(frame.file):
            line_by_file.setdefault(stack.source, frame.line)
    return len(set(line_by_file.values())) > 1


def _outside_text(state: RankWaitState) -> str:
    """What a rank does that is in no communication call by its stack."""
    is_host_code = state.position is None or not state.position.op
    if is_host_code and may_hide_a_wait(state.frame):
        return "host code, or a wait that a stack does not show"
    return activity_text(state)


def _some_ranks_elsewhere(
    inside: dict[_CallPlace, list[int]], outside: list[RankWaitState], lines: list[CauseLine]
) -> HangCause:
    communicating = tuple(sorted(rank for ranks in inside.values() for rank in ranks))
    others = tuple(state.rank for state in outside)
    grade: CauseGrade = "suspected" if len(others) <= len(communicating) else "unknown"
    calls = " or ".join(dict.fromkeys(call.op for call in inside))
    activities = {_outside_text(state) for state in outside}
    activity = activities.pop() if len(activities) == 1 else ""
    is_wait = activity.startswith("waits")
    others_text = activity if is_wait else verb_form(others, "is not", "are not")
    if is_wait and len(others) > 1:
        others_text = activity.replace("waits", "wait", 1).replace("its", "their", 1)
    return HangCause(
        "stacks_only",
        grade,
        f"{ranks_text(communicating)} {verb_form(communicating, 'is', 'are')} in {calls}, "
        f"{ranks_text(others)} {others_text}",
        # Without a majority in the calls, either side may be wrong.
        ranks=others if grade == "suspected" else tuple(sorted((*communicating, *others))),
        lines=lines,
        details=["stacks contain no groups and no call numbers, so this is no proof"],
    )


def _different_calls(
    job: JobWaitState, inside: dict[_CallPlace, list[int]], lines: list[CauseLine]
) -> HangCause:
    """The ranks are in several calls. A clear majority at one of them singles out the others."""
    if len({call.op for call in inside}) == 1 and not is_known_operation(next(iter(inside)).op):
        return _all_in_one_kind_of_wait(inside, lines)
    calls = "; ".join(
        f"{ranks_text(ranks)} in {call.op} at {call.place}" for call, ranks in inside.items()
    )
    majority, *others = inside.values()
    total = len(majority) + sum(map(len, others))
    is_clear = len(majority) >= 2 and len(majority) * 3 >= total * 2
    different = tuple(sorted(rank for ranks in others for rank in ranks))
    return HangCause(
        "stacks_only",
        "suspected",
        f"ranks are in different calls: {calls}",
        ranks=different if is_clear else tuple(job.ranks),
        lines=lines,
        details=["if these calls are on one group, they do not match; stacks contain no groups"],
    )


def _all_in_one_kind_of_wait(
    inside: dict[_CallPlace, list[int]], lines: list[CauseLine]
) -> HangCause:
    """The stages of a pipeline, say, wait at different lines of one program."""
    ranks = tuple(sorted(rank for ranks in inside.values() for rank in ranks))
    op = next(iter(inside)).op
    are = verb_form(ranks, "is", "are")
    return HangCause(
        "blocked",
        "unknown",
        f"{ranks_text(ranks)} {are} blocked in {op}; no stack shows which rank they wait for",
        ranks=ranks,
        lines=lines,
    )


def _all_ranks_at_one_call(
    job: JobWaitState, inside: dict[_CallPlace, list[int]], lines: list[CauseLine]
) -> HangCause:
    call, ranks = next(iter(inside.items()))
    are = verb_form(ranks, "is", "are")
    unplaced = [rank for rank in job.ranks if rank not in ranks]
    others = "no known rank is elsewhere"
    if unplaced:
        others = f"no file shows the line of {ranks_text(unplaced)}"
    return HangCause(
        "stacks_only",
        "unknown",
        f"{ranks_text(ranks)} {are} in {call.op} at {call.place}; {others}",
        ranks=tuple(ranks),
        lines=lines,
    )
