"""The driver with local clocks: each rank runs ahead on a clock of its own until it needs somebody
who has not come yet.

For programs in which no order of arrival decides anything (`distsim.semantics.form.mismatches`):
who meets whom is linked beforehand, and a time is the largest of those that it needs, so it does
not matter who is looked at first. `distsim.engine.event_driven` is the reference that this driver
is held to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from distsim.semantics.form.completion import CompletionConditions
from distsim.semantics.form.instructions import (
    KIND_COLLECTIVE,
    KIND_WORK,
    STEP_BEGIN,
    STEP_COLLECTIVE,
    STEP_FINISH,
    STEP_ISSUE,
    STEP_JOIN,
    STEP_MESSAGE,
    STEP_NEVER,
    STEP_POST,
    STEP_RENDEZVOUS,
    STEP_SYNC,
    STEP_WAIT_EACH,
    STEP_WAIT_ENDS,
    STEP_WORK,
    CompilationUnit,
    ThreadStep,
    UnitThreads,
    flatten_to_threads,
)
from distsim.semantics.form.linked_program import IntArray, LinkedProgram

#: Classes are worth their while where they hold at least so many ranks on average
#: (`distsim.semantics.local.quotient`).
MIN_RANKS_PER_CLASS = 8


class LocalThread:
    """A host or a stream of one rank: where it is, its clock, and the key that it waits for (None:
    it runs, or has ended).
    """

    __slots__ = ("base", "clock", "ended", "is_host", "key", "meets", "pc", "rank", "steps")

    def __init__(
        self,
        rank: int,
        base: int,
        steps: list[ThreadStep],
        meets: list[int],
        clock: int,
        is_host: bool,
    ) -> None:
        self.rank, self.base, self.steps, self.meets, self.clock, self.is_host = (
            rank,
            base,
            steps,
            meets,
            clock,
            is_host,
        )
        self.pc, self.ended = 0, False
        self.key: int | None = None


#: One number for each row.
RowColumn = list[int] | IntArray


class LocalRunInputs(NamedTuple):
    """What a driver goes over: the columns of `CompletionConditions` by row, ``missing`` how many
    come to each instance, and the ``threads`` (hosts, streams) with nobody on the way yet. Of a
    folded program the rows of one rank of each class."""

    linked: LinkedProgram
    conditions: CompletionConditions
    need: RowColumn
    room: RowColumn
    lag: RowColumn
    price: RowColumn
    instance: RowColumn
    kind: RowColumn
    early: Mapping[int, tuple[int, ...]]
    missing: list[int]
    hosts: list[LocalThread]
    streams: list[LocalThread]


def local_run_inputs(
    linked: LinkedProgram,
    conditions: CompletionConditions,
    *,
    plain: bool = True,
    steps: Mapping[int, UnitThreads] | None = None,
) -> LocalRunInputs:
    """The course of all ranks of a program. ``plain``: columns as lists, which a loop reads faster.
    ``steps``: what `threads_by_unit` gave for the program, for whoever runs it more than once."""
    hosts, streams = _create_all_threads(linked, steps or threads_by_unit(linked))
    missing = [len(members) for members in linked.members]
    for instance in conditions.never.tolist():
        missing[instance] += 1

    def column(values: IntArray) -> RowColumn:
        return values.tolist() if plain else values

    return LocalRunInputs(
        linked,
        conditions,
        column(conditions.need),
        column(conditions.room),
        column(conditions.lag),
        column(conditions.price),
        column(linked.instance),
        column(linked.kind),
        conditions.early,
        missing,
        hosts,
        streams,
    )


def threads_by_unit(linked: LinkedProgram) -> dict[int, UnitThreads]:
    """The steps of each unit's threads, by the unit's identity."""
    return {id(unit): flatten_unit_threads(linked, unit) for unit in linked.units}


def _create_all_threads(
    linked: LinkedProgram, steps: Mapping[int, UnitThreads]
) -> tuple[list[LocalThread], list[LocalThread]]:
    nobody = LocalThread(-1, 0, [], [], 0, True)
    nobody.ended = True
    hosts, streams = [nobody] * linked.program.world_size, list[LocalThread]()
    for rank in linked.program.present:
        unit = linked.unit_of[rank]
        hosts[rank], more = create_rank_threads(
            linked, steps[id(unit)], rank, linked.base[rank], linked.meets[rank], rank
        )
        streams += more
    return hosts, streams


def flatten_unit_threads(linked: LinkedProgram, unit: CompilationUnit) -> UnitThreads:
    """The steps of a unit's threads."""
    return flatten_to_threads(unit, linked.program.codes[unit.code].offsets, linked.profile.lock)


