"""What the states of live processes show: stopped ranks, exited ranks, and hung worker processes.

The kernel's state of a process is certain, so a stopped or exited rank is a proved cause. That a
rank or a worker is blocked is only suspected, because two looks at it may miss slow progress.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from distsim.hang_doctor.analysis.hang_cause import CauseLine, HangCause
from distsim.hang_doctor.analysis.stack_position import DATA_LOADER, user_frame
from distsim.hang_doctor.analysis.wait_state import JobWaitState, RankWaitState
from distsim.hang_doctor.model.evidence_records import ProcessState, RankEvidence, StackFrame
from distsim.hang_doctor.model.phrases import ranks_text, verb_form

_STOPPED: Final = ("T", "t")
_EXITED: Final = ("Z", "X", "gone")
_UNINTERRUPTIBLE: Final = "D"
#: A process that used more of a CPU than this between the two looks is computing.
_BUSY_SHARE: Final = 0.5
_MAX_WORKERS: Final = 4


def live_causes(job: JobWaitState) -> list[HangCause]:
    """Causes that the states of live processes show; empty for a job that was not inspected."""
    return [*_stopped_ranks(job), *_exited_ranks(job), *_hung_workers(job), *_kernel_waits(job)]


def _ranks_in_state(job: JobWaitState, states: tuple[str, ...]) -> dict[int, ProcessState]:
    found = {}
    for rank, records in job.evidence.ranks.items():
        process = own_process(records)
        if process is not None and process.state in states:
            found[rank] = process
    return found


def own_process(records: RankEvidence) -> ProcessState | None:
    """The process of a live rank itself; None if it was not inspected."""
    return next((one for one in records.processes if not one.is_child), None)


def _stopped_ranks(job: JobWaitState) -> list[HangCause]:
    stopped = _ranks_in_state(job, _STOPPED)
    if not stopped:
        return []
    ranks = tuple(stopped)
    pids = ", ".join(str(process.pid) for process in stopped.values())
    are = verb_form(ranks, "is", "are")
    by = "a debugger" if all(one.state == "t" for one in stopped.values()) else "SIGSTOP"
    host = next(iter(stopped.values())).host
    return [
        HangCause(
            "stopped",
            "proved",
            f"{ranks_text(ranks)} {are} stopped by {by}, so the other ranks wait",
            culprits=ranks,
            ranks=ranks,
            lines=[CauseLine((rank,), "stopped", job.ranks[rank].frame) for rank in ranks],
            details=[f"help: on {host}, resume with `kill -CONT {pids.replace(',', '')}`"],
        )
    ]


def _exited_ranks(job: JobWaitState) -> list[HangCause]:
    exited = _ranks_in_state(job, _EXITED)
    if not exited:
        return []
    ranks = tuple(exited)
    have = verb_form(ranks, "has", "have")
    return [
        HangCause(
            "crash",
            "suspected",
            f"{ranks_text(ranks)} {have} exited, and the launcher has not ended the other ranks",
            ranks=ranks,
            details=["the log of the rank shows whether it failed or reached its end"],
        )
    ]


# --- workers of a DataLoader ---


def _hung_workers(job: JobWaitState) -> list[HangCause]:
    """Ranks that wait for their DataLoader, with the worker processes that do not move."""
    found = []
    for rank, state in job.ranks.items():
        processes = job.evidence.ranks[rank].processes
        workers = [one for one in processes if one.is_child]
        if state.position is None or state.position.op != DATA_LOADER or not processes:
            continue
        found.append(_worker_cause(rank, state, workers))
    return found


def _worker_cause(rank: int, state: RankWaitState, workers: list[ProcessState]) -> HangCause:
    hung = [worker for worker in workers if _is_hung_worker(worker)]
    lines = [CauseLine((rank,), "waits for its DataLoader", state.frame)]
    lines += [
        CauseLine((rank,), f"worker process {worker.pid}, {_state_text(worker)}", _frame(worker))
        for worker in hung[:_MAX_WORKERS]
    ]
    if not hung:
        title = f"rank {rank} waits for its DataLoader, and no worker process of it is blocked"
        details = ["a worker has died, or the workers are slow"]
    else:
        pids = ", ".join(str(worker.pid) for worker in hung[:_MAX_WORKERS])
        processes = "process" if len(hung) == 1 else "processes"
        title = f"rank {rank} waits for its DataLoader, whose worker {processes} {pids} "
        title += "does not move" if len(hung) == 1 else "do not move"
        details = list(_advice(hung))
    return HangCause("data_loader", "suspected", title, ranks=(rank,), lines=lines, details=details)


def _is_hung_worker(worker: ProcessState) -> bool:
    """Whether a child process is stopped, in the kernel, or blocked in code of the data set.

    An idle worker waits in torch's own loop for an index.
    """
    if worker.state in (*_STOPPED, _UNINTERRUPTIBLE):
        return True
    frames = _main_frames(worker)
    is_loading = any(frame.name == "fetch" for frame in frames)
    return is_loading and not worker.moved and worker.cpu_share < _BUSY_SHARE


def _main_frames(process: ProcessState) -> tuple[StackFrame, ...]:
    return next((stack.frames for stack in process.stacks if stack.main), ())


def _frame(process: ProcessState) -> StackFrame | None:
    return user_frame(_main_frames(process))


def _state_text(process: ProcessState) -> str:
    if process.state in _STOPPED:
        return "stopped"
    channel = f" in {process.wait_channel}" if process.wait_channel else ""
    if process.state == _UNINTERRUPTIBLE:
        return f"in an uninterruptible wait{channel}"
    return f"blocked{channel}"


def _advice(hung: list[ProcessState]) -> Iterator[str]:
    stopped = [str(worker.pid) for worker in hung if worker.state in _STOPPED]
    if stopped:
        yield f"help: resume with `kill -CONT {' '.join(stopped)}`"
    if any(worker.state == _UNINTERRUPTIBLE for worker in hung):
        yield "an uninterruptible wait is one for a disk, a network file system or a driver"


# --- the kernel ---


def _kernel_waits(job: JobWaitState) -> list[HangCause]:
    """Ranks in an uninterruptible wait: a file system or a driver does not answer."""
    waiting = _ranks_in_state(job, (_UNINTERRUPTIBLE,))
    if not waiting:
        return []
    ranks = tuple(waiting)
    channels = sorted({one.wait_channel for one in waiting.values() if one.wait_channel})
    where = f" ({', '.join(channels)})" if channels else ""
    verb = verb_form(ranks, "waits", "wait")
    return [
        HangCause(
            "kernel_wait",
            "suspected",
            f"{ranks_text(ranks)} {verb} in the kernel{where}: a disk, a network file system or a "
            "driver does not answer",
            ranks=ranks,
            lines=[CauseLine((rank,), "in the kernel", job.ranks[rank].frame) for rank in ranks],
        )
    ]


def movement_text(records: RankEvidence) -> str:
    """Whether a live rank moved between the two looks; empty if it was not inspected."""
    process = own_process(records)
    if process is None or not process.stacks:
        return ""
    if process.state in _STOPPED:
        return "stopped"
    if process.moved:
        return "its stack moves"
    if process.cpu_share >= _BUSY_SHARE:
        return f"does not leave this line, uses {process.cpu_share:.0%} of a CPU"
    native = f", in {process.native[0]}" if process.native else ""
    return f"did not move{native}"
