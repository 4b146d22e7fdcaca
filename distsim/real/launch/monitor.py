"""Watches the rank processes: starts repetitions, detects hangs, and ends all ranks.

Key idea: a hang is a time without progress. Each of these is progress:

- the progress file of any rank changed;
- a rank computes or sleeps on purpose;
- a rank uses its core in a call of gloo, which waits without using a core;
- a rank loads torch.

`moved_ns` is the time of the last progress.

The monitor only decides that a run is over and why; `results` finds out what went wrong.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from distsim.real.launch.coordinator import LaunchCoordinator
from distsim.real.launch.start_methods import ProcessLauncher
from distsim.real.shared.job import WorkerJob
from distsim.real.shared.progress_file import (
    STOPPED_MESSAGE,
    ControlFile,
    ProgressField,
    ProgressFile,
    ProgressSnapshot,
    RankPhase,
    parse_snapshot,
)

#: How often the progress files are read.
_POLL_S = 0.01
#: After a rank has died, this time without progress is a hang: an error of a peer shows within
#: milliseconds (semantics 2.4).
_GRACE_AFTER_DEATH_NS = 1_500_000_000
#: How often the CPU time of the ranks is read.
_CPU_CHECK_INTERVAL_NS = 500_000_000
#: The common start lies this far in the future, so that every rank learns of it in time.
_START_LEAD_NS = 2_000_000
#: Phases of a rank that will not continue, although its process may still live.
_FINAL_PHASES = (RankPhase.RAISED, RankPhase.EXITED, RankPhase.STRUCK, RankPhase.BROKEN)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class MonitorResult(NamedTuple):
    """How a run ended. ``reason``: done, standstill, start (ranks are missing), interrupted.

    ``seen``: the last progress of every rank. ``exits``: exit statuses of the ranks whose process
    had ended before the end of the run was decided. ``starts_ns``: the common start of each
    repetition. ``still_ns``: the time without progress at the end. ``ended_by``: the signal that
    interrupted this launcher.
    """

    reason: str
    seen: dict[int, ProgressSnapshot]
    exits: dict[int, int | None]
    starts_ns: tuple[int, ...]
    stacks: dict[int, str]
    still_ns: int = 0
    ended_by: str = ""


class _RankState(NamedTuple):
    """What the monitor knows of a rank. ``exit_code`` is None while its process lives."""

    progress: ProgressSnapshot
    exit_code: int | None

    @property
    def is_over(self) -> bool:
        return self.progress.phase == RankPhase.ENDED or self.exit_code is not None

    @property
    def has_failed_or_exited(self) -> bool:
        """Whether the rank ended before the end of its program."""
        if self.progress.phase == RankPhase.ENDED:
            return False
        return self.exit_code is not None or self.progress.phase in _FINAL_PHASES


class RankMonitor:
    """Watches the ranks of this machine and, through ``coordinator``, those of the others."""

    def __init__(
        self,
        job: WorkerJob,
        ranks: Sequence[int],
        launcher: ProcessLauncher,
        coordinator: LaunchCoordinator,
        timeout_ns: int,
        start_ns: int,
    ) -> None:
        self.job = job
        self.ranks = tuple(ranks)
        self.launcher = launcher
        self.coordinator = coordinator
        self.timeout_ns = timeout_ns
        self.start_limit_ns = start_ns
        self.progress_files = {
            rank: ProgressFile(job.progress_path(rank), create=True) for rank in self.ranks
        }
        self.control_file = ControlFile(job.control_file, create=True)
        absent = {fault.rank for fault in job.program.faults if fault.kind == "absent"}
        self.expected = [rank for rank in range(job.program.world_size) if rank not in absent]
        self.ended_by = ""  # the name of a signal
        self.began_ns = self.moved_ns = time.monotonic_ns()
        self.starts: list[int] = []
        self.states: dict[int, _RankState] = {}
        self._marks: dict[int, tuple[int, bool, int]] = {}  # what counts as progress, by rank
        self._cpu_ticks: dict[int, int] = {}
        self._cpu_checked_ns = self.began_ns
        self._loading_ticks = 0
        self._loading_checked_ns = self.began_ns

    # --- the loop ---
    def run(self) -> MonitorResult:
        """Watch until the run is over. The processes still exist afterwards; see `finish`."""
        while True:
            self._look()
            self._start_repetition()
            reason = self.coordinator.decide(self._reason())
            if reason:
                break
            time.sleep(_POLL_S)
        still_ns = time.monotonic_ns() - self.moved_ns
        self._look()
        # Before the stacks are requested: their signal may interrupt a wait of torch's sockets,
        # which then raises an error.
        self._mark_stopped_processes()
        stacks = self._stacks() if reason in ("standstill", "interrupted") else {}
        return MonitorResult(
            reason,
            {rank: state.progress for rank, state in self.states.items()},
            {rank: state.exit_code for rank, state in self.states.items()},
            tuple(self.starts),
            stacks,
            still_ns,
            self.ended_by,
        )

    def _look(self) -> None:
        """Read the state of all ranks, and note whether there was progress."""
        now_ns = time.monotonic_ns()
        local = {
            rank: (file.raw(), self.launcher.exit_of(rank))
            for rank, file in self.progress_files.items()
        }
        for rank, (contents, exit_code) in self.coordinator.share(local).items():
            state = _RankState(parse_snapshot(contents, rank), exit_code)
            self._note_progress(rank, state, now_ns)
            self.states[rank] = state

        is_gloo_on_cpu = self.job.backend == "gloo" and self.job.devices.kind == "cpu"
        if is_gloo_on_cpu and now_ns - self._cpu_checked_ns > _CPU_CHECK_INTERVAL_NS:
            self._check_cpu_use(now_ns)
        if now_ns - self._loading_checked_ns > _CPU_CHECK_INTERVAL_NS:
            self._check_loading(now_ns)

    def _note_progress(self, rank: int, state: _RankState, now_ns: int) -> None:
        progress, is_alive = state.progress, state.exit_code is None
        # While a rank loads, its launcher reports CPU use as "busy until" (`_check_loading`); later
        # the rank itself writes the end of a compute there, which is in the future.
        is_loading = progress.phase <= RankPhase.LOADING
        mark = (progress.progress, is_alive, progress.busy_until_ns if is_loading else 0)
        if self._marks.get(rank) != mark:
            self._marks[rank] = mark
            self.moved_ns = now_ns
        is_local = rank in self.progress_files
        if is_local and is_alive and progress.busy_until_ns > self.moved_ns:
            self.moved_ns = min(progress.busy_until_ns, now_ns)

    def _check_loading(self, now_ns: int) -> None:
        """Note progress of ranks that load torch, by their CPU time.

        On a busy machine loading may take very long. It goes through the progress file, so that
        launchers on other machines see it too.
        """
        self._loading_checked_ns = now_ns
        loading = [rank for rank in self.ranks if self._is_loading(rank)]
        ticks = self._ticks_of_loading_processes() if loading else 0
        if ticks > self._loading_ticks + 1:
            for rank in loading:
                self.progress_files[rank].words[ProgressField.BUSY_UNTIL_NS] = now_ns
        self._loading_ticks = ticks

    def _is_loading(self, rank: int) -> bool:
        state = self.states[rank]
        return state.exit_code is None and state.progress.phase <= RankPhase.LOADING

    def _ticks_of_loading_processes(self) -> int:
        """CPU time of all child processes but those that have finished loading.

        A process that loads may not have written its process ID yet.
        """
        snapshots = [state.progress for state in self.states.values()]
        loaded = {snapshot.pid for snapshot in snapshots if snapshot.phase > RankPhase.LOADING}
        pids = [int(child.pid or 0) for child in multiprocessing.active_children()]
        return sum(_cpu_ticks(pid) for pid in pids if pid not in loaded)

    def _check_cpu_use(self, now_ns: int) -> None:
        """Note progress of ranks that use their cores inside a call, because they move data.

        Gloo waits without using a core. nccl, mpi and CUDA spin while they wait, so this says
        nothing about them.
        """
        self._cpu_checked_ns = now_ns
        for rank in self.ranks:
            progress, exit_code = self.states[rank]
            if exit_code is None and progress.phase == RankPhase.IN_CALL:
                ticks = _cpu_ticks(progress.pid)
                if ticks > self._cpu_ticks.get(rank, ticks) + 1:
                    self.moved_ns = now_ns
                self._cpu_ticks[rank] = ticks

    def _mark_stopped_processes(self) -> None:
        """Give a message to ranks whose process was stopped (SIGSTOP, or by a debugger)."""
        for rank in self.ranks:
            state = self.states[rank]
            if state.exit_code is not None or state.progress.message:
                continue
            if _process_state(state.progress.pid) in ("T", "t"):
                stopped = state.progress._replace(message=STOPPED_MESSAGE)
                self.states[rank] = state._replace(progress=stopped)

    def _start_repetition(self) -> None:
        """Announce the start of the next repetition when every rank waits for it."""
        repetition = len(self.starts)
        if repetition >= self.job.repeats:
            return
        local = [self.states[rank].progress for rank in self.ranks]
        local_ready = all(
            progress.phase == RankPhase.READY and progress.repetition == repetition
            for progress in local
        )
        if self.coordinator.ready(repetition, local_ready):
            start_ns = time.monotonic_ns() + _START_LEAD_NS
            self.starts.append(start_ns)
            self.control_file.start_repetition(repetition, start_ns)

    # --- when it is over ---
    def _reason(self) -> str:
        """Why the run is over; empty while it continues."""
        if self.ended_by:
            return "interrupted"
        known = [self.states[rank] for rank in self.expected if rank in self.states]
        if len(known) == len(self.expected) and all(state.is_over for state in known):
            return "done"
        still_ns = time.monotonic_ns() - self.moved_ns
        if self._is_starting(known):
            return "start" if still_ns > self.start_limit_ns else ""
        return "standstill" if still_ns > self._hang_limit_ns(known) else ""

    def _is_starting(self, known: Sequence[_RankState]) -> bool:
        """Some process is still loading, and none has failed."""
        for state in known:
            if state.exit_code is not None or state.progress.phase == RankPhase.BROKEN:
                return False
        if len(known) < len(self.expected):
            return True
        return any(state.progress.phase <= RankPhase.LOADING for state in known)

    def _hang_limit_ns(self, known: Sequence[_RankState]) -> int:
        """The time without progress that counts as a hang."""
        limit_ns = self.timeout_ns
        if any(state.has_failed_or_exited for state in known):
            limit_ns = min(limit_ns, _GRACE_AFTER_DEATH_NS)
        alive = [state.progress for state in known if state.exit_code is None]
        if any(progress.phase == RankPhase.WRITING for progress in alive):
            # Writing large tensors takes time.
            limit_ns = max(limit_ns, self.start_limit_ns)
        return limit_ns

    def _stacks(self) -> dict[int, str]:
        """The Python stacks of living local ranks, which they write themselves on a signal."""
        asked = []
        for rank in self.ranks:
            progress, exit_code = self.states[rank]
            has_handler = RankPhase.LOADING < progress.phase < RankPhase.ENDED
            if exit_code is None and progress.pid and has_handler:
                with suppress(ProcessLookupError):
                    os.kill(progress.pid, signal.SIGUSR1)
                    asked.append(rank)
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            if all(_file_size(self.job.stack(rank)) for rank in asked):
                break
            time.sleep(0.01)
        time.sleep(0.02 if asked else 0)  # let the last one finish writing
        return {
            rank: self.job.stack(rank).read_text(errors="replace")
            for rank in asked
            if _file_size(self.job.stack(rank))
        }

    # --- the end ---
    def finish(self, clean: bool) -> None:
        """Release the ranks, or kill them; no rank process is left when this returns."""
        if clean:
            self.control_file.stop()
        self.launcher.end(3.0 if clean else 0.0)
        for file in self.progress_files.values():
            file.close()
        self.control_file.close()

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Let Ctrl-C, a closed terminal and SIGTERM end the run in good order."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            self.ended_by = self.ended_by or signal.Signals(number).name

        before = {name: signal.signal(name, note) for name in _SIGNALS}
        try:
            yield
        finally:
            for name, handler in before.items():
                signal.signal(name, handler)


def _cpu_ticks(pid: int) -> int:
    """The CPU time of a process in clock ticks (proc(5): utime and stime); 0 if unknown."""
    fields = _proc_stat(pid)
    return int(fields[11]) + int(fields[12]) if fields else 0


def _process_state(pid: int) -> str:
    """R, S, T, … (proc(5)); empty if unknown."""
    return next(iter(_proc_stat(pid)), "")


def _proc_stat(pid: int) -> list[str]:
    """The fields of proc(5) after the command's name; none if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
