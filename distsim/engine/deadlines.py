"""Timeouts: what happens if a wait exceeds its group's timeout while other ranks still proceed.

Key idea: a hang is never ended by a timeout, except for that of a monitored_barrier, whose purpose
is to name the missing ranks. So deadlines matter only between two events, or while a rank is
blocked in a monitored_barrier: if the next event is later than a deadline, the deadline comes
first. Most runs end before any deadline, and are simulated without this module
(`distsim.engine.timeout_check`).

* gloo: the timeout of a message starts when its request is waited for, that of a collective when a
  worker starts it. Creating a group waits a second longer (in the store). The rank raises, and the
  group is closed in its process: its partners see the connection closed (G10).
* nccl, first use of a communicator: group rank 0 publishes the communicator's id in the store, and
  the others wait for it there. If it comes later than the store's timeout, they raise. The
  watchdog does not see this wait, because nothing is enqueued yet. Nothing limits the wait of
  group rank 0 for the others. Source: ``ProcessGroupNCCL::broadcastUniqueNCCLID`` (torch 2.13);
  reported as nccl#708, pytorch#82091 and NeMo/Speech#14399.
* nccl, later: the watchdog's timeout starts when the host enqueues (2.4). The host cannot run ahead
  of its device by more launches than the launch queue holds, so it starts when the queue has room.
  The process is ended.
* mpi has no timeouts.

Source: design §5, rule 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from distsim.backends import BackendProfile
from distsim.backends.gloo import monitored_barrier_error
from distsim.engine.timeout_check import LAUNCH_QUEUE_DEPTH, MONITORED_BARRIER
from distsim.findings.final_state import FinalState
from distsim.findings.finding_types import Finding, SourceLocation
from distsim.program.model import Program
from distsim.semantics.form.instructions import (
    AwaitRendezvous,
    ExitRank,
    Instruction,
    PartKind,
    WaitForRows,
)
from distsim.semantics.ordered.state import CLOSED, DUE, HUNG, RUNNING, RunState
from distsim.semantics.ordered.transitions import TransitionRules

_STORE_OPS = ("new_group", "init_process_group")


class TimedOutCall(NamedTuple):
    """A call whose wait exceeded ``limit_ns``.

    ``missing``: for group rank 0 of a monitored_barrier, the ranks that have not arrived.
    ``publisher``: the rank that has not published the id of the communicator; -1 if the call did
    not wait for that. ``since_ns``: when the wait began.
    """

    rank: int
    position: int
    limit_ns: int
    missing: tuple[int, ...] = ()
    publisher: int = -1
    since_ns: int = 0


class _DeadlineEntry(NamedTuple):
    """A deadline; ``row`` is -1 for a rendezvous.

    ``since`` distinguishes this wait of the host from an earlier one; -1 if the host does not
    matter. ``number`` orders deadlines of the same time.
    """

    at_ns: int
    number: int
    rank: int
    row: int
    since: int
    limit_ns: int


class RunDeadlines:
    """The deadlines of a run. ``late``: the calls whose timeout expired, in order."""

    def __init__(self, rules: TransitionRules, state: RunState) -> None:
        self.rules, self.state = rules, state
        self.limits = rules.program.group_timeouts_ns(rules.profile.timeout_ns)
        self.late: list[TimedOutCall] = []
        self._heap: list[_DeadlineEntry] = []
        self._number = 0
        self._queued: dict[int, list[int]] = {}  # rank -> launches beyond the launch queue

    def next_ns(self, since: list[int]) -> int | None:
        """The next deadline that still matters."""
        while self._heap and not self._holds(self._heap[0], since):
            heappop(self._heap)
        return self._heap[0].at_ns if self._heap else None

    def expire(self) -> tuple[int, ExitRank | int]:
        """The next deadline expires: (rank, its end; or, if its host is not in the wait, the group
        that is closed).
        """
        entry = heappop(self._heap)
        here = position = self.rules.position(self.state, entry.rank)
        if entry.row >= 0:
            position = self.rules.part(entry.row).position
        missing = self._missing(entry.row)
        publisher = self._awaited_publisher(entry.rank) if entry.row < 0 else None
        if publisher is not None:
            since_ns = entry.at_ns - entry.limit_ns
            self.late.append(
                TimedOutCall(entry.rank, position, entry.limit_ns, (), publisher, since_ns)
            )
            return entry.rank, ExitRank(here, "raised", _store_error(entry, publisher))
        self.late.append(TimedOutCall(entry.rank, position, entry.limit_ns, missing))
        if self.rules.profile.timed_out == "crashes":
            milliseconds = entry.limit_ns // 10**6
            text = (
                f"Watchdog caught collective operation timeout: ran for {milliseconds} milliseconds"
            )
            return entry.rank, ExitRank(here, "crashed", text)
        if entry.row >= 0 and not self._host_waits_for(entry):
            return entry.rank, self.rules.group[entry.row]
        return entry.rank, ExitRank(here, "raised", self._text(entry, missing))

    def _host_waits_for(self, entry: _DeadlineEntry) -> bool:
        instruction = self.rules.instruction(self.state, entry.rank)
        own_row = entry.row - self.rules.base[entry.rank]
        return isinstance(instruction, WaitForRows) and own_row in instruction.rows

    def watches(self, since: list[int]) -> bool:
        """Whether a rank is blocked in a monitored_barrier, which times out even in a hang."""
        barriers = (entry for entry in self._heap if self._is_monitored_barrier(entry.row))
        return any(self._holds(entry, since) for entry in barriers)

    def _is_monitored_barrier(self, row: int) -> bool:
        return row >= 0 and self.rules.part(row).call.op == MONITORED_BARRIER

    def _missing(self, row: int) -> tuple[int, ...]:
        """The ranks that have not arrived at a monitored_barrier, if the row's rank tracks them."""
        if not self._is_monitored_barrier(row) or not self._tracks_arrivals(row):
            return ()
        linked = self.rules.linked
        rows = linked.rows_of[int(linked.instance[row])].tolist()
        open_rows = (other for other in rows if self.state.phase[other] != CLOSED)
        arrived = {self.rules.rank_of[other] for other in open_rows}
        return tuple(rank for rank in self._members(row) if rank not in arrived)

    def _members(self, row: int) -> tuple[int, ...]:
        return self.rules.program.groups[self.rules.group[row]].ranks

    def _tracks_arrivals(self, row: int) -> bool:
        return self._members(row)[0] == self.rules.rank_of[row]

    def _text(self, entry: _DeadlineEntry, missing: tuple[int, ...]) -> str:
        if missing:
            all_of_them = bool(self.rules.part(entry.row).call.fields.get("wait_all_ranks"))
            return monitored_barrier_error(entry.rank, missing, all_of_them, entry.limit_ns)
        op = self.rules.part(entry.row).call.op if entry.row >= 0 else _STORE_OPS[0]
        if op in _STORE_OPS:
            return "Wait timeout"
        word = {PartKind.RECEIVE: "recv", PartKind.SEND: "send"}.get(
            PartKind(self.rules.kind[entry.row]), op
        )
        return f"Timed out waiting {entry.limit_ns // 10**6}ms for {word} operation to complete"

    # --- timeouts that start ---
    def blocked(self, rank: int, now: int, instruction: Instruction, row: int) -> None:
        """A host starts to wait, for ``row`` if it is >= 0.

        Requests are waited for one after the other (G11).
        """
        if isinstance(instruction, AwaitRendezvous) and self._awaited_publisher(rank) is not None:
            self._add(now, rank, -1, now, self.limits[0])
            return
        if self.rules.profile.timed_out != "raises":
            return
        if isinstance(instruction, AwaitRendezvous):
            limit = self.limits[instruction.of_group] + self.rules.profile.store_grace_ns
            self._add(now, rank, -1, now, limit)
        elif row >= 0 and self.state.phase[row] and 0 <= self.rules.kind[row] <= PartKind.RECEIVE:
            self._add(now, rank, row, now, self.limits[self.rules.group[row]])

    def _awaited_publisher(self, rank: int) -> int | None:
        """The rank whose communicator id a rank waits for in the store; None if it does not."""
        instruction = self.rules.instruction(self.state, rank)
        if not self.rules.profile.publishes_communicator_id:
            return None
        if not isinstance(instruction, AwaitRendezvous) or not instruction.creates_communicator:
            return None
        ((instance, members),) = self.rules.meetings(rank, instruction)
        publisher = members[0]
        arrived = self.state.at_rendezvous.get(instance, {})
        return None if publisher == rank or publisher in arrived else publisher

    def started(self, row: int, now: int) -> None:
        """A collective leaves its queue."""
        if self.rules.profile.timed_out == "raises" and self.rules.kind[row] == PartKind.COLLECTIVE:
            call = self.rules.part(row).call
            own = call.fields.get("timeout_ns")
            # A monitored_barrier's own timeout is that of group rank 0; the other ranks wait for
            # its answer with the timeout of the group.
            own_holds = call.op != MONITORED_BARRIER or self._tracks_arrivals(row)
            limit = int(own) if own and own_holds else self.limits[self.rules.group[row]]
            grace = self.rules.profile.store_grace_ns if call.op in _STORE_OPS else 0
            self._add(now, self.rules.rank_of[row], row, -1, limit + grace)

    def enqueued(self, rank: int, row: int, now: int) -> None:
        """A host enqueues a launch on its device."""
        if self.rules.profile.timed_out == "crashes":
            if self.state.open_launches[rank] > LAUNCH_QUEUE_DEPTH:
                self._queued.setdefault(rank, []).append(row)
            else:
                self._watch(rank, row, now)

    def done(self, rank: int, now: int) -> None:
        """A launch has ended: there is room for the next one."""
        if self._queued.get(rank):
            self._watch(rank, self._queued[rank].pop(0), now)

    def _watch(self, rank: int, row: int, now: int) -> None:
        first = self.rules.base[rank] + self.rules.task(row).parts[0]
        if self.rules.kind[first] != PartKind.WORK:
            self._add(now, rank, first, -1, self.limits[self.rules.group[first]])

    def _add(self, now: int, rank: int, row: int, since: int, limit: int) -> None:
        self._number += 1
        heappush(self._heap, _DeadlineEntry(now + limit, self._number, rank, row, since, limit))

    def _holds(self, entry: _DeadlineEntry, since: list[int]) -> bool:
        """Whether a deadline still matters: its wait is not over."""
        if self.state.ends[entry.rank] is not None:
            return False
        if entry.since >= 0 and since[entry.rank] != entry.since:
            return False
        if entry.row < 0 and self.rules.profile.publishes_communicator_id:
            return self._awaited_publisher(entry.rank) is not None
        if entry.row < 0:
            return isinstance(self.rules.instruction(self.state, entry.rank), AwaitRendezvous)
        phase = self.state.phase[entry.row]
        # A transfer that is in flight is late too: the timeout runs until it is over.
        return phase != CLOSED and (self.rules.profile.device or phase in (RUNNING, DUE, HUNG))


