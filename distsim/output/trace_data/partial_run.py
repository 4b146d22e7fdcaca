"""How a partial run ended, in words and as data, for replays, comparisons and pictures.

A run is partial if its recording stops before the run did, or if its ranks did not all finish.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from distsim.checker.wording import rank_list
from distsim.common.units import show_ns
from distsim.output.text_layout import truncated
from distsim.trace.model import Trace
from distsim.trace.run_end import StoppedRank, is_partial, stopped_ranks

#: Groups of ranks that are listed, and characters of an error message.
MAX_STOP_LINES: Final = 8
MAX_MESSAGE_LENGTH: Final = 160
_OUTCOME_TEXT: Final = {
    "hangs": "it hung",
    "raises": "ranks raised errors",
    "crashes": "it crashed",
    "wrong-data": "it finished with wrong data",
    "undefined": "its behaviour was undefined",
}
_STATUS_TEXT: Final = {
    "killed": "killed",
    "crashed": "crashed",
    "raised": "raised an error",
    "silent": "silent",
    "absent": "never started",
}


def partial_run_text(trace: Trace) -> str:
    """``partial: it was ended from outside``; empty for a complete run."""
    if not is_partial(trace):
        return ""
    texts = (_end_text(trace), _truncation_text(trace))
    return "partial: " + "; ".join(text for text in texts if text)


def _end_text(trace: Trace) -> str:
    """Why the run stopped; empty if only the file is cut."""
    header = trace.header
    outcome = header.get("outcome")
    if header.get("cut") and (not outcome or outcome == "completes"):
        return ""
    reason = header.get("reason")
    if reason == "under way":
        return "its launcher was killed or is still running"
    if reason == "interrupted":
        ended_by = header.get("ended_by")
        return f"it was ended by {ended_by}" if ended_by else "it was ended from outside"
    return _OUTCOME_TEXT.get(str(outcome or ""), "its end is unknown")


def _truncation_text(trace: Trace) -> str:
    """How many calls are left of a file that is cut; empty for a whole file."""
    cut = trace.header.get("cut")
    if not cut:
        return ""
    total = f" of {cut['calls']}" if cut.get("calls") is not None else ""
    text = f"the file is cut, {cut.get('read')}{total} calls are there"
    present = set(trace["rank"].tolist())
    lost = [rank for rank in range(trace.world_size) if rank not in present]
    return f"{text}, none of {rank_list(lost)}" if lost else text


def stopped_rank_lines(trace: Trace, found: Sequence[StoppedRank] | None = None) -> list[str]:
    """Where ranks stopped, for example ``ranks 0-3 in send, line 11, iteration 2``.

    Ranks at the same position are joined. The cause comes first, with its error message.
    """
    stops = stopped_ranks(trace) if found is None else found
    ranks_by_position: dict[str, list[int]] = {}
    for stop in stops:
        ranks_by_position.setdefault(stop_position_text(trace, stop), []).append(stop.rank)
    lines = [f"{rank_list(sorted(ranks))} {where}" for where, ranks in ranks_by_position.items()]
    if stops and stops[0].message and stops[0].status != "killed":
        lines[0] += f": {truncated(stops[0].message, MAX_MESSAGE_LENGTH)}"
    hidden = len(lines) - MAX_STOP_LINES
    if hidden > 0:
        return [*lines[:MAX_STOP_LINES], f"… {hidden} more"]
    return lines


def stop_position_text(trace: Trace, stop: StoppedRank) -> str:
    """The state of a rank and its position, without its number."""
    state = _STATUS_TEXT.get(stop.status, "")
    if stop.status == "absent":
        return state
    position = "before its first call" if stop.row < 0 else _call_position(trace, stop)
    return f"{state} {position}" if state else position


def _call_position(trace: Trace, stop: StoppedRank) -> str:
    call = trace.row(stop.row)
    name = call.name if call.op == "compute" and call.name else call.op
    text = f"{'in' if stop.inside else 'after'} {name}"
    if call.place.line:
        text += f", line {call.place.line}"
    if int(trace["iteration"].max()) > 0:
        text += f", iteration {call.iteration}"
    return text


def partial_run_json(trace: Trace) -> dict[str, object] | None:
    """A partial run as data; None for a complete run. Times are in ns."""
    if not is_partial(trace):
        return None
    ranks = [_stop_json(trace, stop) for stop in stopped_ranks(trace)]
    return {
        "summary": partial_run_text(trace),
        "reason": trace.header.get("reason"),
        "cut": trace.header.get("cut"),
        "stops": ranks,
    }


def _stop_json(trace: Trace, stop: StoppedRank) -> dict[str, object]:
    call = trace.row(stop.row) if stop.row >= 0 else None
    return {
        "rank": stop.rank,
        "status": stop.status,
        "inside_call": stop.inside,
        "op": None if call is None else call.op,
        "line": None if call is None else call.place.line,
        "iteration": None if call is None else call.iteration,
        "position": None if call is None else call.position,
        "at_ns": stop.at_ns,
        "message": stop.message,
    }


def recording_length_text(trace: Trace) -> str:
    """How long the run was recorded; empty if unknown."""
    until_ns = trace.header.get("until_ns")
    return f", watched for {show_ns(int(until_ns))}" if until_ns else ""


__all__ = [
    "partial_run_json",
    "partial_run_text",
    "stop_position_text",
    "stopped_rank_lines",
    "recording_length_text",
]
