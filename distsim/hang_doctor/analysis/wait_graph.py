"""Where every rank stands, and whom it waits for: edges that the records prove, and those that lead
to ranks nobody told of.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from distsim.hang_doctor.model.evidence import Evidence
from distsim.hang_doctor.model.evidence_records import (
    EvidenceCall,
    ProcessEnd,
    RankEvidence,
    StackFrame,
)
from distsim.hang_doctor.model.operation_names import OPS_THAT_NEED_ALL, P2P_OPS
from distsim.hang_doctor.readers.stacks import (
    StackPosition,
    is_library_file,
    stack_position,
    user_frame,
)

#: Calls of torch in which every rank of the job must be, whoever the new group's members are.
_JOB_WIDE_CALLS = ("new_group", "new_subgroups", "init_process_group", "init_device_mesh")

#: Launches that a host may be ahead of its device; CUDA's queue of a stream takes no more, and the
#: host waits.
_MAX_LAUNCHES = 1024


class EvidenceWait(NamedTuple):
    """A rank is in a call. ``missing``: members whose records say that they are not; ``silent``:
    members of whom nothing is known. ``doubtful``: those that are missing may have been there, and
    what says so is lost from their recording.
    """

    rank: int
    call: EvidenceCall
    missing: tuple[int, ...]
    silent: tuple[int, ...]
    frame: StackFrame | None
    open_ended: bool = False  # the peers or members are not known
    doubtful: bool = False


@dataclass
class RankWaitState:
    """A rank at the end of what is known of it."""

    rank: int
    waits: tuple[EvidenceWait, ...] = ()
    place: StackPosition | None = None
    end: ProcessEnd | None = None

    @property
    def frame(self) -> StackFrame | None:
        """The line of the user's code at which it stands."""
        if self.place is not None and self.place.frame is not None:
            return self.place.frame
        return next((w.frame for w in self.waits if w.frame is not None), None)

    @property
    def told(self) -> StackFrame | None:
        """The line that belongs to what is said of it: that of its error, though its process may be
        elsewhere by now.
        """
        return (user_frame(self.end.frames) if self.end is not None else None) or self.frame


class RankProgress:
    """How far a rank is, looked up: ``last`` number made and ``done`` number finished by group, its
    collectives, and its open calls.
    """

    def __init__(self, given: RankEvidence) -> None:
        self.last = {
            group: status.enqueued for group, status in given.status.items() if status.enqueued >= 0
        }
        self.done = {group: status.completed for group, status in given.status.items()}
        self.calls: dict[tuple[str, int], EvidenceCall] = {}
        self.unwritten = (
            0 if given.recorded and not given.lapped else None
        )  # of a group on which there is nothing
        self.open = [call for call in given.calls if call.state == "waiting"]
        for call in given.calls:
            if not call.p2p:
                self.calls.setdefault((call.group, call.number), call)
                self.last[call.group] = max(self.last.get(call.group, call.number), call.number)
                if call.state == "done":
                    self.done[call.group] = max(self.done.get(call.group, -1), call.number)


@dataclass
class JobWaitState:
    """All ranks that something is known of, and how far each is on each group."""

    evidence: Evidence
    ranks: dict[int, RankWaitState] = field(default_factory=dict)
    _reach: dict[int, RankProgress] = field(default_factory=dict)
    _members: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def reach(self, rank: int) -> RankProgress:
        """How far a rank is of which something is known."""
        if rank not in self._reach:
            self._reach[rank] = RankProgress(self.evidence.ranks[rank])
        return self._reach[rank]

    def last(self, rank: int, group: str) -> int | None:
        """The number of a rank's last call on a group: 0 where a whole recording has none, None
        where its records do not say.
        """
        if rank not in self.evidence.ranks:
            return None
        reach = self.reach(rank)
        return reach.last.get(group, reach.unwritten)

    def members(self, group: str) -> tuple[int, ...]:
        """Who belongs to a group, as far as anybody said."""
        known = self.evidence.groups.get(group)
        if known is not None and known.members is not None:
            return known.members
        if group not in self._members:
            given = self.evidence.ranks.items()
            self._members[group] = tuple(
                sorted(
                    r
                    for r, e in given
                    if group in e.status or any(c.group == group for c in e.calls)
                )
            )
        return self._members[group]

    def behind(self, group: str, number: int) -> tuple[int, ...]:
        return tuple(
            m for m in self.members(group) if (n := self.last(m, group)) is not None and n < number
        )


