"""Which send belongs to which receive, judged by the recordings of both ranks.

Messages between two ranks in one direction on one group are matched in order: the first send with
the first receive, and so on. Flight Recorder keeps only the latest calls in a ring buffer, so with
incomplete recordings only the open messages can be counted.
"""

from __future__ import annotations

from distsim.hang_doctor.analysis.wait_state import JobWaitState
from distsim.hang_doctor.model.evidence_records import EvidenceCall

#: How many launches a host may be ahead of its device. CUDA's queue of a stream takes no more; then
#: the host waits.
_MAX_LAUNCHES = 1024


def opposite(op: str) -> str:
    """The operation at the other end of a message."""
    return "recv" if op == "send" else "send"


def matching_message(job: JobWaitState, call: EvidenceCall) -> EvidenceCall | None:
    """The call of the peer that this message matches, if the peer has posted it."""
    if call.peer is None:
        return None
    peer_records = job.evidence.ranks.get(call.peer)
    if peer_records is None:
        return None
    own_records = job.evidence.ranks[call.rank]
    # Without the oldest calls the positions of finished messages are unknown on one side.
    open_only = peer_records.lost_oldest_calls or own_records.lost_oldest_calls
    own = [
        other
        for other in own_records.calls
        if _is_message(other, call.op, call.peer, call.group, open_only)
    ]
    theirs = [
        other
        for other in peer_records.calls
        if _is_message(other, opposite(call.op), call.rank, call.group, open_only)
    ]
    position = 0
    for index, other in enumerate(own):
        if other.order == call.order and other.number == call.number:
            position = index
            break
    return theirs[position] if position < len(theirs) else None


def _is_message(call: EvidenceCall, op: str, peer: int, group: str, open_only: bool) -> bool:
    """Whether ``call`` is such a message with ``peer`` (or with any rank) on ``group``."""
    if not call.p2p or call.op != op or call.group != group:
        return False
    if open_only and call.state != "waiting":
        return False
    return call.peer in (peer, None)


def is_answered(job: JobWaitState, call: EvidenceCall) -> bool:
    """Whether the peer has posted the other half, and its device is not busy with another call."""
    other = matching_message(job, call)
    if other is None:
        return False
    if other.state != "waiting" or other.started:
        return True
    progress = job.progress_of(other.rank)
    if progress.is_queued(other):
        return False
    return not any(waiting.started for waiting in progress.waiting)


def may_be_lost(job: JobWaitState, call: EvidenceCall) -> bool:
    """Whether the peer may have finished the other half, and its recording has lost that call."""
    if call.peer is None:
        return False
    peer_records = job.evidence.ranks[call.peer]
    own_records = job.evidence.ranks[call.rank]
    if not (peer_records.lost_oldest_calls or own_records.lost_oldest_calls):
        return False
    # The recording holds fewer calls than the host may be ahead of the device.
    if len(peer_records.calls) < _MAX_LAUNCHES:
        return True
    wanted = opposite(call.op)
    return any(
        other.state == "done" and _is_message(other, wanted, call.rank, call.group, open_only=False)
        for other in peer_records.calls
    )
