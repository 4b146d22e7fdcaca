"""The process of one rank, from its start to its exit.

It loads torch, connects, runs the program once per repetition, writes the contents of its buffers,
and ends as the process of a script does (`_end_as_script`). With other backends than gloo, and for
programs that stay connected, it waits until the launcher releases it.
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
    FINISHED,
    POSTED,
    RETURNED,
    CallTimeTable,
    ControlFile,
    ProgressField,
    ProgressFile,
    RankPhase,
)
from distsim.real.worker.compute_load import wait_until
from distsim.real.worker.runner import RankExit, RankRunner, note_exit

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.0005
#: The last part of the wait for the common start is spun.
_SPIN_NS = 500_000
#: Errors that are the machine's fault whenever they occur. For example, NCCL notices that ranks
#: share a GPU only at its first operation.
_ENVIRONMENT_ERRORS = (
    "Duplicate GPU detected",
    "Multiple Ranks are using the same GPU",
    "CUDA out of memory",
    "CUDA driver",
    "no CUDA-capable device",
    "no kernel image is available",
)
#: A script's interpreter takes at least this long until it destroys the process group. Messages
#: still arrive in that time.
_FINALIZATION_S = 0.1
#: How many calls are recorded to measure the cost of recording.
_RECORDING_TRIALS = 2000


def run_rank(job: WorkerJob, rank: int) -> None:
    """Run one rank. Ends the process; never returns."""
    status = 1
    try:
        status = _run_process(job, rank)
    finally:
        os._exit(status)


def run_elastic_rank(job: WorkerJob) -> None:
    """Entry point for torch's elastic launcher.

    It sets the rank in the environment, and expects successful ranks to return.
    """
    status = _run_process(job, int(os.environ["RANK"]))
    if status:
        os._exit(status)


def _run_process(job: WorkerJob, rank: int) -> int:
    progress = ProgressFile(job.progress_path(rank))
    _set_up_process(job, rank, progress)
    return _run_program(job, rank, progress)


def _set_up_process(job: WorkerJob, rank: int, progress: ProgressFile) -> None:
    """Prepare the process.

    It gets its own process group, ends with its parent, writes its Python stack on SIGUSR1 and its
    output to a file, and has the environment variables of the rank.
    """
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(name, signal.SIG_DFL)
    die_with_parent(job.parent)
    launcher = multiprocessing.parent_process()
    if not job.parent and launcher is not None:
        # The parent is the fork server, which does not end with its launcher.
        threading.Thread(target=_die_with_launcher, args=(launcher,), daemon=True).start()
    progress.words[ProgressField.PID] = os.getpid()
    progress.advance(RankPhase.LOADING, 0, time.monotonic_ns())
    _redirect_output(job, rank)
    _set_environment(job, rank)


def _redirect_output(job: WorkerJob, rank: int) -> None:
    """Send the output and, on SIGUSR1 or a crash, the Python stack to files."""
    output = os.open(job.output(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = sys.stderr = os.fdopen(
        output, "w", buffering=1, encoding="utf-8", errors="replace"
    )
    stack = os.open(job.stack(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.enable(stack, all_threads=False)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)


def _set_environment(job: WorkerJob, rank: int) -> None:
    for variable, value in job.environment(rank).items():
        if value:
            os.environ[variable] = value
        else:
            os.environ.pop(variable, None)
    for variable, value in default_variables(job.backend, job.devices).items():
        os.environ.setdefault(variable, value)


def die_with_parent(parent: int) -> None:
    """Let the kernel end this process with its parent (Linux).

    If the parent has exited already, this process ends at once. ``parent`` 0: do not check that.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(1)


def _die_with_launcher(launcher: BaseProcess) -> None:
    launcher.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _run_program(job: WorkerJob, rank: int, progress: ProgressFile) -> int:
    """Connect, run all repetitions and write the result; return the exit status."""
    position = 0
    runner: RankRunner | None = None
    try:
        runner = _connect(job, rank, progress)
        for repetition in range(job.repeats):
            times = CallTimeTable(job.times(rank, repetition), job.program.code(rank).offsets[-1])
            if repetition:
                runner.memory.reset()
            runner.ready(times)
            _await_start(job, progress, repetition)
            runner.run()
            position = progress.words[ProgressField.POSITION]
            progress.advance(RankPhase.WRITING, position, time.monotonic_ns())
        position = progress.words[ProgressField.POSITION]
        _write_result(job, rank, runner)
    except RankExit as end:
        note_exit(progress, progress.words[ProgressField.POSITION], end.code)
        status = end.code
    except BaseException as error:
        is_early = _is_before_program(job, progress)
        _report_error(progress, error, RankPhase.BROKEN if is_early else RankPhase.RAISED)
        status = 1
    else:
        if not _ends_as_script(job):
            progress.advance(RankPhase.ENDED, position, time.monotonic_ns())
            return _wait_for_release(job, runner)
        # The rank counts as ended only when its process can end.
        progress.advance(RankPhase.RUNNING, position, time.monotonic_ns())
        _end_as_script(runner)
        progress.advance(RankPhase.ENDED, position, time.monotonic_ns())
        return 0
    if runner is not None and _ends_as_script(job):
        _end_as_script(runner)
    return status


