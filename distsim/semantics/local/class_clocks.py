"""The local driver for classes of ranks: the order of steps from one rank of each class, the times
of all its ranks as one column.

Key idea: the representatives run first and record a tape of what ran when. Every step on the tape
is then done again, as `distsim.semantics.local.rank_clocks` does it with one clock, but with
a column of clocks, one for each rank of the class. What has arrived is known from the
representatives' run, so only times remain to be computed.

This works because the order of the steps, and where each rank stops, is the same for all ranks of
a stable class (`distsim.semantics.local.quotient`); only the times differ, for example because one
member is late. numpy does the arithmetic for a whole class at once, so the cost of Python per step
is paid once per class instead of once per rank.

It does not decide whether folding pays (`distsim.semantics.local.run`), and it does not check that
the classes are stable.

In this module ``cls`` is a `QuotientClass`, ``t`` the clocks of a thread on all ranks of a class,
and ``i`` the rows of one call on all these ranks.
"""

from __future__ import annotations

import numpy as np

from distsim.common.arrays import IntArray
from distsim.semantics.form.completion import CompletionConditions
from distsim.semantics.form.instructions import KIND_COLLECTIVE, KIND_WORK
from distsim.semantics.form.linked_program import LinkedProgram
from distsim.semantics.local.quotient import QuotientClass, QuotientProgram
from distsim.semantics.local.rank_clocks import (
    NEVER_KEY,
    LocalClocks,
    LocalRunInputs,
    LocalThread,
    RowTimes,
    RunProgress,
    ThreadSegment,
    create_rank_threads,
    flatten_unit_threads,
    local_run_inputs,
)
from distsim.semantics.local.thread_steps import (
    NO_ROW,
    STEP_BEGIN,
    STEP_COLLECTIVE,
    STEP_FINISH,
    STEP_ISSUE,
    STEP_JOIN,
    STEP_MESSAGE,
    STEP_POST,
    STEP_RENDEZVOUS,
    STEP_SYNC,
    STEP_WAIT,
    STEP_WAIT_EACH,
    STEP_WAIT_ENDS,
    STEP_WORK,
    ThreadStep,
)

_POSTING_STEPS = (STEP_POST, STEP_MESSAGE, STEP_JOIN, STEP_COLLECTIVE)


def run_quotient(
    linked: LinkedProgram, conditions: CompletionConditions, quotient: QuotientProgram
) -> RunProgress:
    """Run a program by its classes; the result describes every rank."""
    tape: list[ThreadSegment] = []
    representatives = LocalClocks(_quotient_inputs(linked, conditions, quotient), tape).run()
    clocks = _ClassClocks(linked, conditions, quotient)
    for segment in tape:
        clocks.replay(segment)
    return clocks.progress(representatives)


class _DenseRows:
    """The rows of the representatives, as one dense block.

    Only these rows take part in the run, and the driver keeps a list entry for every row number.
    ``rows``: by new row, the row of the linked program. ``first``: by class, the first new row of
    its representative.
    """

    def __init__(self, linked: LinkedProgram, quotient: QuotientProgram) -> None:
        representatives = [int(cls.ranks[0]) for cls in quotient.classes]
        sizes = np.array(
            [linked.base[rank + 1] - linked.base[rank] for rank in representatives], dtype=np.int64
        )
        ends = np.cumsum(sizes)
        base = np.array([cls.base[0] for cls in quotient.classes], dtype=np.int64)
        self.first = ends - sizes
        self.rows = np.repeat(base - self.first, sizes) + np.arange(sizes.sum())
        self._class_of_rank = quotient.of
        self._rank_of_row = linked.rank
        self._base_of_rank = np.array(linked.base, dtype=np.int64)

    def renumbered(self, column: IntArray) -> IntArray:
        """Rows of any rank as new rows of the representative of its class.

        A representative may need a row of a rank that does not run. Stability guarantees that the
        representative of that rank's class has an equivalent row at the same offset.
        """
        # Negative entries are markers ("none", "never arrives") and stay as they are. The index is
        # clipped to 0 only so that it can be looked up; `where` discards the result.
        row = np.maximum(column, 0)
        rank = self._rank_of_row[row]
        new_row = self.first[self._class_of_rank[rank]] + row - self._base_of_rank[rank]
        return np.where(column >= 0, new_row, column)


