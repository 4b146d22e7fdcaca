"""Who is blocked, on whom, where a run with local clocks has stopped, told as a `Standstill`."""

from __future__ import annotations

from itertools import chain

import numpy as np

from distsim.semantics.form import (
    AWAIT_ENDS,
    END,
    KIND_COLLECTIVE,
    KIND_SEND,
    MEET,
    NEVER,
    WAIT_EACH,
    WAIT_ENDS,
    Launch,
    Leave,
    Step,
    Stuck,
    Unit,
)
from distsim.semantics.link import Linked
from distsim.semantics.local import Progress, Thread
from distsim.standstill import Blocked, Need, RankEnd, Standstill


def standstill(run: Progress) -> Standstill:
    """What a run left behind. Ranks that have not ended are blocked at their present call."""
    return _Told(run).standstill()


class _Told:
    def __init__(self, run: Progress) -> None:
        self.run, self.linked = run, run.linked
        self._missing: dict[int, tuple[int, ...]] = {}
        self._launches: dict[int, dict[int, Launch]] = {}
        self._launch_of: dict[int, dict[int, Launch]] = {}

    def standstill(self) -> Standstill:
        ends, blocked = [], []
        absent = {f.rank for f in self.linked.program.faults if f.kind == "absent"}
        for rank in self.linked.program.present:
            host = self.run.hosts[rank]
            if rank in absent:
                ends.append(RankEnd(rank, "absent", 0))
            elif host.ended:
                leave = self.linked.unit_of[rank].instructions[-1]
                assert isinstance(leave, Leave)
                ends.append(RankEnd(rank, leave.status, leave.position, host.clock, leave.message))
            else:
                position = host_position(self.linked, host)
                ends.append(RankEnd(rank, "blocked", position, host.clock))
                on_device = self.linked.profile.device and host.steps[host.pc][0] not in (MEET, NEVER)
                blocked.append(Blocked(rank, position, self._of_host(host, position), host.clock, on_device))
        return Standstill(tuple(ends), tuple(blocked), tuple(self._unreceived()))

    def _unreceived(self) -> list[tuple[int, int, int]]:
        """(rank, position, part) of messages that no receive has met."""
        linked, posted, mate = self.linked, np.asarray(self.run.posted), self.run.conditions.mate
        sends = np.flatnonzero((linked.kind == KIND_SEND) & (posted >= 0))
        lost = sends[(mate[sends] < 0) | (posted[np.maximum(mate[sends], 0)] < 0)]
        return [linked.place(row) for row in lost.tolist()]

    def _of_host(self, host: Thread, position: int) -> tuple[Need, ...]:
        step, row, rows = host.steps[host.pc]
        if step == MEET:
            missing = [self._not_met(host, number) for number in rows]
            return (Need(position, -1, missing[0] if len(rows) == 1 else tuple(dict.fromkeys(chain(*missing)))),)
        if step == NEVER:
            last = self.linked.unit_of[host.rank].instructions[-1]
            return (Need(position, -1, last.ranks if isinstance(last, Stuck) else ()),)
        found: dict[Need, None] = {}
        for i in self._waited_for(host, (step, row, rows), position):
            found |= dict.fromkeys(self._needs(i))
        return tuple(found)

    def _not_met(self, host: Thread, number: int) -> tuple[int, ...]:
        instance = host.meets[number]
        if instance not in self._missing:
            came = frozenset(self.run.came.get(instance, ()))
            self._missing[instance] = tuple(r for r in self.linked.members[instance] if r not in came)
        return self._missing[instance]

    def _waited_for(self, host: Thread, at: Step, position: int) -> list[int]:
        """The open rows that a host waits for, launches by their parts."""
        step, row, rows = at
        if step not in (AWAIT_ENDS, WAIT_ENDS):
            mine = rows[:1] if step == WAIT_EACH else rows or (row,)
            return [host.base + r for r in mine]
        launches = self._launches_of(host)
        begun = row < 0 or not self._is_wait(host, position)
        wanted = sorted(launches) if begun else rows
        still = (launches[r] for r in wanted if self.run.ended[host.base + r] < 0)
        return [host.base + part.row for launch in still if not begun or self._has_begun(host, launch) for part in launch.parts]

    def _is_wait(self, host: Thread, position: int) -> bool:
        """The host waits for requests, not for all that it has launched."""
        call = self.linked.program.code_call(host.rank, position)
        return call.op not in ("synchronize", "destroy_process_group")

    def _launches_of(self, host: Thread) -> dict[int, Launch]:
        unit: Unit = self.linked.unit_of[host.rank]
        if id(unit) not in self._launches:
            self._launches[id(unit)] = {launch.row: launch for launch in unit.launches}
            self._launch_of[id(unit)] = {part.row: launch for launch in unit.launches for part in launch.parts}
        return self._launches[id(unit)]

    def _has_begun(self, host: Thread, launch: Launch) -> bool:
        return self.run.posted[host.base + launch.parts[0].row] >= 0

    # --- what a row lacks ---
    def _needs(self, i: int) -> list[Need]:
        """What must come before a row can finish: its own partners, or, before it has begun, those of the launches ahead of it."""
        rank, position, part = self.linked.place(i)
        if self.run.posted[i] >= 0:
            ranks = self._lacking(i, rank)
            return [] if ranks is None else [Need(position, part, ranks)]
        return [need for row in self._ahead(rank, i) for need in self._needs(row)]

    def _ahead(self, rank: int, i: int) -> list[int]:
        """The open parts that have begun and stand before a row's launch, over all launches between."""
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
        return tuple(r for r, n in zip(needs, self.run.early[i], strict=False) if n < 0 or posted[n] < 0)

    def _missing_of(self, instance: int) -> tuple[int, ...]:
        """Members that have not come to a collective; the same tuple for all who ask."""
        if instance not in self._missing:
            there = {int(self.linked.rank[row]) for row in self.linked.rows_of[instance] if self.run.posted[row] >= 0}
            self._missing[instance] = tuple(r for r in self.linked.members[instance] if r not in there)
        return self._missing[instance]


def host_position(linked: Linked, host: Thread) -> int:
    """The call that a host is in, or its end."""
    _, row, _ = host.steps[host.pc] if host.pc < len(host.steps) else (END, -1, ())
    code = linked.program.code(host.rank)
    return len(code.calls) if row < 0 else linked.positions(code)[row]