def last_finished(whole: JobWaitState, rank: int, group: str) -> int:
    """The last call that a rank is known to have finished on a group, -1 unknown."""
    return whole.reach(rank).done.get(group, -1) if rank in whole.evidence.ranks else -1


def job_wait_state(evidence: Evidence) -> JobWaitState:
    """Where everybody stands."""
    whole = JobWaitState(evidence)
    for rank in sorted(evidence.ranks):
        whole.ranks[rank] = RankWaitState(
            rank,
            place=_main_thread_position(evidence.ranks[rank]),
            end=_process_end(evidence.ranks[rank]),
        )
    for rank, stand in whole.ranks.items():
        stand.waits = tuple(_rank_waits(whole, rank, stand))
    return whole


def _process_end(given: RankEvidence) -> ProcessEnd | None:
    """How it ended: what says why before what does not, what followed from nobody else before what
    did.
    """
    return min(given.ends, key=lambda e: (e.unexplained, e.follows, e.clean), default=None)


def _main_thread_position(given: RankEvidence) -> StackPosition | None:
    """Where the main thread is. A thread in a collective speaks for the rank where no main thread
    was shown.
    """
    places = [(stack, stack_position(stack)) for stack in given.stacks]
    main = [
        (s, p)
        for s, p in places
        if s.main and p.frame is not None and not _is_service_thread(s.frames)
    ]
    chosen = main or [(s, p) for s, p in places if p.op]
    if not chosen:
        return None
    best = max(chosen, key=lambda sp: (bool(sp[1].op), sp[1].peer is not None, len(sp[0].frames)))[
        1
    ]
    whole = next(
        (
            p.frame
            for _, p in chosen
            if p.frame and best.frame and _is_longer_path(p.frame, best.frame)
        ),
        best.frame,
    )
    return best._replace(frame=whole)


def _is_longer_path(one: StackFrame, other: StackFrame) -> bool:
    """The same line, with more of its path."""
    return one.line == other.line and one.file.endswith("/" + other.file)


def _is_service_thread(frames: tuple[StackFrame, ...]) -> bool:
    """Threads that serve: pools, watchers, the debug server."""
    return all(is_library_file(f.file) for f in frames) and len(frames) <= 3


def _rank_waits(whole: JobWaitState, rank: int, stand: RankWaitState) -> Iterable[EvidenceWait]:
    given = whole.evidence.ranks[rank]
    pending = pending_calls(whole, given)
    for call in pending:
        yield (
            _message_wait(whole, call, stand) if call.p2p else _collective_wait(whole, call, stand)
        )
    if (
        pending
        or stand.place is None
        or stand.place.op
        not in (
            *P2P_OPS,
            *OPS_THAT_NEED_ALL,
            *_JOB_WIDE_CALLS,
            "broadcast",
            "reduce",
            "gather",
            "scatter",
        )
    ):
        return
    yield _wait_from_stack(whole, rank, stand.place)


def pending_calls(whole: JobWaitState, given: RankEvidence) -> list[EvidenceCall]:
    """The first call of each group that is not done; where the device says at which it is, those
    alone.
    """
    found: dict[tuple[str, bool, int | None], EvidenceCall] = {}
    for call in given.calls:
        if call.state == "waiting" or (
            call.state == "over" and _ended_by_timeout(whole, given, call)
        ):
            found.setdefault((call.group, call.p2p, call.peer if call.p2p else None), call)
    for group, status in given.status.items():
        if (
            0 <= status.completed < status.enqueued
            and (group, False, None) not in found
            and not _repeats_unnamed_call(given, group)
        ):
            number = status.completed + 1
            seen = next(
                (c for c in given.calls if (c.group, c.number, c.p2p) == (group, number, False)),
                None,
            )
            op = seen.op if seen else ""
            blank = EvidenceCall(
                given.rank, group, number, op, "waiting", order=1 << 40, source=status.sources[0]
            )
            found[group, False, None] = replace(seen, state="waiting") if seen else blank
    calls = sorted(found.values(), key=lambda c: c.order)
    return [c for c in calls if c.started] or [
        c for c in calls if not _is_queued(whole.reach(given.rank), c)
    ]


