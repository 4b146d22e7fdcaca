"""Causes that consist in calls that do not match: an extra or omitted call, or different arguments.

``divergence`` finds the differences; this module decides which of them explain the hang, and
phrases them. It also takes over the mismatches that torch itself detected.
"""

from __future__ import annotations

from distsim.hang_doctor.analysis.divergence import (
    MismatchSide,
    RankDivergence,
    RecordedMismatch,
    first_mismatch,
    mismatched_message,
    rank_divergences,
)
from distsim.hang_doctor.analysis.hang_cause import CauseLine, HangCause
from distsim.hang_doctor.analysis.stack_position import user_frame
from distsim.hang_doctor.analysis.wait_state import JobWaitState
from distsim.hang_doctor.model.phrases import call_text, ranks_text, verb_form

_DIFFERENCE_TEXT = {
    "kind": "different operations",
    "size": "different sizes",
    "dtype": "different dtypes",
}


# --- extra and omitted calls ---


def divergence_causes(job: JobWaitState) -> list[HangCause]:
    """Ranks that make a call too many or too few, on groups that matter to the hang."""
    has_ended_rank = any(state.end for state in job.ranks.values())
    groups_with_waits = {wait.call.group for wait in job.all_waits()}
    found = []
    for group, known in job.evidence.groups.items():
        if not known.sure:
            continue
        if has_ended_rank or group in groups_with_waits or _has_unequal_progress(job, group):
            found += _divergences_on_group(job, group)
    return found


def _has_unequal_progress(job: JobWaitState, group: str) -> bool:
    """Whether the known members of a group are at different calls."""
    last_calls = {job.last_call(member, group) for member in job.members_of(group)}
    return len(last_calls - {None}) > 1


def _divergences_on_group(job: JobWaitState, group: str) -> list[HangCause]:
    divergences = rank_divergences(job, group)
    recorded = [rank for rank in job.members_of(group) if _has_calls_on(job, rank, group)]
    is_one_rank = len({divergence.rank for divergence in divergences}) == 1
    if is_one_rank and len(recorded) > 2:
        return [_divergence_of_one_rank(job, divergence) for divergence in divergences]
    # No rank is clearly the wrong one. Between two ranks, both divergences are the same difference.
    if len(recorded) == 2:
        divergences = divergences[:1]
    return [_divergence_between_two(job, divergence) for divergence in divergences]


def _has_calls_on(job: JobWaitState, rank: int, group: str) -> bool:
    records = job.evidence.ranks.get(rank)
    return records is not None and any(call.group == group for call in records.calls)


def _divergence_of_one_rank(job: JobWaitState, divergence: RankDivergence) -> HangCause:
    """A cause that blames the one rank that differs from all others."""
    rank = divergence.rank
    is_one_call = divergence.call_count == 1
    count = "a call" if is_one_call else f"{divergence.call_count} calls"
    shift = "one call" if is_one_call else f"{divergence.call_count} calls"
    if divergence.extra:
        action = f"makes {count} that the others do not make"
    else:
        action = f"skips {count} that the others make"
    group = job.evidence.groups[divergence.group].label
    place = _call_place_text(divergence)
    return HangCause(
        "diverged",
        "proved",
        f"rank {rank} {action}: {'' if is_one_call else 'first '}{place} "
        f"(call {divergence.number} of {group})",
        culprits=(rank,),
        ranks=(rank,),
        lines=_divergence_lines(job, divergence),
        details=[
            f"from there on, its calls on {group} are shifted by {shift} against those of the "
            "others"
        ],
        group=divergence.group,
        number=divergence.number,
    )


