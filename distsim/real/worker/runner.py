"""The program of one rank, call by call, each through its own row's torch call."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from math import prod
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from distsim.operations.core.resolved_call import ResolvedCall
from distsim.operations.registry import OPERATIONS
from distsim.program.code import CodeCall
from distsim.program.model import RankFault
from distsim.real.shared.job import WorkerJob
from distsim.real.shared.progress_file import (
    FINISHED,
    RETURNED,
    ROW_WIDTH,
    SOURCE,
    WAITED,
    CallTimeTable,
    ProgressField,
    ProgressFile,
    RankPhase,
)
from distsim.real.worker.compute_load import ComputeLoad
from distsim.real.worker.device_clock import DeviceClock, HostClock
from distsim.real.worker.rank_groups import RankProcessGroups
from distsim.real.worker.rank_tensors import RankTensors, buffers_of

if TYPE_CHECKING:
    from torch.distributed import Work

_now = time.monotonic_ns


class RankExit(Exception):
    """The rank leaves here: an `exit` step or fault, with its status."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class PlannedCall(NamedTuple):
    """A call with all that running it needs."""

    position: int
    cell: int  # of its line in the table
    code_call: CodeCall
    call: ResolvedCall


class PendingRequests(NamedTuple):
    """Requests of a call that are not waited for yet, with the lines of the table they belong
    to.
    """

    works: Sequence[Work]
    cells: Sequence[int]
    calls: Sequence[ResolvedCall]