def _ends_as_script(job: WorkerJob) -> bool:
    return job.backend == "gloo" and not job.program.options.get("stays_connected")


def _end_as_script(runner: RankRunner) -> None:
    """Destroy requests and process groups, as the interpreter does at the end of a script.

    The destructor of ProcessGroupGloo waits for open collectives. Leaving by ``os._exit`` alone
    would skip it.
    """
    time.sleep(_FINALIZATION_S)
    groups = runner.groups
    if groups.connected:
        groups.destroy()
    groups.__dict__.clear()
    # Requests go last (run): a dropped request would cancel its message.
    runner.__dict__.clear()


def _is_before_program(job: WorkerJob, progress: ProgressFile) -> bool:
    """The rank failed before its program began, and the scenario does not intend that.

    The scenario intends it if a rank is absent or the start-up fails.
    """
    phase = progress.words[ProgressField.PHASE]
    if phase != RankPhase.CONNECTING:
        return phase == RankPhase.LOADING
    if any(fault.kind == "absent" for fault in job.program.faults):
        return False
    return job.program.startup is None or not job.program.startup.failed


def _connect(job: WorkerJob, rank: int, progress: ProgressFile) -> RankRunner:
    import torch

    torch.set_num_threads(job.threads)
    if job.devices.kind == "cuda":
        gpu = job.devices.gpu_of(job.local_rank(rank))
        torch.cuda.set_device(gpu)
        runner = RankRunner(job, rank, progress, f"cuda:{gpu}", torch.cuda)
    else:
        runner = RankRunner(job, rank, progress)
    runner.prepare()
    progress.advance(RankPhase.CONNECTING, 0, time.monotonic_ns())
    if not runner.calls_init_process_group:
        runner.groups.start()
    return runner


def _await_start(job: WorkerJob, progress: ProgressFile, repetition: int) -> None:
    """Wait for the common start of a repetition, which the launcher announces."""
    control_file = ControlFile(job.control_file)
    progress.words[ProgressField.REPETITION] = repetition
    progress.advance(RankPhase.READY, 0, time.monotonic_ns())
    while not (start_ns := control_file.started_ns(repetition)):
        time.sleep(_POLL_S)
    wait_until(start_ns, _SPIN_NS)
    control_file.close()


def _report_error(progress: ProgressFile, error: BaseException, phase: RankPhase) -> None:
    text = str(error).strip() or "no message"
    progress.write_message(f"{type(error).__name__}: {_first_line_of_error(text)}")
    if _is_environment_error(error, text):
        phase = RankPhase.BROKEN
    progress.advance(phase, progress.words[ProgressField.POSITION], time.monotonic_ns())
    import traceback

    traceback.print_exception(error)


def _first_line_of_error(text: str) -> str:
    # NCCL's own words come after the place in torch's sources.
    nccl_reason = text.partition("Last error:\n")[2].strip()
    if nccl_reason:
        return nccl_reason.splitlines()[0]
    # Remove the place in the library's own sources.
    return re.sub(r"^\[\S*?:\d+\] ", "", text.splitlines()[0])


def _is_environment_error(error: BaseException, text: str) -> bool:
    """The machine failed, not the program."""
    if isinstance(error, EnvironmentFault):
        return True
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return True
    return any(words in text for words in _ENVIRONMENT_ERRORS)


def _write_result(job: WorkerJob, rank: int, runner: RankRunner) -> None:
    """Write the final contents of every named buffer, and the cost of recording a call."""
    buffers = runner.memory.buffers
    index = {
        "overhead_ns": _recording_cost_ns(job, rank),
        "buffers": {label: (buffer.shape, buffer.dtype) for label, buffer in buffers.items()},
    }
    numbers = {f"buffer {label}": runner.memory.packed(buffer) for label, buffer in buffers.items()}
    # Renamed when it is complete, so that the launcher never reads half a file.
    partial = job.result(rank).with_suffix(".part")
    partial.write_bytes(pack_record({"index": json.dumps(index).encode(), **numbers}))
    os.replace(partial, job.result(rank))


def _recording_cost_ns(job: WorkerJob, rank: int) -> int:
    """The cost of recording the post and the finish of one call, measured on files of its own."""
    cells = CallTimeTable(job.times(rank, job.repeats), 1).cells
    trial_path = job.progress_path(rank).with_name(f"trial-{rank}")
    progress = ProgressFile(trial_path, create=True)
    begin_ns = time.monotonic_ns()
    for _ in range(_RECORDING_TRIALS):
        now_ns = time.monotonic_ns()
        progress.advance(RankPhase.IN_CALL, 0, now_ns)
        cells[POSTED] = now_ns
        cells[RETURNED] = cells[FINISHED] = time.monotonic_ns()
    return (time.monotonic_ns() - begin_ns) // _RECORDING_TRIALS


def _wait_for_release(job: WorkerJob, runner: RankRunner) -> int:
    """Wait until the launcher releases this rank, then end as a program does.

    A rank that exited earlier would close its connections.
    """
    control_file = ControlFile(job.control_file)
    while not control_file.stopped:
        time.sleep(0.002)
    if runner.groups.connected:
        runner.groups.destroy()
    return 0
