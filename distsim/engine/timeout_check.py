"""Whether any wait of a run exceeds its timeout. Most runs end before, and need no deadlines
(`distsim.engine.deadlines`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from distsim.backends import BackendProfile
from distsim.common.arrays import BoolArray, IntArray
from distsim.engine.run_record import RunColumns
from distsim.operations.registry import OPERATIONS
from distsim.program.code import CodeCall
from distsim.program.model import Program
from distsim.semantics.local.rank_clocks import RunProgress

#: The number of launches by which a host may be ahead of its device: the size of CUDA's queue of
#: kernels of a stream.
LAUNCH_QUEUE_DEPTH = 1024
#: The call whose timeout ends a hang (observed: `coll.one_missing.monitored_barrier`; group rank 0
#: raises and names the missing ranks).
MONITORED_BARRIER = "monitored_barrier"


def may_exceed_timeout(run: RunProgress, shared: bool = False) -> bool:
    """Whether anything in a run may last longer than the shortest timeout; a quick upper bound.

    A run cannot last longer than its latest start plus the highest cost. If links are ``shared``,
    it cannot last longer than all costs twice over, one after the other.
    """
    linked = run.linked
    if linked.profile.timed_out == "nothing":
        return False
    if linked.profile.timed_out == "raises" and _has_monitored_barrier(linked.program):
        return True
    clocks = (run.posted, run.ended, run.returned, run.latest, [host.clock for host in run.hosts])
    end = max(int(np.max(np.asarray(column), initial=0)) for column in clocks)
    durations = run.conditions.duration
    longest = 2 * int(durations.sum()) if shared else int(np.max(durations, initial=0))
    return end + longest > _shortest_timeout_ns(linked.program, linked.profile)


def _shortest_timeout_ns(program: Program, profile: BackendProfile) -> int:
    return min([*program.group_timeouts_ns(profile.timeout_ns), *_timeouts_of_calls(program)])


def exceeds_timeout(program: Program, profile: BackendProfile, columns: RunColumns) -> bool:
    """Whether any wait of a run without deadlines lasts longer than the shortest timeout."""
    if profile.timed_out == "nothing":
        return False
    shortest = _shortest_timeout_ns(program, profile)
    posted, returned, finished = (
        np.frombuffer(getattr(columns, name), dtype=np.int64)
        for name in ("posted", "returned", "finished")
    )
    may_time_out = profile.timed_out == "raises" and _has_monitored_barrier(program)
    if may_time_out and _blocks_in_monitored_barrier(program, columns, posted, finished):
        return True
    end = int(max(returned.max(initial=0), finished.max(initial=0)))
    if end <= shortest:
        return False
    rows_by_code = [_rows_with_timeout(code.calls, profile.device) for code in program.codes]
    for rank in program.present:
        rows = slice(columns.base[rank], columns.base[rank + 1])
        until_done, until_returned = rows_by_code[program.code_of[rank]]
        started = posted[rows]
        done = np.where(finished[rows] >= 0, finished[rows], end)
        left = np.where(returned[rows] >= 0, returned[rows], end)
        if profile.device:
            started = _enqueued(started, done)
        spans = np.where(until_done, done, left) - started
        if np.any((started >= 0) & (until_done | until_returned) & (spans > shortest)):
            return True
    return False


def _enqueued(posted: IntArray, done: IntArray) -> IntArray:
    """When the launch queue of the device had room for each row of a rank; -1 if never posted."""
    ended_so_far = np.maximum.accumulate(np.where(posted >= 0, done, 0))
    has_room_at = np.concatenate((np.zeros(LAUNCH_QUEUE_DEPTH, dtype=np.int64), ended_so_far))
    return np.where(posted >= 0, np.maximum(posted, has_room_at[: len(posted)]), -1)


def _has_monitored_barrier(program: Program) -> bool:
    calls = (call for code in program.codes for call in code.distinct_calls(parts=False))
    return any(call.op == MONITORED_BARRIER for call in calls)


def _blocks_in_monitored_barrier(
    program: Program, columns: RunColumns, posted: IntArray, finished: IntArray
) -> bool:
    """Whether some rank has posted a monitored_barrier that never finished."""
    for rank in program.present:
        rows = slice(columns.base[rank], columns.base[rank + 1])
        is_barrier = [op == MONITORED_BARRIER for op in _ops_by_row(program.code(rank).calls)]
        is_open = (posted[rows] >= 0) & (finished[rows] < 0)
        if np.any(np.array(is_barrier, dtype=np.bool_) & is_open):
            return True
    return False


def _ops_by_row(calls: list[CodeCall]) -> list[str]:
    """The operation of each row of a code; that of the batch for the parts of a batch."""
    return [call.op for call in calls for _ in (call, *call.parts)]


def _timeouts_of_calls(program: Program) -> Iterator[int]:
    """Timeouts that are arguments of calls."""
    for code in program.codes:
        for call in code.calls:
            if call.fields.get("timeout_ns"):
                yield int(call.fields["timeout_ns"])


def _rows_with_timeout(calls: list[CodeCall], device: bool) -> tuple[BoolArray, BoolArray]:
    """By row of a code: (whether its timeout runs until it is done, or until the call returns).

    The first is so for collectives and, on a device, for all communication; the second for
    messages and waits. NCCL's watchdog does not see signals.
    """
    operations = [OPERATIONS[op] for op in _ops_by_row(calls)]
    kinds = ["" if operation.signals else operation.kind for operation in operations]
    until_done = ("p2p", "batch", "collective") if device else ("collective",)
    until_returned = () if device else ("p2p", "batch", "wait", "group")
    return (
        np.array([kind in until_done for kind in kinds], dtype=np.bool_),
        np.array([kind in until_returned for kind in kinds], dtype=np.bool_),
    )
