"""Whether the ranks of a recording can be compared at all; if not, no rank is named.

Reasons not to compare: the clocks cannot be aligned, as in files of two jobs; there is one rank; or
the profiles do not show the communication that links the ranks. A rank of a distsim trace may
really have no communication, so the last reason holds for profiles only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distsim.common.units import show_ns
from distsim.trace.recordings.event_graph import NO_MEETING
from distsim.trace.recordings.recording import Recording

#: Clocks that are wrong by this share of a step may move a wait to another rank.
_WRONG_CLOCK_SHARE = 0.10
_LEAST_CLOCK_ERROR_NS = 1e6
_MOST_NAMED = 8


def reason_not_to_compare(recording: Recording, step_ns: float) -> str:
    """One or two sentences with the reason and the remedy; empty if the ranks are comparable."""
    if len(recording.graph.ranks) == 1:
        return _single_rank(recording)
    error = recording.clocks.worst_ns
    if error > max(_WRONG_CLOCK_SHARE * step_ns, _LEAST_CLOCK_ERROR_NS):
        return (
            f"These files do not fit together: their clocks differ by {show_ns(int(error))} of a "
            f"{show_ns(int(step_ns))} step. Are they of one run?"
        )
    return _without_links(recording) if recording.is_profile else ""


def _single_rank(recording: Recording) -> str:
    if not recording.missing_ranks:
        return "One rank cannot be compared."
    ranks = _rank_names(recording.missing_ranks)
    return f"One rank cannot be compared; give the files of {ranks}."


def _rank_names(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_NAMED]))
    more = "" if len(ranks) <= _MOST_NAMED else ", …"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"


def _without_links(recording: Recording) -> str:
    columns = recording.graph.columns
    in_meeting = columns.meeting != NO_MEETING
    communicating = {int(rank) for rank in np.unique(columns.rank[in_meeting])}
    silent = [rank for rank in recording.graph.ranks if rank not in communicating]
    if communicating and silent:
        has = "has" if len(silent) == 1 else "have"
        return (
            f"{_rank_names(silent).capitalize()} {has} no communication events, but other ranks "
            "do. Profile all ranks with the same settings."
        )
    pairs = np.unique(np.stack([columns.meeting[in_meeting], columns.rank[in_meeting]]), axis=1)
    _, members = np.unique(pairs[0], return_counts=True)
    if (members > 1).any():
        return ""
    return (
        "No communication event links these ranks, so their waits are unknown. Profile steps with "
        "collectives or messages, and use one job."
    )
