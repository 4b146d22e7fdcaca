"""The driver for ranks in classes: the order of steps from one rank of each class, the times of all
its ranks as one column.

Every step is what `distsim.semantics.local.rank_clocks` does with one clock, done with a column of
clocks: the times of a row are `CompletionConditions.ends`, and who has come is known from the
representatives' run.
"""

from __future__ import annotations

import numpy as np

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
    STEP_POST,
    STEP_RENDEZVOUS,
    STEP_SYNC,
    STEP_WAIT,
    STEP_WAIT_EACH,
    STEP_WAIT_ENDS,
    STEP_WORK,
    ThreadStep,
)
from distsim.semantics.form.linked_program import IntArray, LinkedProgram
from distsim.semantics.local.quotient import QuotientClass, QuotientProgram
from distsim.semantics.local.rank_clocks import (
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


def run_quotient(
    linked: LinkedProgram, conditions: CompletionConditions, folded: QuotientProgram
) -> RunProgress:
    """Run a program by its classes; what it left is told of every rank."""
    tape: list[ThreadSegment] = []
    course, first = _quotient_inputs(linked, conditions, folded)
    ran = LocalClocks(course, tape).run()
    columns = _ClassClocks(linked, conditions, folded)
    for segment in tape:
        columns.replay(segment)
    return columns.progress(ran, first)


def _quotient_inputs(
    linked: LinkedProgram, conditions: CompletionConditions, folded: QuotientProgram
) -> tuple[LocalRunInputs, IntArray]:
    """The course of the first rank of each class, rows numbered anew; and where each class's rows
    begin.
    """
    base = np.array([one.base[0] for one in folded.classes], dtype=np.int64)
    sizes = np.array(
        [linked.base[one.ranks[0] + 1] - linked.base[one.ranks[0]] for one in folded.classes],
        dtype=np.int64,
    )
    first = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])
    rows = np.repeat(base - first[:-1], sizes) + np.arange(first[-1])
    all_base = np.array(linked.base, dtype=np.int64)

    def of(column: IntArray) -> IntArray:
        """Rows as rows of the classes' first ranks."""
        there = np.maximum(column, 0)
        rank = linked.rank[there]
        return np.where(column >= 0, first[folded.of[rank]] + there - all_base[rank], column)

    instance = linked.instance[rows]
    kinds = np.where(instance >= 0, folded.kinds[instance], -1)
    own = {int(row): i for i, row in enumerate(rows.tolist())} if conditions.early else {}
    early = {
        own[row]: tuple(dict.fromkeys(of(np.array(needs, dtype=np.int64)).tolist()))
        for row, needs in conditions.early.items()
        if row in own
    }
    missing = [
        places if whole else places + 1
        for places, whole in zip(folded.places, folded.complete, strict=True)
    ]
    hosts, streams = [], list[LocalThread]()
    for one in folded.classes:
        rank = int(one.ranks[0])
        meets = [int(folded.kinds[i]) for i in linked.meets[rank]]
        host, more = create_rank_threads(
            linked,
            flatten_unit_threads(linked, one.unit),
            one.number,
            int(first[one.number]),
            meets,
            rank,
        )
        hosts.append(host)
        streams += more
    return LocalRunInputs(
        linked,
        conditions,
        of(conditions.need[rows]).tolist(),
        of(conditions.room[rows]).tolist(),
        conditions.lag[rows].tolist(),
        conditions.price[rows].tolist(),
        kinds.tolist(),
        linked.kind[rows].tolist(),
        early,
        missing,
        hosts,
        streams,
    ), first