def _quotient_inputs(
    linked: LinkedProgram, conditions: CompletionConditions, quotient: QuotientProgram
) -> LocalRunInputs:
    """The inputs of a run of the representatives, with their rows renumbered."""
    dense = _DenseRows(linked, quotient)
    rows = dense.rows
    instance = linked.instance[rows]
    # An instance counts down the members that it still waits for. Here the members of one class
    # arrive together, so the count is that of the distinct places, not of the ranks.
    missing = [
        places if complete else places + 1  # one more than can ever arrive
        for places, complete in zip(quotient.places, quotient.complete, strict=True)
    ]
    hosts: list[LocalThread] = []
    streams: list[LocalThread] = []
    for cls in quotient.classes:
        rank = int(cls.ranks[0])
        # Instances of one kind behave equally, so the run needs one instance for each kind.
        rendezvous = [int(quotient.kinds[i]) for i in linked.rendezvous_of[rank]]
        steps = flatten_unit_threads(linked, cls.unit)
        host, host_streams = create_rank_threads(
            linked, steps, cls.number, int(dense.first[cls.number]), rendezvous, rank
        )
        hosts.append(host)
        streams += host_streams
    return LocalRunInputs(
        linked,
        conditions,
        need=dense.renumbered(conditions.need[rows]).tolist(),
        freed_by=dense.renumbered(conditions.freed_by[rows]).tolist(),
        lag=conditions.lag[rows].tolist(),
        duration=conditions.duration[rows].tolist(),
        instance=np.where(instance >= 0, quotient.kinds[instance], -1).tolist(),
        kind=linked.kind[rows].tolist(),
        partial_waits=_partial_waits(conditions, dense),
        missing=missing,
        hosts=hosts,
        streams=streams,
    )


def _partial_waits(
    conditions: CompletionConditions, dense: _DenseRows
) -> dict[int, tuple[int, ...]]:
    """The rows that a row of an irregular collective needs, both as new rows."""
    if not conditions.partial_waits:
        return {}
    found: dict[int, tuple[int, ...]] = {}
    new_row = {int(row): i for i, row in enumerate(dense.rows.tolist())}
    for row, needs in conditions.partial_waits.items():
        if row in new_row:
            needed = dense.renumbered(np.array(needs, dtype=np.int64))
            # Several needed ranks may have one representative: wait for it once.
            found[new_row[row]] = tuple(dict.fromkeys(needed.tolist()))
    return found


