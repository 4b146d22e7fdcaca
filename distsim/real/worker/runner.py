"""Runs the program of one rank, call by call, and records when each call was posted and finished.

Each call goes through the `torch_call` of its row in the operation table. Nothing is decided during
the run: the calls are resolved and the tensors created before, so that the measured times are those
of torch. The loop in `run` writes to mapped memory directly, because every function call per event
would be measured too.
"""

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
    """The rank exits here, with a status: an `exit` step or fault."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class PlannedCall(NamedTuple):
    """A resolved call. ``cell``: offset of the first cell of its row in the time table."""

    position: int
    cell: int
    code_call: CodeCall
    call: ResolvedCall


class PendingRequests(NamedTuple):
    """Requests of a call that were not waited for yet, with the cells of their rows."""

    works: Sequence[Work]
    cells: Sequence[int]
    calls: Sequence[ResolvedCall]


class RankRunner:
    """Runs one rank's program. `prepare` first, then `ready` and `run` once per repetition.

    ``device``: where its tensors are, as torch names it. ``cuda``: torch.cuda, or None on the CPU.
    """

    def __init__(
        self,
        job: WorkerJob,
        rank: int,
        progress: ProgressFile,
        device: str = "cpu",
        cuda: ModuleType | None = None,
    ) -> None:
        import torch.distributed

        self.dist: ModuleType = torch.distributed
        self.job = job
        self.rank = rank
        self.progress = progress
        self.clock = _completion_clock(job, progress, cuda)
        self.program = job.program
        self.memory = RankTensors(job.program, rank, device)
        self.groups = RankProcessGroups(job, rank)
        self.faults = [fault for fault in job.program.faults if fault.rank == rank]
        slowdown = prod(fault.factor for fault in self.faults if fault.kind == "slow")
        self.load = ComputeLoad(progress, job.busy, slowdown, device, cuda, job.compute_times)
        self.pending: dict[int, PendingRequests] = {}  # by the position of the call
        self.last_waited: PendingRequests | None = None
        self.cells = memoryview(b"")
        self._eager = job.program.options.get("init") == "eager"
        self.plan = self._plan()
        self._run_by_kind: dict[str, Callable[[PlannedCall], None]] = {
            "p2p": self._communicate,
            "remote": self._communicate,
            "collective": self._communicate,
            "batch": self._batch,
            "wait": self._wait,
            "local": self._local,
            "group": self._group,
        }

    def _plan(self) -> list[PlannedCall]:
        """All calls of the rank; each one in the code is resolved once, however often it runs."""
        code = self.program.code(self.rank)
        resolved: dict[int, ResolvedCall] = {}
        plan = []
        for position in code.positions(self.program.row_of[self.rank]):
            code_call = code.calls[position]
            call = resolved.get(id(code_call))
            if call is None:
                call = resolved[id(code_call)] = self.program.resolve(self.rank, code_call)
            plan.append(PlannedCall(position, code.offsets[position] * ROW_WIDTH, code_call, call))
        return plan

    @property
    def calls_init_process_group(self) -> bool:
        """The program contains its own init_process_group."""
        return any(
            call.op == "init_process_group" for code in self.program.codes for call in code.calls
        )

    def prepare(self) -> None:
        """Create every tensor now, so that this is not measured."""
        for planned in self.plan:
            for buffer in buffers_of(planned.call):
                if buffer.name:
                    self.memory[buffer]
        self.load.prepare(planned.call for planned in self.plan)
        self.clock.synchronize()

    def ready(self, times: CallTimeTable) -> None:
        """Prepare a repetition: its time table, and the synchronisation of the clocks."""
        self.cells = times.cells
        self.pending.clear()
        self.clock.start(times.cells)

    # --- one repetition ---
    def run(self) -> None:
        """Run the whole program once. Raises whatever torch raises, and `RankExit`."""
        progress, cells = self.progress, self.cells
        timers = self._start_timed_faults()
        strikes = self._faults_by_position()
        late_ns = sum(fault.delay_ns for fault in self.faults if fault.kind == "late")
        if late_ns:
            self.load.spend(late_ns, busy=False)
        for planned in self.plan:
            if strikes and planned.position in strikes:
                self._strike(strikes[planned.position], planned.position)
            now = _now()
            progress.advance(RankPhase.IN_CALL, planned.position, now)
            cells[planned.cell] = now
            with self.clock.stream(planned.call.queue):
                self._run_by_kind[OPERATIONS[planned.call.op].kind](planned)
            if cells[planned.cell + RETURNED] < 0:
                cells[planned.cell + RETURNED] = _now()
        end = len(self.program.code(self.rank).calls)
        if end in strikes or (None in strikes and not self.plan):
            self._strike(strikes.get(end) or strikes[None], end)
        if self.clock.on_device:
            # At the end of the program the host waits for its device, so it may hang there.
            progress.advance(RankPhase.IN_CALL, end, _now())
            self.clock.finish()
        progress.advance(RankPhase.RUNNING, end, _now())
        for timer in timers:
            timer.cancel()

    # --- calls ---
    def _communicate(self, planned: PlannedCall) -> None:
        call, cell, cells = planned.call, planned.cell, self.cells
        operation = OPERATIONS[call.op]
        began = self.clock.before()
        result = operation.torch_call(self.dist, call, self.memory, self.groups.of(call.group))
        cells[cell + RETURNED] = _now()
        if not (operation.nonblocking or call.is_async):
            self.clock.done(began, planned.position, [cell], ("stream", call.queue))
            is_any_source_receive = call.peer is None and operation.direction == "recv"
            if is_any_source_receive and isinstance(result, int):
                cells[cell + SOURCE] = result
            return
        works: Any = [] if result is None else [result]
        if operation.kind == "collective" or self.clock.on_device:
            followed = [] if call.op in _HOST_BLOCKING_OPS else works
            queue = _launch_queue(call, self._eager)
            self.clock.follow(began, planned.position, [cell], followed, queue)
        self._keep_requests(planned, works, [cell], [call])

    def _keep_requests(
        self,
        planned: PlannedCall,
        works: Sequence[Work],
        cells: Sequence[int],
        calls: Sequence[ResolvedCall],
    ) -> None:
        """Keep the request, and release what its variable held before, as Python does."""
        for distance in planned.code_call.drops:
            self.pending.pop(planned.position - distance, None)
        if planned.code_call.handled:
            self.pending[planned.position] = PendingRequests(works, cells, calls)

    def _batch(self, planned: PlannedCall) -> None:
        call, cell, cells = planned.call, planned.cell, self.cells
        part_cells = [cell + ROW_WIDTH * (1 + k) for k in range(len(call.parts))]
        for part_cell in part_cells:
            cells[part_cell] = cells[cell]
        began = self.clock.before()
        group = call.parts[0].group if call.parts else call.group
        works: Any = OPERATIONS[call.op].torch_call(
            self.dist, call, self.memory, self.groups.of(group)
        )
        now = _now()
        for part_cell in part_cells:
            cells[part_cell + RETURNED] = now
        requests = PendingRequests(works or [], part_cells, call.parts)
        if self.clock.on_device:
            queue = _launch_queue(call.parts[0], eager=True) if call.parts else ""
            self.clock.follow(began, planned.position, part_cells, requests.works, queue)
        if planned.code_call.handled:
            cells[cell + RETURNED] = now
            self._keep_requests(planned, *requests)
        else:
            self._finish(planned.position, requests)
            cells[cell + RETURNED] = _now()
        cells[cell + FINISHED] = cells[cell + RETURNED]

    def _wait(self, planned: PlannedCall) -> None:
        invalid = planned.code_call.invalid
        if invalid is not None and not planned.code_call.waits:
            is_second_wait = invalid.code == "DS105"
            if not is_second_wait or self.last_waited is None:
                raise RuntimeError(invalid.message)
            # Wait again for the same request, to see how the backend reacts.
            self._finish(planned.position, self.last_waited)
        for distance in planned.code_call.waits:
            requests = self.pending.pop(planned.position - distance, None)
            if requests is not None:
                self._finish(planned.position, requests)
                self.last_waited = requests
        self.cells[planned.cell + FINISHED] = _now()

    def _finish(self, position: int, requests: PendingRequests) -> None:
        """Wait for requests. The backend may have returned a single Work for all of them."""
        cells = self.cells
        one_each = len(requests.works) == len(requests.cells)
        for index, work in enumerate(requests.works):
            work.wait()
            now = _now()
            finished = (index,) if one_each else range(len(requests.cells))
            self.clock.waited(position, [requests.cells[k] for k in finished])
            for k in finished:
                cell, call = requests.cells[k], requests.calls[k]
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
            self.clock.synchronize(call.stream)
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
    def _faults_by_position(self) -> dict[int | None, RankFault]:
        """The faults that end the rank before it makes a certain call."""
        return {
            fault.position: fault
            for fault in self.faults
            if fault.kind in ("kill", "raise", "exit") and fault.at_ns is None
        }

    def _start_timed_faults(self) -> list[threading.Timer]:
        timers = []
        for fault in self.faults:
            if fault.at_ns is not None:
                timer = threading.Timer(fault.at_ns / 1e9, self._strike_at, (fault,))
                timer.daemon = True
                timer.start()
                timers.append(timer)
        return timers

    def _strike_at(self, fault: RankFault) -> None:
        """A timed fault ends the rank wherever it is, as in the simulation."""
        position = self.progress.words[ProgressField.POSITION]
        if fault.kind == "raise":
            self.progress.write_message("raised by a fault")
            self.progress.advance(RankPhase.RAISED, position, _now())
            os._exit(1)
        if fault.kind == "exit":
            note_exit(self.progress, position, fault.code)
            os._exit(fault.code)
        self._strike(fault, position)

    def _strike(self, fault: RankFault, position: int) -> None:
        if fault.kind == "kill":
            self.progress.write_message("killed by a fault")
            self.progress.advance(RankPhase.STRUCK, position, _now())
            os.kill(os.getpid(), signal.SIGKILL)
        self.progress.advance(RankPhase.RUNNING, position, _now())
        if fault.kind == "exit":
            raise RankExit(fault.code)
        raise RuntimeError("raised by a fault")


#: Calls whose wait stops the host (ProcessGroupNCCL.cpp, WorkNCCL::wait with a barrier's tensor).
_HOST_BLOCKING_OPS = ("barrier", "monitored_barrier")


def _completion_clock(job: WorkerJob, progress: ProgressFile, cuda: ModuleType | None) -> HostClock:
    """The clock that records when work was finished.

    On the CPU the futures of gloo's collectives do; nccl's futures are done when the operation is
    enqueued, so a GPU needs events.
    """
    if cuda is None:
        return HostClock(tracks_futures=job.backend == "gloo")
    wait_blocks_host = job.backend != "nccl" or job.program.options.get("blocking_wait")
    return DeviceClock(progress, cuda, probes=not wait_blocks_host)


def _launch_queue(call: ResolvedCall, eager: bool) -> tuple[int, ...]:
    """The communicator of a call; its launches run one after the other.

    It is that of the group. Under lazy init, a message outside a batch uses a communicator of its
    pair of ranks (ProcessGroupNCCL.cpp, `pointToPoint`).
    """
    if call.peer is None or eager:
        return (call.group.id,)
    return (call.group.id, *sorted((call.rank, call.peer)))


def note_exit(progress: ProgressFile, position: int, code: int) -> None:
    """Record that the rank exits."""
    progress.write_message(f"exit {code}")
    progress.words[ProgressField.CODE] = code
    progress.advance(RankPhase.EXITED, position, _now())