def _repeats_unnamed_call(given: RankEvidence, group: str) -> bool:
    """A status without a group's name says nothing that a call without one does not say."""
    return group == "" and any(c.group == "" for c in given.calls)


def _ended_by_timeout(whole: JobWaitState, given: RankEvidence, call: EvidenceCall) -> bool:
    """A call of gloo that ended, nobody says how: by a timeout, where a member has not come to
    it.
    """
    return (
        call.op in OPS_THAT_NEED_ALL
        and call.number == whole.last(given.rank, call.group)
        and bool(whole.behind(call.group, call.number))
    )


def _collective_wait(whole: JobWaitState, call: EvidenceCall, stand: RankWaitState) -> EvidenceWait:
    group = whole.evidence.groups[call.group]
    others = [m for m in whole.members(call.group) if m != call.rank]
    late = {m for m in others if (n := whole.last(m, call.group)) is not None and n < call.number}
    missing = late | {m for m in others if m not in late and _is_queued_behind(whole, m, call)}
    unknown = [m for m in others if m not in missing and whole.last(m, call.group) is None]
    ended = [m for m in unknown if _has_failed(whole, m)]
    silent = tuple(m for m in unknown if m not in ended)
    sure = tuple(sorted({*missing, *ended})) if group.sure else ()
    frame = user_frame(call.frames) or (stand.place.frame if stand.place else None)
    return EvidenceWait(
        call.rank,
        call,
        sure,
        silent,
        frame,
        open_ended=not group.sure or (group.members is None and not missing),
    )


def _has_failed(whole: JobWaitState, rank: int) -> bool:
    given = whole.evidence.ranks.get(rank)
    end = None if given is None else _process_end(given)
    return (
        end is not None
        and end.kind in ("killed", "raised")
        and not (end.follows or end.unexplained)
    )


def _is_queued_behind(whole: JobWaitState, member: int, call: EvidenceCall) -> bool:
    """It has enqueued the call, and its device is still at an earlier one."""
    if member not in whole.evidence.ranks:
        return False
    reach = whole.reach(member)
    own = reach.calls.get((call.group, call.number))
    if own is None or own.state != "waiting" or own.started:
        return False
    return _is_queued(reach, own) or any(c.started and c.group != call.group for c in reach.open)


def _message_wait(whole: JobWaitState, call: EvidenceCall, stand: RankWaitState) -> EvidenceWait:
    """A message meets the message that its peer has open the other way round, in order."""
    frame = user_frame(call.frames) or (stand.place.frame if stand.place else None)
    peer = call.peer
    if peer is None:
        return EvidenceWait(call.rank, call, (), (), frame, open_ended=True)
    given = whole.evidence.ranks.get(peer)
    if given is None or not (given.recorded or given.stacks):
        return EvidenceWait(call.rank, call, (), (peer,), frame)
    if not given.recorded:
        return EvidenceWait(call.rank, call, (), (), frame, open_ended=True)
    if is_answered(whole, call):
        return EvidenceWait(call.rank, call, (), (), frame)
    return EvidenceWait(call.rank, call, (peer,), (), frame, doubtful=_may_be_finished(whole, call))


def _may_be_finished(whole: JobWaitState, call: EvidenceCall) -> bool:
    """Is one of the two recordings without its oldest calls, so that a message that the peer has
    finished may be the other half?
    """
    given = whole.evidence.ranks[call.peer] if call.peer is not None else None
    if given is None or not (given.lapped or whole.evidence.ranks[call.rank].lapped):
        return False
    other = "recv" if call.op == "send" else "send"
    short = len(given.calls) < _MAX_LAUNCHES
    return short or any(
        _is_between(c, other, call.rank, call.group, True) and c.state == "done"
        for c in given.calls
    )