class RankRunner:
    """Runs one rank's program. `prepare` first, then `ready` and `run` once per repetition.

    ``device``: where its tensors lie, as torch names it. ``cuda``: torch.cuda, or None on the
    CPU.
    """

    def __init__(
        self,
        job: WorkerJob,
        rank: int,
        board: ProgressFile,
        device: str = "cpu",
        cuda: ModuleType | None = None,
    ) -> None:
        import torch.distributed

        self.dist: ModuleType = torch.distributed
        self.job, self.rank, self.board = job, rank, board
        self.clock = _completion_clock(job, board, cuda)
        self.program = job.program
        self.memory = RankTensors(job.program, rank, device)
        self.groups = RankProcessGroups(job, rank)
        self.faults = [f for f in job.program.faults if f.rank == rank]
        slowness = prod(f.factor for f in self.faults if f.kind == "slow")
        self.load = ComputeLoad(board, job.busy, slowness, device, cuda, job.prices)
        self.open: dict[int, PendingRequests] = {}
        self.spent: PendingRequests | None = None
        self.cells = memoryview(b"")
        self._eager = job.program.options.get("init") == "eager"
        self.plan = self._plan()
        self._kinds: dict[str, Callable[[PlannedCall], None]] = {
            "p2p": self._communicate,
            "remote": self._communicate,
            "collective": self._communicate,
            "batch": self._batch,
            "wait": self._wait,
            "local": self._local,
            "group": self._group,
        }

    def _plan(self) -> list[PlannedCall]:
        code = self.program.code(self.rank)
        known: dict[int, ResolvedCall] = {}
        plan = []
        for position in code.positions(self.program.row_of[self.rank]):
            code_call = code.calls[position]
            call = known.get(id(code_call))
            if call is None:
                call = known[id(code_call)] = self.program.resolve(self.rank, code_call)
            plan.append(PlannedCall(position, code.offsets[position] * ROW_WIDTH, code_call, call))
        return plan

    @property
    def calls_init_process_group(self) -> bool:
        """The program writes its own init_process_group."""
        return any(
            call.op == "init_process_group" for code in self.program.codes for call in code.calls
        )

    def prepare(self) -> None:
        """Make every tensor now, so that no time of the run goes into it."""
        for planned in self.plan:
            for buffer in buffers_of(planned.call):
                if buffer.name:
                    self.memory[buffer]
        self.load.prepare(planned.call for planned in self.plan)
        self.clock.synchronize()

    def ready(self, times: CallTimeTable) -> None:
        """What a repetition needs and must not be counted in it: the table, the clocks
        synchronised.
        """
        self.cells = times.cells
        self.open.clear()
        self.clock.start(times.cells)

    # --- one repetition ---
    def run(self) -> None:
        """The whole program once. Raises whatever torch raises, and `RankExit`."""
        board, cells = self.board, self.cells
        timers = self._timed_faults()
        strikes = {
            f.position: f
            for f in self.faults
            if f.kind in ("kill", "raise", "exit") and f.at_ns is None
        }
        late_ns = sum(f.delay_ns for f in self.faults if f.kind == "late")
        if late_ns:
            self.load.spend(late_ns, busy=False)
        for planned in self.plan:
            if strikes and planned.position in strikes:
                self._strike(strikes[planned.position], planned.position)
            now = _now()
            board.step(RankPhase.IN_CALL, planned.position, now)
            cells[planned.cell] = now
            with self.clock.stream(planned.call.queue):
                self._kinds[OPERATIONS[planned.call.op].kind](planned)
            if cells[planned.cell + RETURNED] < 0:
                cells[planned.cell + RETURNED] = _now()
        end = len(self.program.code(self.rank).calls)
        if end in strikes or (None in strikes and not self.plan):
            self._strike(strikes.get(end) or strikes[None], end)
        if self.clock.on_device:
            board.step(
                RankPhase.IN_CALL, end, _now()
            )  # the program's end is where the host waits for its device
            self.clock.finish()
        board.step(RankPhase.RUNNING, end, _now())
        for timer in timers:
            timer.cancel()

    # --- calls ---
    def _communicate(self, planned: PlannedCall) -> None:
        call, cell, cells = planned.call, planned.cell, self.cells
        row, began = OPERATIONS[call.op], self.clock.before()
        got = row.torch_call(self.dist, call, self.memory, self.groups.of(call.group))
        cells[cell + RETURNED] = _now()
        if not (row.nonblocking or call.is_async):
            self.clock.done(began, planned.position, [cell], ("stream", call.queue))
            if call.peer is None and row.direction == "recv" and isinstance(got, int):
                cells[cell + SOURCE] = got
            return
        works: Any = [] if got is None else [got]
        if row.kind == "collective" or self.clock.on_device:
            quick = call.op not in _HOST_BLOCKING_OPS
            self.clock.follow(
                began,
                planned.position,
                [cell],
                works if quick else [],
                _launch_queue(call, self._eager),
            )
        self._keep(planned, works, [cell], [call])

    def _keep(
        self,
        planned: PlannedCall,
        works: Sequence[Work],
        cells: Sequence[int],
        calls: Sequence[ResolvedCall],
    ) -> None:
        """Bind the request, and let go of what its handle held before, as Python does."""
        for distance in planned.code_call.drops:
            self.open.pop(planned.position - distance, None)
        if planned.code_call.handled:
            self.open[planned.position] = PendingRequests(works, cells, calls)

    def _batch(self, planned: PlannedCall) -> None:
        call, cell, cells = planned.call, planned.cell, self.cells
        parts = [cell + ROW_WIDTH * (1 + k) for k in range(len(call.parts))]
        for part in parts:
            cells[part] = cells[cell]
        began = self.clock.before()
        works: Any = OPERATIONS[call.op].torch_call(
            self.dist,
            call,
            self.memory,
            self.groups.of(call.parts[0].group if call.parts else call.group),
        )
        now = _now()
        for part in parts:
            cells[part + RETURNED] = now
        opened = PendingRequests(works or [], parts, call.parts)
        if self.clock.on_device:
            self.clock.follow(
                began,
                planned.position,
                parts,
                opened.works,
                _launch_queue(call.parts[0], eager=True) if parts else "",
            )
        if planned.code_call.handled:
            cells[cell + RETURNED] = now
            self._keep(planned, *opened)
        else:
            self._finish(planned.position, opened)
            cells[cell + RETURNED] = _now()
        cells[cell + FINISHED] = cells[cell + RETURNED]

    def _wait(self, planned: PlannedCall) -> None:
        invalid = planned.code_call.invalid
        if invalid is not None and not planned.code_call.waits:
            if not invalid[1].startswith("DS105") or self.spent is None:
                raise RuntimeError(invalid[1].partition(" ")[2].splitlines()[0])
            self._finish(
                planned.position, self.spent
            )  # a second wait for a request, to see what the back end makes of it
        for distance in planned.code_call.waits:
            opened = self.open.pop(planned.position - distance, None)
            if opened is not None:
                self._finish(planned.position, opened)
                self.spent = opened
        self.cells[planned.cell + FINISHED] = _now()

    def _finish(self, position: int, opened: PendingRequests) -> None:
        cells, one_each = self.cells, len(opened.works) == len(opened.cells)
        for k, work in enumerate(opened.works):
            work.wait()
            now = _now()
            mine = (k,) if one_each else range(len(opened.cells))
            self.clock.waited(position, [opened.cells[n] for n in mine])
            for n in mine:
                cell, call = opened.cells[n], opened.calls[n]
                cells[cell + WAITED] = now
                if call.peer is None and OPERATIONS[call.op].direction == "recv":
                    cells[cell + SOURCE] = call.group.ranks[work._source_rank()]

    def _local(self, planned: PlannedCall) -> None:
        call, cells = planned.call, self.cells
        if call.op == "compute":
            began = self.clock.before() if call.queue != "host" else None
            self.load.compute(call)
            if began is not None:
                cells[planned.cell + RETURNED] = _now()
                self.clock.done(
                    began, planned.position, [planned.cell], ("stream", call.queue), compute=True
                )
                return
        elif call.op == "sleep":
            self.load.spend(call.time_ns, busy=False)
        elif call.op == "assign":
            self.memory.assign(call)
        elif call.op == "synchronize":
            self.clock.synchronize()
        elif call.op == "wait_stream":
            self.clock.wait_stream(call.queue, call.stream)
        elif call.op == "exit":
            raise RankExit(call.code)
        elif call.op == "fail":
            raise RuntimeError(call.message or "failed")
        cells[planned.cell + RETURNED] = cells[planned.cell + FINISHED] = _now()

    def _group(self, planned: PlannedCall) -> None:
        call = planned.call
        if call.op == "init_process_group":
            self.groups.start(call)
        elif call.op == "new_group":
            self.groups.step(call)
        else:
            self.groups.destroy(call)
        self.cells[planned.cell + FINISHED] = _now()

    # --- faults ---
    def _timed_faults(self) -> list[threading.Timer]:
        timers = []
        for fault in self.faults:
            if fault.at_ns is not None:
                timer = threading.Timer(fault.at_ns / 1e9, self._strike_at, (fault,))
                timer.daemon = True
                timer.start()
                timers.append(timer)
        return timers

    def _strike_at(self, fault: RankFault) -> None:
        """A fault at a time ends the rank wherever it is, as in the simulation."""
        position = self.board.words[ProgressField.POSITION]
        if fault.kind == "raise":
            self.board.say("raised by a fault")
            self.board.step(RankPhase.RAISED, position, _now())
            os._exit(1)
        if fault.kind == "exit":
            exit_rank(self.board, position, fault.code)
        self._strike(fault, position)

    def _strike(self, fault: RankFault, position: int) -> None:
        if fault.kind == "kill":
            self.board.say("killed by a fault")
            self.board.step(RankPhase.STRUCK, position, _now())
            os.kill(os.getpid(), signal.SIGKILL)
        self.board.step(RankPhase.RUNNING, position, _now())
        if fault.kind == "exit":
            raise RankExit(fault.code)
        raise RuntimeError("raised by a fault")