class _ClassClocks:
    """Times of all ranks while the tape is followed."""

    def __init__(
        self, linked: LinkedProgram, conditions: CompletionConditions, folded: QuotientProgram
    ) -> None:
        self.linked, self.conditions, self.folded = linked, conditions, folded
        self.posted, self.issued, self.returned, self.ended, self.waited = (
            np.full(linked.rows, -1, dtype=np.int64) for _ in range(5)
        )
        self.latest = np.zeros(len(linked.members), dtype=np.int64)
        self.clocks: dict[int, IntArray] = {}
        self._on_streams: dict[int, set[int]] = {}
        self.met: set[tuple[int, int]] = (
            set()
        )  # (class, number) of meets that its ranks have come to
        self.meets = [
            np.array([linked.meets[rank] for rank in one.ranks.tolist()], dtype=np.int64).T
            for one in folded.classes
        ]

    def replay(self, segment: ThreadSegment) -> None:
        """Follow one thread of a class, and let it post what it stops at."""
        thread, one = segment.thread, self.folded.classes[segment.thread.rank]
        t = self.clocks.get(id(thread))
        if t is None:
            t = self._start(thread, one)
        for step in thread.steps[segment.start : segment.end]:
            t = self._step(one, step, t, done=True)
        if segment.end < len(thread.steps):
            self._step(one, thread.steps[segment.end], t, done=False)
        self.clocks[id(thread)] = t

    def _start(self, thread: LocalThread, one: QuotientClass) -> IntArray:
        late = self.linked.program.delays
        return np.array(
            [late.get(rank, 0) if thread.is_host else 0 for rank in one.ranks.tolist()],
            dtype=np.int64,
        )

    def _step(self, one: QuotientClass, at: ThreadStep, t: IntArray, done: bool) -> IntArray:
        """The clocks after a step; where it is not done, only what others see of it happens."""
        step, row, rows = at
        i = one.base + row
        if step in (STEP_POST, STEP_MESSAGE, STEP_JOIN, STEP_COLLECTIVE) and self.posted[i[0]] < 0:
            self.posted[i] = t
            if step in (STEP_JOIN, STEP_COLLECTIVE):
                np.maximum.at(self.latest, self.linked.instance[i], t)
        elif step == STEP_ISSUE:
            self.issued[i] = t
        elif step == STEP_RENDEZVOUS and (one.number, rows[0]) not in self.met:
            for number in rows:
                self.met.add((one.number, number))
                np.maximum.at(self.latest, self.meets[one.number][number], t)
        return self._await(one, at, i, t) if done else t

    def _await(self, one: QuotientClass, at: ThreadStep, i: IntArray, t: IntArray) -> IntArray:
        step, row, rows = at
        if step in (STEP_MESSAGE, STEP_COLLECTIVE):
            t = np.maximum(t, self._ends(i))
            self.returned[i] = t
        elif step == STEP_WORK:
            self.posted[i] = t
            t = t + self.conditions.price[i]
            self.ended[i] = t
            if self._on_host(one, row):
                self.returned[i] = t
        elif step == STEP_RENDEZVOUS:
            for number in rows:
                t = np.maximum(t, self.latest[self.meets[one.number][number]])
            if row >= 0:
                self.returned[i] = np.maximum(self.returned[i], t)
        elif step == STEP_BEGIN:
            t = self._after(one, rows, np.maximum(t, self.issued[i]))
        elif step in (STEP_WAIT, STEP_WAIT_EACH, STEP_WAIT_ENDS, STEP_SYNC):
            waits = rows[:1] if step == STEP_WAIT_EACH else rows
            t = (
                self._after(one, rows, t)
                if step in (STEP_WAIT_ENDS, STEP_SYNC)
                else self._all_done(one, waits, t)
            )
            if row >= 0:
                self.returned[i] = t
            for r in rows[1:] if step == STEP_WAIT_EACH else ():
                self.waited[one.base + r] = t
        elif step == STEP_FINISH:
            t = self._all_done(one, rows, t)
            self.ended[i] = t
        return t

    def _on_host(self, one: QuotientClass, row: int) -> bool:
        return row not in self._stream_rows(one)

    def _stream_rows(self, one: QuotientClass) -> set[int]:
        found = self._on_streams.get(one.number)
        if found is None:
            found = self._on_streams[one.number] = {
                launch.row for launch in one.unit.launches if launch.on_stream
            }
        return found

    def _after(self, one: QuotientClass, rows: tuple[int, ...], t: IntArray) -> IntArray:
        for r in rows:
            t = np.maximum(t, self.ended[one.base + r])
        return t

    def _all_done(self, one: QuotientClass, rows: tuple[int, ...], t: IntArray) -> IntArray:
        for r in rows:
            t = np.maximum(t, self._ends(one.base + r))
        return t

    def _ends(self, i: IntArray) -> IntArray:
        kind = self.linked.kind[i[0]]
        if kind == KIND_WORK:
            return self.ended[i]
        if kind == KIND_COLLECTIVE:
            return self.conditions.collective_ends(i, self.posted, self.latest)
        return self.conditions.message_ends(i, self.posted)

    # --- the end ---
    def _since(self, ran: LocalClocks, host: LocalThread, one: QuotientClass) -> IntArray:
        """A host's clocks at its end, or since it waits for what is missing: what it waited for
        before that is done.
        """
        t = self.clocks.get(id(host), np.zeros(len(one.ranks), dtype=np.int64))
        step, _, rows = host.steps[host.pc] if host.pc < len(host.steps) else (STEP_POST, -1, ())
        for r in rows if step == STEP_WAIT else ():
            if ran.done(host.base + r, 0)[0] is not None:
                break
            t = np.maximum(t, self._ends(one.base + r))
        for r in rows if step == STEP_WAIT_ENDS else ():
            if ran.ended[host.base + r] < 0:
                break
            t = np.maximum(t, self.ended[one.base + r])
        return t

    def progress(self, ran: LocalClocks, first: IntArray) -> RunProgress:
        """What the classes left, of every rank."""
        linked, folded = self.linked, self.folded
        times = RowTimes(self.posted, self.issued, self.returned, self.ended, self.waited)
        left = RunProgress(local_run_inputs(linked, self.conditions, plain=False), times)
        left.latest = self.latest
        came = np.bincount(
            linked.instance[(linked.instance >= 0) & (self.posted >= 0)],
            minlength=len(linked.members),
        )
        for one in folded.classes:
            host = ran.hosts[one.number]
            clocks = self._since(ran, host, one).tolist()
            for rank, clock in zip(one.ranks.tolist(), clocks, strict=True):
                mine = left.hosts[rank]
                mine.pc, mine.ended, mine.clock = host.pc, host.ended, clock
                mine.key = None if host.ended else -1
            for number in (n for c, n in self.met if c == one.number):
                for rank, instance in zip(
                    one.ranks.tolist(), self.meets[one.number][number].tolist(), strict=True
                ):
                    left.came.setdefault(instance, []).append(rank)
                    came[instance] += 1
        left.missing = (np.array(left.missing, dtype=np.int64) - came).tolist()
        return left
