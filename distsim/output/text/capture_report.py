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
    through = all(s.state == "ended" for s in judged.stands)
    ended = {
        "ended": "all ranks came to their end"
        if through
        else "then all had ended, not all at their last line",
        "stalled": "then calls met that do not fit: no data to go on with"
        if has_mismatched_collective(captured)
        else "then nothing could go on",
        "late": "and it was still running when its time was over",
    }[captured.ended]
    lines = wrapped_lines(
        f"captured from {' '.join((captured.capture_options.target.name, *captured.capture_options.target.args))}: {judged.calls} calls; {ended}"
    )
    if judged.worlds > 1:
        which = "the last" if judged.captured.past else "the first that does not come through"
        lines += wrapped_lines(
            f"of {judged.worlds} worlds that the script started one after the other, this is {which}",
            "  ",
        )
    if judged.threaded and captured.ended == "ended":
        lines += wrapped_lines(
            f"{ranks_label(judged.threaded)}: several threads made calls; another order of theirs than this one was not judged",
            "  ",
        )
    if captured.ended == "late":
        lines += wrapped_lines(
            "undecided: a process was still running, so nobody knows what it would have done", "  "
        )
    return lines


def _rank_status_lines(judged: CaptureResult) -> list[str]:
    """Where ranks are, alike ones together; nothing where all ended."""
    if all(s.state == "ended" for s in judged.stands):
        return []
    groups: dict[object, list[CapturedRankStatus]] = {}
    for stand in judged.stands:
        groups.setdefault((stand.state, stand.what, stand.place), []).append(stand)
    lines = ["Where ranks came to"]
    for alike in list(groups.values())[:_MAX_STATUS_GROUPS]:
        lines += _one_status_lines(alike[0], [s.rank for s in alike])
    if len(groups) > _MAX_STATUS_GROUPS:
        lines.append(f"  … and {len(groups) - _MAX_STATUS_GROUPS} more")
    return lines


def _one_status_lines(stand: CapturedRankStatus, ranks: Sequence[int]) -> list[str]:
    words = {
        "waits": f"waits in {stand.what}",
        "runs": f"runs {stand.what}",
        "killed": f"was killed by {stand.what}",
    }
    what = words.get(stand.state, f"{stand.state} {stand.what}".strip())
    lines = wrapped_lines(f"{ranks_label(ranks)}: {what}", "  ", "    ")
    file, line, function, via = stand.place
    if line:
        lines += wrapped_lines(f"{file}:{line} in {function}", "    ", "      ")
        if stand.source:
            lines.append(f"      {truncated(stand.source, 72)}")
        if via:
            lines += wrapped_lines(f"via {via}", "      ")
    return lines


def capture_json(judged: CaptureResult) -> dict[str, object]:
    """What `distsim capture --format json` prints: the keys of `simulate --format json`, and
    ``captured``.
    """
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
    told = {
        "target": captured.capture_options.target.name,
        "args": list(captured.capture_options.target.args),
        "ended": captured.ended,
        "calls": judged.calls,
        "threaded": list(judged.threaded),
        "ranks": ranks,
    }
    return {**simulation_json(judged.simulation), "outcome": judged.outcome, "captured": told}
