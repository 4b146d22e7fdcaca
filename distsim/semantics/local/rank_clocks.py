"""The driver with local clocks: each rank runs ahead on its own clock until it needs a rank that
has not arrived yet.

It is exact for programs in which no order of arrival decides anything
(`distsim.semantics.form.order_dependence`).

Key idea: matches are fixed beforehand, and every time is the maximum of the times that it depends
on, plus a cost. So it does not matter in which order the threads run: each runs until a time that
it needs is unknown, parks itself under a *key* for that time, and is woken when the time is known.

`distsim.engine.event_driven` is the reference that this driver is tested against. This module does
not decide whether ranks are run one by one or by classes: see `distsim.semantics.local.run`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from distsim.common.arrays import IntArray
from distsim.semantics.form.completion import CompletionConditions
from distsim.semantics.form.instructions import KIND_COLLECTIVE, KIND_WORK, CompilationUnit
from distsim.semantics.form.linked_program import LinkedProgram
from distsim.semantics.local.thread_steps import (
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
    ThreadStep,
    UnitThreads,
    flatten_to_threads,
)

#: Running by classes (`distsim.semantics.local.quotient`) pays where they hold at least so many
#: ranks on average.
MIN_RANKS_PER_CLASS = 8

# Keys under which threads park: 4 * row + kind of event for rows, 4 * instance + 3 for instances.
# A plain integer, because a run parks millions of times. The hot loop of `LocalClocks` writes out
# ``4 * row`` for the time at which a row is posted.
_END_KEY, _ISSUE_KEY, _INSTANCE_KEY = 1, 2, 3
#: The key of something that never happens.
NEVER_KEY = -1


class LocalThread:
    """A host or a stream of one rank.

    ``pc``: its next step; ``clock``: its time there; ``key``: what it is parked under (None: it
    runs or has ended). ``rendezvous``: the instance of each rendezvous of a host.
    """

    __slots__ = ("base", "clock", "ended", "is_host", "key", "pc", "rank", "rendezvous", "steps")

    def __init__(
        self,
        rank: int,
        base: int,
        steps: list[ThreadStep],
        rendezvous: list[int],
        clock: int,
        is_host: bool,
    ) -> None:
        self.rank = rank
        self.base = base
        self.steps = steps
        self.rendezvous = rendezvous
        self.clock = clock
        self.is_host = is_host
        self.pc = 0
        self.ended = False
        self.key: int | None = None


#: One number for each row.
RowColumn = list[int] | IntArray


class LocalRunInputs(NamedTuple):
    """What a driver starts with.

    The columns of `CompletionConditions` by row; ``missing``: how many members each instance waits
    for; and all threads at their start. For a folded program, the rows are those of one rank of
    each class.
    """

    linked: LinkedProgram
    conditions: CompletionConditions
    need: RowColumn
    freed_by: RowColumn
    lag: RowColumn
    duration: RowColumn
    instance: RowColumn
    kind: RowColumn
    partial_waits: Mapping[int, tuple[int, ...]]
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
    """The inputs for all ranks of a program.

    ``plain``: columns as lists, which a loop reads faster than arrays. ``steps``: the result of
    `threads_by_unit`, for callers that run the program more than once.
    """
    hosts, streams = _create_all_threads(linked, steps or threads_by_unit(linked))
    missing = [len(members) for members in linked.members]
    for instance in conditions.never.tolist():
        missing[instance] += 1  # one more than can ever arrive

    def column(values: IntArray) -> RowColumn:
        return values.tolist() if plain else values

    return LocalRunInputs(
        linked,
        conditions,
        need=column(conditions.need),
        freed_by=column(conditions.freed_by),
        lag=column(conditions.lag),
        duration=column(conditions.duration),
        instance=column(linked.instance),
        kind=column(linked.kind),
        partial_waits=conditions.partial_waits,
        missing=missing,
        hosts=hosts,
        streams=streams,
    )


def threads_by_unit(linked: LinkedProgram) -> dict[int, UnitThreads]:
    """The steps of each unit's threads, by the unit's identity."""
    return {id(unit): flatten_unit_threads(linked, unit) for unit in linked.units}


def _create_all_threads(
    linked: LinkedProgram, steps: Mapping[int, UnitThreads]
) -> tuple[list[LocalThread], list[LocalThread]]:
    """Hosts by rank (one that has ended for ranks that another represents), and all streams."""
    ended = LocalThread(-1, 0, [], [], 0, True)
    ended.ended = True
    hosts = [ended] * linked.program.world_size
    streams: list[LocalThread] = []
    for rank in linked.program.present:
        unit_steps = steps[id(linked.unit_of[rank])]
        hosts[rank], rank_streams = create_rank_threads(
            linked, unit_steps, rank, linked.base[rank], linked.rendezvous_of[rank], rank
        )
        streams += rank_streams
    return hosts, streams


def flatten_unit_threads(linked: LinkedProgram, unit: CompilationUnit) -> UnitThreads:
    """The steps of a unit's threads."""
    return flatten_to_threads(unit, linked.program.codes[unit.code].offsets, linked.profile.lock)


