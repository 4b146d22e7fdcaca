"""Hangs in which every required rank has arrived: the communication itself does not complete.

The calls match as far as the records show, so no rank is blamed. Possible reasons are the network,
a device kernel before the call, and NCCL connections that the two sides set up differently.
"""

from __future__ import annotations

from typing import NamedTuple

from distsim.hang_doctor.analysis.hang_cause import CauseLine, HangCause
from distsim.hang_doctor.analysis.inconclusive import activity_lines
from distsim.hang_doctor.analysis.message_pairs import matching_message
from distsim.hang_doctor.analysis.stack_position import user_frame
from distsim.hang_doctor.analysis.wait_chains import same_call
from distsim.hang_doctor.analysis.wait_state import EvidenceWait, JobWaitState, RankWaitState
from distsim.hang_doctor.model.evidence_records import EvidenceCall, EvidenceGroup
from distsim.hang_doctor.model.phrases import call_text, ranks_text

# --- collectives ---


def communication_hangs(job: JobWaitState) -> list[HangCause]:
    """The first collective that all members are in, with matching arguments, and that hangs."""
    for wait in job.all_waits():
        if wait.call.p2p or wait.leads_to_unavailable_rank:
            continue
        group = job.evidence.groups.get(wait.call.group)
        if group is not None and _all_members_are_in(job, group, wait):
            return [_collective_hangs(job, group, wait)]
    return []


def _all_members_are_in(job: JobWaitState, group: EvidenceGroup, wait: EvidenceWait) -> bool:
    if group.members is None or not group.sure:
        return False
    return all(_is_in(job.ranks[member], wait) for member in group.members)


def _is_in(state: RankWaitState, wait: EvidenceWait) -> bool:
    return any(same_call(other, wait) for other in state.waits)


def _collective_hangs(job: JobWaitState, group: EvidenceGroup, wait: EvidenceWait) -> HangCause:
    call = wait.call
    members = group.members or ()
    return HangCause(
        "communication",
        "proved",
        f"all {len(members)} required ranks are in {call_text(job.evidence, call)} and their calls "
        "match, but it does not complete",
        ranks=members,
        lines=[CauseLine(members, call.op, wait.frame)],
        details=[
            "these records blame no rank: check the network, the errors of NCCL and the driver "
            "(NCCL_DEBUG=WARN, dmesg), and device kernels that run before the call"
        ],
        group=call.group,
        number=call.number,
    )


# --- messages ---


class _MessagePair(NamedTuple):
    """A send and the receive that it matches."""

    send: EvidenceCall
    recv: EvidenceCall

    @property
    def ranks(self) -> set[int]:
        return {self.send.rank, self.recv.rank}

    @property
    def is_open_on_both_sides(self) -> bool:
        return self.send.state == "waiting" and self.recv.state == "waiting"

    def lines(self) -> list[CauseLine]:
        send, recv = self
        return [
            CauseLine((send.rank,), f"send to rank {recv.rank}", user_frame(send.frames)),
            CauseLine((recv.rank,), f"recv from rank {send.rank}", user_frame(recv.frames)),
        ]


def matched_messages_hang(job: JobWaitState) -> list[HangCause]:
    """A send and a receive match each other, wait for no other rank, and do not complete."""
    pairs = _open_pairs(job)
    for pair in pairs:
        if pair.send.batched != pair.recv.batched:
            return [_batched_against_single(pair)]
    blocked = _blocked_ranks(job, pairs)
    hanging = [pair for pair in pairs if not _waits_on_one_of(pair, blocked)]
    if not hanging:
        return []
    return [_messages_hang(hanging)]


def _open_pairs(job: JobWaitState) -> list[_MessagePair]:
    """The pairs of which at least one side is waiting."""
    pairs: dict[tuple[int, int, int, int], _MessagePair] = {}
    for wait in job.all_waits():
        if not wait.call.p2p or wait.missing:
            continue
        other = matching_message(job, wait.call)
        if other is None:
            continue
        is_send = wait.call.op == "send"
        pair = _MessagePair(wait.call, other) if is_send else _MessagePair(other, wait.call)
        # Both sides may wait; the key keeps one entry for the pair.
        send, recv = pair
        pairs[send.rank, send.order, recv.rank, recv.order] = pair
    return list(pairs.values())


