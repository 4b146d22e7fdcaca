"""Timeouts: what becomes of a wait that outlasts its group's timeout while others still move
(design §5, rule 5).

A standstill is never ended by a timeout, but for that of a monitored_barrier, which is there to
tell who is missing. So deadlines are looked at only between two things that happen, or while a rank
stands in a monitored_barrier: where the next event is later than a deadline, the deadline comes
first. Most runs are over before any deadline; they are simulated without (`outlasts`).

* gloo: a message's clock starts when its request is waited for, a collective's when a worker begins it; making a group waits a
  second longer (in the store). The rank raises, and the group is closed in its process: its partners see the connection closed (G10).
* nccl: the watchdog's clock starts when the host enqueues (2.4). The host can't run ahead of its device by more than the launch queue
  holds, so it starts when that had room. The process is taken down.
* mpi knows no timeouts.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

from distsim.backends import BackendProfile
from distsim.backends.gloo import monitored_barrier_error
from distsim.engine.timeout_check import LAUNCH_QUEUE_DEPTH, MONITORED_BARRIER, group_timeouts_ns
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
    """A call that waited longer than it may, ``limit_ns``. ``missing``: of a monitored_barrier's
    rank 0, who has not come.
    """

    rank: int
    position: int
    limit_ns: int
    missing: tuple[int, ...] = ()


class _DeadlineEntry(NamedTuple):
    """``since`` tells this wait of the host from an earlier one; -1 where the host does not
    matter.
    """

    at_ns: int
    number: int
    rank: int
    row: int
    since: int
    limit_ns: int


class RunDeadlines:
    """The clocks of a run that may outlast a timeout. ``late``: those that ran out, in order."""

    def __init__(self, rules: TransitionRules, state: RunState) -> None:
        self.rules, self.state = rules, state
        self.limits = group_timeouts_ns(rules.program, rules.profile)
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
        """The next deadline runs out: whose, and what becomes of that rank, or the group that it
        closes while the host is elsewhere.
        """
        entry = heappop(self._heap)
        position = (
            self.rules.part(entry.row).position
            if entry.row >= 0
            else self.rules.position(self.state, entry.rank)
        )
        missing = self._missing(entry.row)
        self.late.append(TimedOutCall(entry.rank, position, entry.limit_ns, missing))
        here = self.rules.position(self.state, entry.rank)
        if self.rules.profile.timed_out == "crashes":
            text = f"Watchdog caught collective operation timeout: ran for {entry.limit_ns // 10**6} milliseconds"
            return entry.rank, ExitRank(here, "crashed", text)
        instruction = self.rules.instruction(self.state, entry.rank)
        waited = entry.row - self.rules.base[entry.rank]
        if entry.row >= 0 and not (
            isinstance(instruction, WaitForRows) and waited in instruction.rows
        ):
            return entry.rank, self.rules.group[entry.row]
        return entry.rank, ExitRank(here, "raised", self._text(entry, missing))

    def watches(self, since: list[int]) -> bool:
        """Some rank stands in a monitored_barrier, which ends in its time though nobody else
        moves.
        """
        rows = (
            entry
            for entry in self._heap
            if entry.row >= 0 and self.rules.part(entry.row).call.op == MONITORED_BARRIER
        )
        return any(self._holds(entry, since) for entry in rows)

    def _missing(self, row: int) -> tuple[int, ...]:
        """Who has not come to the monitored_barrier of a rank that keeps its list."""
        if (
            row < 0
            or self.rules.part(row).call.op != MONITORED_BARRIER
            or not self._tracks_arrivals(row)
        ):
            return ()
        linked = self.rules.linked
        instance = int(linked.instance[row])
        came = {
            self.rules.rank_of[r]
            for r in linked.rows_of[instance].tolist()
            if self.state.phase[r] != CLOSED
        }
        return tuple(rank for rank in self._members(row) if rank not in came)

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

    # --- clocks that start ---
    def blocked(self, rank: int, now: int, instruction: Instruction, row: int) -> None:
        """A host begins to wait, for ``row`` if it waits for one (requests are waited for one after
        the other, G11).
        """
        if self.rules.profile.timed_out != "raises":
            return
        if isinstance(instruction, AwaitRendezvous):
            self._add(
                now,
                rank,
                -1,
                now,
                self.limits[instruction.of_group] + self.rules.profile.store_grace_ns,
            )
        elif row >= 0 and self.state.phase[row] and 0 <= self.rules.kind[row] <= PartKind.RECEIVE:
            self._add(now, rank, row, now, self.limits[self.rules.group[row]])

    def started(self, row: int, now: int) -> None:
        """A collective leaves its queue."""
        if self.rules.profile.timed_out == "raises" and self.rules.kind[row] == PartKind.COLLECTIVE:
            call = self.rules.part(row).call
            own = call.fields.get("timeout_ns")
            listed = call.op != MONITORED_BARRIER or self._tracks_arrivals(
                row
            )  # the others wait for its word as long as their group waits
            limit = int(own) if own and listed else self.limits[self.rules.group[row]]
            grace = self.rules.profile.store_grace_ns if call.op in _STORE_OPS else 0
            self._add(now, self.rules.rank_of[row], row, -1, limit + grace)

    def enqueued(self, rank: int, row: int, now: int) -> None:
        """A host hands a launch to its device."""
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
        if self.state.ends[entry.rank] is not None or (
            entry.since >= 0 and since[entry.rank] != entry.since
        ):
            return False
        if entry.row < 0:
            return isinstance(self.rules.instruction(self.state, entry.rank), AwaitRendezvous)
        phase = self.state.phase[entry.row]
        # A transfer under way is late too: the clock runs until it is over.
        return phase != CLOSED and (self.rules.profile.device or phase in (RUNNING, DUE, HUNG))


def timeout_findings(
    program: Program, profile: BackendProfile, late: tuple[TimedOutCall, ...]
) -> tuple[Finding, ...]:
    """DS804, one per place."""
    places: dict[int, list[TimedOutCall]] = {}
    for one in late:
        places.setdefault(
            program.code_call(
                one.rank, min(one.position, len(program.code(one.rank).calls) - 1)
            ).site,
            [],
        ).append(one)
    found = []
    for site, those in places.items():
        ranks = tuple(sorted({one.rank for one in those}))
        place, op = program.sites[site].place(ranks[0]), program.sites[site].op
        if those[0].missing:
            found.append(_monitored_barrier_finding(those[0], ranks, place))
            continue
        end = (
            "its watchdog ends the process"
            if profile.timed_out == "crashes"
            else "it raises, and its group is dead there"
        )
        whose = (
            f"rank {ranks[0]} waits"
            if len(ranks) == 1
            else f"ranks {', '.join(map(str, ranks[:8]))} wait"
        )
        text = f"{whose} in {op} for longer than the {those[0].limit_ns / 1e9:g} s of the timeout while others still move: {end}"
        help_text = "raise the timeout of this group (new groups don't inherit the world's), or let nobody wait for the slow work"
        found.append(Finding("DS804", "error", text, ranks, ranks, (help_text,), (place,)))
    return tuple(found)


def _monitored_barrier_finding(
    late: TimedOutCall, ranks: tuple[int, ...], place: SourceLocation
) -> Finding:
    """A monitored_barrier has done what it is there for."""
    who = f"rank{'' if len(late.missing) == 1 else 's'} {', '.join(map(str, late.missing[:8]))}"
    have = "has" if len(late.missing) == 1 else "have"
    text = f"rank {late.rank} raises in monitored_barrier after {late.limit_ns / 1e9:g} s: {who} {have} not come"
    help_text = f"see where {who} {'is' if len(late.missing) == 1 else 'are'} instead; all others wait for that"
    return Finding("DS804", "error", text, ranks, ranks, (help_text,), (place,))
