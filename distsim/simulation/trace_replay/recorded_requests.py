"""Which calls belong together in a trace: requests and their waits, receives and their senders."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence

from distsim.trace.model import TraceCall


def requests_ended_by(rank_calls: Sequence[TraceCall]) -> dict[int, list[int]]:
    """The requests that each call of a rank ends, by positions in the trace.

    If the trace has no column ``ended_by``, the times of the waits show it.
    """
    found: dict[int, list[int]] = defaultdict(list)
    calls = [call for call in rank_calls if call.part < 0]
    waits = [call for call in calls if call.op == "wait"]
    requests = [call for call in calls if call.handle == call.position]
    stated = [call for call in requests if call.ended_by > call.position]
    for call in stated:
        found[call.ended_by].append(call.position)
    for wait in waits:
        args = json.loads(wait.args) if wait.args else {}
        if "waits" in args:
            found[wait.position] = [wait.position - distance for distance in args["waits"]]
    if stated:
        return found
    for wait in waits:
        for request in requests:
            if request.position < wait.position and _is_ended_by_wait(request, wait):
                found[wait.position].append(request.position)
    return found


def _is_ended_by_wait(request: TraceCall, wait: TraceCall) -> bool:
    """The request was completed during the wait, or the wait names it."""
    is_during_wait = wait.posted_ns <= request.waited_ns <= wait.returned_ns
    return (request.waited_ns >= 0 and is_during_wait) or request.position == wait.handle


def senders_by_row(rows: Sequence[TraceCall]) -> dict[int, int]:
    """For each receive that met a message, by row: the sender."""
    sender_of_match = {
        call.match: call.rank for call in rows if call.match >= 0 and call.op in ("send", "isend")
    }
    receives = [(row, call) for row, call in enumerate(rows) if call.op in ("recv", "irecv")]
    return {
        row: sender_of_match[call.match] for row, call in receives if call.match in sender_of_match
    }