def _divergence_between_two(job: JobWaitState, divergence: RankDivergence) -> HangCause:
    """A cause that blames no rank: either side may be the intended one."""
    other = _other_rank(job, divergence)
    caller, omitter = divergence.rank, other
    if not divergence.extra:
        caller, omitter = other, divergence.rank
    group = job.evidence.groups[divergence.group].label
    title = (
        f"{ranks_text((caller, omitter))} diverge at call {divergence.number} of {group}: "
        f"rank {caller} calls {_call_place_text(divergence)}, rank {omitter} does not"
    )
    return HangCause(
        "diverged",
        "proved",
        title,
        ranks=tuple(sorted((divergence.rank, other))),
        lines=_divergence_lines(job, divergence),
        details=[
            f"either rank {caller} makes a call too many, or rank {omitter} skips one; two ranks "
            "are not enough to decide"
        ],
        group=divergence.group,
        number=divergence.number,
    )


def _call_place_text(divergence: RankDivergence) -> str:
    frame = user_frame(divergence.call.frames)
    op = divergence.call.op
    return f"{op} at {frame.place}" if frame else op


def _divergence_lines(job: JobWaitState, divergence: RankDivergence) -> list[CauseLine]:
    """The line of the call, and the line at which a rank that omits it is now."""
    rank, call = divergence.rank, divergence.call
    callers = (rank,) if divergence.extra else tuple(_other_ranks(job, divergence))
    lines = [CauseLine(callers, call.op, user_frame(call.frames))]
    state = job.ranks.get(rank)
    if not divergence.extra and state is not None and state.frame is not None:
        lines.append(CauseLine((rank,), "now", state.frame))
    return lines


def _other_ranks(job: JobWaitState, divergence: RankDivergence) -> list[int]:
    """The other members of the group about which something is known."""
    members = job.members_of(divergence.group)
    return [rank for rank in members if rank != divergence.rank and rank in job.ranks]


def _other_rank(job: JobWaitState, divergence: RankDivergence) -> int:
    others = _other_ranks(job, divergence)
    return others[0] if others else divergence.rank


# --- mismatched collectives ---


def mismatch_causes(job: JobWaitState, divergences: list[HangCause]) -> list[HangCause]:
    """The first mismatch on each group, unless it did no harm.

    If the calls were shifted before, the mismatch is a consequence: its cause then takes over the
    title, the blamed ranks and the lines of the divergence.
    """
    found = []
    for group, known in job.evidence.groups.items():
        mismatch = first_mismatch(job, group)
        if mismatch is None or not _is_harmful(job, mismatch):
            continue
        cause = _mismatch_cause(job, mismatch, known.sure)
        shift = _divergence_before(divergences, mismatch)
        if shift is not None:
            cause.title = shift.title
            cause.culprits = shift.culprits
            cause.number = shift.number
            cause.lines = [*shift.lines, *cause.lines]
            cause.details = [*shift.details, *cause.details]
        found.append(cause)
    return found


def _divergence_before(
    divergences: list[HangCause], mismatch: RecordedMismatch
) -> HangCause | None:
    for divergence in divergences:
        if divergence.group == mismatch.group and divergence.number <= mismatch.number:
            return divergence
    return None


def _is_harmful(job: JobWaitState, mismatch: RecordedMismatch) -> bool:
    """Whether a mismatch can explain the hang.

    Calls that all completed in spite of different sizes or dtypes did no harm. Where the record
    does not say whether a call completed (Gloo, NCCL_DEBUG), different operations or sizes count.
    Different dtypes count only if the job ended or is blocked there, because Gloo compares bytes.
    """
    states = [side.call.state for side in mismatch.sides]
    if mismatch.what != "kind" and all(state == "done" for state in states):
        return False
    if mismatch.what != "dtype" or any(state in ("waiting", "unknown") for state in states):
        return True
    if any(state.end is not None for state in job.ranks.values()):
        return True
    if all(_is_last_call(job, mismatch, rank) for side in mismatch.sides for rank in side.ranks):
        return True
    calls = (wait.call for wait in job.all_waits())
    numbers = [call.number for call in calls if call.group == mismatch.group]
    return any(number >= mismatch.number for number in numbers)


def _is_last_call(job: JobWaitState, mismatch: RecordedMismatch, rank: int) -> bool:
    return job.last_call(rank, mismatch.group) == mismatch.number


