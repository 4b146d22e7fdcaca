"""The event-driven engine: the rules of `distsim.semantics.ordered.transitions`, driven by a clock.

Key idea: everything happens at its own time, so the order of arrival is right, for any-source
receives, shared network cards, queues and dying ranks, under all profiles. The engine accepts every
program, and is the reference that the faster drivers are tested against.

Times: a message finishes at max(both sides ready) + cost, for both sides. A buffered send is done
when it is ready, and its data arrive at ready + cost. A member of a collective finishes at
max(arrival of those it needs) + cost. Transfers that share links at the same time take longer
(`distsim.engine.link_sharing`).
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import chain

import numpy as np

from distsim.backends import BackendProfile
from distsim.backends.message_matching import ANY_SENDER
from distsim.common.records import dataclass
from distsim.engine.deadlines import RunDeadlines, TimedOutCall
from distsim.engine.event_clock import ClockEntry, EventClock
from distsim.engine.host_states import HostStates
from distsim.engine.in_flight import InFlightTransfers
from distsim.engine.message_arrivals import MessageArrivals, ReceiveSchedule
from distsim.engine.run_record import CallKey, QueueNames, RunColumns
from distsim.engine.timeout_check import exceeds_timeout
from distsim.findings.final_state import FinalState
from distsim.hardware.cost import CostModel
from distsim.program.model import Program, RankFault
from distsim.semantics.classes.representatives import FoldingError
from distsim.semantics.form.compiler import exit_by_fault
from distsim.semantics.form.instructions import BlockForever, ExitRank, Instruction, PartKind
from distsim.semantics.form.linked_program import LinkedProgram
from distsim.semantics.form.mismatches import RowMismatch
from distsim.semantics.form.order_dependence import (
    exits_change_result,
    exits_with_open_requests,
)
from distsim.semantics.ordered.blocked_state import blocked_state_at
from distsim.semantics.ordered.machine_tables import OP_DROP, OP_POST, OP_RENDEZVOUS, OP_WAIT
from distsim.semantics.ordered.state import DUE, RUNNING, RowsMismatched
from distsim.semantics.ordered.transitions import TransitionRules

__all__ = ["CallKey", "ReceiveSchedule", "OrderedRun", "simulate_in_order"]

_SEND, _RECEIVE = int(PartKind.SEND), int(PartKind.RECEIVE)
#: The time from the last line of a script until its process closes its sockets. A process with
#: torch takes 0.1 s to 1 s, depending on the load of the machine (measured). Messages still arrive
#: in that time.
EXIT_NS = 100_000_000
#: Faults that may strike at a time.
_TIMED_FAULTS = ("kill", "raise", "exit", "fail")


@dataclass(frozen=True)
class OrderedRun:
    """The result of a run.

    - ``matches``: rows that matched, in the order in which the last of them finished.
    - ``end_ns``: when the last event happened.
    - ``late``: calls whose timeout expired.
    - ``undefined``: ranks that are blocked where the backend's behaviour is undefined.
    """

    columns: RunColumns
    final_state: FinalState
    matches: tuple[tuple[int, ...], ...]
    mismatches: tuple[RowMismatch, ...]
    end_ns: int
    queues: QueueNames
    late: tuple[TimedOutCall, ...] = ()
    undefined: tuple[int, ...] = ()


def simulate_in_order(
    program: Program,
    profile: BackendProfile,
    cost: CostModel,
    follow: ReceiveSchedule | None = None,
    *,
    linked: LinkedProgram | None = None,
) -> OrderedRun:
    """Run a program until it ends or hangs; once more with deadlines, if a wait exceeded a timeout.

    A receive that ``follow`` names waits for its message even if others have arrived. Raises
    UsageError if that message never arrives. ``linked``: the program under the profile, if the
    caller has it.
    """
    rules = TransitionRules(linked or LinkedProgram(program, profile))
    follow = follow or {}
    # Most programs end with nothing open and no rank blocked. Then it makes no difference whether
    # processes end, and a run in which they stay is faster: hosts need not look for lost ranks.
    may_lose_requests = exits_with_open_requests(rules.linked)
    rules.processes_stay = rules.detects_peer_death and not may_lose_requests
    engine = _EventDrivenEngine(rules, cost, follow)
    run = engine.run()
    if rules.processes_stay and engine.exits_matter(run):
        rules.processes_stay = False
        run = _EventDrivenEngine(rules, cost, follow).run()
    if not exceeds_timeout(program, profile, run.columns):
        return run
    if program.representative_of is not None:
        raise FoldingError
    rules.processes_stay = False
    return _EventDrivenEngine(rules, cost, follow, timed=True).run()


#: The rows of a message, or the instance of a collective.
_MismatchKey = tuple[int, ...] | int


class _EventDrivenEngine:
    """One run. It is the `distsim.semantics.ordered.state.TransitionListener` of its rules.

    By row, -1 where there is none: ``began``, ``finished``, ``waited`` (times, ns), ``match`` (the
    first of the rows that matched) and ``mate`` (the other side of a message).

    - ``matches``: rows that matched, in order; ``rows_of_instance``: those of complete collectives.
    - ``mismatches``: the latest of each message or collective that differs.
    - ``due_now``: rows that are due and finish without taking time.
    - ``take_scheduled_at``: the time for which a take is already scheduled, or -1.
    - ``exited_with_requests``: some rank has ended while requests of it were open.

    Entries of the clock are integers where possible, because a run has millions: a row that
    finishes, or ``~rank`` for a host that continues; anything else is called.
    """

    def __init__(
        self, rules: TransitionRules, cost: CostModel, follow: ReceiveSchedule, timed: bool = False
    ) -> None:
        self.rules, self.program = rules, rules.program
        self.state = rules.initial()
        self.clock = EventClock(self._instant)
        self.arrivals = MessageArrivals(rules, self.state, follow)
        self.deadlines = RunDeadlines(rules, self.state) if timed else None
        self.hosts = HostStates(self.program.world_size)
        rows = rules.linked.rows
        self.began = [-1] * rows
        self.finished = [-1] * rows
        self.waited = [-1] * rows
        self.match = [-1] * rows
        self.mate = [-1] * rows
        self.matches: list[tuple[int, ...]] = []
        self.mismatches: dict[_MismatchKey, RowsMismatched] = {}
        self.rows_of_instance: dict[int, tuple[int, ...]] = {}
        self.due_now: list[int] = []
        self.has_any_source = bool(rules.open_boxes)
        #: Part of the protocol of a listener: whether it ignores `started` and `touched`.
        self.quiet = not (self.has_any_source or timed)
        self.take_scheduled_at = -1
        self.exited_with_requests = False
        self.ended_ranks: set[int] = set()
        #: A heap: when the process of a rank that has ended closes its sockets, and the rank.
        self.exits_due: list[tuple[int, int]] = []
        #: Ranks whose `EXIT_NS` have passed, but whose process waits for open collectives.
        self.overdue_exits: set[int] = set()
        self.now = 0
        # Looked up for each of the millions of events of a run, so without a detour.
        self.rank_of, self.put = rules.rank_of, self.clock.put
        self.transfers = InFlightTransfers(
            rules, cost, self.clock, self.arrivals, self.mate, self._finish, self._take
        )

    def run(self) -> OrderedRun:
        self._start()
        exits_take_time = self.rules.profile.joins_collectives_at_exit
        if self.deadlines is None and (self.rules.processes_stay or not exits_take_time):
            self.clock.run()
            return self._result()
        has_events = True
        while has_events:
            self.clock.run(self._next_deadline, self._reach_deadline)
            # Nothing else can happen now, so an exit need not take its time.
            has_events = self._close_next_process() or self._schedule_monitored_timeout()
        return self._result()

    def _next_deadline(self) -> int | None:
        """When the next timeout expires, or the next process that exits closes its sockets."""
        times = [self.exits_due[0][0]] if self.exits_due else []
        if self.deadlines is not None:
            expires = self.deadlines.next_ns(self.hosts.since)
            times += [] if expires is None else [expires]
        return min(times, default=None)

    def _reach_deadline(self) -> None:
        self.now = self.clock.now
        while self.exits_due and self.exits_due[0][0] <= self.now:
            self._close_process(heappop(self.exits_due)[1])
        self._expire()

    def _schedule_monitored_timeout(self) -> bool:
        """If a monitored_barrier will still time out, let the clock continue until then.

        All ranks are blocked. Returns whether there is such a timeout.
        """
        if self.deadlines is None or not self.deadlines.watches(self.hosts.since):
            return False
        at = self.deadlines.next_ns(self.hosts.since)
        if at is None or at < self.clock.now:
            return False
        self.clock.put(at, self._expire)
        return True

    # --- exits of processes ---
    def _close_next_process(self) -> bool:
        """Let the next exit that does not wait for a collective proceed.

        Returns whether there is one.
        """
        while self.exits_due:
            if self._close_process(heappop(self.exits_due)[1]):
                return True
        return False

    def _close_process(self, rank: int) -> bool:
        """Let a process that exits close its sockets. Returns whether it closes any.

        If it then waits for an open collective, it keeps those of the groups that are still open.
        """
        can_continue = self.rules.can_continue_exit(self.state, rank)
        if can_continue:
            self.rules.continue_exit(self.state, rank, self)
            self._follow_up()
        if rank in self.state.exiting:
            self.overdue_exits.add(rank)
        return can_continue

    def _note_exit_progress(self, row: int) -> None:
        rank = self.rank_of[row]
        if rank in self.overdue_exits:
            self.overdue_exits.discard(rank)
            heappush(self.exits_due, (self.now, rank))

    def exits_matter(self, run: OrderedRun) -> bool:
        """Whether the result may change if processes end with their programs."""
        if self.exited_with_requests or self.exits_due:
            return True

        def has_open_collective() -> bool:
            # `exited_with_requests` is already set if a rank has ended with an open collective.
            return False

        return exits_change_result(self.rules.linked, run.final_state, has_open_collective)

    def _start(self) -> None:
        """Schedule faults and the starts of hosts.

        At the same instant faults go before other events, but a fault at time 0 goes after the
        starts of the hosts.
        """
        timed = [fault for fault in self.program.faults if fault.at_ns is not None]
        faults = [fault for fault in timed if fault.kind in _TIMED_FAULTS]
        for fault in faults:
            if fault.at_ns != 0:
                self._schedule_fault(fault)
        for rank, end in enumerate(self.state.ends):
            if end is None:
                self.clock.put(self.program.delays.get(rank, 0), ~rank)
        for fault in faults:
            if fault.at_ns == 0:
                self._schedule_fault(fault)

    def _schedule_fault(self, fault: RankFault) -> None:
        def strike() -> None:
            self._apply_fault(fault.rank, fault.kind, fault.code)

        self.clock.put(fault.at_ns or 0, strike)

    def _instant(self, entries: list[ClockEntry]) -> None:
        """All entries of one instant: rows that finish, hosts that continue, and calls."""
        self.now = self.clock.now
        host, finish = self._host, self._finish
        for entry in entries:
            if type(entry) is not int:
                entry()  # type: ignore[operator]
            elif entry < 0:
                host(~entry)
            else:
                finish(entry)

    def _finish(self, row: int) -> None:
        """A row finishes, unless it was cancelled meanwhile."""
        if self.state.phase[row] == DUE:
            self.rules.finish(self.state, row, self)
            if self.due_now or self.arrivals.fresh or self.arrivals.changed:
                self._follow_up()

    # --- hosts ---
    def _host(self, rank: int) -> None:  # noqa: PLR0912  (hot loop, see below)
        """Run a host until it has to wait.

        This loop takes most of the time of a run. So it runs posts and waits itself, and calls
        `_step` only for the rest, and for waits while some rank is lost. ``lock``: the backend has
        one lock per process. ``here``: the call that the host is in.
        """
        state, rules, hosts = self.state, self.rules, self.hosts
        phase, stopped = state.phase, hosts.open[rank]
        if stopped >= 0 and phase[stopped] and not state.lost_ranks:
            hosts.waiting.add(rank)
            return
        steps, ends, pc, now, lock, base = (
            rules.steps[rank],
            state.ends,
            state.pc,
            self.now,
            rules.locked[rank],
            rules.base[rank],
        )
        entered, here, follows, arrivals = (
            hosts.entered[rank],
            hosts.position[rank],
            self.has_any_source,
            self.arrivals,
        )
        while ends[rank] is None:
            op, instruction, task, position, rows = steps[pc[rank]]
            if position != here:
                here = hosts.position[rank] = position
                entered.append(now)
            if op > OP_WAIT:  # neither a post nor a wait
                if not self._step(rank, op, instruction):
                    return
            elif op == OP_POST:
                if lock and task.locks and rules.worker_has_lock(state, rank):  # type: ignore[union-attr]
                    self._block(rank, instruction, -1)
                    return
                pc[rank] += 1
                rules.post(state, rank, task, self)  # type: ignore[arg-type]
                if rules.ranks_to_end:
                    rules.abort(state, self)
                if self.due_now or (follows and (arrivals.fresh or arrivals.changed)):
                    self._follow_up()
                if self.deadlines is not None:
                    self.deadlines.enqueued(rank, base + task.row, now)  # type: ignore[union-attr]
            else:
                # A row that is over has the phase CLOSED (0).
                for row in rows:
                    if phase[base + row]:
                        break
                else:
                    if instruction.waited:  # type: ignore[union-attr]
                        self._note_wait(rank, instruction)
                    pc[rank] += 1
                    if lock:
                        rules.start_waiting_collective(state, rank, self)
                        rules.abort(state, self)
                    if self.due_now or (follows and (arrivals.fresh or arrivals.changed)):
                        self._follow_up()
                    hosts.blocked[rank] = False
                    continue
                if not state.lost_ranks:
                    self._block(rank, instruction, base + row)
                    return
                if not self._step(rank, op, instruction):
                    return
            hosts.blocked[rank] = False

    def _step(self, rank: int, op: int, instruction: Instruction) -> bool:
        """Run a step of any kind. Returns whether the host continues."""
        state, rules, now = self.state, self.rules, self.now
        if not rules.can_step(state, rank):
            row = -1
            if op == OP_WAIT:
                row = rules.open_row(state, rank, instruction.rows)  # type: ignore[union-attr]
            self._block(rank, instruction, row)
            return False
        if op == OP_DROP and self._yields(rank, instruction):
            return False
        if op == OP_WAIT and instruction.waited:  # type: ignore[union-attr]
            self._note_wait(rank, instruction)
        _, _, task, _, _ = rules.steps[rank][state.pc[rank]]  # before the step moves on
        rules.step(state, rank, self)
        self.hosts.blocked[rank] = False
        self._follow_up()
        if task is not None and self.deadlines is not None:
            self.deadlines.enqueued(rank, rules.base[rank] + task.row, now)
        if op == OP_RENDEZVOUS and rules.can_step(state, rank):
            # The last rank to arrive lets the others continue first, in the order of arrival.
            self.put(now, ~rank)
            return False
        return True

    def _yields(self, rank: int, drop: Instruction) -> bool:
        """Let other hosts go first, once, before a request of an earlier call is dropped.

        A rank that posts a partner at this instant still matches it. Returns whether the host
        yields.
        """
        hosts, row = self.hosts, self.rules.base[rank] + drop.row  # type: ignore[union-attr]
        is_of_earlier_call = self.rules.part(row).position < drop.position
        has_yielded = hosts.yielded[rank]
        yields = is_of_earlier_call and not has_yielded
        hosts.yielded[rank] = yields
        if yields:
            self.put(self.now, ~rank)
        return yields

    def _note_wait(self, rank: int, wait: Instruction) -> None:
        base, now = self.rules.base[rank], self.now
        for row in wait.waited:  # type: ignore[union-attr]
            self.waited[base + row] = now

    def _block(self, rank: int, instruction: Instruction, row: int) -> None:
        """A host waits, for a row or for something else (-1)."""
        hosts = self.hosts
        if not hosts.blocked[rank] or row != hosts.open[rank]:
            hosts.blocked[rank], hosts.since[rank] = True, self.now
            if self.deadlines is not None:
                self.deadlines.blocked(rank, self.now, instruction, row)
        hosts.open[rank] = row
        hosts.waiting.add(rank)

    def _wake(self, rank: int) -> None:
        if rank in self.hosts.waiting:
            self.hosts.waiting.discard(rank)
            self.put(self.now, ~rank)

    def _wake_all(self) -> None:
        for rank in sorted(self.hosts.waiting):
            self.put(self.now, ~rank)
        self.hosts.waiting.clear()

    def _apply_fault(self, rank: int, kind: str, code: int) -> None:
        """A fault at a time."""
        if self.state.ends[rank] is None:
            self.rules.kill(
                self.state,
                rank,
                exit_by_fault(self.rules.position(self.state, rank), kind, code),
                self,
            )
            self._follow_up()
            self._wake(rank)

    def _expire(self) -> None:
        """A timeout expires.

        A rank that is not in the wait itself finds its group closed when it reaches the wait (G10).
        """
        self.now = self.clock.now
        if self.deadlines is None or self.deadlines.next_ns(self.hosts.since) != self.now:
            return
        rank, outcome = self.deadlines.expire()
        if isinstance(outcome, ExitRank):
            self.rules.kill(self.state, rank, outcome, self)
            self._follow_up()
        else:
            self.rules.close(self.state, rank, outcome)
        self._wake_all()

    # --- what follows from a choice ---
    def _follow_up(self) -> None:
        """Finish rows that take no time, and let any-source receives take messages.

        What follows from a row comes before the next row. So the newest rows are taken first, and
        rows that became due together in their order.
        """
        while self.due_now:
            rows, self.due_now = self.due_now[::-1], []
            while rows:
                row = rows.pop()
                if self.state.phase[row] == DUE:
                    self.rules.finish(self.state, row, self)
                rows += self.due_now[::-1]
                self.due_now.clear()
        if self.has_any_source and (self.arrivals.fresh or self.arrivals.changed):
            self._match_any_source_receives()

    def _match_any_source_receives(self) -> None:
        arrivals = self.arrivals
        while arrivals.fresh:
            receive = arrivals.fresh.pop()
            if self.state.phase[receive] == RUNNING:
                send = arrivals.waiting_for(receive, self.now)
                if send >= 0:
                    self.rules.take(self.state, send, self)
                    self._follow_up()
        if self.take_scheduled_at != self.now and arrivals.may_take(self.now):
            self.take_scheduled_at = self.now
            self.put(self.now, self._take)

    def _take(self) -> None:
        """An any-source receive takes the first message, after all other events of this instant."""
        self.take_scheduled_at = -1
        send = self.arrivals.first(self.now)
        if send >= 0:
            self.rules.take(self.state, send, self)
            self._follow_up()

    # --- events of the rules ---
    def due(self, row: int, /) -> None:
        self.began[row] = now = self.now
        end = self.transfers.end_of(row)
        if end > now:
            self.put(end, row)
        elif end >= 0:  # not `END_UNKNOWN`: the flow of a transfer will report its end
            self.due_now.append(row)

    def done(self, row: int, /) -> None:
        self.finished[row] = now = self.now
        rank, hosts = self.rank_of[row], self.hosts
        # A host that waits for something else than a row (-1) looks again after each of its rows.
        if rank in hosts.waiting and (hosts.open[rank] in (row, -1) or self.state.lost_ranks):
            hosts.waiting.discard(rank)
            self.put(now, ~rank)
        if self.deadlines is not None and self.rules.is_launch(row):
            self.deadlines.done(rank, self.now)
        if self.overdue_exits:
            self._note_exit_progress(row)

    def started(self, row: int, /) -> None:
        kind, rules = self.rules.kind[row], self.rules
        if kind < 0:
            self.began[row] = self.now
            return
        if kind == _SEND:
            self.arrivals.arrived[row] = self.now
        elif self.has_any_source and kind == _RECEIVE and rules.peer[row] == ANY_SENDER:
            self.arrivals.fresh.append(row)
        if self.deadlines is not None:
            self.deadlines.started(row, self.now)

    def met(self, rows: tuple[int, ...], instance: int, /) -> None:
        self.matches.append(rows)
        if instance < 0:
            send, receive = rows
            self.mate[send], self.mate[receive] = receive, send
            self.match[send] = self.match[receive] = min(send, receive)
            return
        first = min(rows)
        for row in rows:
            self.match[row] = first
        self.rows_of_instance[instance] = rows

    def mismatched(self, event: RowsMismatched, /) -> None:
        self.mismatches[event.rows if event.instance < 0 else event.instance] = event

    def released(self, rank: int, /) -> None:
        self._wake(rank)

    def ended(self, rank: int, gone: bool, /) -> None:
        if rank not in self.ended_ranks:
            self.ended_ranks.add(rank)
            self.hosts.since[rank] = self.now
        if rank in self.state.exiting:
            heappush(self.exits_due, (self.now + EXIT_NS, rank))
        if gone and self.rules.detects_peer_death:
            self._wake_all()
        elif not self.exited_with_requests:
            self.exited_with_requests = self.rules.has_open_requests(self.state, rank)

    def groups_closed(self, rank: int, /) -> None:
        self._wake_all()

    def cancelled(self, row: int, /) -> None:
        """The row's end stays -1."""
        if self.overdue_exits:
            self._note_exit_progress(row)

    def touched(self, box: int, /) -> None:
        self.arrivals.changed[box] = None

    # --- the end ---
    def _result(self) -> OrderedRun:
        self.arrivals.check()
        since, finished = self.hosts.since, self.finished
        untimed = blocked_state_at(self.rules, self.state)
        ends = tuple(
            end if end.status == "absent" else end._replace(at_ns=since[end.rank])
            for end in untimed.ends
        )
        blocked = tuple(one._replace(since_ns=since[one.rank]) for one in untimed.blocked)
        mismatches = tuple(
            RowMismatch(self._all_that_met(event), event.fields, event.outcome)
            for event in self.mismatches.values()
        )
        numbers, names = self.rules.linked.queue_names()
        return OrderedRun(
            columns=self._columns(),
            final_state=FinalState(ends, blocked, untimed.unreceived),
            matches=_matches_by_end(self.matches, finished),
            mismatches=mismatches,
            end_ns=max([0, *since, max(finished, default=0)]),
            queues=(numbers.tolist(), names),
            late=tuple(self.deadlines.late) if self.deadlines is not None else (),
            undefined=self._undefined(),
        )

    def _all_that_met(self, event: RowsMismatched) -> tuple[int, ...]:
        """The rows of a mismatch; for a collective, all that arrived in the end."""
        if event.instance in self.rows_of_instance:
            return self.rows_of_instance[event.instance]
        arrived = self.state.arrived.get(event.instance)
        return event.rows if arrived is None else tuple(arrived.values())

    def _columns(self) -> RunColumns:
        columns = RunColumns(self.program)
        columns.started = np.array(self.began, dtype=np.int64)
        columns.finished = np.array(self.finished, dtype=np.int64)
        columns.waited = np.array(self.waited, dtype=np.int64)
        columns.match = np.array(self.match, dtype=np.int64)
        self.hosts.write(self.rules.linked, columns)
        duration = columns.finished - columns.started
        for row, ns in self.transfers.alone.items():
            if columns.finished[row] >= 0 and duration[row] != ns:
                columns.alone[row] = ns
        return columns

    def _undefined(self) -> tuple[int, ...]:
        blocked = [rank for rank, end in enumerate(self.state.ends) if end is None]
        return tuple(rank for rank in blocked if self._is_undefined(rank))

    def _is_undefined(self, rank: int) -> bool:
        instruction = self.rules.instruction(self.state, rank)
        return isinstance(instruction, BlockForever) and instruction.undefined


def _matches_by_end(
    matches: list[tuple[int, ...]], finished: list[int]
) -> tuple[tuple[int, ...], ...]:
    """Rows that matched, in the order in which the last of them finished.

    Rows of which none has finished (-1) are omitted.
    """
    if not matches:
        return ()
    counts = np.fromiter(map(len, matches), dtype=np.int64)
    rows = np.fromiter(chain.from_iterable(matches), dtype=np.int64)
    begin = np.cumsum(counts) - counts
    ends = np.maximum.reduceat(np.array(finished)[rows], begin)
    firsts = np.minimum.reduceat(rows, begin)
    order = np.lexsort((firsts, ends))
    order = order[ends[order] >= 0]
    return tuple(matches[number] for number in order.tolist())
