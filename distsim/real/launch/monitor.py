"""Looks after the workers: lets them start together, sees when nothing moves any more, ends them
all whatever happens.
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

#: How often the boards are looked at.
_POLL_S = 0.01
#: Once a rank has died, so long without progress is a standstill: a peer's error shows within
#: milliseconds (semantics 2.4).
_GRACE_AFTER_DEATH_NS = 1_500_000_000
#: How often the ranks' use of their cores is looked at.
_CPU_CHECK_INTERVAL_NS = 500_000_000
#: Until the common start, so that every rank has seen the word.
_START_LEAD_NS = 2_000_000
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class MonitorResult(NamedTuple):
    """How a run came to its end. ``reason``: done, standstill, start (not all came), interrupted.

    ``seen``: the last board of every rank; ``exits``: exit statuses of those whose process was over
    before the end was decided; ``starts_ns``: the common start of each repetition. ``still_ns``:
    how long nothing had moved then. ``ended_by``: the signal that interrupted this launcher.
    """

    reason: str
    seen: dict[int, ProgressSnapshot]
    exits: dict[int, int | None]
    starts_ns: tuple[int, ...]
    stacks: dict[int, str]
    still_ns: int = 0
    ended_by: str = ""


class RankMonitor:
    """Watches the ranks of this machine, and through ``coordinator`` those of the others."""

    def __init__(
        self,
        job: WorkerJob,
        ranks: Sequence[int],
        launcher: ProcessLauncher,
        coordinator: LaunchCoordinator,
        timeout_ns: int,
        start_ns: int,
    ) -> None:
        self.job, self.ranks, self.launcher, self.coordinator = (
            job,
            tuple(ranks),
            launcher,
            coordinator,
        )
        self.timeout_ns, self.start_limit_ns = timeout_ns, start_ns
        self.boards = {rank: ProgressFile(job.board(rank), create=True) for rank in self.ranks}
        self.control_file = ControlFile(job.control_file, create=True)
        absent = {f.rank for f in job.program.faults if f.kind == "absent"}
        self.everyone = [r for r in range(job.program.world_size) if r not in absent]
        self.ended_by = ""  # the name of a signal
        self.began_ns = self.moved_ns = time.monotonic_ns()
        self._marks: dict[int, tuple[int, bool, int]] = {}
        self.starts: list[int] = []
        self.all: dict[int, tuple[ProgressSnapshot, int | None]] = {}
        self._worked: dict[int, int] = {}
        self._worked_ns = self.began_ns
        self._loading_ticks = 0
        self._loading_ns = self.began_ns

    # --- the loop ---
    def run(self) -> MonitorResult:
        """Until all is over, or nothing moves, or somebody wants an end. The workers are still
        there afterwards.
        """
        while True:
            self._look()
            self._start()
            reason = self.coordinator.decide(self._reason())
            if reason:
                break
            time.sleep(_POLL_S)
        still_ns = time.monotonic_ns() - self.moved_ns
        self._look()
        self._look_at_stopped()  # before its stack is asked for: the signal may end a wait of torch's sockets with an error
        stacks = self._stacks() if reason in ("standstill", "interrupted") else {}
        seen_, exits = (
            {r: s for r, (s, _) in self.all.items()},
            {r: code for r, (_, code) in self.all.items()},
        )
        return MonitorResult(
            reason, seen_, exits, tuple(self.starts), stacks, still_ns, self.ended_by
        )

    def _look(self) -> None:
        now = time.monotonic_ns()
        here = {
            rank: (board.raw(), self.launcher.exit_of(rank)) for rank, board in self.boards.items()
        }
        for rank, (data, code) in self.coordinator.share(here).items():
            board = parse_snapshot(data, rank)
            mark = (
                board.progress,
                code is None,
                board.busy_until_ns if board.phase <= RankPhase.LOADING else 0,
            )
            if self._marks.get(rank) != mark:
                self._marks[rank] = mark
                self.moved_ns = now
            if rank in self.boards and board.busy_until_ns > self.moved_ns and code is None:
                self.moved_ns = min(board.busy_until_ns, now)
            self.all[rank] = (board, code)

        if (
            self.job.backend == "gloo"
            and self.job.devices.kind == "cpu"
            and now - self._worked_ns > _CPU_CHECK_INTERVAL_NS
        ):
            self._look_at_work(now)
        if now - self._loading_ns > _CPU_CHECK_INTERVAL_NS:
            self._look_at_loading(now)

    def _look_at_loading(self, now: int) -> None:
        """Ranks that load torch on a busy machine take as long as they take: while they use their
        cores, their boards say so.
        """
        self._loading_ns = now
        loading = [
            rank
            for rank in self.ranks
            if self.all[rank][0].phase <= RankPhase.LOADING and self.all[rank][1] is None
        ]
        others = {board.pid for board, _ in self.all.values() if board.phase > RankPhase.LOADING}
        pids = (
            [int(child.pid or 0) for child in multiprocessing.active_children()] if loading else []
        )
        ticks = sum(_cpu_ticks(pid) for pid in pids if pid not in others)
        if ticks > self._loading_ticks + 1:
            for rank in loading:
                self.boards[rank].words[ProgressField.BUSY_UNTIL_NS] = now
        self._loading_ticks = ticks

    def _look_at_work(self, now: int) -> None:
        """A rank that spends its core's time in a call moves data: gloo waits without any. (nccl,
        mpi and CUDA wait by spinning.)
        """
        self._worked_ns = now
        for rank in self.ranks:
            board, code = self.all[rank]
            if code is None and board.phase == RankPhase.IN_CALL:
                ticks = _cpu_ticks(board.pid)
                if ticks > self._worked.get(rank, ticks) + 1:
                    self.moved_ns = now
                self._worked[rank] = ticks

    def _look_at_stopped(self) -> None:
        """Say of a rank whose process somebody has stopped that this is so."""
        for rank in self.ranks:
            board, code = self.all[rank]
            if code is None and not board.message and _process_state(board.pid) in ("T", "t"):
                self.all[rank] = board._replace(message=STOPPED_MESSAGE), code

    def _start(self) -> None:
        """Give the word for the next repetition when every rank waits for it."""
        turn = len(self.starts)
        if turn >= self.job.repeats:
            return
        here = [self.all[rank][0] for rank in self.ranks]
        if self.coordinator.ready(
            turn, all(b.phase == RankPhase.READY and b.repetition == turn for b in here)
        ):
            start_ns = time.monotonic_ns() + _START_LEAD_NS
            self.starts.append(start_ns)
            self.control_file.go(turn, start_ns)

    def _reason(self) -> str:
        if self.ended_by:
            return "interrupted"
        known = [self.all[rank] for rank in self.everyone if rank in self.all]
        if len(known) == len(self.everyone) and all(_has_ended(*one) for one in known):
            return "done"
        now = time.monotonic_ns()
        if self._starting(known):
            return "start" if now - self.moved_ns > self.start_limit_ns else ""
        gone = any(
            code is not None
            or b.phase in (RankPhase.RAISED, RankPhase.EXITED, RankPhase.STRUCK, RankPhase.BROKEN)
            for b, code in known
        )
        limit_ns = min(self.timeout_ns, _GRACE_AFTER_DEATH_NS) if gone else self.timeout_ns
        if any(
            b.phase == RankPhase.WRITING and code is None for b, code in known
        ):  # large tensors take their time
            limit_ns = max(limit_ns, self.start_limit_ns)
        return "standstill" if now - self.moved_ns > limit_ns else ""

    def _starting(self, known: Sequence[tuple[ProgressSnapshot, int | None]]) -> bool:
        """Some process is still loading, and none has failed."""
        if any(code is not None or b.phase == RankPhase.BROKEN for b, code in known):
            return False
        return len(known) < len(self.everyone) or any(
            b.phase in (RankPhase.NEW, RankPhase.LOADING) for b, _ in known
        )

    def _stacks(self) -> dict[int, str]:
        """The Python stack of every rank of this machine that still lives, written by itself on a
        signal.
        """
        asked = []
        for rank in self.ranks:
            board, code = self.all[rank]
            if code is None and board.pid and RankPhase.LOADING < board.phase < RankPhase.ENDED:
                with suppress(ProcessLookupError):
                    os.kill(board.pid, signal.SIGUSR1)
                    asked.append(rank)
        end = time.monotonic() + 0.5
        while time.monotonic() < end and not all(_file_size(self.job.stack(r)) for r in asked):
            time.sleep(0.01)
        time.sleep(0.02 if asked else 0)
        return {
            rank: self.job.stack(rank).read_text(errors="replace")
            for rank in asked
            if _file_size(self.job.stack(rank))
        }

    # --- the end ---
    def finish(self, clean: bool) -> None:
        """Let the ranks go, or end them; none is left when this returns."""
        if clean:
            self.control_file.stop()
        self.launcher.end(3.0 if clean else 0.0)
        for board in self.boards.values():
            board.close()
        self.control_file.close()

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Ctrl-C, a closed terminal and SIGTERM end the run in good order."""
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


def _has_ended(board: ProgressSnapshot, code: int | None) -> bool:
    return board.phase == RankPhase.ENDED or code is not None


def _cpu_ticks(pid: int) -> int:
    """What a process has had of its cores, in clock ticks (proc(5): utime and stime); 0 where that
    can't be told.
    """
    fields = _proc_stat(pid)
    return int(fields[11]) + int(fields[12]) if fields else 0


def _process_state(pid: int) -> str:
    """R, S, T, … (proc(5)); empty where that can't be told."""
    return next(iter(_proc_stat(pid)), "")


def _proc_stat(pid: int) -> list[str]:
    """The fields of proc(5) behind the command's name; none where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