def create_rank_threads(
    linked: LinkedProgram, steps: UnitThreads, number: int, base: int, meets: list[int], rank: int
) -> tuple[LocalThread, list[LocalThread]]:
    """A host and its streams, at their start. ``number``: what it is called, ``rank``: whose faults
    it has.
    """
    faults = [fault for fault in linked.program.faults if fault.rank == rank]
    host = LocalThread(number, base, steps.host, meets, linked.program.delays.get(rank, 0), True)
    host.ended = any(fault.kind == "absent" for fault in faults)
    return host, [LocalThread(number, base, stream, [], 0, False) for stream in steps.streams]


class RowTimes(NamedTuple):
    """By row, -1 where it never was; see `RunProgress`."""

    posted: RowColumn
    issued: RowColumn
    returned: RowColumn
    ended: RowColumn
    waited: RowColumn


class RunProgress:
    """How far all have come; ``times`` where that is known: left out, nobody has gone anywhere.

    By row, -1 where it never was: ``posted`` (there for others), ``issued`` (handed to a stream),
    ``returned`` (of calls that wait), ``ended`` (of launches and of own work), ``waited`` (of
    requests that are waited for one by one). By instance: how many are ``missing``, when the
    ``latest`` came, who ``came`` to a meet. ``hosts``: by rank; one that has ended where another
    rank stands for it.
    """

    def __init__(self, course: LocalRunInputs, times: RowTimes | None = None) -> None:
        self.course, self.linked, self.conditions = course, course.linked, course.conditions
        known = times or RowTimes(*([-1] * len(course.need) for _ in RowTimes._fields))
        self.posted, self.issued, self.returned, self.ended, self.waited = known
        self.need, self.room, self.lag, self.price = (
            course.need,
            course.room,
            course.lag,
            course.price,
        )
        self.instance, self.kind, self.early = course.instance, course.kind, course.early
        self.missing = list(course.missing)
        self.latest: RowColumn = [0] * len(self.missing)
        self.came: dict[int, list[int]] = {}
        self.hosts = course.hosts

    def done(self, i: int, t: int) -> tuple[int | None, int]:
        """When a row that was posted is done, if all it needs is there: (None, the later of t and
        that), else (key, t).

        Keys are what a thread waits for: a row's post 4r, its end 4r + 1, its issue 4r + 2, an
        instance 4i + 3; -1 what never comes.
        """
        kind = int(self.kind[i])
        if kind == KIND_COLLECTIVE:
            return self._collective_done(i, t)
        if kind == KIND_WORK:
            return None, max(t, self.ended[i])
        n, mine = self.need[i], self.posted[i]
        if n < 0:
            gate = self.room[i]  # a send that goes ahead, as soon as there is room
            if n != -1:
                return -1, t
            if gate >= 0:
                if self.posted[gate] < 0:
                    return 4 * gate, t
                mine = max(mine, self.posted[gate])
            return None, max(t, mine)
        came, more = self.posted[n], self.lag[i]
        if came < 0:
            return 4 * n, t
        if self.room[n] >= 0:  # a receive before this one made room for the message
            came = max(came, self.posted[self.room[n]])
        return None, max(t, max(mine, came) + more if more >= 0 else max(mine, came - more))

    def _collective_done(self, i: int, t: int) -> tuple[int | None, int]:
        needs = self.early.get(i) if self.early else None
        if needs is None:
            instance = self.instance[i]
            return (
                (4 * instance + 3, t)
                if self.missing[instance]
                else (None, max(t, self.latest[instance] + self.price[i]))
            )
        began = self.posted[i]
        for n in needs:
            if n < 0 or self.posted[n] < 0:
                return (4 * n if n >= 0 else -1), t
            began = max(began, self.posted[n])
        return None, max(t, began + self.price[i])


