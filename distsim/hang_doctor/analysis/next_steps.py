"""What to collect next: the files and settings that would settle what the evidence leaves open.

Suggestions are ordered by how much they settle. There are none once the cause is proved, except
for files of ranks that were not given at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from distsim.hang_doctor.analysis.hang_cause import HangCause
from distsim.hang_doctor.analysis.wait_state import JobWaitState, RankWaitState
from distsim.hang_doctor.model.evidence import Evidence
from distsim.hang_doctor.model.phrases import ranges_text, ranks_text

#: Kinds of causes that are settled once proved, even if no rank is blamed.
_KINDS_WITHOUT_BLAME = ("mismatch", "tag_mismatch", "communication", "diverged")


def what_to_collect(
    job: JobWaitState, absent: tuple[int, ...], main: HangCause | None
) -> list[str]:
    """Suggestions as sentences. ``absent``: ranks of the job about which nothing was given."""
    suggestions: list[str] = []
    if _has_only_profiles(job.evidence):
        suggestions.append(
            "a profile is written by a job that goes on: if the job is slow rather than hung, run "
            "`distsim slow` on these files"
        )
    if absent:
        suggestions.append(f"collect the files of {ranks_text(absent)}; none were given")
    if not _is_settled(main):
        suggestions += _open_suggestions(job, main)
    return suggestions


def _has_only_profiles(evidence: Evidence) -> bool:
    kinds = {file.kind for file in evidence.files if file.ranks}
    return kinds == {"Kineto trace"}


def _is_settled(main: HangCause | None) -> bool:
    if main is None or main.grade != "proved":
        return False
    return bool(main.culprits) or main.kind in _KINDS_WITHOUT_BLAME


def _open_suggestions(job: JobWaitState, main: HangCause | None) -> Iterator[str]:
    evidence = job.evidence
    wanted = _ranks_whose_stacks_help(job, main)
    if wanted:
        yield (
            f"while the job hangs, take the stack of {ranks_text(wanted)}: `distsim doctor --pid "
            "PID` on its node, or `py-spy dump --locals --pid PID > "
            f"rank_{ranges_text(wanted[:1])}.txt`"
        )
    if not any(records.recorded for records in evidence.ranks.values()):
        yield (
            "in the next run, write Flight Recorder dumps of all ranks: TORCH_FR_BUFFER_SIZE=20000 "
            "TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_FR_DUMP_TEMP_FILE=/shared/fr_rank_ (older "
            "versions: TORCH_NCCL_TRACE_BUFFER_SIZE, TORCH_NCCL_DEBUG_INFO_TEMP_FILE); then run "
            "`distsim doctor /shared`"
        )
    elif not any(records.records_messages for records in evidence.ranks.values()):
        yield (
            "take the stacks of all ranks with local variables (`py-spy dump --locals`): they show "
            "which rank sends to which; Gloo records no messages"
        )
    if _has_local_group_names(evidence) and not evidence.disputes:
        yield (
            "use torch 2.5 or newer, whose log lines name groups by GUID, or collect Flight "
            "Recorder dumps"
        )


def _ranks_whose_stacks_help(job: JobWaitState, main: HangCause | None) -> Sequence[int]:
    """Ranks with unknown position and end; those that the main cause concerns, if there are any."""
    unplaced = [rank for rank, state in job.ranks.items() if _is_unplaced(state)]
    if main is None:
        return unplaced
    concerned = [rank for rank in main.ranks if rank in unplaced]
    return concerned or unplaced


def _is_unplaced(state: RankWaitState) -> bool:
    return state.position is None and state.end is None


def _has_local_group_names(evidence: Evidence) -> bool:
    """Whether a newer version of torch would name a group equally in all processes."""
    return any(not group.sure and not group.may_share_name for group in evidence.groups.values())
