"""Causes that consist in the end of a process: a rank failed, and the others wait for it.

An end counts as the cause only if it is the rank's own failure, and if the rank does not continue
afterwards. A consequence of another rank's end or of a wait is no failure of its own.
"""

from __future__ import annotations

from distsim.hang_doctor.analysis.hang_cause import CauseLine, HangCause
from distsim.hang_doctor.analysis.process_deaths import death_order
from distsim.hang_doctor.analysis.stack_position import is_library_file, user_frame
from distsim.hang_doctor.analysis.wait_state import JobWaitState, RankWaitState
from distsim.hang_doctor.model.evidence_records import ProcessEnd
from distsim.hang_doctor.model.phrases import ranks_text, signal_name, verb_form

#: How many crashes a combined title lists.
_MAX_CRASHES_IN_TITLE = 4


def crash_causes(job: JobWaitState) -> list[HangCause]:
    """Ranks whose process failed by itself; the others wait for them or lost the connection."""
    awaited = {rank for wait in job.all_waits() for rank in wait.missing}
    found = []
    for rank, state in job.ranks.items():
        end = state.end
        if end is None or end.follows or end.clean:
            continue
        if end.unexplained:
            # A rank that was waiting in a call may have ended by the timeout of that call.
            if not state.waits:
                found.append(_unexplained_end_cause(rank, end))
        elif state.waits and rank not in awaited:
            found.append(_caught_error_cause(rank, end))
        elif death_order(job.evidence, rank, end) != "before":
            found.append(_killed_cause(rank, end))
        else:
            found.append(_crash_cause(job, rank, end))
    return _merge_crashes(job, found)


def _crash_cause(job: JobWaitState, rank: int, end: ProcessEnd) -> HangCause:
    waiting = [
        other for other, state in job.ranks.items() if _waits_or_failed_in_consequence(state)
    ]
    if rank in waiting:
        waiting.remove(rank)
    details = []
    if waiting:
        verb = verb_form(waiting, "waits", "wait")
        details.append(
            f"{ranks_text(waiting)} {verb} for rank {rank}, or lost the connection to it"
        )
    return HangCause(
        "crash",
        "proved",
        f"rank {rank} {_crash_text(end)}",
        culprits=(rank,),
        ranks=(rank,),
        lines=_crash_lines(rank, end),
        details=details,
        of_library=bool(end.frames) and is_library_file(end.frames[0].file),
    )


def _killed_cause(rank: int, end: ProcessEnd) -> HangCause:
    """A signal from outside ended a rank first, but perhaps because the job already hung."""
    return HangCause(
        "crash",
        "suspected",
        f"rank {rank} {_end_text(end)}",
        ranks=(rank,),
        lines=_crash_lines(rank, end),
        details=[
            "these files do not show whether it died before the others hung, or was killed because "
            "the job hung: compare the time with the logs of the other ranks, and search dmesg for "
            "the OOM killer"
        ],
    )


def ends_from_outside(job: JobWaitState) -> list[HangCause]:
    """The ends that came after the hang: somebody killed the job."""
    ends = job.later_ends
    if not ends:
        return []
    ranks = tuple(sorted(ends))
    signals = sorted({signal_name(end.signal) for end in ends.values()})
    title = f"{' and '.join(signals)} ended {ranks_text(ranks)}"
    if len(ranks) > 1 and len(signals) == 1:
        title += " within seconds"
    return [
        HangCause(
            "killed_from_outside",
            "unknown",
            f"{title}: the job was ended from outside, which is not the cause of the hang",
            ranks=ranks,
        )
    ]


def _waits_or_failed_in_consequence(state: RankWaitState) -> bool:
    if state.waits:
        return True
    return state.end is not None and state.end.follows


def _crash_lines(rank: int, end: ProcessEnd) -> list[CauseLine]:
    frame = user_frame(end.frames)
    if frame is None:
        return []
    what = end.text
    if end.kind == "raised":
        what = end.text.split(":")[0]
    return [CauseLine((rank,), what, frame)]


def _caught_error_cause(rank: int, end: ProcessEnd) -> HangCause:
    """An error of a rank that is in a call afterwards, and that no other rank waits for."""
    return HangCause(
        "crash",
        "suspected",
        f"rank {rank} {_end_text(end)}, but is in a later call; no rank waits for it",
        ranks=(rank,),
        lines=_crash_lines(rank, end),
        details=[
            "the error was caught, or another thread raised it: it may be unrelated to the hang"
        ],
    )


def _unexplained_end_cause(rank: int, end: ProcessEnd) -> HangCause:
    """A launcher reports that a process ended first, but not why.

    This is only suspected, because a call that timed out ends a process as well.
    """
    return HangCause(
        "crash",
        "suspected",
        f"rank {rank} {_end_text(end)}",
        ranks=(rank,),
        details=[
            f"the log of rank {rank} shows the reason: an error of its own, or a call that timed "
            "out because another rank was missing"
        ],
    )


def _crash_text(end: ProcessEnd) -> str:
    return f"{_end_text(end)} before the others hung"


def _end_text(end: ProcessEnd) -> str:
    if end.kind == "killed":
        return f"was killed ({end.text})"
    return end.text if end.text.startswith("ended") else f"raised {end.text}"


def _merge_crashes(job: JobWaitState, found: list[HangCause]) -> list[HangCause]:
    """Combine several proved crashes into one cause, unless a launcher saw one of them first.

    The files do not say in which order the others happened.
    """
    proved = [cause for cause in found if cause.grade == "proved"]
    suspected = [cause for cause in found if cause.grade != "proved"]
    seen_first = [cause for cause in proved if _was_seen_first(job, cause)]
    if len(proved) <= 1 or len(seen_first) == 1:
        later = [cause for cause in proved if cause not in seen_first]
        return [*seen_first, *later, *suspected]
    return [_combined_crash(job, proved), *suspected]


def _was_seen_first(job: JobWaitState, crash: HangCause) -> bool:
    """Whether a launcher reports this crash as the first failure."""
    ends = job.evidence.ranks[crash.ranks[0]].ends
    return any(end.seen_first for end in ends)


def _combined_crash(job: JobWaitState, crashes: list[HangCause]) -> HangCause:
    ranks = tuple(sorted(rank for crash in crashes for rank in crash.ranks))
    lines = [line for crash in crashes for line in crash.lines]
    ends = [end for rank in ranks if (end := job.ranks[rank].end) is not None]
    texts = {_crash_text(end) for end in ends}
    if len(texts) == 1:
        title = f"{ranks_text(ranks)} {texts.pop()}"
        return HangCause("crash", "proved", title, culprits=ranks, ranks=ranks, lines=lines)
    listed = "; ".join(
        crash.title.removesuffix(" before the others hung")
        for crash in crashes[:_MAX_CRASHES_IN_TITLE]
    )
    return HangCause(
        "crash",
        "proved",
        f"{ranks_text(ranks)} failed with different errors: {listed}",
        ranks=ranks,
        lines=lines,
        details=[
            "these files do not show which rank failed first, or whether one failure caused "
            "another: compare the times in the logs"
        ],
    )