class ThreadSegment(NamedTuple):
    """A thread went on from one step to another, at which it stopped, without a halt between."""

    thread: LocalThread
    start: int
    end: int


class LocalClocks(RunProgress):
    """One run: `run` it once, then look at what it left. ``tape``: who went how far, in this order,
    if it is asked for.
    """

    def __init__(self, course: LocalRunInputs, tape: list[ThreadSegment] | None = None) -> None:
        super().__init__(course)
        self.parked: dict[int, list[LocalThread]] = {}
        self.tape = tape

    def run(self) -> LocalClocks:
        """Let every thread go as far as it gets."""
        ready = [*self.course.streams[::-1], *(host for host in self.hosts[::-1] if not host.ended)]
        tape, parked = self.tape, self.parked
        while ready:
            thread = ready.pop()
            start = thread.pc
            key = thread.key = self._advance_thread(thread, ready)
            if tape is not None:
                tape.append(ThreadSegment(thread, start, thread.pc))
            if key is None:
                thread.ended = True
            elif key in parked:
                parked[key].append(thread)
            else:
                parked[key] = [thread]
        return self

    def _advance_thread(self, thread: LocalThread, ready: list[LocalThread]) -> int | None:
        """Run a thread until it needs what is not there; the key of that, None at its end."""
        posted, returned, need, lag, room, parked = (
            self.posted,
            self.returned,
            self.need,
            self.lag,
            self.room,
            self.parked,
        )
        steps, base, t, ended = thread.steps, thread.base, thread.clock, self.ended
        key: int | None = None
        for pc in range(thread.pc, len(steps)):
            step, row, rows = steps[pc]
            if step <= STEP_MESSAGE:
                i = base + row
                if posted[i] < 0:
                    posted[i] = t
                    if 4 * i in parked:
                        ready += parked.pop(4 * i)
                if step == STEP_POST:
                    continue
                rows = (row,)
            if step <= STEP_FINISH:
                for r in rows:
                    i = base + r
                    n = need[i]
                    if n >= 0 and room[n] < 0 and posted[n] >= 0:
                        came, mine, more = posted[n], posted[i], lag[i]
                        end = (
                            (came if came > mine else mine) + more
                            if more >= 0
                            else max(mine, came - more)
                        )
                        if end > t:
                            t = end
                    else:
                        key, t = self.done(i, t)
                        if key is not None:
                            break
                if key is not None:
                    break  # since it waits for this one, the others before it being done
                if step == STEP_FINISH:
                    i = base + row
                    ended[i] = t
                    self._wake(4 * i + 1, ready)
                elif row >= 0:
                    returned[base + row] = t
            elif step == STEP_WORK:
                i = base + row
                posted[i] = t
                t += self.price[i]
                ended[i] = t
                if thread.is_host:
                    returned[i] = t
                else:
                    self._wake(4 * i + 1, ready)
            elif step == STEP_ISSUE:
                self.issued[base + row] = t
                self._wake(4 * (base + row) + 2, ready)
            else:
                go_on = self._begin if step == STEP_BEGIN else self._step
                key, t = go_on(thread, step, row, rows, t, ready)
                if key is not None:
                    break  # since it waits for what is missing, what it waited for before that being done
        else:
            pc = len(steps)
        thread.pc, thread.clock = pc, t
        return key

    def _step(
        self,
        thread: LocalThread,
        step: int,
        row: int,
        rows: tuple[int, ...],
        t: int,
        ready: list[LocalThread],
    ) -> tuple[int | None, int]:
        """A step that is not a plain message: (key that is missing, clock)."""
        base = thread.base
        i = base + row
        key: int | None = None
        if step in (STEP_JOIN, STEP_COLLECTIVE):
            if self.posted[i] < 0:
                self.posted[i] = t
                self._wake(4 * i, ready)
                self._come(self.instance[i], t, ready)
            if step == STEP_COLLECTIVE:
                key, t = self.done(i, t)
                if key is None:
                    self.returned[i] = t
        elif step == STEP_RENDEZVOUS:
            key, t = self._meet(thread, rows, t, ready)
            if key is None and row >= 0:
                self.returned[i] = max(self.returned[i], t)
        elif step in (STEP_SYNC, STEP_WAIT_ENDS, STEP_WAIT_EACH):
            key, later = (
                self.done(base + rows[0], t)
                if step == STEP_WAIT_EACH
                else self._after(base, rows, t)
            )
            t = t if key is not None and step == STEP_SYNC else later
            if key is None and row >= 0:
                self.returned[i] = t
            for r in rows[1:] if step == STEP_WAIT_EACH and key is None else ():
                self.waited[base + r] = t
        else:
            key = -1 if step == STEP_NEVER else None
        return key, t

    def _wake(self, key: int, ready: list[LocalThread]) -> None:
        if key in self.parked:
            ready += self.parked.pop(key)

    def _come(self, instance: int, t: int, ready: list[LocalThread]) -> None:
        """One more member is there; the last one lets all go."""
        self.missing[instance] -= 1
        if t > self.latest[instance]:
            self.latest[instance] = t
        if not self.missing[instance]:
            self._wake(4 * instance + 3, ready)

    def _meet(
        self, thread: LocalThread, numbers: tuple[int, ...], t: int, ready: list[LocalThread]
    ) -> tuple[int | None, int]:
        """All who make something together have come; each comes once, to all spots, when its host
        first gets here.
        """
        instances = [thread.meets[number] for number in numbers]
        if thread.key is None or thread.key % 4 != 3 or thread.key // 4 not in instances:
            for instance in instances:
                self.came.setdefault(instance, []).append(thread.rank)
                self._come(instance, t, ready)
        for instance in instances:
            if self.missing[instance]:
                return 4 * instance + 3, t
        return None, max(t, *(self.latest[instance] for instance in instances))

    def _begin(
        self,
        thread: LocalThread,
        step: int,
        row: int,
        rows: tuple[int, ...],
        t: int,
        ready: list[LocalThread],
    ) -> tuple[int | None, int]:
        """A stream comes to a launch: the host has handed it over, and those before it have
        ended.
        """
        i = thread.base + row
        return (
            self._after(thread.base, rows, max(t, self.issued[i]))
            if self.issued[i] >= 0
            else (4 * i + 2, t)
        )

    def _after(self, base: int, rows: tuple[int, ...], t: int) -> tuple[int | None, int]:
        """Launches that must have ended."""
        for r in rows:
            end = self.ended[base + r]
            if end < 0:
                return 4 * (base + r) + 1, t
            t = max(t, end)
        return None, t


def run_local_clocks(linked: LinkedProgram, conditions: CompletionConditions) -> RunProgress:
    """Run a program that is free of order, by classes where that pays."""
    if len(linked.units) * MIN_RANKS_PER_CLASS <= len(linked.program.present):
        from distsim.semantics.local.class_clocks import run_quotient
        from distsim.semantics.local.quotient import coarsest_quotient

        folded = coarsest_quotient(linked, conditions)
        if folded is not None:
            return run_quotient(linked, conditions, folded)
    return LocalClocks(local_run_inputs(linked, conditions)).run()
