"""Which ranks are blocked, and on which ranks, where a run with local clocks has stopped.

Key idea: nothing is simulated here. The driver leaves each host at the step that it could not
complete. The kind of this step, and the rows that it names, say what is missing; the columns of the
run say which ranks have not posted it.

What a blocked host waits for may itself be queued behind an earlier launch on the device. The base
class, `BlockedStateBuilder`, follows such queues to the launch that really waits for other ranks.
The same questions are answered for the event-driven engine by
`distsim.semantics.ordered.blocked_state`.
"""

from __future__ import annotations

from itertools import chain

import numpy as np

from distsim.findings.final_state import BlockedRank, FinalState, RankEnd, WaitDependency
from distsim.semantics.form.blocked_state_builder import BlockedStateBuilder
from distsim.semantics.form.instructions import (
    KIND_COLLECTIVE,
    KIND_SEND,
    BlockForever,
    CompilationUnit,
    ExitRank,
    OperationLaunch,
)
from distsim.semantics.form.linked_program import LinkedProgram
from distsim.semantics.local.rank_clocks import LocalThread, RunProgress
from distsim.semantics.local.thread_steps import (
    NO_ROW,
    STEP_END,
    STEP_NEVER,
    STEP_RENDEZVOUS,
    STEP_SYNC,
    STEP_WAIT_EACH,
    STEP_WAIT_ENDS,
)


def blocked_state_of_run(run: RunProgress) -> FinalState:
    """The result of a run. Ranks that have not ended are blocked in their current call."""
    return _LocalBlockedStateBuilder(run).final_state()


