"""Files of different runs lie in one folder: dumps that a job left earlier, of ranks that did not
write one since. Their clocks tell.

A call that all need ends nowhere before all have made it, and whoever waits longer than its
time-out ends. So two ranks that finished the same call made it within that time, or they are not of
one run; or the clock of a machine is wrong, which looks the same.
"""

from __future__ import annotations

from statistics import median_low

from distsim.hang_doctor.model.evidence import Evidence
from distsim.hang_doctor.model.evidence_records import RankEvidence
from distsim.hang_doctor.model.operation_names import OPS_THAT_NEED_ALL
from distsim.hang_doctor.model.phrases import ranks_text

#: The longest time-out that torch sets by itself (Gloo's, `default_pg_timeout`), in nanoseconds.
_DEFAULT_TIMEOUT_NS = 30 * 60 * 10**9
#: Times before are no time of day but a count from the start of a run (1973).
_MIN_UNIX_TIME_NS = 10**17


def drop_stale_ranks(evidence: Evidence) -> None:
    """Take out ranks whose files are of another time than those of most; where there is no most,
    nobody is to be accused.
    """
    if len(evidence.ranks) < 2:
        return
    patience = max(
        _DEFAULT_TIMEOUT_NS, *(given.longest_timeout_ns for given in evidence.ranks.values())
    )
    away = {
        rank: ns for rank, ns in _time_offsets(evidence, patience).items() if abs(ns) > patience
    }
    if not away:
        return
    text = "; ".join(
        f"{ranks_text([rank])}'s {_duration_text(abs(ns))} {'before' if ns < 0 else 'after'} the others'"
        for rank, ns in sorted(away.items())[:6]
    )
    if len(away) * 2 >= sum(_has_times(given) for given in evidence.ranks.values()):
        evidence.disputes.append(
            f"the same calls were made at different times ({text}): files of different runs, or clocks that are "
            "wrong; I cannot tell which belong together"
        )
        for group in evidence.groups.values():
            group.sure = False
        return
    evidence.disputes.append(
        f"the same calls were made at different times ({text}): a file of another run, or a clock that is wrong; the "
        f"records of {ranks_text(away)} are left out"
    )
    for rank in away:
        del evidence.ranks[rank]


def _time_offsets(evidence: Evidence, patience: int) -> dict[int, int]:
    """How long before or after most each rank made the last call that the most finished; else, how
    long before all that others made.
    """
    made: dict[tuple[str, int], dict[int, int]] = {}
    for rank, given in evidence.ranks.items():
        for call in given.calls if _has_times(given) else ():
            if (
                call.state == "done"
                and call.op in OPS_THAT_NEED_ALL
                and not call.p2p
                and call.at_ns > _MIN_UNIX_TIME_NS
            ):
                made.setdefault((call.group, call.number), {})[rank] = call.at_ns
    found: dict[int, int] = {}
    for at in sorted(made.values(), key=len):
        if len(at) > 1:
            middle = median_low(at.values())
            found |= {rank: ns - middle for rank, ns in at.items()}
    spans = {
        rank: (min(times), max(times))
        for rank, given in evidence.ranks.items()
        if _has_times(given) and (times := _call_times(given))
    }
    for rank, (_, last) in spans.items():
        first = min((start for other, (start, _) in spans.items() if other != rank), default=last)
        if rank not in found and first - last > patience:
            found[rank] = last - first
    return found


def _has_times(given: RankEvidence) -> bool:
    return given.recorded and any(call.at_ns > _MIN_UNIX_TIME_NS for call in given.calls)


def _call_times(given: RankEvidence) -> list[int]:
    return [call.at_ns for call in given.calls if call.at_ns > _MIN_UNIX_TIME_NS]


def _duration_text(ns: int) -> str:
    minutes = ns // (60 * 10**9)
    return (
        f"{minutes} minutes"
        if minutes < 120
        else f"{minutes // 60} hours"
        if minutes < 72 * 60
        else f"{minutes // 1440} days"
    )
