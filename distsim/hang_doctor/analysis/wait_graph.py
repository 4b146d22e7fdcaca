"""Build the wait state of a job: which rank is in which call, and which ranks that call waits for.

For each rank this module finds the calls that are not finished. For each of them it compares the
progress of the other members: a member whose records end before the call is *missing*; a member
without files is *silent*. Where no call was recorded, the position in the stack is used instead.

The result contains only what the records show. ``wait_chains`` follows the waits to their ends,
and ``causes`` and ``inconclusive`` draw the conclusions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from distsim.hang_doctor.analysis.message_pairs import is_answered, may_be_lost, opposite
from distsim.hang_doctor.analysis.process_deaths import death_order, ended_from_outside
from distsim.hang_doctor.analysis.stack_position import (
    CERTAIN_WAITS,
    JOB_WIDE_CALLS,
    PROGRAM_END,
    StackPosition,
    is_library_file,
    stack_position,
    user_frame,
)
from distsim.hang_doctor.analysis.wait_state import EvidenceWait, JobWaitState, RankWaitState
from distsim.hang_doctor.model.evidence import Evidence
from distsim.hang_doctor.model.evidence_records import (
    UNKNOWN_NUMBER,
    EvidenceCall,
    GroupProgress,
    ProcessEnd,
    RankEvidence,
    StackFrame,
    ThreadStack,
)
from distsim.hang_doctor.model.operation_names import OPS_THAT_NEED_ALL, P2P_OPS

#: Calls whose name in a stack shows a wait for other ranks.
_WAITING_CALLS = (
    *P2P_OPS,
    *OPS_THAT_NEED_ALL,
    *JOB_WIDE_CALLS,
    *CERTAIN_WAITS,
    "broadcast",
    "reduce",
    "gather",
    "scatter",
)
#: The order of a call that only the counters of a group show: after all recorded calls.
_AFTER_RECORDED_CALLS = 1 << 40
#: A thread of library code with at most this many frames is a service thread.
_MAX_SERVICE_FRAMES = 3
#: At most this many ranks of a job are listed as not given.
_MAX_LISTED_RANKS = 1 << 16


def job_wait_state(evidence: Evidence) -> JobWaitState:
    """The state of all ranks that the evidence mentions."""
    job = JobWaitState(evidence, later_ends=_later_ends(evidence))
    for rank in sorted(evidence.ranks):
        records = evidence.ranks[rank]
        end = None if rank in job.later_ends else _process_end(records)
        job.ranks[rank] = RankWaitState(rank, position=_main_thread_position(records), end=end)
    # The waits of a rank depend on the positions of the other ranks.
    for state in job.ranks.values():
        state.waits = tuple(_waits_of_rank(job, state))
    return job


# --- the end and the position of a rank ---


def _later_ends(evidence: Evidence) -> dict[int, ProcessEnd]:
    """The ends by which somebody stopped a job that already hung."""
    found = ended_from_outside(evidence)
    for rank, records in evidence.ranks.items():
        end = _process_end(records)
        if end is None or rank in found or end.follows:
            continue
        if death_order(evidence, rank, end) == "after":
            found[rank] = end
    return found


def _process_end(records: RankEvidence) -> ProcessEnd | None:
    """How the process ended.

    An explained end is preferred to an unexplained one, and an end of its own to a consequence of
    another rank's end.
    """
    return min(
        records.ends, key=lambda end: (end.unexplained, end.follows, end.clean), default=None
    )


class _PositionedStack(NamedTuple):
    stack: ThreadStack
    position: StackPosition

    def informativeness(self) -> tuple[bool, bool, int]:
        """More informative positions compare as greater."""
        position = self.position
        return bool(position.op), position.peer is not None, len(self.stack.frames)


def _main_thread_position(records: RankEvidence) -> StackPosition | None:
    """The position of the main thread, or else of a thread that is in a communication call."""
    stacks = [_PositionedStack(stack, stack_position(stack)) for stack in records.stacks]
    candidates = [found for found in stacks if _may_be_main_thread(found)]
    if not candidates:
        candidates = [found for found in stacks if found.position.op]
    if not candidates:
        return None
    best = max(candidates, key=_PositionedStack.informativeness).position
    return best._replace(frame=_with_longest_path(best.frame, candidates))


def _may_be_main_thread(found: _PositionedStack) -> bool:
    if not found.stack.main or found.position.frame is None:
        return False
    return found.position.op == PROGRAM_END or not _is_service_thread(found.stack.frames)


def _is_service_thread(frames: tuple[StackFrame, ...]) -> bool:
    """Whether this is a thread of a library: a pool, a watcher, the debug server."""
    if len(frames) > _MAX_SERVICE_FRAMES:
        return False
    return all(is_library_file(frame.file) for frame in frames)


def _with_longest_path(
    frame: StackFrame | None, candidates: list[_PositionedStack]
) -> StackFrame | None:
    """The same line as another tool prints it with a longer path, which is easier to find."""
    if frame is None:
        return None
    for _, position in candidates:
        other = position.frame
        if other is None or other.line != frame.line:
            continue
        if other.file.endswith("/" + frame.file):
            return other
    return frame


# --- the waits of a rank ---


def _waits_of_rank(job: JobWaitState, state: RankWaitState) -> Iterator[EvidenceWait]:
    pending = _pending_calls(job, job.evidence.ranks[state.rank])
    for call in pending:
        if call.p2p:
            yield _message_wait(job, call, state)
        else:
            yield _collective_wait(job, call, state)
    position = state.position
    if not pending and position is not None and position.op in _WAITING_CALLS:
        yield _wait_from_stack(job, state.rank, position)


class _Channel(NamedTuple):
    """Calls of a rank on one channel wait for the same ranks, so the first of them counts."""

    group: str
    p2p: bool
    peer: int | None


def _pending_calls(job: JobWaitState, records: RankEvidence) -> list[EvidenceCall]:
    """The first unfinished call on each channel.

    If the device reports the calls that it is executing, those alone. Otherwise without calls that
    merely queue behind another one of the same rank.
    """
    pending: dict[_Channel, EvidenceCall] = {}
    for call in records.calls:
        if _is_unfinished(job, records, call):
            peer = call.peer if call.p2p else None
            pending.setdefault(_Channel(call.group, call.p2p, peer), call)
    for group, status in records.status.items():
        channel = _Channel(group, False, None)
        has_unfinished = 0 <= status.completed < status.enqueued
        if not has_unfinished or channel in pending or _repeats_unnamed_call(records, group):
            continue
        pending[channel] = _call_after_completed(records, group, status)

    calls = sorted(pending.values(), key=lambda call: call.order)
    started = [call for call in calls if call.started]
    if started:
        return started
    progress = job.progress_of(records.rank)
    return [call for call in calls if not progress.is_queued(call)]


def _is_unfinished(job: JobWaitState, records: RankEvidence, call: EvidenceCall) -> bool:
    if call.state == "waiting":
        return True
    return call.state == "over" and _ended_by_timeout(job, records, call)


def _ended_by_timeout(job: JobWaitState, records: RankEvidence, call: EvidenceCall) -> bool:
    """Whether a Gloo call whose outcome was not recorded must have ended by its timeout.

    That is so if it is the last call of the rank on the group, needs all members, and a member has
    not made it.
    """
    if call.op not in OPS_THAT_NEED_ALL:
        return False
    if call.number != job.last_call(records.rank, call.group):
        return False
    members = job.members_of(call.group)
    return any(job.is_before(member, call.group, call.number) for member in members)


def _repeats_unnamed_call(records: RankEvidence, group: str) -> bool:
    """Whether counters without a group's name say the same as a call without one."""
    return group == "" and any(call.group == "" for call in records.calls)


