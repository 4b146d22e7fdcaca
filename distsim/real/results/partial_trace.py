"""Writes the recording of a run while the run is still going on.

A launcher that is killed cannot write its recording any more. So a thread writes the current state
of the ranks' tables from time to time, next to the file that the recording will become. The thread
has a low priority and rests in proportion to its own cost, so that the ranks keep their cores.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import numpy as np

from distsim.common.errors import DistsimError
from distsim.common.file_io import is_stream
from distsim.findings.final_state import FinalState, RankEnd, RankEndStatus
from distsim.real.launch.session import LaunchSession
from distsim.real.results.merge_tables import RankTimeTable, merge_rank_tables
from distsim.real.shared.job import WorkerJob
from distsim.real.shared.progress_file import RankPhase, parse_snapshot
from distsim.trace.jsonl import PARTIAL_SUFFIX, TRACE_SUFFIXES, write_trace
from distsim.trace.model import Trace

#: The shortest rest between two writes, in seconds.
_WRITE_INTERVAL_S: Final = 0.5
#: The rest after a write, in multiples of the CPU time of that write: at most 5 % of a core.
_REST_FACTOR: Final = 20
#: Niceness of the writing thread: it works when no other process wants the core.
_NICENESS: Final = 15
_FAILED_PHASES: Final[dict[int, RankEndStatus]] = {
    RankPhase.STRUCK: "killed",
    RankPhase.RAISED: "raised",
    RankPhase.BROKEN: "raised",
}


def partial_trace_path(trace: str | os.PathLike[str]) -> Path | None:
    """The file of a partial recording; None if the recording is not in distsim's own format."""
    path = Path(trace)
    if is_stream(path) or not path.name.endswith(TRACE_SUFFIXES):
        return None
    return Path(f"{path}{PARTIAL_SUFFIX}")


@contextmanager
def write_partial_trace(
    session: LaunchSession, job: WorkerJob, starts_ns: Sequence[int]
) -> Iterator[None]:
    """Write what the ranks of this machine have recorded, repeatedly, until the block ends.

    ``starts_ns`` grows: the common start of each repetition. The file stays; the code that writes
    the whole recording removes it.
    """
    trace = session.options.trace
    is_first_launcher = session.number == 0
    path = partial_trace_path(trace) if trace and is_first_launcher else None
    if path is None:
        yield
        return

    # The first write is immediate, so that a launcher that is killed at once leaves a file too.
    write_trace(_trace_so_far(session, job, starts_ns), path)
    is_over = threading.Event()
    thread = threading.Thread(
        target=_keep_writing, args=(session, job, starts_ns, path, is_over), daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _keep_writing(
    session: LaunchSession,
    job: WorkerJob,
    starts_ns: Sequence[int],
    path: Path,
    is_over: threading.Event,
) -> None:
    with suppress(OSError, AttributeError):
        # On Linux this applies to the calling thread alone.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    cpu_s = 0.0
    while not is_over.wait(max(_WRITE_INTERVAL_S, _REST_FACTOR * cpu_s)):
        # CPU time, not wall time: on a busy machine the same work takes longer but costs no more.
        began_s = time.thread_time()
        with suppress(OSError, DistsimError):  # a full disk costs this recording, not the run
            write_trace(_trace_so_far(session, job, starts_ns), path)
        cpu_s = time.thread_time() - began_s


def _trace_so_far(session: LaunchSession, job: WorkerJob, starts_ns: Sequence[int]) -> Trace:
    """The content of the tables now, for the repetition that is going on."""
    repetition = max(len(starts_ns) - 1, 0)
    now_ns = time.monotonic_ns()
    start_ns = starts_ns[repetition] if starts_ns else now_ns
    tables = {}
    for rank in session.ranks if starts_ns else ():
        with suppress(FileNotFoundError):
            tables[rank] = RankTimeTable(job.times(rank, repetition).read_bytes(), start_ns)
    header = {
        "backend": session.backend,
        "cluster": "",
        "launcher": session.launcher,
        "repetition": repetition,
        "compute": "busy" if job.busy else "asleep",
        "reason": "under way",
        "until_ns": now_ns - start_ns,
    }
    final_state = FinalState(_failed_ends(session, job, start_ns), ())
    trace = merge_rank_tables(job.program, tables, final_state, "", header)
    is_local = np.isin(trace["rank"], session.ranks)
    columns = {name: column[is_local] for name, column in trace.columns.items()}
    return Trace({**trace.header, "complete": False}, trace.tables, columns)


def _failed_ends(session: LaunchSession, job: WorkerJob, start_ns: int) -> tuple[RankEnd, ...]:
    """The ends of local ranks whose progress files say that they have failed."""
    ends = []
    for rank in session.ranks:
        with suppress(OSError):
            data = job.progress_path(rank).read_bytes()
            if not data:
                continue
            snapshot = parse_snapshot(data, rank)
            status = _FAILED_PHASES.get(snapshot.phase)
            if status is not None:
                at_ns = max(snapshot.since_ns - start_ns, 0)
                ends.append(RankEnd(rank, status, snapshot.position, at_ns, snapshot.message))
    return tuple(ends)