def _store_error(entry: _DeadlineEntry, publisher: int) -> str:
    """The text of torch 2.13 for a communicator id that does not arrive in the store in time."""
    return (
        f"[{entry.rank}] is setting up NCCL communicator and retrieving ncclUniqueId from "
        f"[{publisher}] via c10d key-value store by store->get, but got error: wait timeout after "
        f"{entry.limit_ns // 10**6}ms"
    )


def timeout_findings(
    program: Program,
    profile: BackendProfile,
    late: tuple[TimedOutCall, ...],
    final_state: FinalState,
) -> tuple[Finding, ...]:
    """DS804 and DS807, one per call site."""
    by_site: dict[int, list[TimedOutCall]] = {}
    for call in late:
        last_position = len(program.code(call.rank).calls) - 1
        site = program.code_call(call.rank, min(call.position, last_position)).site
        by_site.setdefault(site, []).append(call)
    findings = []
    for site, calls in by_site.items():
        ranks = tuple(sorted({call.rank for call in calls}))
        place, op = program.sites[site].place(ranks[0]), program.sites[site].op
        if calls[0].publisher >= 0:
            needed_ns = _needed_timeout_ns(calls, final_state)
            findings.append(_late_communicator_finding(calls[0], ranks, place, needed_ns))
            continue
        if calls[0].missing:
            findings.append(_monitored_barrier_finding(calls[0], ranks, place))
            continue
        end = "the call raises, and the group is unusable on this rank"
        if profile.timed_out == "crashes":
            end = "the watchdog ends the process"
        whose = f"ranks {', '.join(map(str, ranks[:8]))} wait"
        if len(ranks) == 1:
            whose = f"rank {ranks[0]} waits"
        text = (
            f"{whose} in {op} longer than the timeout of {calls[0].limit_ns / 1e9:g} s, while "
            f"other ranks still work: {end}"
        )
        help_text = (
            "increase the timeout of this group (new groups do not inherit the world's), "
            "or move the slow work so that no rank waits for it"
        )
        findings.append(Finding("DS804", "error", text, ranks, ranks, (help_text,), (place,)))
    return tuple(findings)