def _call_after_completed(records: RankEvidence, group: str, status: GroupProgress) -> EvidenceCall:
    """The first call that the counters of a group show as unfinished."""
    number = status.completed + 1
    for call in records.calls:
        if call.is_collective(group, number):
            return call._replace(state="waiting")
    return EvidenceCall(
        records.rank,
        group,
        number,
        op="",
        state="waiting",
        order=_AFTER_RECORDED_CALLS,
        source=status.sources[0],
    )


def _frame_of_wait(call: EvidenceCall, state: RankWaitState) -> StackFrame | None:
    recorded = user_frame(call.frames)
    if recorded is not None:
        return recorded
    return state.position.frame if state.position else None


# --- collectives ---


def _collective_wait(job: JobWaitState, call: EvidenceCall, state: RankWaitState) -> EvidenceWait:
    group = job.evidence.groups[call.group]
    missing: set[int] = set()
    unknown: list[int] = []
    for member in job.members_of(call.group):
        if member == call.rank:
            continue
        if job.is_before(member, call.group, call.number) or _queues_before(job, member, call):
            missing.add(member)
        elif job.last_call(member, call.group) is None:
            unknown.append(member)

    # A process that has failed will not make the call, whatever its records lack.
    failed = [member for member in unknown if _has_failed(job, member)]
    silent = tuple(member for member in unknown if member not in failed)
    # Without a key that is equal in all processes, the other ranks may be on another group.
    proved_missing = tuple(sorted({*missing, *failed})) if group.sure else ()
    return EvidenceWait(
        call.rank,
        call,
        proved_missing,
        silent,
        _frame_of_wait(call, state),
        open_ended=not group.sure or (group.members is None and not missing),
    )