def matching_message(whole: JobWaitState, call: EvidenceCall) -> EvidenceCall | None:
    """The message of the peer that meets this one, if it was posted: of those between the two in
    one direction, that of the same number.

    Where one of the two has lost its oldest calls, those that are open are counted.
    """
    given = whole.evidence.ranks.get(call.peer) if call.peer is not None else None
    if given is None or call.peer is None:
        return None
    ours = whole.evidence.ranks[call.rank]
    every = not (given.lapped or ours.lapped)
    mine = [c for c in ours.calls if _is_between(c, call.op, call.peer, call.group, every)]
    other = "recv" if call.op == "send" else "send"
    theirs = [c for c in given.calls if _is_between(c, other, call.rank, call.group, every)]
    at = next(
        (i for i, c in enumerate(mine) if c.order == call.order and c.number == call.number), 0
    )
    return theirs[at] if at < len(theirs) else None


def _is_between(call: EvidenceCall, op: str, peer: int, group: str, every: bool) -> bool:
    return (
        call.p2p
        and call.op == op
        and (every or call.state == "waiting")
        and call.group == group
        and call.peer in (peer, None)
    )


def is_answered(whole: JobWaitState, call: EvidenceCall) -> bool:
    """Has the peer posted the other half, and is its device not at something else?"""
    other = matching_message(whole, call)
    if other is None:
        return False
    if other.state != "waiting" or other.started:
        return True
    reach = whole.reach(other.rank)
    return not (_is_queued(reach, other) or any(c.started for c in reach.open))


def _is_queued(reach: RankProgress, call: EvidenceCall) -> bool:
    """Is the device at an earlier call after which this one runs?"""
    return any(c.order < call.order and _share_communicator(c, call) for c in reach.open)


def _share_communicator(one: EvidenceCall, other: EvidenceCall) -> bool:
    """Do two calls of a rank run in order? Collectives and batches of messages of a group share its
    communicator, which takes one at a time; single messages have one for the two ranks.
    """
    alone = (one.p2p and not one.batched, other.p2p and not other.batched)
    if one.group != other.group or alone[0] != alone[1]:
        return False
    return (
        one.peer == other.peer if alone[0] else (one.p2p, one.number) != (other.p2p, other.number)
    )


def _wait_from_stack(whole: JobWaitState, rank: int, place: StackPosition) -> EvidenceWait:
    """What only the stack tells: gloo records no messages, and many jobs record nothing."""
    group = next(
        (
            k
            for k, g in whole.evidence.groups.items()
            if g.desc == "default_pg" or g.name in ("0", "world")
        ),
        "",
    )
    key = group if place.whole_group else ""
    p2p = place.op in P2P_OPS
    call = EvidenceCall(
        rank,
        key,
        -1,
        place.op,
        "waiting",
        p2p,
        place.peer if place.whole_group else None,
        source="its stack",
        tag=place.tag,
    )
    if place.op in _JOB_WIDE_CALLS:
        seen = {r: s.place for r, s in whole.ranks.items() if s.place is not None and r != rank}
        elsewhere = tuple(r for r, p in seen.items() if p.op != place.op)
        unseen = tuple(r for r in range(min(whole.evidence.world, 1 << 16)) if r not in whole.ranks)
        return EvidenceWait(
            rank, call, elsewhere, unseen, place.frame, open_ended=not elsewhere and not unseen
        )
    if not p2p or call.peer is None:
        return EvidenceWait(rank, call, (), (), place.frame, open_ended=True)
    other = whole.ranks.get(call.peer)
    if other is None:
        return EvidenceWait(rank, call, (), (call.peer,), place.frame)
    away = (
        other.place is not None or other.end is not None or whole.evidence.ranks[call.peer].recorded
    )
    return EvidenceWait(
        rank,
        call,
        (call.peer,) if away and not _is_answering(other, call) else (),
        (),
        place.frame,
        open_ended=not away,
    )


def _is_answering(other: RankWaitState, call: EvidenceCall) -> bool:
    """Is the peer in the other half of this message?"""
    place = other.place
    want = "recv" if call.op == "send" else "send"
    if place is None or place.op != want or place.peer not in (call.rank, None):
        return False
    return place.tag is None or call.tag is None or place.tag == call.tag
