"""The faults of the run that a trace records: slow links, and ranks that were killed or absent."""

from __future__ import annotations

from collections.abc import Sequence

from distsim.program.code import SharedCode
from distsim.program.model import LinkFault, RankFault
from distsim.trace.model import Trace, TraceCall


def link_faults(trace: Trace) -> tuple[LinkFault, ...]:
    """Links that were slower in the run of the trace."""
    return tuple(
        LinkFault(link, tuple(nodes), factor)
        for link, nodes, factor in trace.header.get("link_faults") or ()
    )


def rank_faults(
    trace: Trace, codes: Sequence[SharedCode], calls_by_rank: Sequence[Sequence[TraceCall]]
) -> tuple[RankFault, ...]:
    """Faults that end ranks as in the trace."""
    faults = []
    for rank, status, at_ns in trace.header.get("ends") or ():
        if status == "absent":
            faults.append(RankFault(rank, "absent", at_ns=None))
        elif status == "killed":
            faults.append(_kill_fault(rank, at_ns, codes[rank], calls_by_rank[rank]))
    return tuple(faults)


def _kill_fault(
    rank: int, at_ns: int, code: SharedCode, rank_calls: Sequence[TraceCall]
) -> RankFault:
    """A rank that died between two calls dies there again; inside a call, at the same time."""
    calls = [call for call in rank_calls if call.part < 0]
    posted = [call for call in calls if call.posted_ns >= 0]
    if posted and posted[-1].returned_ns < 0 and posted[-1].posted_ns == at_ns:
        posted.pop()  # it died at the very beginning of this call
    if any(call.returned_ns < 0 for call in posted):
        return RankFault(rank, "kill", at_ns=max(at_ns, 0))
    calls_not_posted = len(calls) - len(posted)
    return RankFault(rank, "kill", position=len(code.calls) - calls_not_posted)
