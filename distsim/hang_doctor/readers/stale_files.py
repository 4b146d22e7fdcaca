"""Drop the files of earlier runs, which a job may have left in the same folder.

A rank that writes no dump in this run leaves its old one there. The clocks show it. A call that
needs all members ends nowhere before all have made it, and a rank that waits longer than its
timeout ends. So two ranks that finished the same call made it within that time. Otherwise the files
belong to different runs, or the clock of a node is wrong, which looks the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median_low

from distsim.hang_doctor.model.evidence import Evidence
from distsim.hang_doctor.model.evidence_records import EvidenceCall, RankEvidence
from distsim.hang_doctor.model.operation_names import OPS_THAT_NEED_ALL
from distsim.hang_doctor.model.phrases import ranks_text

#: The longest timeout that torch sets by default (Gloo's, `default_pg_timeout`), in nanoseconds.
_DEFAULT_TIMEOUT_NS = 30 * 60 * 10**9
#: Earlier times (before 1973) are no time of day, but count from the start of a run.
_MIN_UNIX_TIME_NS = 10**17
_MAX_LISTED_RANKS = 6


def drop_stale_ranks(evidence: Evidence) -> None:
    """Remove ranks whose files are of another time than those of the majority.

    Without a majority it is unknown which files belong together. Then no group is sure any more,
    and no rank is blamed.
    """
    if len(evidence.ranks) < 2:
        return
    timeouts_ns = [records.longest_timeout_ns for records in evidence.ranks.values()]
    timeout_ns = max(_DEFAULT_TIMEOUT_NS, *timeouts_ns)
    offsets = _time_offsets(evidence, timeout_ns)
    stale = {rank: offset for rank, offset in offsets.items() if abs(offset) > timeout_ns}
    if not stale:
        return
    text = "; ".join(
        _offset_text(rank, offset) for rank, offset in sorted(stale.items())[:_MAX_LISTED_RANKS]
    )
    timed_ranks = sum(_has_times(records) for records in evidence.ranks.values())
    if len(stale) * 2 >= timed_ranks:
        evidence.disputes.append(
            f"the same calls have different times ({text}): these are files of different runs, or "
            "clocks are wrong; it is unknown which files belong together"
        )
        for group in evidence.groups.values():
            group.sure = False
        return
    evidence.disputes.append(
        f"the same calls have different times ({text}): a file is of another run, or a clock is "
        f"wrong; the records of {ranks_text(stale)} are ignored"
    )
    for rank in stale:
        del evidence.ranks[rank]


def _offset_text(rank: int, offset_ns: int) -> str:
    relation = "before" if offset_ns < 0 else "after"
    return f"{ranks_text([rank])} {_duration_text(abs(offset_ns))} {relation} the others"


def _time_offsets(evidence: Evidence, timeout_ns: int) -> dict[int, int]:
    """How long before (negative) or after the others each rank was active.

    Ranks that finished a common call are compared by it, preferably by the call that the most ranks
    finished. Another rank has an offset only if it ended long before all others began.
    """
    found: dict[int, int] = {}
    # In ascending order, so that the calls of the most ranks overwrite the others.
    for times in sorted(_times_of_common_calls(evidence), key=len):
        if len(times) > 1:
            middle = median_low(times.values())
            for rank, time in times.items():
                found[rank] = time - middle

    times_by_rank = {
        rank: _call_times(records)
        for rank, records in evidence.ranks.items()
        if _has_times(records)
    }
    first_by_rank = {rank: min(times) for rank, times in times_by_rank.items()}
    for rank, own_times in times_by_rank.items():
        last = max(own_times)
        others = [first for other, first in first_by_rank.items() if other != rank]
        first_of_others = min(others, default=last)
        if rank not in found and first_of_others - last > timeout_ns:
            found[rank] = last - first_of_others
    return found


def _times_of_common_calls(evidence: Evidence) -> list[dict[int, int]]:
    """For each finished call that needs all members: rank -> when it made the call."""
    times_by_call: dict[tuple[str, int], dict[int, int]] = {}
    for rank, records in evidence.ranks.items():
        for call in _finished_calls_of_all(records):
            times_by_call.setdefault((call.group, call.number), {})[rank] = call.at_ns
    return list(times_by_call.values())


def _finished_calls_of_all(records: RankEvidence) -> Iterator[EvidenceCall]:
    if not _has_times(records):
        return
    for call in records.calls:
        is_finished = call.state == "done" and call.at_ns > _MIN_UNIX_TIME_NS
        if is_finished and call.op in OPS_THAT_NEED_ALL and not call.p2p:
            yield call


def _has_times(records: RankEvidence) -> bool:
    return records.recorded and any(call.at_ns > _MIN_UNIX_TIME_NS for call in records.calls)


def _call_times(records: RankEvidence) -> list[int]:
    return [call.at_ns for call in records.calls if call.at_ns > _MIN_UNIX_TIME_NS]


def _duration_text(ns: int) -> str:
    minutes = ns // (60 * 10**9)
    if minutes < 120:
        return f"{minutes} minutes"
    if minutes < 72 * 60:
        return f"{minutes // 60} hours"
    return f"{minutes // 1440} days"