def _needed_timeout_ns(calls: Sequence[TimedOutCall], final_state: FinalState) -> int:
    """How long the ranks would have to wait for the id of the communicator; 0 if unknown.

    The publisher arrives later, and is then blocked in the call, because its peers have raised.
    """
    publisher = calls[0].publisher
    arrived_ns = [blocked.since_ns for blocked in final_state.blocked if blocked.rank == publisher]
    if not arrived_ns:
        return 0
    return max(0, arrived_ns[0] - min(call.since_ns for call in calls))


def _late_communicator_finding(
    late: TimedOutCall, ranks: tuple[int, ...], place: SourceLocation, needed_ns: int
) -> Finding:
    """The first rank of a communicator publishes its id after the others have timed out."""
    seconds = f"{late.limit_ns / 1e9:g} s"
    numbers = ", ".join(map(str, ranks[:8]))
    waiting = f"rank {numbers} raises" if len(ranks) == 1 else f"ranks {numbers} raise"
    text = (
        f"{waiting} in {place.op} after {seconds}: this call creates the NCCL communicator, "
        f"and rank {late.publisher} has not published the communicator's id in the store by then"
    )
    needed, reason = seconds, ""
    if needed_ns > late.limit_ns:
        needed = f"{needed_ns / 1e9:g} s"
        reason = f" (the time at which rank {late.publisher} arrives)"
    help_text = (
        f"pass a `timeout` above {needed} to init_process_group{reason}, or do the slow work of "
        f"rank {late.publisher} before the job starts"
    )
    return Finding("DS807", "error", text, ranks, ranks, (help_text,), (place,))


def _monitored_barrier_finding(
    late: TimedOutCall, ranks: tuple[int, ...], place: SourceLocation
) -> Finding:
    """A monitored_barrier has served its purpose: it names the missing ranks."""
    is_single = len(late.missing) == 1
    noun = "rank" if is_single else "ranks"
    missing = f"{noun} {', '.join(map(str, late.missing[:8]))}"
    seconds = f"{late.limit_ns / 1e9:g} s"
    text = f"rank {late.rank} raises in monitored_barrier after {seconds}: {missing} did not arrive"
    help_text = f"find out why {missing} did not reach the barrier; all other ranks wait there"
    return Finding("DS804", "error", text, ranks, ranks, (help_text,), (place,))
