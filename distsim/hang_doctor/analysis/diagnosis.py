"""The analysis: what the evidence proves of why nothing moves, what it only suggests, and what is
to be collected next.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from distsim.hang_doctor.analysis import causes, inconclusive, wait_chains
from distsim.hang_doctor.analysis.causes import HangCause
from distsim.hang_doctor.analysis.wait_graph import JobWaitState, job_wait_state, last_finished
from distsim.hang_doctor.model.evidence import Evidence
from distsim.hang_doctor.model.phrases import call_text, ranges_text, ranks_text, verb_form


@dataclass
class Diagnosis:
    """``causes``: the main one first. ``culprits`` of the main one: ranks that the records prove it
    of; often nobody.
    """

    evidence: Evidence
    standing: JobWaitState
    causes: list[HangCause] = field(default_factory=list)
    common: list[str] = field(default_factory=list)
    absent: tuple[int, ...] = ()
    collect: list[str] = field(default_factory=list)

    @property
    def main(self) -> HangCause | None:
        return self.causes[0] if self.causes else None

    @property
    def culprits(self) -> tuple[int, ...]:
        return self.causes[0].culprits if self.causes else ()


def diagnose_hang(evidence: Evidence) -> Diagnosis:
    """The diagnosis of what was given."""
    whole = job_wait_state(evidence)
    found = Diagnosis(evidence, whole)
    found.absent = _ranks_without_evidence(evidence)
    found.causes = _demote_disputed(evidence, _ordered_causes(whole))
    found.common = _last_common_calls(whole)
    found.collect = _what_to_collect(evidence, whole, found.absent, found.main)
    return found


def _demote_disputed(evidence: Evidence, found: list[HangCause]) -> list[HangCause]:
    """Nothing is proved by files of which it is not sure whose they are: what rests on them comes
    last.
    """
    doubted = [cause for cause in found if evidence.disputed.intersection(cause.ranks)]
    for cause in doubted:
        cause.culprits, cause.grade = (), "suspected" if cause.grade == "proved" else cause.grade
    return [*(cause for cause in found if cause not in doubted), *doubted]


def _ranks_without_evidence(evidence: Evidence) -> tuple[int, ...]:
    """Ranks of the job of whom nothing was given."""
    members = {m for g in evidence.groups.values() if g.members for m in g.members} | set(
        range(min(evidence.world, 1 << 16))
    )
    return tuple(sorted(members - set(evidence.ranks)))


def _ordered_causes(whole: JobWaitState) -> list[HangCause]:
    """All causes that the evidence shows, that which explains the others first."""
    crashes = causes.crash_causes(whole)
    parted = causes.divergence_causes(whole)
    clashes = causes.mismatch_causes(whole, parted)
    circles = wait_chains.wait_cycles(whole)
    named = [
        *crashes,
        *clashes,
        *parted,
        *causes.mismatch_reported_by_torch(whole),
        *causes.message_mismatch_causes(whole),
        *circles,
    ]
    clashing = {r for c in clashes for r in c.ranks}
    if crashes and clashes and set(crashes[0].culprits) & clashing and crashes[0].of_library:
        named = [*clashes, *crashes, *parted, *circles]  # torch raised because they did not fit
    behind = wait_chains.ranks_behind(whole)
    found = [*named, *behind]
    found.sort(key=lambda c: c.grade != "proved")  # suspicions come after what is proved
    found = [
        *inconclusive.connection_mismatches(whole),
        *found,
    ]  # the crash that comes of it is of the library
    if all(c.grade != "proved" for c in found):
        found = [
            *found,
            *inconclusive.finished_elsewhere(whole),
            *inconclusive.tool_reports(whole),
            *inconclusive.missing_evidence(whole),
            *inconclusive.communication_hangs(whole),
            *inconclusive.matched_messages_hang(whole),
            *inconclusive.stacks_only(whole),
        ]
        if all(c.kind == "crash" for c in found):
            found += inconclusive.waits_of_unknown_members(
                whole
            ) or inconclusive.consequence_errors(whole)
    else:
        found += inconclusive.tool_reports(whole)
    return _without_repetition(found)


def _without_repetition(found: list[HangCause]) -> list[HangCause]:
    """One bug, one cause: what says the same again is left out, and so is a circle of those who
    merely wait behind a proved cause.
    """
    kept: list[HangCause] = []
    for cause in found:
        if any(cause.title == other.title for other in kept):
            continue
        if (
            kept
            and kept[0].grade == "proved"
            and cause.kind in ("circle", "behind", "messages")
            and kept[0].kind not in ("behind", "circle")
        ):
            continue
        if (
            kept
            and cause.kind == "parted"
            and any(k.kind == "clash" and k.group == cause.group for k in kept)
        ):
            continue
        kept.append(cause)
    return kept


def _last_common_calls(whole: JobWaitState) -> list[str]:
    """Of each group on which somebody waits: the last call that all of whom something is known have
    finished, or else made.
    """
    found = []
    for group in dict.fromkeys(
        w.call.group
        for s in whole.ranks.values()
        for w in s.waits
        if w.call.number >= 0 and not w.call.p2p
    ):
        members = [m for m in whole.members(group) if whole.last(m, group) is not None]
        if len(members) < 2 or not whole.evidence.groups[group].sure:
            continue
        ended = [last_finished(whole, m, group) for m in members]
        made = min(whole.last(m, group) or 0 for m in members)
        number, word = (min(ended), "finished") if min(ended) >= 0 else (made, "made")
        calls = (
            c
            for e in whole.evidence.ranks.values()
            for c in e.calls
            if (c.group, c.number, c.p2p) == (group, number, False)
        )
        shown = next(calls, None)
        group_text = whole.evidence.groups[group].shown
        what = (
            call_text(whole.evidence, shown)
            if shown
            else f"call {number} of {group_text}"
            if number
            else f"none on {group_text}"
        )
        found.append(f"{word} by all of {ranks_text(members)}: {what}")
    return found


def _what_to_collect(
    evidence: Evidence, whole: JobWaitState, absent: tuple[int, ...], main: HangCause | None
) -> list[str]:
    """What to collect next: commands and variables, those that would settle the most first; none
    where all is told.
    """
    found = []
    recorded = any(e.recorded for e in evidence.ranks.values())
    settled = (
        main is not None
        and main.grade == "proved"
        and (main.culprits or main.kind in ("clash", "tags", "communication", "parted"))
    )
    if absent:
        found.append(
            f"the files of {ranks_text(absent)}: nothing of {verb_form(absent, 'it', 'them')} was given (lost, or never written?)"
        )
    unplaced = [r for r, s in whole.ranks.items() if s.place is None and s.end is None]
    wanted = [r for r in (main.ranks if main else ()) if r in unplaced] or (
        [] if settled else unplaced
    )
    if wanted and not settled:
        found.append(
            f"while it hangs, the stack of {ranks_text(wanted)}: `distsim doctor --pid PID` there, or `py-spy dump --locals --pid PID > "
            f"rank_{ranges_text(wanted[:1])}.txt`"
        )
    if not recorded and not settled:
        found.append(
            "Flight Recorder dumps of all ranks, from the next run: TORCH_FR_BUFFER_SIZE=20000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 "
            "TORCH_FR_DUMP_TEMP_FILE=/shared/fr_rank_ (older versions: TORCH_NCCL_TRACE_BUFFER_SIZE, "
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE); then `distsim doctor /shared`"
        )
    if recorded and not settled and not any(e.messages for e in evidence.ranks.values()):
        found.append(
            "Gloo records no messages: the stacks of all ranks with locals (`py-spy dump --locals`) tell who sends to whom"
        )
    if (
        any(not g.sure and not g.of_a_split for g in evidence.groups.values())
        and not settled
        and not evidence.disputes
    ):
        found.append("lines that name groups by GUID: torch 2.5 or newer, or Flight Recorder dumps")
    return found