class _ClassClocks:
    """The times of all ranks while the tape is replayed.

    ``clocks``: by thread of a representative, the clocks of that thread on all ranks of the class.
    ``latest``: by instance, when the last member arrived. ``arrived_at``: (class, number) of the
    rendezvous that a class has reached; ``rendezvous``: by class, the instances of its rendezvous,
    of shape (numbers, ranks).

    Invariant: the tape lists every step after the steps whose results it needs, so each time that
    a step reads has its final value.
    """

    def __init__(
        self, linked: LinkedProgram, conditions: CompletionConditions, quotient: QuotientProgram
    ) -> None:
        self.linked, self.conditions, self.quotient = linked, conditions, quotient
        self.posted, self.issued, self.returned, self.ended, self.waited = (
            np.full(linked.rows, -1, dtype=np.int64) for _ in range(5)
        )
        self.latest = np.zeros(len(linked.members), dtype=np.int64)
        self.clocks: dict[int, IntArray] = {}
        self._stream_rows: dict[int, set[int]] = {}
        self.arrived_at: set[tuple[int, int]] = set()
        self.rendezvous = [
            np.array([linked.rendezvous_of[rank] for rank in cls.ranks.tolist()], dtype=np.int64).T
            for cls in quotient.classes
        ]

    def replay(self, segment: ThreadSegment) -> None:
        """Do the steps of a segment, and post what the step posts at which the thread parked."""
        thread = segment.thread
        cls = self.quotient.classes[thread.rank]
        t = self.clocks.get(id(thread))
        if t is None:
            t = self._start(thread, cls)
        # A thread parks inside a step: it has posted, and waits for others. When it is woken, the
        # next segment starts with the same step, whose post is then skipped (see `_post`).
        for step in thread.steps[segment.start : segment.end]:
            self._post(cls, step, t)
            t = self._wait(cls, step, t)
        if segment.end < len(thread.steps):
            self._post(cls, thread.steps[segment.end], t)
        self.clocks[id(thread)] = t

    def _start(self, thread: LocalThread, cls: QuotientClass) -> IntArray:
        # Only hosts start late (fault `delay`); a stream waits for what its host issues.
        if not thread.is_host:
            return np.zeros(len(cls.ranks), dtype=np.int64)
        delays = self.linked.program.delays
        return np.array([delays.get(rank, 0) for rank in cls.ranks.tolist()], dtype=np.int64)

    def _post(self, cls: QuotientClass, thread_step: ThreadStep, t: IntArray) -> None:
        """The part of a step that other threads see, whether or not the step completes."""
        step, row, rows = thread_step
        i = cls.base + row  # the row of this call on every rank of the class
        # Either all ranks of the class have posted this row or none, so the first is enough.
        if step in _POSTING_STEPS and self.posted[i[0]] < 0:
            self.posted[i] = t
            if step in (STEP_JOIN, STEP_COLLECTIVE):
                # `maximum.at` and not an indexed assignment: ranks of the class may be members of
                # the same instance, and then its index occurs several times.
                np.maximum.at(self.latest, self.linked.instance[i], t)
        elif step == STEP_ISSUE:
            self.issued[i] = t
        elif step == STEP_RENDEZVOUS and (cls.number, rows[0]) not in self.arrived_at:
            for number in rows:
                self.arrived_at.add((cls.number, number))
                np.maximum.at(self.latest, self.rendezvous[cls.number][number], t)

    def _wait(  # noqa: PLR0912  (one branch per kind of step)
        self, cls: QuotientClass, thread_step: ThreadStep, t: IntArray
    ) -> IntArray:
        """The clocks after a step that completes."""
        step, row, rows = thread_step
        i = cls.base + row
        if step in (STEP_MESSAGE, STEP_COLLECTIVE):
            t = np.maximum(t, self._ends(i))
            self.returned[i] = t
        elif step == STEP_WORK:
            self.posted[i] = t
            t = t + self.conditions.duration[i]
            self.ended[i] = t
            # Work that a stream runs blocks no host, so it sets no time of return here.
            if row not in self._rows_on_streams(cls):
                self.returned[i] = t
        elif step == STEP_RENDEZVOUS:
            for number in rows:
                t = np.maximum(t, self.latest[self.rendezvous[cls.number][number]])
            # A call may consist of several rendezvous; it returns after the last.
            if row >= 0:
                self.returned[i] = np.maximum(self.returned[i], t)
        elif step == STEP_BEGIN:
            # A launch starts when the stream is free (t), the host has issued it, and the launches
            # that it is ordered after have ended.
            t = self._after(cls, rows, np.maximum(t, self.issued[i]))
        elif step in (STEP_WAIT_ENDS, STEP_SYNC):
            t = self._after(cls, rows, t)
            if row >= 0:
                self.returned[i] = t
        elif step == STEP_WAIT:
            t = self._all_done(cls, rows, t)
            if row >= 0:
                self.returned[i] = t
        elif step == STEP_WAIT_EACH:
            t = self._all_done(cls, rows[:1], t)
            if row >= 0:
                self.returned[i] = t
            # The first row is the awaited request; the others record when it was waited for.
            for r in rows[1:]:
                self.waited[cls.base + r] = t
        elif step == STEP_FINISH:
            t = self._all_done(cls, rows, t)
            self.ended[i] = t
        return t

    def _rows_on_streams(self, cls: QuotientClass) -> set[int]:
        rows = self._stream_rows.get(cls.number)
        if rows is None:
            rows = {launch.row for launch in cls.unit.launches if launch.on_stream}
            self._stream_rows[cls.number] = rows
        return rows

    def _after(self, cls: QuotientClass, rows: tuple[int, ...], t: IntArray) -> IntArray:
        for r in rows:
            t = np.maximum(t, self.ended[cls.base + r])
        return t

    def _all_done(self, cls: QuotientClass, rows: tuple[int, ...], t: IntArray) -> IntArray:
        for r in rows:
            t = np.maximum(t, self._ends(cls.base + r))
        return t

    def _ends(self, i: IntArray) -> IntArray:
        # The calls of one row have one kind on all ranks of a class, because they share a unit.
        kind = self.linked.kind[i[0]]
        if kind == KIND_WORK:
            return self.ended[i]
        if kind == KIND_COLLECTIVE:
            return self.conditions.collective_ends(i, self.posted, self.latest)
        return self.conditions.message_ends(i, self.posted)

    # --- the result ---
    def progress(self, representatives: LocalClocks) -> RunProgress:
        """The result of the run for every rank."""
        linked = self.linked
        times = RowTimes(self.posted, self.issued, self.returned, self.ended, self.waited)
        run = RunProgress(local_run_inputs(linked, self.conditions, plain=False), times)
        run.latest = self.latest
        in_instance = (linked.instance >= 0) & (self.posted >= 0)
        # Count again by rank what the representatives' run counted by class: who has arrived where.
        arrived = np.bincount(linked.instance[in_instance], minlength=len(linked.members))
        for cls in self.quotient.classes:
            self._set_hosts(run, representatives, cls)
            for number in (n for c, n in self.arrived_at if c == cls.number):
                instances = self.rendezvous[cls.number][number].tolist()
                for rank, instance in zip(cls.ranks.tolist(), instances, strict=True):
                    run.came.setdefault(instance, []).append(rank)
                    arrived[instance] += 1
        run.missing = (np.array(run.missing, dtype=np.int64) - arrived).tolist()
        return run

    def _set_hosts(
        self, run: RunProgress, representatives: LocalClocks, cls: QuotientClass
    ) -> None:
        """Copy where the representative's host has stopped to all ranks of its class."""
        host = representatives.hosts[cls.number]
        clocks = self._since(representatives, host, cls).tolist()
        for rank, clock in zip(cls.ranks.tolist(), clocks, strict=True):
            own = run.hosts[rank]
            own.pc, own.ended, own.clock = host.pc, host.ended, clock
            own.key = None if host.ended else NEVER_KEY

    def _since(
        self, representatives: LocalClocks, host: LocalThread, cls: QuotientClass
    ) -> IntArray:
        """A host's clocks at its end, or since when it waits for something that is missing.

        As in `LocalClocks`, the clock of a blocked host includes the waits that are over. The tape
        does not: a segment ends before the step in which its thread stopped.
        """
        t = self.clocks.get(id(host), np.zeros(len(cls.ranks), dtype=np.int64))
        step, _, rows = (
            host.steps[host.pc] if host.pc < len(host.steps) else (STEP_POST, NO_ROW, ())
        )
        if step == STEP_WAIT:
            for r in rows:
                if representatives.done(host.base + r, 0)[0] is not None:
                    break
                t = np.maximum(t, self._ends(cls.base + r))
        elif step == STEP_WAIT_ENDS:
            for r in rows:
                if representatives.ended[host.base + r] < 0:
                    break
                t = np.maximum(t, self.ended[cls.base + r])
        return t