def _mismatch_cause(job: JobWaitState, mismatch: RecordedMismatch, sure: bool) -> HangCause:
    """``sure``: the group is the same for all ranks (see ``EvidenceGroup``)."""
    group = job.evidence.groups[mismatch.group].label
    difference = _DIFFERENCE_TEXT[mismatch.what]
    sides = "; ".join(_side_text(side) for side in mismatch.sides)
    culprits = mismatch.minority if sure else ()
    details = []
    if not sure and job.evidence.disputes:
        details.append("the files contradict each other, so these may be calls of two jobs")
    elif not sure:
        details.append(
            "the log identifies this group by a number that differs between processes, so these "
            "may be two groups"
        )
    elif not culprits:
        details.append("there is no clear majority, so no rank is blamed")
    return HangCause(
        "mismatch",
        "proved" if sure else "suspected",
        f"call {mismatch.number} of {group} does not match ({difference}): {sides}",
        culprits=culprits,
        ranks=tuple(sorted(rank for side in mismatch.sides for rank in side.ranks)),
        lines=[_side_line(side, mismatch.what) for side in mismatch.sides],
        details=details,
        group=mismatch.group,
        number=mismatch.number,
    )


def _side_text(side: MismatchSide) -> str:
    return f"{ranks_text(side.ranks)} {verb_form(side.ranks, 'has', 'have')} {side.text}"


def _side_line(side: MismatchSide, difference: str) -> CauseLine:
    what = side.call.op if difference == "kind" else f"{side.call.op} of {side.text}"
    return CauseLine(side.ranks, what, user_frame(side.call.frames))


def mismatch_reported_by_torch(job: JobWaitState) -> list[HangCause]:
    """The mismatches that torch found under TORCH_DISTRIBUTED_DEBUG=DETAIL.

    Torch compares a rank with one other rank only, so it remains open which one is wrong.
    """
    pairs = job.evidence.reported_mismatches
    if not pairs:
        return []
    ranks_by_call: dict[str, set[int]] = {}
    for pair in pairs:
        ranks_by_call.setdefault(pair.call, set()).add(pair.rank)
        ranks_by_call.setdefault(pair.other_call, set()).add(pair.other)
    sides = "; ".join(
        f"{ranks_text(ranks)} {verb_form(tuple(ranks), 'is', 'are')} in {call}"
        for call, ranks in ranks_by_call.items()
    )
    ranks = tuple(sorted(set().union(*ranks_by_call.values())))
    return [
        HangCause(
            "mismatch",
            "proved",
            f"torch reports a mismatch: {sides}",
            ranks=ranks,
            lines=_error_lines(job, ranks),
            details=[
                "torch compares two ranks only: look at their source lines to see which one is "
                "wrong"
            ],
        )
    ]


def _error_lines(job: JobWaitState, ranks: tuple[int, ...]) -> list[CauseLine]:
    """Where these ranks raised the error that ended them."""
    lines = []
    for rank in ranks:
        end = job.ranks[rank].end if rank in job.ranks else None
        if end is not None and end.frames:
            lines.append(CauseLine((rank,), "raised the error", user_frame(end.frames)))
    return lines


# --- mismatched messages ---


def message_mismatch_causes(job: JobWaitState) -> list[HangCause]:
    """A send and its receive that have different sizes or dtypes."""
    pair = mismatched_message(job)
    if pair is None:
        return []
    send, recv = pair
    sent = f"{max(send.elements_in, 0):,} {send.dtype}"
    received = f"{max(recv.elements_out, recv.elements_in, 0):,} {recv.dtype}"
    title = (
        f"a send of rank {send.rank} does not match its receive on rank {recv.rank}: "
        f"{sent} are sent, {received} are expected"
    )
    return [
        HangCause(
            "mismatch",
            "proved",
            title,
            ranks=(send.rank, recv.rank),
            lines=[
                CauseLine((call.rank,), call_text(job.evidence, call), user_frame(call.frames))
                for call in pair
            ],
            group=send.group,
        )
    ]
