"""Who is blocked, on whom, where a run with local clocks has stopped, told as a `FinalState`."""

from __future__ import annotations

from itertools import chain

import numpy as np

from distsim.findings.final_state import BlockedRank, FinalState, RankEnd, WaitDependency
from distsim.semantics.form.instructions import (
    KIND_COLLECTIVE,
    KIND_SEND,
    STEP_END,
    STEP_NEVER,
    STEP_RENDEZVOUS,
    STEP_SYNC,
    STEP_WAIT_EACH,
    STEP_WAIT_ENDS,
    BlockForever,
    CompilationUnit,
    ExitRank,
    OperationLaunch,
    ThreadStep,
)
from distsim.semantics.form.linked_program import LinkedProgram
from distsim.semantics.local.rank_clocks import LocalThread, RunProgress


def blocked_state_of_run(run: RunProgress) -> FinalState:
    """What a run left behind. Ranks that have not ended are blocked at their present call."""
    return _LocalBlockedStateBuilder(run).final_state()


class _LocalBlockedStateBuilder:
    def __init__(self, run: RunProgress) -> None:
        self.run, self.linked = run, run.linked
        self._missing: dict[int, tuple[int, ...]] = {}
        self._launches: dict[int, dict[int, OperationLaunch]] = {}
        self._launch_of: dict[int, dict[int, OperationLaunch]] = {}

    def final_state(self) -> FinalState:
        ends, blocked = [], []
        absent = {f.rank for f in self.linked.program.faults if f.kind == "absent"}
        for rank in self.linked.program.present:
            host = self.run.hosts[rank]
            if rank in absent:
                ends.append(RankEnd(rank, "absent", 0))
            elif host.ended:
                leave = self.linked.unit_of[rank].instructions[-1]
                assert isinstance(leave, ExitRank)
                ends.append(RankEnd(rank, leave.status, leave.position, host.clock, leave.message))
            else:
                position = host_position(self.linked, host)
                ends.append(RankEnd(rank, "blocked", position, host.clock))
                on_device = self.linked.profile.device and host.steps[host.pc][0] not in (
                    STEP_RENDEZVOUS,
                    STEP_NEVER,
                )
                blocked.append(
                    BlockedRank(
                        rank, position, self._of_host(host, position), host.clock, on_device
                    )
                )
        return FinalState(tuple(ends), tuple(blocked), tuple(self._unreceived()))

    def _unreceived(self) -> list[tuple[int, int, int]]:
        """(rank, position, part) of messages that no receive has met."""
        linked, posted, mate = self.linked, np.asarray(self.run.posted), self.run.conditions.mate
        sends = np.flatnonzero((linked.kind == KIND_SEND) & (posted >= 0))
        lost = sends[(mate[sends] < 0) | (posted[np.maximum(mate[sends], 0)] < 0)]
        return [linked.place(row) for row in lost.tolist()]

    def _of_host(self, host: LocalThread, position: int) -> tuple[WaitDependency, ...]:
        step, row, rows = host.steps[host.pc]
        if step == STEP_RENDEZVOUS:
            missing = [self._not_met(host, number) for number in rows]
            return (
                WaitDependency(
                    position,
                    -1,
                    missing[0] if len(rows) == 1 else tuple(dict.fromkeys(chain(*missing))),
                ),
            )
        if step == STEP_NEVER:
            last = self.linked.unit_of[host.rank].instructions[-1]
            return (
                WaitDependency(position, -1, last.ranks if isinstance(last, BlockForever) else ()),
            )
        found: dict[WaitDependency, None] = {}
        for i in self._waited_for(host, (step, row, rows), position):
            found |= dict.fromkeys(self._needs(i))
        return tuple(found)

    def _not_met(self, host: LocalThread, number: int) -> tuple[int, ...]:
        instance = host.meets[number]
        if instance not in self._missing:
            came = frozenset(self.run.came.get(instance, ()))
            self._missing[instance] = tuple(
                r for r in self.linked.members[instance] if r not in came
            )
        return self._missing[instance]

    def _waited_for(self, host: LocalThread, at: ThreadStep, position: int) -> list[int]:
        """The open rows that a host waits for, launches by their parts."""
        step, row, rows = at
        if step not in (STEP_SYNC, STEP_WAIT_ENDS):
            mine = rows[:1] if step == STEP_WAIT_EACH else rows or (row,)
            return [host.base + r for r in mine]
        launches = self._launches_of(host)
        begun = row < 0 or not self._is_wait(host, position)
        wanted = sorted(launches) if begun else rows
        still = (launches[r] for r in wanted if self.run.ended[host.base + r] < 0)
        return [
            host.base + part.row
            for launch in still
            if not begun or self._has_begun(host, launch)
            for part in launch.parts
        ]

    def _is_wait(self, host: LocalThread, position: int) -> bool:
        """The host waits for requests, not for all that it has launched."""
        call = self.linked.program.code_call(host.rank, position)
        return call.op not in ("synchronize", "destroy_process_group")

    def _launches_of(self, host: LocalThread) -> dict[int, OperationLaunch]:
        unit: CompilationUnit = self.linked.unit_of[host.rank]
        if id(unit) not in self._launches:
            self._launches[id(unit)] = {launch.row: launch for launch in unit.launches}
            self._launch_of[id(unit)] = {
                part.row: launch for launch in unit.launches for part in launch.parts
            }
        return self._launches[id(unit)]

    def _has_begun(self, host: LocalThread, launch: OperationLaunch) -> bool:
        return self.run.posted[host.base + launch.parts[0].row] >= 0

    # --- what a row lacks ---
    def _needs(self, i: int) -> list[WaitDependency]:
        """What must come before a row can finish: its own partners, or, before it has begun, those
        of the launches ahead of it.
        """
        rank, position, part = self.linked.place(i)
        if self.run.posted[i] >= 0:
            ranks = self._lacking(i, rank)
            return [] if ranks is None else [WaitDependency(position, part, ranks)]
        return [need for row in self._ahead(rank, i) for need in self._needs(row)]

    def _ahead(self, rank: int, i: int) -> list[int]:
        """The open parts that have begun and stand before a row's launch, over all launches
        between.
        """
        host = self.run.hosts[rank]
        launches = self._launches_of(host)
        launch = self._launch_of[id(self.linked.unit_of[rank])][i - host.base]
        seen, found, todo = set[int](), list[int](), list(launch.after)
        while todo:
            row = todo.pop()
            if row in seen or self.run.ended[host.base + row] >= 0:
                continue
            seen.add(row)
            if self._has_begun(host, launches[row]):
                found += [host.base + part.row for part in launches[row].parts]
            else:
                todo += launches[row].after
        return sorted(found)

    def _lacking(self, i: int, rank: int) -> tuple[int, ...] | None:
        """Whom a row that has begun waits for; None where it is done."""
        if self.run.done(i, 0)[0] is None:
            return None
        linked = self.linked
        if int(linked.kind[i]) != KIND_COLLECTIVE:
            return (int(linked.peer[i]),)
        instance = int(linked.instance[i])
        missing = self._missing_of(instance)
        needs = self.run.conditions.needs.of(i) if self.run.early else None
        if needs is None:
            return missing
        posted = self.run.posted
        return tuple(
            r for r, n in zip(needs, self.run.early[i], strict=False) if n < 0 or posted[n] < 0
        )

    def _missing_of(self, instance: int) -> tuple[int, ...]:
        """Members that have not come to a collective; the same tuple for all who ask."""
        if instance not in self._missing:
            there = {
                int(self.linked.rank[row])
                for row in self.linked.rows_of[instance]
                if self.run.posted[row] >= 0
            }
            self._missing[instance] = tuple(
                r for r in self.linked.members[instance] if r not in there
            )
        return self._missing[instance]


def host_position(linked: LinkedProgram, host: LocalThread) -> int:
    """The call that a host is in, or its end."""
    _, row, _ = host.steps[host.pc] if host.pc < len(host.steps) else (STEP_END, -1, ())
    code = linked.program.code(host.rank)
    return len(code.calls) if row < 0 else linked.positions(code)[row]
