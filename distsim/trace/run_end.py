"""How the run of a trace ended: whether it came to its end, and where ranks stopped.

A trace of a partial run (a recording that was interrupted, a file that was cut) does not state the
cause. `stopped_ranks` sorts the ranks so that the most likely cause comes first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from distsim.trace.model import Trace

#: Outcomes of runs in which all ranks came to their ends.
_FINISHED_OUTCOMES: Final = ("completes", "wrong-data", "undefined")
#: Ranks with these statuses are more likely causes than ranks that are merely blocked.
_FAILED_STATUSES: Final = ("killed", "crashed", "absent")
#: Calls in which a rank waits for no other rank.
_LOCAL_OPS: Final = ("compute", "sleep", "assign")
#: In place of a row: the rank has not posted any call.
_NO_ROW: Final = -1


class StoppedRank(NamedTuple):
    """Where a rank stopped.

    ``row``: its last call, -1 if it made none; ``inside``: it is in that call, not after it.
    ``status``: as in `distsim.findings.final_state.RankEndStatus`; "blocked" for a rank that merely
    made no further progress. ``message``: the text of an error.
    """

    rank: int
    status: str
    row: int
    inside: bool
    at_ns: int
    message: str = ""


def is_partial(trace: Trace) -> bool:
    """Whether the run did not come to its end, or the file was cut."""
    header = trace.header
    outcome = header.get("outcome")
    if header.get("cut") or header.get("reason") in ("interrupted", "under way"):
        return True
    if outcome is None:
        return not header.get("complete", True)
    return outcome not in _FINISHED_OUTCOMES


def stopped_ranks(trace: Trace) -> tuple[StoppedRank, ...]:
    """The ranks that did not come to their end, the likely cause first.

    The order: ranks that the recording blames, ranks that died, ranks that were in local work, then
    by time. Empty for a run that came to its end. For a file that was cut, only ranks that are
    known to have stopped.
    """
    if trace.header.get("outcome") in _FINISHED_OUTCOMES or not is_partial(trace):
        return ()
    stopped = _unordered_stopped_ranks(trace)
    blamed = set(trace.header.get("culprits") or ())
    return tuple(
        sorted(
            stopped,
            key=lambda stop: (
                stop.rank not in blamed,
                stop.status not in _FAILED_STATUSES,
                not _is_in_local_work(trace, stop),
                stop.at_ns,
                stop.rank,
            ),
        )
    )


def _unordered_stopped_ranks(trace: Trace) -> list[StoppedRank]:
    last_posted = _last_posted_rows(trace)
    unfinished = _first_unfinished_rows(trace)
    ends: dict[int, tuple[str, int]] = {
        rank: (status, at_ns) for rank, status, at_ns in trace.header.get("ends") or ()
    }
    messages: Mapping[str, Any] = trace.header.get("said") or {}
    is_cut = bool(trace.header.get("cut"))
    stopped = []
    for rank in range(trace.world_size):
        row = last_posted[rank]
        is_in_call = row >= 0 and int(trace["returned_ns"][row]) < 0
        open_row = row if is_in_call else unfinished.get(rank, _NO_ROW)
        is_inside = open_row >= 0
        # After a cut, the calls that are missing may be those that the rank still made.
        may_have_finished = is_cut or _has_posted_all_calls(trace, rank, row)
        if rank not in ends and not is_inside and may_have_finished:
            continue
        status, at_ns = ends.get(rank, ("blocked", -1))
        stop_row = open_row if is_inside else row
        stop_ns = max(at_ns, _post_time(trace, stop_row))
        message = str(messages.get(str(rank), ""))
        stopped.append(StoppedRank(rank, status, stop_row, is_inside, stop_ns, message))
    return stopped


def _post_time(trace: Trace, row: int) -> int:
    return int(trace["posted_ns"][row]) if row >= 0 else 0


def _is_in_local_work(trace: Trace, stop: StoppedRank) -> bool:
    """The rank is in a local call or between two calls, so no other rank holds it up."""
    if stop.row < 0:
        return False
    return not stop.inside or trace.text("op", int(trace["op"][stop.row])) in _LOCAL_OPS


def _last_posted_rows(trace: Trace) -> list[int]:
    """The row of each rank's last posted call, or `_NO_ROW`; parts of batches do not count."""
    last = np.full(trace.world_size, _NO_ROW, dtype=np.int64)
    posted = np.flatnonzero((trace["part"] < 0) & (trace["posted_ns"] >= 0))
    np.maximum.at(last, trace["rank"][posted], posted)
    return last.tolist()


def _first_unfinished_rows(trace: Trace) -> dict[int, int]:
    """By rank, the first request whose work never finished although the host went on."""
    has_returned = (trace["posted_ns"] >= 0) & (trace["returned_ns"] >= 0)
    is_request = (trace["part"] < 0) & (trace["handle"] == trace["position"])
    is_unfinished = has_returned & is_request & (trace["finished_ns"] < 0)
    rows: dict[int, int] = {}
    for row in np.flatnonzero(is_unfinished).tolist():
        rows.setdefault(int(trace["rank"][row]), row)
    return rows


def _has_posted_all_calls(trace: Trace, rank: int, row: int) -> bool:
    """Whether ``row``, the rank's last posted call, is the last call of the rank."""
    if row < 0:
        return not bool((trace["rank"] == rank).any())
    ranks, parts = trace["rank"], trace["part"]
    following = row + 1
    while following < len(trace) and int(ranks[following]) == rank:
        if int(parts[following]) < 0:
            return False
        following += 1
    return True