class _LocalBlockedStateBuilder(BlockedStateBuilder):
    """Answers the questions of `BlockedStateBuilder` from a `RunProgress`."""

    def __init__(self, run: RunProgress) -> None:
        self.run, self.linked = run, run.linked
        #: Members that have not arrived, by instance. Cached, because in a large collective every
        #: blocked member asks the same question.
        self._missing: dict[int, tuple[int, ...]] = {}
        #: By unit, then by row counted from a rank's first row.
        self._launches: dict[int, dict[int, OperationLaunch]] = {}
        self._launch_of_part: dict[int, dict[int, OperationLaunch]] = {}

    def final_state(self) -> FinalState:
        ends, blocked = [], []
        absent = {fault.rank for fault in self.linked.program.faults if fault.kind == "absent"}
        for rank in self.linked.program.present:
            host = self.run.hosts[rank]
            if rank in absent:
                ends.append(RankEnd(rank, "absent", 0))
            elif host.ended:
                end = self.linked.unit_of[rank].instructions[-1]
                assert isinstance(end, ExitRank)
                ends.append(RankEnd(rank, end.status, end.position, host.clock, end.message))
            else:
                blocked.append(self._blocked(host))
                ends.append(RankEnd(rank, "blocked", blocked[-1].position, host.clock))
        return FinalState(tuple(ends), tuple(blocked), tuple(self._unreceived()))

    def _unreceived(self) -> list[tuple[int, int, int]]:
        """(rank, position, part) of messages that no receive has matched."""
        linked, posted = self.linked, np.asarray(self.run.posted)
        # A send without a receive in the program has the mate -1. A mate that exists may still not
        # have been posted: the receiver stopped before it.
        receive_of = self.run.conditions.mate
        sends = np.flatnonzero((linked.kind == KIND_SEND) & (posted >= 0))
        receives = receive_of[sends]
        unreceived = (receives < 0) | (posted[np.maximum(receives, 0)] < 0)
        return [linked.place(row) for row in sends[unreceived].tolist()]

    def _blocked(self, host: LocalThread) -> BlockedRank:
        position = host_position(self.linked, host)
        # On a device, a blocked call is one that the host has enqueued. Two steps are exceptions:
        # there the host itself waits and nothing is enqueued.
        waits_on_host = host.steps[host.pc][0] in (STEP_RENDEZVOUS, STEP_NEVER)
        on_device = self.linked.profile.device and not waits_on_host
        dependencies = self._dependencies_of_host(host, position)
        return BlockedRank(host.rank, position, dependencies, host.clock, on_device)

    def _dependencies_of_host(self, host: LocalThread, position: int) -> tuple[WaitDependency, ...]:
        step, _, rows = host.steps[host.pc]
        if step == STEP_RENDEZVOUS:
            # One call may need several rendezvous: a batch creates a connection to each peer.
            missing = [self._missing_at_rendezvous(host, number) for number in rows]
            ranks = missing[0] if len(rows) == 1 else tuple(dict.fromkeys(chain(*missing)))
            return (WaitDependency(position, -1, ranks),)
        if step == STEP_NEVER:
            # The compiler ends a unit with `BlockForever` if no order of events completes a call.
            last = self.linked.unit_of[host.rank].instructions[-1]
            ranks = last.ranks if isinstance(last, BlockForever) else ()
            return (WaitDependency(position, -1, ranks),)
        return self._distinct_dependencies(self._rows_waited_for(host, position))

    def _missing_at_rendezvous(self, host: LocalThread, number: int) -> tuple[int, ...]:
        instance = host.rendezvous[number]
        if instance not in self._missing:
            arrived = frozenset(self.run.came.get(instance, ()))
            members = self.linked.members[instance]
            self._missing[instance] = tuple(rank for rank in members if rank not in arrived)
        return self._missing[instance]

    def _rows_waited_for(self, host: LocalThread, position: int) -> list[int]:
        """The open parts that a host waits for."""
        step, row, rows = host.steps[host.pc]
        if step == STEP_WAIT_EACH:
            # The other rows of this step only record when the wait began.
            return [host.base + r for r in rows[:1]]
        if step not in (STEP_SYNC, STEP_WAIT_ENDS):
            # A step that posts and waits at once names no rows: it waits for its own.
            return [host.base + r for r in rows or (row,)]
        launches = self._launches_of(host)
        if row == NO_ROW or not self._waits_for_requests(host, position):
            # The host waits for everything. What has not started is behind something that has.
            unfinished = [launches[r] for r in sorted(launches) if self._is_open(host.base + r)]
            waited_for = [one for one in unfinished if self._has_launch_started(host, one)]
        else:
            waited_for = [launches[r] for r in rows if self._is_open(host.base + r)]
        return [host.base + part.row for launch in waited_for for part in launch.parts]

    def _waits_for_requests(self, host: LocalThread, position: int) -> bool:
        """Whether the host's call waits for certain requests, not for all launches."""
        call = self.linked.program.code_call(host.rank, position)
        return call.op not in ("synchronize", "destroy_process_group")

    def _launches_of(self, host: LocalThread) -> dict[int, OperationLaunch]:
        unit: CompilationUnit = self.linked.unit_of[host.rank]
        # Ranks with equal calls share a unit object, so its identity is a sufficient key.
        if id(unit) not in self._launches:
            self._launches[id(unit)] = {launch.row: launch for launch in unit.launches}
            self._launch_of_part[id(unit)] = {
                part.row: launch for launch in unit.launches for part in launch.parts
            }
        return self._launches[id(unit)]

    def _has_launch_started(self, host: LocalThread, launch: OperationLaunch) -> bool:
        return self._has_started(host.base + launch.parts[0].row)

    # --- the questions of the base class ---
    def _launch_of(self, row: int) -> OperationLaunch:
        host = self.run.hosts[int(self.linked.rank[row])]
        launches, own_row = self._launches_of(host), row - host.base
        if own_row in launches:
            return launches[own_row]
        return self._launch_of_part[id(self.linked.unit_of[host.rank])][own_row]

    def _is_open(self, row: int) -> bool:
        return bool(self.run.ended[row] < 0)

    def _has_started(self, row: int) -> bool:
        return bool(self.run.posted[row] >= 0)

    def _own_dependencies(self, row: int) -> list[WaitDependency]:
        # `done` returns the key of what is missing, or None if the row has all it needs.
        if self.run.done(row, 0)[0] is None:
            return []
        _, position, part = self.linked.place(row)
        return [WaitDependency(position, part, self._ranks_needed(row))]

    def _ranks_needed(self, row: int) -> tuple[int, ...]:
        """The ranks that a row which has started waits for."""
        if int(self.linked.kind[row]) != KIND_COLLECTIVE:
            return (int(self.linked.peer[row]),)
        missing = self._missing_members(int(self.linked.instance[row]))
        # Some collectives let a member return before all have arrived: in a broadcast, a rank needs
        # its parent in the tree, but not its siblings. `early` lists such needs by row.
        ranks = self.run.conditions.needs.of(row) if self.run.partial_waits else None
        if ranks is None:
            return missing
        posted = self.run.posted
        # Rows stand in the order of the ranks; a rank whose row is negative never arrives.
        rank_rows = zip(ranks, self.run.partial_waits[row], strict=False)
        return tuple(rank for rank, needed in rank_rows if needed < 0 or posted[needed] < 0)

    def _missing_members(self, instance: int) -> tuple[int, ...]:
        """Members that have not arrived at a collective; one tuple for all rows of it."""
        if instance not in self._missing:
            rows = self.linked.rows_of[instance]
            arrived = {int(self.linked.rank[row]) for row in rows if self._has_started(row)}
            members = self.linked.members[instance]
            self._missing[instance] = tuple(rank for rank in members if rank not in arrived)
        return self._missing[instance]


def host_position(linked: LinkedProgram, host: LocalThread) -> int:
    """The call that a host is in, or the number of calls if it is at its end."""
    _, row, _ = host.steps[host.pc] if host.pc < len(host.steps) else (STEP_END, NO_ROW, ())
    code = linked.program.code(host.rank)
    return len(code.calls) if row == NO_ROW else linked.positions(code)[row]
