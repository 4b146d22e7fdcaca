"""A captured run as text and as JSON: the simulation of its calls, and the position of each rank in
the script.
"""

from __future__ import annotations

from collections.abc import Sequence

from distsim.output.json.simulation_result import simulation_json
from distsim.output.report_record import Block, Paragraph, Report, Section, Verbatim, paragraphs
from distsim.output.report_text import write_text
from distsim.output.text.simulation_report import simulation_report
from distsim.output.text_layout import ranks_label, truncated
from distsim.script_capture.result.evaluation import CaptureResult, has_mismatched_collective
from distsim.script_capture.result.rank_status import STORE_KEY, CapturedRankStatus

SCHEMA_VERSION = 1
#: Groups of ranks at the same position that are shown.
_MAX_STATUS_GROUPS = 16


def capture_text(judged: CaptureResult) -> str:
    """The whole report as text."""
    return write_text(capture_report(judged))


def capture_report(judged: CaptureResult) -> Report:
    """The report of the simulation, with two sections about the script after its head."""
    head, *rest = simulation_report(judged.simulation).sections
    return Report([head, _capture_section(judged), _rank_status_section(judged), *rest])


def _capture_section(judged: CaptureResult) -> Section:
    captured = judged.captured
    target = captured.capture_options.target
    command = " ".join((target.name, *target.args))
    notes = []
    if judged.worlds > 1:
        which = "the last one" if judged.captured.past else "the first one that fails"
        notes.append(
            f"the script created {judged.worlds} worlds one after the other; "
            f"this report is about {which}"
        )
    if judged.threaded and captured.ended == "ended":
        notes.append(
            f"{ranks_label(judged.threaded)}: several threads made calls; "
            "only the captured order of their calls was checked"
        )
    if captured.ended == "late":
        notes.append("undecided: a process was still running when capture stopped")
    head = Paragraph(f"captured from {command}: {judged.calls} calls; {_end_text(judged)}")
    if captured.capture_options.devices:
        notes.insert(0, f"devices: {captured.capture_options.devices}")
    notes.insert(0, f"backend: {_backend_origin(judged)}")
    return Section([head, *paragraphs(notes, "  ")])


def _backend_origin(judged: CaptureResult) -> str:
    """The backend whose rules were applied, and why this one."""
    backend = judged.simulation.program.backend
    if judged.captured.capture_options.backend:
        return f"{backend}, chosen by --backend"
    if not judged.captured.ranks:
        return f"{backend}, the default, because no rank called init_process_group"
    return f"{backend}, which init_process_group asked for"


def _end_text(judged: CaptureResult) -> str:
    """How the run of the script ended."""
    captured = judged.captured
    if captured.ended == "late":
        return "it was still running at the time limit"
    if captured.ended == "stalled":
        if has_mismatched_collective(captured):
            return "then capture stopped: the collectives did not match, so they have no result"
        blocked = [status.rank for status in judged.stands if status.state == "waits"]
        if not blocked:
            return "then no rank could proceed"
        return f"then {ranks_label(blocked)} could not proceed"
    if all(status.state == "ended" for status in judged.stands):
        return "all ranks finished"
    return "all ranks ended, some of them before their last line"


def _rank_status_section(judged: CaptureResult) -> Section:
    """Where the ranks are, equal ones joined; nothing if all have ended."""
    if all(s.state == "ended" for s in judged.stands):
        return Section([])
    groups: dict[object, list[CapturedRankStatus]] = {}
    for status in judged.stands:
        groups.setdefault((status.state, status.what, status.place), []).append(status)
    blocks: list[Block] = []
    for equal in list(groups.values())[:_MAX_STATUS_GROUPS]:
        blocks += _status_blocks(equal[0], [status.rank for status in equal])
    if len(groups) > _MAX_STATUS_GROUPS:
        blocks.append(Paragraph(f"… and {len(groups) - _MAX_STATUS_GROUPS} more", "  "))
    return Section(blocks, "Position of the ranks")


def _status_blocks(status: CapturedRankStatus, ranks: Sequence[int]) -> list[Block]:
    is_store_key = status.what.startswith(STORE_KEY)
    words = {
        "waits": f"waiting for {status.what}" if is_store_key else f"blocked in {status.what}",
        "runs": f"running {status.what}",
        "killed": f"killed by {status.what}",
        "ended": "finished",
        "absent": status.what,
    }
    what = words.get(status.state, f"{status.state} {status.what}".strip())
    blocks: list[Block] = [Paragraph(f"{ranks_label(ranks)}: {what}", "  ", "    ")]
    file, line, function, via = status.place
    if not line:
        return blocks
    blocks.append(Paragraph(f"{file}:{line} in {function}", "    ", "      "))
    if status.source:
        blocks.append(Verbatim([f"      {truncated(status.source, 72)}"]))
    if via:
        blocks.append(Paragraph(f"via {via}", "      "))
    return blocks


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
        "devices": captured.capture_options.devices,
        "threaded": list(judged.threaded),
        "ranks": ranks,
    }
    return {**simulation_json(judged.simulation), "outcome": judged.outcome, "captured": capture}