#: Calls whose wait stops the host (ProcessGroupNCCL.cpp, WorkNCCL::wait with a barrier's tensor).
_HOST_BLOCKING_OPS = ("barrier", "monitored_barrier")


def _completion_clock(job: WorkerJob, board: ProgressFile, cuda: ModuleType | None) -> HostClock:
    """What tells when work was done. Futures of gloo tell it of collectives; nccl's are done when
    the operation is enqueued.
    """
    if cuda is None:
        return HostClock(tracks_futures=job.backend == "gloo")
    return DeviceClock(
        board, cuda, probes=job.backend == "nccl" and not job.program.options.get("blocking_wait")
    )


def _launch_queue(call: ResolvedCall, eager: bool) -> tuple[int, ...]:
    """What a call's launch follows on its device: its group's communicator. Under lazy init a
    message outside a batch has its pair's own (ProcessGroupNCCL.cpp, `pointToPoint`)."""
    own = call.peer is not None and not eager
    return (call.group.id, *sorted((call.rank, call.peer or 0))) if own else (call.group.id,)


def exit_rank(board: ProgressFile, position: int, code: int) -> None:
    """End the process as sys.exit does, at once."""
    board.say(f"exit {code}")
    board.words[ProgressField.CODE] = code
    board.step(RankPhase.EXITED, position, _now())
    os._exit(code)