def create_rank_threads(
    linked: LinkedProgram,
    steps: UnitThreads,
    number: int,
    base: int,
    rendezvous: list[int],
    rank: int,
) -> tuple[LocalThread, list[LocalThread]]:
    """A host and its streams, at their start.

    ``number`` becomes `LocalThread.rank` (a class number in a folded program); ``rank`` is the one
    whose faults it has.
    """
    faults = [fault for fault in linked.program.faults if fault.rank == rank]
    host = LocalThread(
        number, base, steps.host, rendezvous, linked.program.delays.get(rank, 0), True
    )
    host.ended = any(fault.kind == "absent" for fault in faults)
    streams = [LocalThread(number, base, stream, [], 0, False) for stream in steps.streams]
    return host, streams


class RowTimes(NamedTuple):
    """Times by row, -1 where the event has not happened; see `RunProgress`."""

    posted: RowColumn
    issued: RowColumn
    returned: RowColumn
    ended: RowColumn
    waited: RowColumn


class RunProgress:
    """How far all ranks have come. Without ``times`` nothing has happened yet.

    By row, -1 where the event has not happened:

    - ``posted``: its partners can match it.
    - ``issued``: the host has enqueued it on a stream.
    - ``returned``: of calls that wait.
    - ``ended``: of launches and of local work.
    - ``waited``: when a request was waited for, where that happens one by one.

    By instance: ``missing``: how many members have not arrived; ``latest``: when the last one
    arrived; ``came``: the ranks that have arrived at a rendezvous.

    ``hosts``: by rank; one that has ended where another rank represents it.
    """

    def __init__(self, inputs: LocalRunInputs, times: RowTimes | None = None) -> None:
        self.inputs, self.linked, self.conditions = inputs, inputs.linked, inputs.conditions
        if times is None:
            times = RowTimes(*([-1] * len(inputs.need) for _ in RowTimes._fields))
        self.posted, self.issued, self.returned, self.ended, self.waited = times
        self.need, self.freed_by, self.lag = inputs.need, inputs.freed_by, inputs.lag
        self.duration, self.instance, self.kind = inputs.duration, inputs.instance, inputs.kind
        self.partial_waits = inputs.partial_waits
        self.missing = list(inputs.missing)
        self.latest: RowColumn = [0] * len(self.missing)
        self.came: dict[int, list[int]] = {}
        self.hosts = inputs.hosts

    def has_open_collective(self) -> bool:
        """Whether a collective has been called that some member has not joined."""
        is_called = (np.asarray(self.kind) == KIND_COLLECTIVE) & (np.asarray(self.posted) >= 0)
        instances = np.asarray(self.instance)[is_called]
        return bool(np.any(np.asarray(self.missing)[instances]))

    def done(self, i: int, t: int) -> tuple[int | None, int]:
        """When a posted row is done, for a thread that waits for it at time ``t``.

        (None, the later of ``t`` and the row's end) if everything that the row needs is known; else
        (key of what is not known, ``t``). Keys are explained at the top of the module.
        """
        kind = int(self.kind[i])
        if kind == KIND_COLLECTIVE:
            return self._collective_done(i, t)
        if kind == KIND_WORK:
            return None, max(t, self.ended[i])
        needed, own = self.need[i], self.posted[i]
        if needed < 0:
            return self._buffered_send_done(i, t)
        other, lag = self.posted[needed], self.lag[i]
        if other < 0:
            return 4 * needed, t
        freed_by = self.freed_by[needed]
        if freed_by >= 0:
            # ``needed`` is a buffered send, which starts only after an earlier message of its
            # channel is taken. The receive of that one is earlier on this rank, so it is posted.
            other = max(other, self.posted[freed_by])
        # See `distsim.semantics.form.completion`: with a negative lag the data travel on their own.
        end = max(own, other) + lag if lag >= 0 else max(own, other - lag)
        return None, max(t, end)

    def _buffered_send_done(self, i: int, t: int) -> tuple[int | None, int]:
        """A send that needs no receive is done as soon as the buffer has freed_by."""
        if self.need[i] != -1:
            return NEVER_KEY, t
        own, freed_by = self.posted[i], self.freed_by[i]
        if freed_by >= 0:
            if self.posted[freed_by] < 0:
                return 4 * freed_by, t
            own = max(own, self.posted[freed_by])
        return None, max(t, own)

    def _collective_done(self, i: int, t: int) -> tuple[int | None, int]:
        needs = self.partial_waits.get(i) if self.partial_waits else None
        if needs is None:
            instance = self.instance[i]
            if self.missing[instance]:
                return 4 * instance + _INSTANCE_KEY, t
            return None, max(t, self.latest[instance] + self.duration[i])
        start = self.posted[i]
        for needed in needs:
            if needed < 0:
                return NEVER_KEY, t
            if self.posted[needed] < 0:
                return 4 * needed, t
            start = max(start, self.posted[needed])
        return None, max(t, start + self.duration[i])


