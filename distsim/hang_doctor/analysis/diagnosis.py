"""The diagnosis of a hang: what the evidence proves, what it suggests, and what to collect next.

The analysis has fixed steps:

1. Build the wait state of all ranks (``wait_graph``).
2. Collect the causes of every kind: crashes, mismatches, wait-for cycles, ranks that are behind. If
   nothing is proved, also collect what is known nevertheless.
3. Order them so that a cause precedes its consequences, and drop repetitions.

It reads no files; ``readers`` do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from distsim.hang_doctor.analysis import (
    communication_failures,
    inconclusive,
    live_states,
    mismatch_causes,
    undecided,
    wait_chains,
    wait_cycles,
)
from distsim.hang_doctor.analysis.crashes import crash_causes, ends_from_outside
from distsim.hang_doctor.analysis.divergence import RecordedMismatch, first_mismatch
from distsim.hang_doctor.analysis.hang_cause import HangCause
from distsim.hang_doctor.analysis.next_steps import what_to_collect
from distsim.hang_doctor.analysis.wait_graph import job_wait_state
from distsim.hang_doctor.analysis.wait_state import JobWaitState
from distsim.hang_doctor.model.evidence import Evidence
from distsim.hang_doctor.model.phrases import call_text, ranks_text

#: At most this many ranks of a job are listed as not given.
_MAX_LISTED_RANKS = 1 << 16
#: Kinds of causes that only describe waits, so they are consequences of other kinds.
_WAIT_KINDS = ("wait_for_cycle", "behind")


@dataclass
class Diagnosis:
    """The result of the analysis.

    ``causes``: the main cause first. ``mismatches``: for each group, the first call that does not
    match. ``common``: for each group, the last call that all ranks have finished, as text.
    ``absent``: ranks of the job about which no file was given. ``collect``: what to collect next.
    """

    evidence: Evidence
    standing: JobWaitState
    causes: list[HangCause] = field(default_factory=list)
    common: list[str] = field(default_factory=list)
    mismatches: dict[str, RecordedMismatch] = field(default_factory=dict)
    absent: tuple[int, ...] = ()
    collect: list[str] = field(default_factory=list)

    @property
    def main(self) -> HangCause | None:
        """The main cause; None if none was found."""
        return self.causes[0] if self.causes else None

    @property
    def culprits(self) -> tuple[int, ...]:
        """The ranks that the records prove responsible for the main cause; often none."""
        return self.causes[0].culprits if self.causes else ()


def diagnose_hang(evidence: Evidence) -> Diagnosis:
    """Analyse the evidence, which must have been reconciled."""
    job = job_wait_state(evidence)
    diagnosis = Diagnosis(evidence, job)
    diagnosis.absent = _ranks_without_evidence(evidence)
    diagnosis.causes = _demote_disputed(evidence, _ordered_causes(job))
    diagnosis.mismatches = _first_mismatches(job)
    diagnosis.common = _last_common_calls(job, _first_differences(diagnosis))
    diagnosis.collect = what_to_collect(job, diagnosis.absent, diagnosis.main)
    return diagnosis


def _ranks_without_evidence(evidence: Evidence) -> tuple[int, ...]:
    """Ranks of the job about which no file was given."""
    expected = set(range(min(evidence.world, _MAX_LISTED_RANKS)))
    for group in evidence.groups.values():
        expected.update(group.members or ())
    return tuple(sorted(expected - set(evidence.ranks)))


# --- the order of causes ---


def _ordered_causes(job: JobWaitState) -> list[HangCause]:
    """All causes that the evidence shows, each before its consequences."""
    found = _recorded_causes(job)
    found.sort(key=lambda cause: cause.grade != "proved")
    # NCCL's error on a mismatched connection precedes all, because it makes the process crash.
    live = live_states.live_causes(job)
    stopped = [cause for cause in live if cause.grade == "proved"]
    found = [*stopped, *communication_failures.connection_mismatches(job), *found]
    if any(cause.grade == "proved" for cause in found):
        found += inconclusive.tool_reports(job)
    else:
        found += [cause for cause in live if cause not in stopped]
        found += _causes_if_nothing_is_proved(job)
        if all(cause.kind == "crash" for cause in found):
            found += inconclusive.waits_of_unknown_members(job) or inconclusive.consequence_errors(
                job
            )
        if not any(cause.grade == "suspected" for cause in found):
            found += undecided.errors_of_unknown_ranks(job)
    if not found:
        found = undecided.cause_not_found(job) or undecided.activity_of_unknown_ranks(job)
    return _without_repetition([*found, *ends_from_outside(job)])


def _recorded_causes(job: JobWaitState) -> list[HangCause]:
    """Crashes, mismatches, wait-for cycles and ranks that are behind."""
    crashes = crash_causes(job)
    divergences = mismatch_causes.divergence_causes(job)
    mismatches = mismatch_causes.mismatch_causes(job, divergences)
    cycles = wait_cycles.wait_cycles(job)
    behind = wait_chains.ranks_behind(job)
    if _is_consequence_of_mismatch(crashes, mismatches):
        return [*mismatches, *crashes, *divergences, *cycles, *behind]
    return [
        *crashes,
        *mismatches,
        *divergences,
        *mismatch_causes.mismatch_reported_by_torch(job),
        *mismatch_causes.message_mismatch_causes(job),
        *cycles,
        *behind,
    ]


def _is_consequence_of_mismatch(crashes: list[HangCause], mismatches: list[HangCause]) -> bool:
    """Whether torch raised the first crash because the calls of its ranks do not match."""
    if not crashes or not crashes[0].of_library:
        return False
    mismatched = {rank for mismatch in mismatches for rank in mismatch.ranks}
    return not mismatched.isdisjoint(crashes[0].culprits)


def _causes_if_nothing_is_proved(job: JobWaitState) -> list[HangCause]:
    """What is suspected, before what is unknown."""
    found = [
        *inconclusive.finished_elsewhere(job),
        *inconclusive.tool_reports(job),
        *inconclusive.missing_evidence(job),
        *communication_failures.communication_hangs(job),
        *communication_failures.matched_messages_hang(job),
        *inconclusive.stacks_only(job),
    ]
    return sorted(found, key=lambda cause: cause.grade == "unknown")


def _without_repetition(found: list[HangCause]) -> list[HangCause]:
    """One cause for each bug, without the later causes that describe its consequences."""
    kept: list[HangCause] = []
    for cause in found:
        if not _is_repetition(cause, kept):
            kept.append(cause)
    return kept


def _is_repetition(cause: HangCause, kept: list[HangCause]) -> bool:
    if any(cause.title == other.title for other in kept):
        return True
    if cause.kind in _WAIT_KINDS:
        return bool(kept) and _explains_waits(kept[0])
    if cause.kind in ("stacks_only", "undecided"):
        # The states of the processes have said the same with more detail.
        return any(other.kind == "data_loader" and other.ranks == cause.ranks for other in kept)
    if cause.kind == "diverged":
        # The mismatch on that group has taken over the divergence.
        return any(other.kind == "mismatch" and other.group == cause.group for other in kept)
    return False


def _explains_waits(cause: HangCause) -> bool:
    """Whether wait-for cycles and ranks that are behind are consequences of this cause."""
    return cause.grade == "proved" and cause.kind not in ("behind", "wait_for_cycle")


def _demote_disputed(evidence: Evidence, found: list[HangCause]) -> list[HangCause]:
    """Move causes that concern disputed ranks to the end, and take back what they prove.

    It is not certain that the files of such a rank belong to it.
    """
    undisputed = []
    disputed = []
    for cause in found:
        if evidence.disputed_ranks.isdisjoint(cause.ranks):
            undisputed.append(cause)
            continue
        cause.culprits = ()
        if cause.grade == "proved":
            cause.grade = "suspected"
        disputed.append(cause)
    return [*undisputed, *disputed]


# --- the last calls that all ranks have in common ---


def _first_mismatches(job: JobWaitState) -> dict[str, RecordedMismatch]:
    """For each group with a mismatch: the first one."""
    found = {}
    for group in job.evidence.groups:
        mismatch = first_mismatch(job, group)
        if mismatch is not None:
            found[group] = mismatch
    return found


def _first_differences(diagnosis: Diagnosis) -> dict[str, int]:
    """For each group on which the calls of its ranks differ: the number of the first such call.

    Calls that are shifted differ already where the shift begins, even if they happen to match.
    """
    found = {group: mismatch.number for group, mismatch in diagnosis.mismatches.items()}
    for cause in diagnosis.causes:
        if cause.kind in ("mismatch", "diverged") and cause.number >= 0:
            found[cause.group] = min(cause.number, found.get(cause.group, cause.number))
    return found


def _last_common_calls(job: JobWaitState, differences: Mapping[str, int]) -> list[str]:
    """For each group that a rank waits on: the last call that all ranks finished, or else made.

    If their calls do not match: the last call before the first difference.
    """
    calls = (wait.call for wait in job.all_waits())
    groups = dict.fromkeys(call.group for call in calls if call.number >= 0 and not call.p2p)
    texts = (_last_common_call(job, group, differences.get(group)) for group in groups)
    return [text for text in texts if text]


def _last_common_call(job: JobWaitState, group: str, first_difference: int | None) -> str:
    """Empty if fewer than two members are known."""
    last_calls = {
        member: last
        for member in job.members_of(group)
        if (last := job.last_call(member, group)) is not None
    }
    if len(last_calls) < 2 or not job.evidence.groups[group].sure:
        return ""
    finished = min(job.last_finished(member, group) for member in last_calls)
    made = min(last_calls.values())
    reached = finished if finished >= 0 else made
    if first_difference is not None and first_difference <= reached:
        matched = _call_text(job, group, first_difference - 1)
        return f"that matched on {ranks_text(last_calls)}: {matched}"
    if finished >= 0:
        return f"that {ranks_text(last_calls)} all finished: {_call_text(job, group, finished)}"
    return f"that {ranks_text(last_calls)} all made: {_call_text(job, group, made)}"


def _call_text(job: JobWaitState, group: str, number: int) -> str:
    for records in job.evidence.ranks.values():
        for call in records.calls:
            if call.is_collective(group, number):
                return call_text(job.evidence, call)
    label = job.evidence.groups[group].label
    return f"call {number} of {label}" if number else f"none on {label}"
