"""What to collect next: the evidence that would settle what the files leave open.

Suggestions fit the evidence. Files that were given are not asked for again, and a job that has
ended is not to be looked at. There are none once the cause is proved, except for files of ranks
that were not given at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from distsim.hang_doctor.analysis.hang_cause import HangCause
from distsim.hang_doctor.analysis.stack_position import DATA_LOADER
from distsim.hang_doctor.analysis.wait_state import JobWaitState
from distsim.hang_doctor.model.evidence import Evidence
from distsim.hang_doctor.model.phrases import ranges_text, ranks_text, verb_form

#: Kinds of causes that are settled once proved, even if no rank is blamed.
_KINDS_WITHOUT_BLAME = ("mismatch", "tag_mismatch", "communication", "diverged")
#: How the kinds of files begin that `distsim slow` reads and that say nothing about hangs.
RECORDING_KINDS = ("Chakra execution trace", "Nsight Systems export")


def what_to_collect(
    job: JobWaitState, absent: tuple[int, ...], main: HangCause | None
) -> list[str]:
    """Suggestions as sentences. ``absent``: ranks of the job about which nothing was given."""
    suggestions: list[str] = []
    if any(file.kind.startswith("distsim scenario") for file in job.evidence.files):
        suggestions.append("to find out whether a scenario hangs, run `distsim check FILE`")
        if not job.ranks:
            return suggestions
    if _has_only_profiles(job.evidence):
        return [
            "a job that wrote a profile was still running: if it is slow rather than hung, run "
            "`distsim slow` on these files"
        ]
    if absent:
        suggestions.append(_absent_text(job.evidence, absent))
    if not _is_settled(main):
        suggestions += _open_suggestions(job, main)
    return suggestions


def _absent_text(evidence: Evidence, absent: tuple[int, ...]) -> str:
    ranks = ranks_text(absent)
    if any(one.processes for one in evidence.ranks.values()):
        return f"inspect {ranks} too: run `distsim doctor --live PID` on the node"
    if len(evidence.files) == 1:
        return (
            f"find the log of {ranks}: this file does not mention {verb_form(absent, 'it', 'them')}"
        )
    return f"collect the files of {ranks}; none were given"


def _has_only_profiles(evidence: Evidence) -> bool:
    """Whether the files show how long operations take, and nothing shows where ranks are."""
    kinds = {file.kind for file in evidence.files if file.ranks}
    if kinds:
        return kinds == {"Kineto trace"}
    return any(file.kind.startswith(RECORDING_KINDS) for file in evidence.files)


def _is_settled(main: HangCause | None) -> bool:
    if main is None or main.grade != "proved":
        return False
    return bool(main.culprits) or main.kind in _KINDS_WITHOUT_BLAME


def _open_suggestions(job: JobWaitState, main: HangCause | None) -> Iterator[str]:
    evidence = job.evidence
    records = evidence.ranks.values()
    was_inspected = bool(evidence.orphan_processes) or any(one.processes for one in records)
    if any(report.tool.endswith("analyzer") for report in evidence.tool_reports):
        yield "give doctor the dumps that the analyzer read: it compares all ranks with each other"
        return
    if evidence.live_without_stacks:
        yield (
            "install py-spy (`pip install py-spy`) and run `distsim doctor --live PID` again: it "
            "then shows the source line of every rank"
        )
    stack_text = _stack_suggestion(job, main)
    if stack_text and not was_inspected:
        yield stack_text
    if _is_gloo(evidence):
        if not any(one.recorded for one in records) and not was_inspected:
            yield (
                "Gloo writes no dump by itself: write one in a thread of each rank, as "
                "docs/how-to/flight-recorder.md shows"
            )
    elif not any(one.recorded for one in records):
        yield (
            "in the next run, write Flight Recorder dumps of all ranks: TORCH_FR_BUFFER_SIZE=20000 "
            "TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_FR_DUMP_TEMP_FILE=/shared/fr_rank_ (older "
            "versions: TORCH_NCCL_TRACE_BUFFER_SIZE, TORCH_NCCL_DEBUG_INFO_TEMP_FILE); then run "
            "`distsim doctor /shared`"
        )
    if _has_local_group_names(job) and not evidence.disputes:
        yield "use torch 2.5 or newer: its log lines name groups equally in all processes"


def _stack_suggestion(job: JobWaitState, main: HangCause | None) -> str:
    """Which stacks to take, and how; empty if they would add nothing."""
    evidence = job.evidence
    loading = [
        rank
        for rank, state in job.ranks.items()
        if state.position is not None and state.position.op == DATA_LOADER
    ]
    when = "when it hangs again" if _has_ended(job) else "while the job hangs"
    if loading:
        return (
            f"{when}, run `distsim doctor --live PID` on the node of {ranks_text(loading)}: it "
            "shows the worker processes of the DataLoader"
        )
    if main is not None and main.kind in ("blocked", "undecided", "stacks_only"):
        return (
            f"{when}, run `distsim doctor --live PID` (PID of torchrun) on each node: it looks at "
            "all ranks twice, with their child processes, locals and functions in C"
        )
    if _lacks_messages(evidence):
        return (
            f"{when}, run `distsim doctor --live PID` on each node: stacks with local variables "
            "show which rank sends to which, and Gloo records no messages"
        )
    wanted = _ranks_whose_stacks_help(job, main)
    if not wanted:
        return ""
    return (
        f"{when}, take the stacks of {ranks_text(wanted)}: `distsim doctor --live PID` on the node,"
        f" or `py-spy dump --locals --pid PID > rank_{ranges_text(wanted[:1])}.txt`"
    )


def _has_ended(job: JobWaitState) -> bool:
    """Whether the job has ended: a timeout or an error ended it, or somebody did."""
    if job.later_ends or job.evidence.orphan_ends:
        return True
    records = job.evidence.ranks.values()
    return any(one.ends or one.waits_since_s is not None for one in records)


def _is_gloo(evidence: Evidence) -> bool:
    if any("gloo" in one.backend for one in evidence.ranks.values()):
        return True
    ends = [end for one in evidence.ranks.values() for end in one.ends]
    return any("gloo/" in end.text for end in (*ends, *evidence.orphan_ends))


def _lacks_messages(evidence: Evidence) -> bool:
    """Whether there are recordings, and none of them has messages or comes with a stack."""
    records = evidence.ranks.values()
    recorded = [one for one in records if one.recorded]
    return bool(recorded) and not any(one.records_messages or one.stacks for one in recorded)


def _ranks_whose_stacks_help(job: JobWaitState, main: HangCause | None) -> Sequence[int]:
    """Ranks with unknown position and end; those that the main cause concerns, if there are any."""
    unplaced = [
        rank for rank, state in job.ranks.items() if state.position is None and state.end is None
    ]
    if main is None:
        return unplaced
    concerned = [rank for rank in main.ranks if rank in unplaced]
    return concerned or unplaced


def _has_local_group_names(job: JobWaitState) -> bool:
    """Whether a newer version of torch would name the group of a wait equally in all processes."""
    groups = job.evidence.groups
    used = {wait.call.group for wait in job.all_waits() if wait.call.source != "its stack"}
    return any(
        key in groups and not groups[key].sure and not groups[key].may_share_name for key in used
    )
