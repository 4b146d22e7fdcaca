"""One rank's process: torch loaded, connected, the program run, what it holds written down; then it
waits to be let go.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from multiprocessing.process import BaseProcess

from distsim.common.errors import EnvironmentFault
from distsim.real.shared.device_selection import default_variables
from distsim.real.shared.job import WorkerJob, pack_record
from distsim.real.shared.progress_file import (
    CallTimeTable,
    ControlFile,
    ProgressField,
    ProgressFile,
    RankPhase,
)
from distsim.real.worker.compute_load import wait_until
from distsim.real.worker.runner import RankExit, RankRunner, exit_rank

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.0005
#: The last part of the wait for the common start is spun.
_SPIN_NS = 500_000
#: Errors of the machine, whenever they show: NCCL finds ranks on one GPU at its first operation.
_ENVIRONMENT_ERRORS = (
    "Duplicate GPU detected",
    "Multiple Ranks are using the same GPU",
    "CUDA out of memory",
    "CUDA driver",
    "no CUDA-capable device",
    "no kernel image is available",
)
#: Lines written to find out what recording costs.
_RECORDING_TRIALS = 2000


def run_rank(job: WorkerJob, rank: int) -> None:
    """Run one rank. Ends the process; never returns."""
    status = 1
    try:
        status = _run_process(job, rank)
    finally:
        os._exit(status)


def run_elastic_rank(job: WorkerJob) -> None:
    """Entry for torch's elastic launcher, which says the rank in the environment and waits for
    those that succeed to return.
    """
    status = _run_process(job, int(os.environ["RANK"]))
    if status:
        os._exit(status)


def _run_process(job: WorkerJob, rank: int) -> int:
    board = ProgressFile(job.board(rank))
    _set_up_process(job, rank, board)
    return _run_program(job, rank, board)


def _set_up_process(job: WorkerJob, rank: int, board: ProgressFile) -> None:
    """A process group of its own, an end with its parent, Python stacks on SIGUSR1, output in a
    file.
    """
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(name, signal.SIG_DFL)
    die_with_parent(job.parent)
    launcher = multiprocessing.parent_process()
    if (
        not job.parent and launcher is not None
    ):  # the fork server is no parent that ends with its launcher
        threading.Thread(target=_die_with_launcher, args=(launcher,), daemon=True).start()
    board.words[ProgressField.PID] = os.getpid()
    board.step(RankPhase.LOADING, 0, time.monotonic_ns())
    output = os.open(job.output(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = sys.stderr = os.fdopen(
        output, "w", buffering=1, encoding="utf-8", errors="replace"
    )
    stack = os.open(job.stack(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.enable(stack, all_threads=False)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    wanted = job.environment(rank)
    os.environ.update(wanted)
    for variable in [name for name, value in wanted.items() if not value]:
        del os.environ[variable]
    for variable, value in default_variables(job.backend, job.devices).items():
        os.environ.setdefault(variable, value)


def die_with_parent(parent: int) -> None:
    """The kernel ends this process with its parent (Linux); it ends here where the parent has gone
    already. 0: don't look.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(1)


def _die_with_launcher(launcher: BaseProcess) -> None:
    launcher.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _run_program(job: WorkerJob, rank: int, board: ProgressFile) -> int:
    position = 0
    try:
        runner = _connect(job, rank, board)
        for repetition in range(job.repeats):
            times = CallTimeTable(job.times(rank, repetition), job.program.code(rank).offsets[-1])
            if repetition:
                runner.memory.reset()
            runner.ready(times)
            _await_start(job, board, repetition)
            runner.run()
            board.step(RankPhase.WRITING, board.words[ProgressField.POSITION], time.monotonic_ns())
        position = board.words[ProgressField.POSITION]
        _write_result(job, rank, runner)
    except RankExit as end:
        exit_rank(board, board.words[ProgressField.POSITION], end.code)
    except BaseException as error:
        _report_error(
            board, error, RankPhase.BROKEN if _is_before_program(job, board) else RankPhase.RAISED
        )
        return 1
    board.step(RankPhase.ENDED, position, time.monotonic_ns())
    return _wait_for_release(job, runner)


