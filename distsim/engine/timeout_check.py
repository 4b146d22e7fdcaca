"""Whether any wait of a run is longer than its timeout (`distsim.engine.deadlines`): most runs are
over before.
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

#: Launches that a host may be ahead of its device: CUDA's queue of kernels of a stream.
LAUNCH_QUEUE_DEPTH = 1024
#: The call whose timeout ends a standstill (observed: `coll.one_missing.monitored_barrier`, group
#: rank 0 raises and names who is missing).
MONITORED_BARRIER = "monitored_barrier"


def group_timeouts_ns(program: Program, profile: BackendProfile) -> list[int]:
    """The timeout of each group, by id. New groups don't inherit the world's (G12); without one the
    back end's default holds.
    """
    written = (
        c.fields.get("timeout_ns")
        for code in program.codes
        for c in code.calls
        if c.op == "init_process_group"
    )
    world = program.options.get("timeout_ns") or next((int(t) for t in written if t), None)
    return [(world if g.id == 0 else g.timeout_ns) or profile.timeout_ns for g in program.groups]


def may_exceed_timeout(run: RunProgress, shared: bool = False) -> bool:
    """Can anything in a run last longer than the shortest timeout? Nothing takes longer than the
    last thing to begin and the dearest. Where links are ``shared`` nothing takes longer than all of
    it, twice over, one after the other."""
    linked = run.linked
    if linked.profile.timed_out == "nothing":
        return False
    clocks = (run.posted, run.ended, run.returned, run.latest, [host.clock for host in run.hosts])
    if linked.profile.timed_out == "raises" and _has_monitored_barrier(linked.program):
        return True
    end = max(int(np.max(np.asarray(column), initial=0)) for column in clocks)
    prices = run.conditions.price
    more = 2 * int(prices.sum()) if shared else int(np.max(prices, initial=0))
    return end + more > _shortest_timeout_ns(linked.program, linked.profile)


def _shortest_timeout_ns(program: Program, profile: BackendProfile) -> int:
    return min([*group_timeouts_ns(program, profile), *_timeouts_of_calls(program)])


def exceeds_timeout(program: Program, profile: BackendProfile, columns: RunColumns) -> bool:
    """Does any wait of a run without deadlines last longer than the shortest timeout?"""
    if profile.timed_out == "nothing":
        return False
    shortest = _shortest_timeout_ns(program, profile)
    posted, returned, finished = (
        np.frombuffer(getattr(columns, n), dtype=np.int64)
        for n in ("posted", "returned", "finished")
    )
    end = int(max(returned.max(initial=0), finished.max(initial=0)))
    if (
        profile.timed_out == "raises"
        and _has_monitored_barrier(program)
        and _blocks_in_monitored_barrier(program, columns, posted, finished)
    ):
        return True
    if end <= shortest:
        return False
    clocked = [_rows_with_timeout(code.calls, profile.device) for code in program.codes]
    for rank in program.present:
        rows, (running, waiting) = (
            slice(columns.base[rank], columns.base[rank + 1]),
            clocked[program.code_of[rank]],
        )
        begun, left, done = posted[rows], returned[rows], finished[rows]
        done = np.where(done >= 0, done, end)
        if profile.device:
            newest = np.concatenate(
                (
                    np.zeros(LAUNCH_QUEUE_DEPTH, dtype=np.int64),
                    np.maximum.accumulate(np.where(begun >= 0, done, 0)),
                )
            )
            begun = np.where(begun >= 0, np.maximum(begun, newest[: len(begun)]), -1)
        spans = np.where(running, done, np.where(left >= 0, left, end)) - begun
        if np.any((begun >= 0) & (running | waiting) & (spans > shortest)):
            return True
    return False


def _has_monitored_barrier(program: Program) -> bool:
    return any(
        call.op == MONITORED_BARRIER
        for code in program.codes
        for call in code.distinct_calls(parts=False)
    )


def _blocks_in_monitored_barrier(
    program: Program, columns: RunColumns, posted: IntArray, finished: IntArray
) -> bool:
    """Some rank has come to a monitored_barrier and never left it."""
    for rank in program.present:
        rows = slice(columns.base[rank], columns.base[rank + 1])
        named = [
            call.op == MONITORED_BARRIER
            for call in program.code(rank).calls
            for _ in (call, *call.parts)
        ]
        if np.any(np.array(named, dtype=np.bool_) & (posted[rows] >= 0) & (finished[rows] < 0)):
            return True
    return False


def _timeouts_of_calls(program: Program) -> Iterator[int]:
    """Timeouts that calls name themselves."""
    for code in program.codes:
        yield from (int(c.fields["timeout_ns"]) for c in code.calls if c.fields.get("timeout_ns"))


def _rows_with_timeout(calls: list[CodeCall], device: bool) -> tuple[BoolArray, BoolArray]:
    """Of each row of a code: is it clocked from its post to its end (collectives; on a device, all
    that communicates), or as long as the host is in it (messages and waits)? NCCL's watchdog does
    not know of signals."""
    kinds = [
        "" if OPERATIONS[call.op].signals else OPERATIONS[call.op].kind
        for call in calls
        for _ in (call, *call.parts)
    ]
    running = ("p2p", "batch", "collective") if device else ("collective",)
    waiting = () if device else ("p2p", "batch", "wait", "group")
    return np.array([kind in running for kind in kinds], dtype=np.bool_), np.array(
        [kind in waiting for kind in kinds], dtype=np.bool_
    )
