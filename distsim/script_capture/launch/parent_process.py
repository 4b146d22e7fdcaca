"""The parent of the ranks: loads what they share, forks them, and runs the hub.

When nothing can go on, it ends every process that descends from the capture, whoever started it:
no process may be left behind.
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
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Final, NamedTuple

from distsim.backends import BACKEND_PROFILES
from distsim.backends.profile import BackendProfile
from distsim.common.records import gc_paused
from distsim.script_capture.hub.event_loop import Hub
from distsim.script_capture.hub.state import RankProcess
from distsim.script_capture.launch.capture_target import CaptureTarget
from distsim.script_capture.launch.rank_environment import (
    RANK_VARIABLE,
    RANKS_VARIABLE,
    LauncherName,
    RankPosition,
    launcher_environment,
)
from distsim.script_capture.launch.rank_process import (
    ChildOptions,
    die_with_parent,
    run_rank_process,
)
from distsim.script_capture.launch.reaper import (
    CAPTURE_VARIABLE,
    OrphanReaper,
    processes_started_by,
)
from distsim.script_capture.patches.dynamo import exclude_from_dynamo
from distsim.script_capture.patches.rebind import find_references
from distsim.script_capture.protocol.message_types import exit_of_status
from distsim.script_capture.protocol.wire import HubAddress, SharedMemoryRegions, listen_for_ranks
from distsim.script_capture.rank.line_trace import LineTrace, StackFrame, TracedLine

#: Regions of shared memory for a script that starts its ranks itself; further ranks have none.
_MAX_SPAWNED_RANKS: Final = 64
#: Rounds of killing all descendants, since processes may fork meanwhile.
_MAX_KILL_ROUNDS: Final = 50
_ENDING_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)
#: prctl(2).
_PR_SET_CHILD_SUBREAPER: Final = 36


@dataclass(frozen=True)
class CaptureRunOptions:
    """How a program is captured. ``ranks`` is 0 if the script starts the ranks itself.

    The rules of ``backend`` choose between messages; None takes the backend that the script asks
    for, which the hub learns only then. ``devices`` is a text for the report: which devices the
    ranks have, and why. ``launcher`` decides which variables a rank gets; ``local_rank_argument``
    is the option by which it also passes the local rank. ``line_traces``: by rank, where it writes
    the lines that it executes; empty if they are not traced.
    """

    target: CaptureTarget
    ranks: int = 0
    nodes: int = 1
    backend: str | None = None
    timeout_s: float | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    keep_output: bool = False
    devices: str = ""
    launcher: LauncherName = "torchrun"
    local_rank_argument: str = ""
    child_options: ChildOptions = field(default_factory=ChildOptions)
    line_traces: Mapping[int, LineTrace] = field(default_factory=dict)


@dataclass(frozen=True)
class CapturedRun:
    """What the ranks did. ``ended`` is "ended", "stalled" or "late" (`Hub.run`).

    ``ranks`` are those that joined, ``others`` processes that did not. ``outputs`` is what the
    ranks wrote, if it was kept. ``ranks_before_timeout`` are the ranks as they were before the
    first timeout expired. ``past`` are worlds that the script started before, and that ended.
    ``uses_store``: the script stored keys, by which ranks may have communicated.
    """

    capture_options: CaptureRunOptions
    ended: str
    world: int
    ranks: Mapping[int, RankProcess]
    others: tuple[RankProcess, ...]
    outputs: Mapping[int, str] = field(default_factory=dict)
    ranks_before_timeout: Mapping[int, RankProcess] | None = None
    past: tuple[CapturedRun, ...] = ()
    uses_store: bool = False

    @property
    def ended_normally(self) -> bool:
        """Whether every process ran to its end."""
        processes = (*self.ranks.values(), *self.others)
        exits = [process.ended for process in processes]
        has_ended = self.ended == "ended" and bool(exits)
        return has_ended and all(end is None or end.how == "ended" for end in exits)

    @property
    def evaluated_ranks(self) -> Mapping[int, RankProcess]:
        """The ranks to evaluate: if a timeout ended one, the ranks as they were before.

        What ranks do after a timeout does not explain why it expired.
        """
        exits = [rank.ended for rank in self.ranks.values() if rank.ended is not None]
        if self.ranks_before_timeout is not None and any(end.how == "raised" for end in exits):
            return self.ranks_before_timeout
        return self.ranks


def run_capture(
    capture_options: CaptureRunOptions, meanwhile: Callable[[], object] | None = None
) -> CapturedRun:
    """Run a program under the hub. The caller has imported what its ranks need.

    ``meanwhile`` is called in a thread, once the ranks have started.
    """
    # First of all: whatever is started from here on is cleaned up.
    reaper = OrphanReaper()
    regions = SharedMemoryRegions(capture_options.ranks or _MAX_SPAWNED_RANKS)
    listener, address = listen_for_ranks()
    hub = Hub(
        listener,
        address.token,
        regions,
        BACKEND_PROFILES[capture_options.backend or "gloo"],
        None if capture_options.backend else _profile_of_request,
    )
    launcher = _RankLauncher(hub, reaper)
    _become_subreaper()
    previous_handlers = _install_signal_handlers()
    _load_shared_modules()
    try:
        for rank in range(max(capture_options.ranks, 1)):
            launcher.start(capture_options, rank, address, regions)
        if meanwhile is not None:
            threading.Thread(target=meanwhile, daemon=True).start()
        with gc_paused():
            ended = hub.run(capture_options.timeout_s, launcher.reap)
            is_incomplete = len(hub.state.ranks) < hub.state.world_size
            if ended == "stalled" and is_incomplete and processes_started_by(reaper.token):
                ended = "late"  # a rank that is missing may be a program without the hub
    finally:
        launcher.end_all()
        hub.close()
        reaper.release()
        _restore_signal_handlers(previous_handlers)
    return _captured_run(capture_options, hub, ended, launcher.outputs_by_rank())


def _captured_run(
    capture_options: CaptureRunOptions, hub: Hub, ended: str, outputs: Mapping[int, str]
) -> CapturedRun:
    state = hub.state
    past = [
        CapturedRun(capture_options, "ended", size, dict(sorted(ranks.items())), ())
        for size, ranks in state.past_worlds
    ]
    return CapturedRun(
        capture_options,
        ended,
        world=state.world_size or capture_options.ranks,
        ranks=dict(sorted(state.ranks.items())),
        others=tuple(process for process in state.processes.values() if process.rank < 0),
        outputs=outputs,
        ranks_before_timeout=hub.quiescence.ranks_before_timeout,
        past=tuple(past),
        uses_store=state.store.has_keys_of_the_script(),
    )


def _load_shared_modules() -> None:
    """Do once, here, what each rank would do in memory of its own.

    Not if torch is not loaded: then only the script brings it.
    """
    if "torch" in sys.modules:
        for name in ("install", "start_methods"):
            import_module(f"distsim.script_capture.patches.{name}")
        exclude_from_dynamo()
        find_references()


class RankTraces(NamedTuple):
    """By rank: the lines that it executed, and the stack of its last call."""

    lines: dict[int, tuple[TracedLine, ...]]
    stacks: dict[int, tuple[StackFrame, ...]]


def run_with_line_traces(captured: CapturedRun, timeout_s: float) -> RankTraces:
    """Run the program again, and return what each rank executes.

    Its output is discarded. Empty if the program starts its ranks itself.
    """
    first_options = captured.capture_options
    traces = {rank: LineTrace() for rank in range(first_options.ranks)}
    if not traces:
        return RankTraces({}, {})
    capture_options = replace(
        first_options,
        timeout_s=timeout_s,
        keep_output=True,
        line_traces=traces,
        child_options=first_options.child_options._replace(counts=False, checks_values=False),
    )
    run_capture(capture_options)
    return RankTraces(
        {rank: tuple(trace.lines()) for rank, trace in traces.items()},
        {rank: trace.stack() for rank, trace in traces.items()},
    )


# --- backends ---
def _profile_of_request(requested: str) -> BackendProfile:
    return BACKEND_PROFILES[known_backend(requested)]


def known_backend(requested: str, device: str = "") -> str:
    """The backend of distsim for what a script asks for.

    ``device`` selects one of ``cpu:gloo,cuda:nccl``; "" is the CPU.
    """
    if ":" in requested:
        by_device = dict(pair.split(":", 1) for pair in requested.split(","))
        requested = by_device.get(device or "cpu", next(iter(by_device.values())))
    return requested if requested in BACKEND_PROFILES else "gloo"


# --- signals ---
def _install_signal_handlers() -> dict[signal.Signals, Any]:
    """Let signals that end this process first end what it started. Returns what was set before.

    A signal that is ignored (nohup) stays ignored.
    """
    previous = {}
    for number in _ENDING_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            with suppress(ValueError):  # not the main thread
                previous[number] = signal.signal(number, _exit_on_signal)
    return previous


def _exit_on_signal(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _restore_signal_handlers(previous: Mapping[signal.Signals, Any]) -> None:
    for number, action in previous.items():
        signal.signal(number, action)


# --- processes ---
class _RankLauncher:
    """Starts and ends the ranks.

    ``open`` are the processes that were started and have not been waited for. ``earlier`` are
    processes that existed before, and must not be ended.
    """

    def __init__(self, hub: Hub, reaper: OrphanReaper) -> None:
        self.hub = hub
        self.reaper = reaper
        self.earlier = set(_descendants(os.getpid(), set()))
        self.open: set[int] = set()
        self.output_descriptors: dict[int, int] = {}

    def start(
        self,
        capture_options: CaptureRunOptions,
        rank: int,
        address: HubAddress,
        regions: SharedMemoryRegions,
    ) -> None:
        """Fork a rank."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if capture_options.keep_output:
            self.output_descriptors[rank] = os.memfd_create(f"rank {rank}")
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                self._prepare_child(parent)
                status = self._run_child(capture_options, rank, address, regions)
            finally:
                os._exit(status)
        self.open.add(pid)
        self.hub.expect(pid, rank if capture_options.ranks else -1)

    def _prepare_child(self, parent: int) -> None:
        """Undo in a rank what only the parent needs."""
        gc.freeze()  # what all ranks share stays shared: no collection touches it
        die_with_parent(parent)
        for number in _ENDING_SIGNALS:
            if signal.getsignal(number) is _exit_on_signal:
                signal.signal(number, signal.SIG_DFL)
        self.hub.close()
        self.reaper.close_in_child()

    def _run_child(
        self,
        capture_options: CaptureRunOptions,
        rank: int,
        address: HubAddress,
        regions: SharedMemoryRegions,
    ) -> int:
        target = capture_options.target
        environment = {**capture_options.environment, CAPTURE_VARIABLE: self.reaper.token}
        ranks = capture_options.ranks
        if ranks:
            nodes = capture_options.nodes
            position = RankPosition(rank, ranks, ranks // nodes, nodes)
            environment |= launcher_environment(capture_options.launcher, position)
            environment |= {RANK_VARIABLE: str(rank), RANKS_VARIABLE: str(ranks)}
            option = capture_options.local_rank_argument
            if option:
                words = (f"{option}={position.local_rank}", *target.args)
                target = replace(target, args=words)
        if capture_options.keep_output:
            _redirect_output(self.output_descriptors[rank])
        faulthandler.enable()
        return run_rank_process(
            target,
            environment,
            address,
            regions,
            capture_options.child_options,
            capture_options.line_traces.get(rank),
        )

    def outputs_by_rank(self) -> dict[int, str]:
        """What the ranks wrote, if it was kept."""
        outputs = {}
        for rank, descriptor in self.output_descriptors.items():
            os.lseek(descriptor, 0, os.SEEK_SET)
            with os.fdopen(descriptor, encoding="utf-8", errors="replace") as file:
                outputs[rank] = file.read()
        return outputs

    def reap(self) -> None:
        """Note which processes have ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.open.discard(pid)
            process = self.hub.state.processes.get(pid)
            if process is not None:
                process.disconnected = True
                if process.ended is None:  # it could not report anything itself
                    process.ended = exit_of_status(os.waitstatus_to_exitcode(status))

    def end_all(self) -> None:
        """End every process that descends from this capture, and wait for them."""
        for _ in range(_MAX_KILL_ROUNDS):
            pids = set(self.open) | set(_descendants(os.getpid(), self.earlier))
            for pid in pids:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self._wait(pids)
            if not pids:
                return

    def _wait(self, pids: set[int]) -> None:
        for pid in pids:
            with suppress(OSError):
                os.waitpid(pid, 0)
            self.open.discard(pid)


def _redirect_output(descriptor: int) -> None:
    """Let this process write its standard output and error there."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(descriptor, number)
        setattr(sys, name, os.fdopen(number, "w", buffering=1, encoding="utf-8", closefd=False))


def _become_subreaper() -> None:
    """Become the parent of descendants whose own parent ends, to be able to end them as well."""
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _descendants(root: int, excluded: set[int]) -> list[int]:
    """Processes below ``root``, without those in ``excluded`` and what is below them."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                parents[int(name)] = _parent_of(name)
    found = []
    for pid in parents:
        ancestor = pid
        while ancestor in parents and ancestor != root and ancestor not in excluded:
            ancestor = parents[ancestor]
        if ancestor == root and pid != root:
            found.append(pid)
    return found


def _parent_of(pid: str) -> int:
    """The parent's process id: the second field behind the name in parentheses (proc(5))."""
    return int(_read_stat(pid).rpartition(b")")[2].split()[1])


def _read_stat(pid: str) -> bytes:
    """Read /proc/PID/stat without a buffer: a machine has hundreds, and a report waits for it."""
    descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    try:
        return os.read(descriptor, 1 << 10)
    finally:
        os.close(descriptor)