def _is_before_program(job: WorkerJob, board: ProgressFile) -> bool:
    """The program has not begun, and nobody is missing who the scenario says is."""
    startup = job.program.startup
    absent = any(fault.kind == "absent" for fault in job.program.faults) or (
        startup is not None and startup.failed
    )
    return board.words[ProgressField.PHASE] == RankPhase.LOADING or (
        board.words[ProgressField.PHASE] == RankPhase.CONNECTING and not absent
    )


def _connect(job: WorkerJob, rank: int, board: ProgressFile) -> RankRunner:
    import torch

    torch.set_num_threads(job.threads)
    if job.devices.kind == "cuda":
        index = job.devices.of(job.local_rank(rank))
        torch.cuda.set_device(index)
        runner = RankRunner(job, rank, board, f"cuda:{index}", torch.cuda)
    else:
        runner = RankRunner(job, rank, board)
    runner.prepare()
    board.step(RankPhase.CONNECTING, 0, time.monotonic_ns())
    if not runner.calls_init_process_group:
        runner.groups.start()
    return runner


def _await_start(job: WorkerJob, board: ProgressFile, repetition: int) -> None:
    """All ranks begin together, at the time that the launcher gives out."""
    control_file = ControlFile(job.control_file)
    board.words[ProgressField.REPETITION] = repetition
    board.step(RankPhase.READY, 0, time.monotonic_ns())
    while not (start_ns := control_file.started_ns(repetition)):
        time.sleep(_POLL_S)
    wait_until(start_ns, _SPIN_NS)
    control_file.close()


def _report_error(board: ProgressFile, error: BaseException, phase: RankPhase) -> None:
    whole = str(error).strip() or "no message"
    text = re.sub(
        r"^\[\S*?:\d+\] ", "", whole.splitlines()[0]
    )  # where in the library's own sources
    reason = whole.partition("Last error:\n")[
        2
    ].strip()  # NCCL's own words, below the place in torch's sources
    board.say(f"{type(error).__name__}: {reason.splitlines()[0] if reason else text}")
    full = isinstance(error, EnvironmentFault) or getattr(error, "errno", None) in (
        errno.ENOSPC,
        errno.EDQUOT,
    )
    if full or any(words in whole for words in _ENVIRONMENT_ERRORS):
        phase = RankPhase.BROKEN
    board.step(phase, board.words[ProgressField.POSITION], time.monotonic_ns())
    import traceback

    traceback.print_exception(error)


def _write_result(job: WorkerJob, rank: int, runner: RankRunner) -> None:
    """What every named buffer holds in the end, and what recording a call cost."""
    buffers = runner.memory.buffers
    index = {
        "overhead_ns": _recording_cost_ns(job, rank),
        "buffers": {label: (buffer.shape, buffer.dtype) for label, buffer in buffers.items()},
    }
    numbers = {f"buffer {label}": runner.memory.packed(buffer) for label, buffer in buffers.items()}
    partial = job.result(rank).with_suffix(".part")
    partial.write_bytes(pack_record({"index": json.dumps(index).encode(), **numbers}))
    os.replace(partial, job.result(rank))


def _recording_cost_ns(job: WorkerJob, rank: int) -> int:
    """Nanoseconds that the post and the finish of one call cost, measured on a table of their
    own.
    """
    times = CallTimeTable(job.times(rank, job.repeats), 1)
    board = ProgressFile(job.board(rank).with_name(f"trial-{rank}"), create=True)
    cells, begin = times.cells, time.monotonic_ns()
    for _ in range(_RECORDING_TRIALS):
        now = time.monotonic_ns()
        board.step(RankPhase.IN_CALL, 0, now)
        cells[0] = now
        cells[1] = cells[2] = time.monotonic_ns()
    return (time.monotonic_ns() - begin) // _RECORDING_TRIALS


def _wait_for_release(job: WorkerJob, runner: RankRunner) -> int:
    """Stay until the launcher says so: a rank that left would close its connections. Then end as a
    program does.
    """
    control_file = ControlFile(job.control_file)
    while not control_file.stopped:
        time.sleep(0.002)
    if runner.groups.connected:
        runner.groups.destroy()
    return 0