def _blocked_ranks(job: JobWaitState, pairs: list[_MessagePair]) -> set[int]:
    """Ranks that are blocked by a missing or unknown rank, directly or through their messages.

    A rank whose open message is with a blocked rank counts as blocked, because a batch of messages
    completes as a whole.
    """
    blocked = {wait.rank for wait in job.all_waits() if wait.leads_to_unavailable_rank}
    open_pairs = [pair for pair in pairs if pair.is_open_on_both_sides]
    while True:
        reached: set[int] = set()
        for pair in open_pairs:
            if blocked & pair.ranks:
                reached |= pair.ranks
        if reached <= blocked:
            return blocked
        blocked |= reached


def _waits_on_one_of(pair: _MessagePair, blocked: set[int]) -> bool:
    return any(call.state == "waiting" and call.rank in blocked for call in pair)


def _messages_hang(pairs: list[_MessagePair]) -> HangCause:
    send, recv = pairs[0]
    more = f" (and {len(pairs) - 1} more such pairs)" if len(pairs) > 1 else ""
    ranks: set[int] = set()
    for pair in pairs:
        ranks |= pair.ranks
    return HangCause(
        "communication",
        "proved",
        f"the send of rank {send.rank} and its receive on rank {recv.rank} are both posted and "
        f"match, but do not complete{more}",
        ranks=tuple(sorted(ranks)),
        lines=pairs[0].lines(),
        details=[
            "these records blame no rank: check the network and the errors of NCCL and the driver "
            "(NCCL_DEBUG=WARN, dmesg)"
        ],
        group=send.group,
    )


def _batched_against_single(pair: _MessagePair) -> HangCause:
    """One side is in a batch and the other is a single message.

    In torch a batch uses the communicator of the group. A single message uses one of the two
    ranks, unless the group's communicator was created at the start (``device_id``).
    """
    send, recv = pair
    batched, single = "in a batch", "as a single message"
    sent, received = (batched, single) if send.batched else (single, batched)
    return HangCause(
        "connection",
        "suspected",
        f"rank {send.rank} sends to rank {recv.rank} {sent}, but rank {recv.rank} receives it "
        f"{received}: on NCCL the two may not match",
        ranks=(send.rank, recv.rank),
        lines=pair.lines(),
        details=[
            "NCCL runs a batch on the communicator of the group, but a single message on one of "
            "the two ranks, unless init_process_group got a device_id",
            "help: use batch_isend_irecv on both ranks, or on neither",
        ],
        group=send.group,
    )


# --- connections ---


def connection_mismatches(job: JobWaitState) -> list[HangCause]:
    """NCCL's error that two ranks connect different things in one call.

    The error does not say which of the two ranks makes the wrong call.
    """
    reports = [report for report in job.evidence.tool_reports if report.tool == "NCCL"]
    if not reports:
        return []
    named = {rank for report in reports for rank in report.ranks}
    ranks = tuple(sorted(rank for rank in named if rank in job.ranks))
    on_ranks = f" on {ranks_text(ranks)}" if ranks else ""
    return [
        HangCause(
            "connection",
            "suspected",
            "two ranks set up different NCCL connections in one call: NCCL reports "
            f'"{reports[0].text}"{on_ranks}',
            ranks=ranks,
            lines=activity_lines(job, ranks),
            details=[
                "NCCL connects two ranks at their first message in a direction, and a group at its "
                "first collective; both sides must make matching calls there",
                "these do not match: two sends first, or a batch of both directions against single "
                "calls",
                "help: post both directions in one batch_isend_irecv on both ranks, or let one of "
                "them receive first; `distsim capture` of the script shows the calls",
            ],
        )
    ]
