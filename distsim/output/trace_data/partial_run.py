"""How a run that did not come to its end ended, in words: one wording for replays, comparisons and
pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from distsim.checker.wording import rank_list
from distsim.common.units import show_ns
from distsim.output.text_layout import truncated
from distsim.trace.model import Trace
from distsim.trace.run_end import StoppedRank, is_partial, stopped_ranks

#: Groups of ranks that are told, and characters of an error's words.
MAX_STOP_LINES: Final = 8
MAX_MESSAGE_LENGTH: Final = 160
_OUTCOME_TEXT: Final = {
    "hangs": "it hangs",
    "raises": "ranks raise",
    "crashes": "it crashes",
    "wrong-data": "it ends with wrong data",
    "undefined": "what happens is not defined",
}
_STATUS_TEXT: Final = {
    "killed": "killed",
    "crashed": "crashed",
    "raised": "raised an error",
    "silent": "silent",
    "absent": "never started",
}


def partial_run_text(trace: Trace) -> str:
    """In a few words; empty where the run came to its end: ``partial: it was ended from
    outside``.
    """
    if not is_partial(trace):
        return ""
    header = trace.header
    reason, is_cut = header.get("reason"), bool(header.get("cut"))
    if reason == "under way":
        told = "its launcher was killed, or still runs"
    elif reason == "interrupted":
        told = (
            f"it was ended by {header['ended_by']}"
            if header.get("ended_by")
            else "it was ended from outside"
        )
    else:
        told = _OUTCOME_TEXT.get(str(header.get("outcome") or ""), "how it ended is not known")
    if is_cut and (not header.get("outcome") or header.get("outcome") == "completes"):
        told = ""
    return "partial: " + "; ".join(part for part in (told, _truncation_text(trace)) if part)


def _truncation_text(trace: Trace) -> str:
    found = trace.header.get("cut")
    if not found:
        return ""
    of = f" of {found['calls']}" if found.get("calls") is not None else ""
    here = set(trace["rank"].tolist())
    lost = [rank for rank in range(trace.world_size) if rank not in here]
    return f"the file is cut, {found.get('read')}{of} calls are there" + (
        f", none of {rank_list(sorted(lost))}" if lost else ""
    )


def stopped_rank_lines(trace: Trace, found: Sequence[StoppedRank] | None = None) -> list[str]:
    """Where the ranks stand, the cause first with its last words, equal ones as one: ``ranks 0-3 in
    send, line 11, iteration 2``.
    """
    chosen = stopped_ranks(trace) if found is None else found
    groups: dict[str, list[int]] = {}
    for stop in chosen:
        groups.setdefault(stop_position_text(trace, stop), []).append(stop.rank)
    lines = [f"{rank_list(sorted(ranks))} {where}" for where, ranks in groups.items()]
    if chosen and chosen[0].said and chosen[0].status != "killed":
        lines[0] += f": {truncated(chosen[0].said, MAX_MESSAGE_LENGTH)}"
    more = len(lines) - MAX_STOP_LINES
    return [*lines[:MAX_STOP_LINES], *([f"… {more} more"] if more > 0 else [])]


def stop_position_text(trace: Trace, stop: StoppedRank) -> str:
    """Where one rank stands, without its number."""
    state = _STATUS_TEXT.get(stop.status, "")
    if stop.status == "absent":
        return state
    if stop.row < 0:
        return " ".join([*([state] if state else []), "before its first call"])
    call = trace.row(stop.row)
    name = call.name if call.op == "compute" and call.name else call.op
    where = f"{'in' if stop.inside else 'after'} {name}{f', line {call.place.line}' if call.place.line else ''}"
    if int(trace["iteration"].max()) > 0:
        where += f", iteration {call.iteration}"
    return f"{state} {where}" if state else where


def partial_run_json(trace: Trace) -> dict[str, object] | None:
    """The same as data; None for a run that came to its end. Times are ns."""
    if not is_partial(trace):
        return None
    ranks = []
    for stop in stopped_ranks(trace):
        call = trace.row(stop.row) if stop.row >= 0 else None
        ranks.append(
            {
                "rank": stop.rank,
                "status": stop.status,
                "inside": stop.inside,
                "op": call and call.op,
                "line": call and call.place.line,
                "iteration": call and call.iteration,
                "position": call and call.position,
                "at_ns": stop.at_ns,
                "said": stop.said,
            }
        )
    return {
        "told": partial_run_text(trace),
        "reason": trace.header.get("reason"),
        "cut": trace.header.get("cut"),
        "stops": ranks,
    }


def recording_length_text(trace: Trace) -> str:
    """After how long a recording was over; empty where that is not known."""
    until_ns = trace.header.get("until_ns")
    return f", watched for {show_ns(int(until_ns))}" if until_ns else ""


__all__ = [
    "partial_run_json",
    "partial_run_text",
    "stop_position_text",
    "stopped_rank_lines",
    "recording_length_text",
]