def _has_failed(job: JobWaitState, rank: int) -> bool:
    """Whether the process of a rank ended by a failure of its own."""
    state = job.ranks.get(rank)
    end = None if state is None else state.end
    if end is None or end.kind == "exited":
        return False
    return not end.follows and not end.unexplained


def _queues_before(job: JobWaitState, member: int, call: EvidenceCall) -> bool:
    """Whether a member has enqueued the call, while its device is still at an earlier one."""
    if member not in job.evidence.ranks:
        return False
    progress = job.progress_of(member)
    own = progress.collectives.get((call.group, call.number))
    if own is None or own.state != "waiting" or own.started:
        return False
    if progress.is_queued(own):
        return True
    return any(other.started and other.group != call.group for other in progress.waiting)


# --- messages ---


def _message_wait(job: JobWaitState, call: EvidenceCall, state: RankWaitState) -> EvidenceWait:
    wait = EvidenceWait(call.rank, call, (), (), _frame_of_wait(call, state))
    if call.peer is None:
        return wait._replace(open_ended=True)
    peer_records = job.evidence.ranks.get(call.peer)
    if peer_records is None:
        return wait._replace(silent=(call.peer,))
    if not peer_records.recorded:
        if not peer_records.stacks:
            return wait._replace(silent=(call.peer,))
        # A stack shows no finished or queued messages.
        return wait._replace(open_ended=True)
    if is_answered(job, call):
        return wait
    return wait._replace(missing=(call.peer,), doubtful=may_be_lost(job, call))


# --- calls that only a stack shows ---


def _wait_from_stack(job: JobWaitState, rank: int, position: StackPosition) -> EvidenceWait:
    """A wait that no recording shows: Gloo records no messages, and many jobs record nothing."""
    # With a group argument, the group is unknown, and so is the meaning of a rank in it.
    on_default_group = position.on_default_group
    call = EvidenceCall(
        rank,
        _default_group_key(job.evidence) if on_default_group else "",
        UNKNOWN_NUMBER,
        position.op,
        "waiting",
        position.op in P2P_OPS,
        position.peer if on_default_group else None,
        source="its stack",
        tag=position.tag,
    )
    wait = EvidenceWait(rank, call, (), (), position.frame)
    if position.op in JOB_WIDE_CALLS:
        return _job_wide_wait(job, wait)
    if not call.p2p or call.peer is None:
        return wait._replace(open_ended=True)
    return _message_wait_from_stack(job, wait, call.peer)


def _default_group_key(evidence: Evidence) -> str:
    return next((key for key, group in evidence.groups.items() if group.is_default), "")


def _job_wide_wait(job: JobWaitState, wait: EvidenceWait) -> EvidenceWait:
    """A call in which every rank of the job must be: the ranks at another position are missing."""
    other_positions = {
        rank: state.position for rank, state in job.ranks.items() if state.position is not None
    }
    other_positions.pop(wait.rank, None)
    elsewhere = tuple(
        rank for rank, position in other_positions.items() if position.op != wait.call.op
    )
    all_ranks = range(min(job.evidence.world, _MAX_LISTED_RANKS))
    not_given = tuple(rank for rank in all_ranks if rank not in job.ranks)
    return wait._replace(
        missing=elsewhere, silent=not_given, open_ended=not elsewhere and not not_given
    )


def _message_wait_from_stack(job: JobWaitState, wait: EvidenceWait, peer: int) -> EvidenceWait:
    peer_state = job.ranks.get(peer)
    if peer_state is None:
        return wait._replace(silent=(peer,))
    is_peer_known = (
        peer_state.position is not None
        or peer_state.end is not None
        or job.evidence.ranks[peer].recorded
    )
    if not is_peer_known:
        return wait._replace(open_ended=True)
    if _is_in_other_half(peer_state, wait.call):
        return wait
    return wait._replace(missing=(peer,))


def _is_in_other_half(peer_state: RankWaitState, call: EvidenceCall) -> bool:
    """Whether the stack of the peer is in the call that matches this message."""
    position = peer_state.position
    if position is None or position.op != opposite(call.op):
        return False
    if position.peer not in (call.rank, None):
        return False
    return position.tag is None or call.tag is None or position.tag == call.tag