class ThreadSegment(NamedTuple):
    """A thread ran without a stop from step ``start`` to step ``end``, at which it parked."""

    thread: LocalThread
    start: int
    end: int


class LocalClocks(RunProgress):
    """One run: call `run` once, then read the attributes of `RunProgress`.

    ``tape``: if given, it records which thread ran how far, in order.
    """

    def __init__(self, inputs: LocalRunInputs, tape: list[ThreadSegment] | None = None) -> None:
        super().__init__(inputs)
        self.parked: dict[int, list[LocalThread]] = {}
        self.tape = tape

    def run(self) -> LocalClocks:
        """Let every thread run as far as it can."""
        hosts = [host for host in self.hosts[::-1] if not host.ended]
        ready = [*self.inputs.streams[::-1], *hosts]
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

    def _advance_thread(  # noqa: PLR0912, PLR0915  (hot loop, see below)
        self, thread: LocalThread, ready: list[LocalThread]
    ) -> int | None:
        """Run a thread until it needs an unknown time; return the key of that, None at its end.

        This loop takes most of the time of a run. Its most frequent cases are therefore written out
        here instead of calling `done` and `_wake`, and `STEP_POST` and `STEP_MESSAGE` share code.
        """
        posted, returned, ended = self.posted, self.returned, self.ended
        need, lag, freed_by, parked = self.need, self.lag, self.freed_by, self.parked
        steps, base, t = thread.steps, thread.base, thread.clock
        key: int | None = None
        for pc in range(thread.pc, len(steps)):
            step, row, rows = steps[pc]
            if step <= STEP_MESSAGE:
                i = base + row
                if posted[i] < 0:  # else the thread was parked here and has posted it before
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
                    if n >= 0 and freed_by[n] < 0 and posted[n] >= 0:
                        # The frequent case of `done`: both sides are posted, without a window.
                        other, own, delay = posted[n], posted[i], lag[i]
                        if delay >= 0:
                            end = (other if other > own else own) + delay
                        else:
                            end = max(own, other - delay)
                        if end > t:
                            t = end
                    else:
                        key, t = self.done(i, t)
                        if key is not None:
                            break
                if key is not None:
                    # The clock already includes the rows before: a blocked rank waits since then.
                    break
                if step == STEP_FINISH:
                    i = base + row
                    ended[i] = t
                    self._wake(4 * i + _END_KEY, ready)
                elif row >= 0:
                    returned[base + row] = t
            elif step == STEP_WORK:
                i = base + row
                posted[i] = t
                t += self.duration[i]
                ended[i] = t
                if thread.is_host:
                    returned[i] = t
                else:
                    self._wake(4 * i + _END_KEY, ready)
            elif step == STEP_ISSUE:
                self.issued[base + row] = t
                self._wake(4 * (base + row) + _ISSUE_KEY, ready)
            else:
                run_step = self._begin if step == STEP_BEGIN else self._step
                key, t = run_step(thread, step, row, rows, t, ready)
                if key is not None:
                    break  # again the clock includes what the thread no longer waits for
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
        """Run a less frequent step; return (key of what is unknown, clock)."""
        i = thread.base + row
        if step in (STEP_JOIN, STEP_COLLECTIVE):
            if self.posted[i] < 0:
                self.posted[i] = t
                self._wake(4 * i, ready)
                self._arrive(self.instance[i], t, ready)
            if step == STEP_JOIN:
                return None, t
            key, t = self.done(i, t)
            if key is None:
                self.returned[i] = t
            return key, t
        if step == STEP_RENDEZVOUS:
            key, t = self._meet(thread, rows, t, ready)
            if key is None and row >= 0:
                self.returned[i] = max(self.returned[i], t)
            return key, t
        if step in (STEP_SYNC, STEP_WAIT_ENDS):
            return self._wait_for_ends(thread.base, step, row, rows, t)
        if step == STEP_WAIT_EACH:
            return self._wait_for_one(thread.base, row, rows, t)
        return (NEVER_KEY if step == STEP_NEVER else None), t

    def _wait_for_ends(
        self, base: int, step: int, row: int, rows: tuple[int, ...], t: int
    ) -> tuple[int | None, int]:
        key, later = self._after(base, rows, t)
        if key is not None:
            # A synchronize waits for everything at once, so it blocks since it was called.
            return key, (t if step == STEP_SYNC else later)
        if row >= 0:
            self.returned[base + row] = later
        return None, later

    def _wait_for_one(
        self, base: int, row: int, rows: tuple[int, ...], t: int
    ) -> tuple[int | None, int]:
        key, t = self.done(base + rows[0], t)
        if key is None:
            if row >= 0:
                self.returned[base + row] = t
            for r in rows[1:]:
                self.waited[base + r] = t
        return key, t

    def _wake(self, key: int, ready: list[LocalThread]) -> None:
        if key in self.parked:
            ready += self.parked.pop(key)

    def _arrive(self, instance: int, t: int, ready: list[LocalThread]) -> None:
        """One more member has arrived; the last one releases all."""
        self.missing[instance] -= 1
        if t > self.latest[instance]:
            self.latest[instance] = t
        if not self.missing[instance]:
            self._wake(4 * instance + _INSTANCE_KEY, ready)

    def _meet(
        self, thread: LocalThread, numbers: tuple[int, ...], t: int, ready: list[LocalThread]
    ) -> tuple[int | None, int]:
        """Wait until all members of every instance of a rendezvous have arrived."""
        instances = [thread.rendezvous[number] for number in numbers]
        if not self._is_parked_at(thread, instances):
            # A host arrives at all instances once, when it first reaches this step.
            for instance in instances:
                self.came.setdefault(instance, []).append(thread.rank)
                self._arrive(instance, t, ready)
        for instance in instances:
            if self.missing[instance]:
                return 4 * instance + _INSTANCE_KEY, t
        return None, max(t, *(self.latest[instance] for instance in instances))

    def _is_parked_at(self, thread: LocalThread, instances: list[int]) -> bool:
        """Whether a thread that runs again was parked at one of ``instances``."""
        if thread.key is None or thread.key % 4 != _INSTANCE_KEY:
            return False
        return thread.key // 4 in instances

    def _begin(
        self,
        thread: LocalThread,
        step: int,
        row: int,
        rows: tuple[int, ...],
        t: int,
        ready: list[LocalThread],
    ) -> tuple[int | None, int]:
        """Wait until the host has issued a launch and the launches before it have ended."""
        i = thread.base + row
        if self.issued[i] < 0:
            return 4 * i + _ISSUE_KEY, t
        return self._after(thread.base, rows, max(t, self.issued[i]))

    def _after(self, base: int, rows: tuple[int, ...], t: int) -> tuple[int | None, int]:
        """Wait until launches have ended."""
        for r in rows:
            end = self.ended[base + r]
            if end < 0:
                return 4 * (base + r) + _END_KEY, t
            t = max(t, end)
        return None, t
