"""The parent: loads what all need, forks the ranks, is their hub until nothing can go on, and
leaves no process behind.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from distsim.backends import BACKEND_PROFILES
from distsim.backends.profile import BackendProfile
from distsim.common.records import gc_paused
from distsim.script_capture.hub.event_loop import Hub
from distsim.script_capture.hub.state import RankProcess, exit_of_status
from distsim.script_capture.launch.rank_process import (
    CaptureTarget,
    ChildOptions,
    die_with_parent,
    run_rank_process,
    torchrun_environment,
)
from distsim.script_capture.launch.reaper import (
    CAPTURE_VARIABLE,
    OrphanReaper,
    processes_started_by,
)
from distsim.script_capture.patches import rebind
from distsim.script_capture.patches.dynamo import exclude_from_dynamo
from distsim.script_capture.protocol.wire import SharedMemoryRegions, listen_for_ranks

#: Ranks that a script which starts them itself may have.
_MAX_SPAWNED_RANKS = 64


@dataclass(frozen=True)
class CaptureRunOptions:
    """How a program is captured. ``ranks``: 0 starts one process, which starts the ranks itself.

    ``backend``: whose rules choose between messages; None takes the one that the script asks for,
    of which the hub knows only then.
    """

    target: CaptureTarget
    ranks: int = 0
    nodes: int = 1
    backend: str | None = None
    timeout_s: float | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    keep_output: bool = False
    child_options: ChildOptions = field(default_factory=ChildOptions)


@dataclass(frozen=True)
class CapturedRun:
    """What came of it. ``ended``: "ended", "stalled" or "late". ``ranks``: by rank, those who
    joined.

    ``outputs``: what they wrote, where it was kept. ``stood``: the ranks before the first time-out
    passed. ``past``: worlds that the script started before and that came to their end, one after
    the other.
    """

    capture_options: CaptureRunOptions
    ended: str
    world: int
    ranks: Mapping[int, RankProcess]
    others: tuple[RankProcess, ...]
    outputs: Mapping[int, str] = field(default_factory=dict)
    stood: Mapping[int, RankProcess] | None = None
    past: tuple[CapturedRun, ...] = ()

    @property
    def evaluated_ranks(self) -> Mapping[int, RankProcess]:
        """The ranks as they are to be judged: where a time-out ended one, as all stood before."""
        late = any(m.ended is not None and m.ended.how == "raised" for m in self.ranks.values())
        return self.stood if self.stood is not None and late else self.ranks


def run_capture(
    capture_options: CaptureRunOptions, meanwhile: Callable[[], object] | None = None
) -> CapturedRun:
    """Run a program under the hub. The caller has imported what its ranks need. ``meanwhile``: done
    in a thread, once they have started.
    """
    keeper = OrphanReaper()
    regions = SharedMemoryRegions(
        max(capture_options.ranks, 1) if capture_options.ranks else _MAX_SPAWNED_RANKS
    )
    listener, address = listen_for_ranks(os.urandom(4).hex())
    hub = Hub(
        listener,
        regions,
        BACKEND_PROFILES[capture_options.backend or "gloo"],
        None if capture_options.backend else _profile_of_request,
    )
    parent = _RankLauncher(hub, keeper)
    _become_subreaper()
    before = _install_signal_handlers()
    _load_shared_modules()
    try:
        for rank in range(max(capture_options.ranks, 1)):
            parent.start(capture_options, rank, address, regions)
        if meanwhile is not None:
            threading.Thread(target=meanwhile, daemon=True).start()
        with gc_paused():
            ended = hub.run(capture_options.timeout_s, parent.reap)
            if (
                ended == "stalled"
                and len(hub.ranks) < hub.world
                and processes_started_by(keeper.token)
            ):
                ended = "late"  # a rank that is missing may be a program without the hub
    finally:
        parent.end_all()
        hub.close()
        keeper.let_go()
        _restore_signal_handlers(before)
    others = tuple(m for m in hub.members.values() if m.rank < 0)
    written, past = (
        parent.written(),
        tuple(
            CapturedRun(capture_options, "ended", n, dict(sorted(ranks.items())), ())
            for n, ranks in hub.past
        ),
    )
    ranks = dict(sorted(hub.ranks.items()))
    return CapturedRun(
        capture_options,
        ended,
        hub.world or capture_options.ranks,
        ranks,
        others,
        written,
        hub.silence.stood,
        past,
    )


def _load_shared_modules() -> None:
    """Do here, once, what each rank would do in memory of its own. Not where the script alone
    brings torch.
    """
    if "torch" in sys.modules:
        for name in ("install", "start_methods"):
            import_module(f"distsim.script_capture.patches.{name}")
        exclude_from_dynamo()
        rebind.find_references()


def _install_signal_handlers() -> dict[signal.Signals, Any]:
    """Signals that end a process end what it started first; what was set before. One that is
    ignored stays so (nohup).
    """
    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            with suppress(ValueError):  # not the main thread
                before[number] = signal.signal(number, _exit_on_signal)
    return before


def _exit_on_signal(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _restore_signal_handlers(before: Mapping[signal.Signals, Any]) -> None:
    for number, action in before.items():
        signal.signal(number, action)


def _profile_of_request(asked: str) -> BackendProfile:
    return BACKEND_PROFILES[known_backend(asked)]


def known_backend(asked: str, on: str = "") -> str:
    """A back end that distsim knows, of what a script asks for. ``on``: which of
    ``cpu:gloo,cuda:nccl``; "" is the CPU's.
    """
    if ":" in asked:
        pairs = dict(pair.split(":", 1) for pair in asked.split(","))
        asked = pairs.get(on or "cpu", next(iter(pairs.values())))
    return asked if asked in BACKEND_PROFILES else "gloo"


class _RankLauncher:
    def __init__(self, hub: Hub, keeper: OrphanReaper) -> None:
        self.hub, self.keeper = hub, keeper
        self.before = set(_descendants(os.getpid(), set()))
        self.started: list[int] = []
        self.open: set[int] = set()
        self.outputs: dict[int, int] = {}

    def start(
        self,
        capture_options: CaptureRunOptions,
        rank: int,
        address: str,
        regions: SharedMemoryRegions,
    ) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if capture_options.keep_output:
            self.outputs[rank] = os.memfd_create(f"rank {rank}")
        mine, pid = os.getpid(), os.fork()
        if pid == 0:
            status = 1
            try:
                gc.freeze()  # what all ranks share stays shared: no collection walks it
                die_with_parent(mine)
                for number in (signal.SIGTERM, signal.SIGHUP):
                    if signal.getsignal(number) is _exit_on_signal:
                        signal.signal(number, signal.SIG_DFL)
                self.hub.close()
                self.keeper.close_in_child()
                status = self._child(capture_options, rank, address, regions)
            finally:
                os._exit(status)
        self.started.append(pid)
        self.open.add(pid)
        self.hub.expect(pid, rank if capture_options.ranks else -1)

    def _child(
        self,
        capture_options: CaptureRunOptions,
        rank: int,
        address: str,
        regions: SharedMemoryRegions,
    ) -> int:
        environment = {**capture_options.environment, CAPTURE_VARIABLE: self.keeper.token}
        if capture_options.ranks:
            environment |= torchrun_environment(
                rank,
                capture_options.ranks,
                capture_options.ranks // capture_options.nodes,
                capture_options.nodes,
            )
            environment |= {"DISTSIM_RANKS": str(capture_options.ranks)}
        if capture_options.keep_output:
            _redirect_output(self.outputs[rank])
        faulthandler.enable()
        return run_rank_process(
            capture_options.target, environment, address, regions, capture_options.child_options
        )

    def written(self) -> dict[int, str]:
        """What the ranks wrote, where it was kept."""
        found = {}
        for rank, fd in self.outputs.items():
            os.lseek(fd, 0, os.SEEK_SET)
            with os.fdopen(fd, encoding="utf-8", errors="replace") as file:
                found[rank] = file.read()
        return found

    def reap(self) -> None:
        """Note who has ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.open.discard(pid)
            member = self.hub.members.get(pid)
            if member is not None:
                member.gone = True
                member.ended = member.ended or exit_of_status(os.waitstatus_to_exitcode(status))

    def end_all(self) -> None:
        """End every process that descends from this capture, and wait for them."""
        for _ in range(50):
            found = set(self.open) | set(_descendants(os.getpid(), self.before))
            for pid in found:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self._wait(found)
            if not found:
                return

    def _wait(self, pids: set[int]) -> None:
        for pid in pids:
            with suppress(OSError):
                os.waitpid(pid, 0)
            self.open.discard(pid)


def _redirect_output(fd: int) -> None:
    """Let this process write there."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(fd, number)
        setattr(sys, name, os.fdopen(number, "w", buffering=1, encoding="utf-8", closefd=False))


def _become_subreaper() -> None:
    """Become the parent of processes whose own parent ends (prctl(2), PR_SET_CHILD_SUBREAPER), to
    end them as well.
    """
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


def _descendants(root: int, others: set[int]) -> list[int]:
    """Processes below ``root``, but for ``others`` and those below them."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                parents[int(name)] = int(_read_stat(name).rpartition(b")")[2].split()[1])
    found = []
    for pid in parents:
        above = pid
        while above in parents and above != root and above not in others:
            above = parents[above]
        if above == root and pid != root:
            found.append(pid)
    return found


def _read_stat(pid: str) -> bytes:
    """The line of a process in proc(5), read without a buffer: a machine has hundreds of them, and
    a report waits.
    """
    fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    try:
        return os.read(fd, 1 << 10)
    finally:
        os.close(fd)
