"""The recording of a run while it is still under way, beside the file that it is to become: a
launcher that is killed leaves it.
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
from distsim.real.results.merge_tables import RankTimeTable, merge_rank_tables
from distsim.real.results.real_run import LaunchSession
from distsim.real.shared.job import WorkerJob
from distsim.real.shared.progress_file import RankPhase, parse_snapshot
from distsim.trace.jsonl import PARTIAL_SUFFIX, TRACE_SUFFIXES, write_trace
from distsim.trace.model import Trace

#: Seconds between two writings; and how many times what the last one took of a core, so that it
#: costs the ranks little of theirs.
_WRITE_INTERVAL_S: Final = 0.5
_REST_FACTOR: Final = 20
#: Of a thread, as of a process: it works when nobody else wants to.
_NICENESS: Final = 15
_FAILED_PHASES: Final[dict[int, RankEndStatus]] = {
    RankPhase.STRUCK: "killed",
    RankPhase.RAISED: "raised",
    RankPhase.BROKEN: "raised",
}


def partial_trace_path(trace: str | os.PathLike[str]) -> Path | None:
    """Where a recording is while it is under way; None where its file is no trace of distsim's
    own.
    """
    path = Path(trace)
    return (
        None
        if is_stream(path) or not path.name.endswith(TRACE_SUFFIXES)
        else Path(f"{path}{PARTIAL_SUFFIX}")
    )


@contextmanager
def write_partial_trace(
    session: LaunchSession, job: WorkerJob, starts_ns: Sequence[int]
) -> Iterator[None]:
    """Write what the ranks of this machine have recorded, now and again, until the block is left.

    ``starts_ns`` grows: the common start of each repetition. The file stays; whoever writes the
    whole recording removes it.
    """
    path = (
        partial_trace_path(session.wish.trace)
        if session.wish.trace and not session.number
        else None
    )
    if path is None:
        yield
        return
    over = threading.Event()
    write_trace(
        _trace_so_far(session, job, starts_ns), path
    )  # a launcher that is killed at once leaves one too
    thread = threading.Thread(
        target=_keep_writing, args=(session, job, starts_ns, path, over), daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _keep_writing(
    session: LaunchSession,
    job: WorkerJob,
    starts_ns: Sequence[int],
    path: Path,
    over: threading.Event,
) -> None:
    with suppress(OSError, AttributeError):
        os.setpriority(
            os.PRIO_PROCESS, threading.get_native_id(), _NICENESS
        )  # Linux: of this thread alone
    took_s = 0.0
    while not over.wait(max(_WRITE_INTERVAL_S, _REST_FACTOR * took_s)):
        began = (
            time.thread_time()
        )  # of a core: on a busy machine the same work takes longer and costs no more
        with suppress(OSError, DistsimError):  # a full disk costs this recording, not the run
            write_trace(_trace_so_far(session, job, starts_ns), path)
        took_s = time.thread_time() - began


def _trace_so_far(session: LaunchSession, job: WorkerJob, starts_ns: Sequence[int]) -> Trace:
    """What the tables hold by now, of the repetition that is under way."""
    turn, now_ns = max(len(starts_ns) - 1, 0), time.monotonic_ns()
    start_ns = starts_ns[turn] if starts_ns else now_ns
    tables = {}
    for rank in session.ranks if starts_ns else ():
        with suppress(FileNotFoundError):
            tables[rank] = RankTimeTable(job.times(rank, turn).read_bytes(), start_ns)
    header = {
        "backend": session.backend,
        "cluster": "",
        "launcher": session.launcher,
        "repetition": turn,
        "compute": "busy" if job.busy else "asleep",
        "reason": "under way",
        "until_ns": now_ns - start_ns,
    }
    trace = merge_rank_tables(
        job.program, tables, FinalState(_failed_ends(session, job, start_ns), ()), "", header
    )
    here = np.isin(trace["rank"], session.ranks)
    columns = {name: column[here] for name, column in trace.columns.items()}
    return Trace({**trace.header, "complete": False}, trace.tables, columns)


def _failed_ends(session: LaunchSession, job: WorkerJob, start_ns: int) -> tuple[RankEnd, ...]:
    """Of ranks that say on their boards that they have failed."""
    found = []
    for rank in session.ranks:
        with suppress(OSError):
            data = job.board(rank).read_bytes()
            board = parse_snapshot(data, rank) if data else None
            if board is not None and board.phase in _FAILED_PHASES:
                at_ns = max(board.since_ns - start_ns, 0)
                found.append(
                    RankEnd(rank, _FAILED_PHASES[board.phase], board.position, at_ns, board.message)
                )
    return tuple(found)
