"""A captured run as text in 80 columns, and as JSON: what `simulate` says of its calls, and where
in the script ranks came to.
"""

from __future__ import annotations

from collections.abc import Sequence

from distsim.output.json.simulation_result import simulation_json
from distsim.output.text.simulation_report import simulation_report_text
from distsim.output.text_layout import ranks_label, truncated, wrapped_lines
from distsim.script_capture.result.evaluation import CaptureResult, has_mismatched_collective
from distsim.script_capture.result.rank_status import CapturedRankStatus

SCHEMA_VERSION = 1
#: Groups of ranks that stand alike which are shown.
_MAX_STATUS_GROUPS = 16


def capture_text(judged: CaptureResult) -> str:
    """The whole report."""
    simulated = simulation_report_text(judged.simulation)
    head, _, rest = simulated.partition("\n\n")
    sections = [
        head,
        "\n".join(_capture_lines(judged)),
        "\n".join(_rank_status_lines(judged)),
        rest,
    ]
    return "\n\n".join(section for section in sections if section)


def _capture_lines(judged: CaptureResult) -> list[str]:
    captured = judged.captured
    target = captured.capture_options.target
    command = " ".join((target.name, *target.args))
    lines = wrapped_lines(f"captured from {command}: {judged.calls} calls; {_end_text(judged)}")
    if judged.worlds > 1:
        which = "the last" if judged.captured.past else "the first that does not come through"
        lines += wrapped_lines(
            f"of {judged.worlds} worlds that the script started one after the other, "
            f"this is {which}",
            "  ",
        )
    if judged.threaded and captured.ended == "ended":
        lines += wrapped_lines(
            f"{ranks_label(judged.threaded)}: several threads made calls; "
            "another order of theirs than this one was not judged",
            "  ",
        )
    if captured.ended == "late":
        lines += wrapped_lines(
            "undecided: a process was still running, so nobody knows what it would have done", "  "
        )
    return lines


def _end_text(judged: CaptureResult) -> str:
    """How the run of the script ended."""
    captured = judged.captured
    if captured.ended == "late":
        return "and it was still running when its time was over"
    if captured.ended == "stalled":
        if has_mismatched_collective(captured):
            return "then calls met that do not fit: no data to go on with"
        return "then nothing could go on"
    if all(status.state == "ended" for status in judged.stands):
        return "all ranks came to their end"
    return "then all had ended, not all at their last line"


def _rank_status_lines(judged: CaptureResult) -> list[str]:
    """Where the ranks are, equal ones joined; nothing if all have ended."""
    if all(s.state == "ended" for s in judged.stands):
        return []
    groups: dict[object, list[CapturedRankStatus]] = {}
    for status in judged.stands:
        groups.setdefault((status.state, status.what, status.place), []).append(status)
    lines = ["Where ranks came to"]
    for equal in list(groups.values())[:_MAX_STATUS_GROUPS]:
        lines += _one_status_lines(equal[0], [status.rank for status in equal])
    if len(groups) > _MAX_STATUS_GROUPS:
        lines.append(f"  … and {len(groups) - _MAX_STATUS_GROUPS} more")
    return lines


def _one_status_lines(status: CapturedRankStatus, ranks: Sequence[int]) -> list[str]:
    words = {
        "waits": f"waits in {status.what}",
        "runs": f"runs {status.what}",
        "killed": f"was killed by {status.what}",
    }
    what = words.get(status.state, f"{status.state} {status.what}".strip())
    lines = wrapped_lines(f"{ranks_label(ranks)}: {what}", "  ", "    ")
    file, line, function, via = status.place
    if line:
        lines += wrapped_lines(f"{file}:{line} in {function}", "    ", "      ")
        if status.source:
            lines.append(f"      {truncated(status.source, 72)}")
        if via:
            lines += wrapped_lines(f"via {via}", "      ")
    return lines


def capture_json(judged: CaptureResult) -> dict[str, object]:
    """The output of `distsim capture --format json`: that of `simulate`, and ``captured``."""
    captured = judged.captured
    ranks = [
        {
            "rank": s.rank,
            "state": s.state,
            "what": s.what,
            "file": s.place[0],
            "line": s.place[1],
            "function": s.place[2],
            "via": s.place[3],
            "source": s.source,
        }
        for s in judged.stands
    ]
    capture = {
        "target": captured.capture_options.target.name,
        "args": list(captured.capture_options.target.args),
        "ended": captured.ended,
        "calls": judged.calls,
        "threaded": list(judged.threaded),
        "ranks": ranks,
    }
    return {**simulation_json(judged.simulation), "outcome": judged.outcome, "captured": capture}
