"""A real run as text in 80 columns and as JSON.

The report says how the run ended and whether that agrees with the simulation. For a run that
failed, it shows where every rank was, and which ranks are the cause.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from distsim.common.units import show_ns
from distsim.findings.final_state import RankEnd
from distsim.findings.finding_types import Finding
from distsim.output.json.simulation_result import finding_json
from distsim.output.report_record import (
    Block,
    Paragraph,
    Report,
    Section,
    Table,
    TableLayout,
    Verbatim,
    paragraphs,
    table_of,
    text_column,
)
from distsim.output.report_text import write_text
from distsim.output.text.finding_list import finding_sections
from distsim.output.text_layout import ranks_label, truncated
from distsim.real.results.posted_calls import DivergingReceive
from distsim.real.results.rank_ends import is_consequence
from distsim.real.results.real_run import RealRun
from distsim.real.results.value_check import BufferCheck

#: What is shown of a stack, of a rank's output, of buffers and of receives; JSON has all.
_MAX_FRAMES = 3
_MAX_OUTPUT_LINES = 3
_MAX_BUFFERS = 8
_MAX_RECEIVES = 8
_LINE_WIDTH = 76
_MIN_MESSAGE_WIDTH = 8


def real_run_text(run: RealRun) -> str:
    """The whole report as text."""
    return write_text(real_run_report(run))


def real_run_report(run: RealRun) -> Report:
    """The report of `distsim run --real`."""
    sections = [_header_section(run)]
    if run.outcome != "completes" or run.reason != "done":
        sections += [
            _rank_section(run),
            Section([Paragraph(_cause_text(run), further="  ")]),
            *finding_sections(run.findings, run.simulation.scenario.file),
            _stack_section(run),
            _output_section(run),
        ]
    sections += [
        _different_receive_section(run),
        _value_check_section(run),
        Section([Paragraph(_recording_text(run), further="  ")]),
    ]
    return Report(sections)


def _header_section(run: RealRun) -> Section:
    simulation = run.simulation
    name = simulation.scenario.name or simulation.scenario.file
    texts = [
        f"{name}: {_outcome_text(run)}",
        f"{simulation.program.world_size} ranks on torch.distributed with {run.backend}, "
        f"started by {run.launcher}, compute: {run.trace.header['compute']}",
    ]
    if run.reason != "interrupted":
        texts.append(_agreement_text(run))
    return Section(paragraphs((*texts, *run.notes)))


def _outcome_text(run: RealRun) -> str:
    """How the run ended, compared with the simulation."""
    if run.reason == "interrupted":
        by = f"by {run.ended_by}" if run.ended_by else "from outside"
        return f"ended {by}; the recording up to then is kept"
    simulated = run.simulation.outcome
    if run.outcome != "completes":
        return f"{run.outcome}; the simulation predicts: {simulated}"
    text = f"completes in {_makespan_text(run.makespans_ns)}"
    if simulated != "completes":
        return f"{text}; the simulation predicts: {simulated}"
    cluster = run.simulation.cost.cluster.name
    return f"{text}; simulated {show_ns(run.simulation.makespan_ns)} on {cluster}"


def _agreement_text(run: RealRun) -> str:
    if run.agrees:
        return f"the run ended {run.agreement or 'as predicted'}"
    return "NOT as predicted: " + "; ".join(run.differences)


def _makespan_text(makespans_ns: Sequence[int]) -> str:
    if len(makespans_ns) < 2:
        return show_ns(makespans_ns[0]) if makespans_ns else "no time"
    low, high = min(makespans_ns), max(makespans_ns)
    median = round(statistics.median(makespans_ns))
    return f"{show_ns(median)} (median of {len(makespans_ns)}, {show_ns(low)} to {show_ns(high)})"


# --- where each rank was, and why ---


_RANK_COLUMNS = [text_column(key) for key in ("rank", "state", "call", "where", "message")]
#: Messages get what is left of the page, but at least some words.
_RANK_LAYOUT = TableLayout(
    [column.key for column in _RANK_COLUMNS], flexible={"message": _MIN_MESSAGE_WIDTH}
)


def _rank_section(run: RealRun) -> Section:
    """The call that each rank was in, with its place and the message of its error."""
    ends = run.final_state.ends
    was_running = _was_still_running(run)
    rows = []
    for end in ends:
        operation, place = _call_cells(run, end)
        state = _state_text(end, was_running)
        cells = (str(end.rank), state, operation, place, end.message)
        rows.append({column.key: cell for column, cell in zip(_RANK_COLUMNS, cells, strict=True)})
    columns = _RANK_COLUMNS if any(end.message for end in ends) else _RANK_COLUMNS[:-1]
    return Section([Table(columns, rows, (_RANK_LAYOUT,))], "Ranks")


def _call_cells(run: RealRun, end: RankEnd) -> tuple[str, str]:
    """The operation that a rank was in, and its place."""
    program = run.simulation.program
    if end.status == "absent" or (end.status == "ended" and not end.message):
        return "", ""
    if end.position >= len(program.code(end.rank).calls):
        return "", "after its last call"
    place = program.place(end.rank, end.position)
    if end.status == "blocked" and end.position == 0 and _has_recorded_nothing(run):
        return "init_process_group", "before its first call"
    if place.file == run.simulation.scenario.file:
        return place.op, f"line {place.line}"
    return place.op, truncated(f"{place.file}:{place.line}", 24)


def _has_recorded_nothing(run: RealRun) -> bool:
    last_makespan_ns = run.makespans_ns[-1] if run.makespans_ns else 0
    return last_makespan_ns == 0 and run.trace.makespan_ns == 0


def _was_still_running(run: RealRun) -> bool:
    """Whether the run was ended from outside while it made progress."""
    return run.reason == "interrupted" and not run.findings and not run.culprits


def _state_text(end: RankEnd, was_running: bool = False) -> str:
    states = {
        "blocked": "running" if was_running else "blocked",
        "silent": "blocked",
        "ended": "ended" if not end.message else "exited",
        "absent": "never started",
    }
    return states.get(end.status, end.status)


def _cause_text(run: RealRun) -> str:
    """The ranks that are the cause, and what happened to the first of them."""
    if not run.culprits:
        return ""
    ends = {end.rank: end for end in run.final_state.ends}
    first = ends[run.culprits[0]]
    text = f"Cause: {ranks_label(list(run.culprits))}"
    if first.status != "blocked" and not is_consequence(first):
        text += f": {_end_text(first)}"
    return f"{text}. {_hang_reason(run)}"


def _end_text(end: RankEnd) -> str:
    """The state and the message of a rank, without saying the state twice."""
    if end.message.startswith(end.status):
        return end.message
    return f"{_state_text(end)}, {end.message}".removesuffix(", ")


def _hang_reason(run: RealRun) -> str:
    if run.reason != "standstill":
        return ""
    if _any_rank_failed(run):
        return "No rank made progress after that."
    return f"No rank made progress for {show_ns(run.timeout_ns)}."


def _any_rank_failed(run: RealRun) -> bool:
    return any(end.status in ("raised", "crashed", "killed") for end in run.final_state.ends)


def _stack_section(run: RealRun) -> Section:
    """The innermost frames of the blocked ranks; ranks with equal frames are joined."""
    ranks_by_frames: dict[tuple[str, ...], list[int]] = {}
    for rank, text in sorted(run.stacks.items()):
        file_lines = [line for line in text.splitlines() if line.startswith("  File ")]
        innermost = tuple(line.strip() for line in file_lines[:_MAX_FRAMES])
        ranks_by_frames.setdefault(innermost, []).append(rank)
    blocks: list[Block] = []
    for frames, ranks in ranks_by_frames.items():
        blocks.append(Paragraph(ranks_label(ranks), "  "))
        frame_lines = [f"    {_frame_tail(frame.removeprefix('File '))}" for frame in frames]
        blocks.append(Verbatim(frame_lines))
    return Section(blocks, "Python stacks, innermost frame first")


_RECEIVE_COLUMNS = [text_column(key) for key in ("rank", "call", "line", "source")]


def _different_receive_section(run: RealRun) -> Section:
    """Receives from any source that took the message of another rank than in the simulation.

    They explain differences of values and of later calls.
    """
    rows = []
    for (rank, position, part), source, simulated_source in run.taken[:_MAX_RECEIVES]:
        place = run.simulation.program.place(rank, position)
        call = f"{place.op}, part {part}" if part >= 0 else place.op
        what = f"received from rank {source}, in the simulation from rank {simulated_source}"
        rows.append((f"rank {rank}", call, f"line {place.line}", what))
    table = table_of(_RECEIVE_COLUMNS, rows)._replace(has_header=False)
    hidden = len(run.taken) - _MAX_RECEIVES
    more = f"… and {hidden} more" if hidden > 0 else ""
    return Section([table, Paragraph(more, "  ")], "Receives from any source")


def _frame_tail(frame: str) -> str:
    """A frame without the beginning of a long path: its end says more."""
    if len(frame) <= _LINE_WIDTH:
        return frame
    return f"…{frame[1 - _LINE_WIDTH :]}"


def _output_section(run: RealRun) -> Section:
    blocks: list[Block] = []
    for rank, text in sorted(run.outputs.items()):
        last_lines = text.strip().splitlines()[-_MAX_OUTPUT_LINES:]
        blocks.append(Paragraph(f"rank {rank}", "  "))
        blocks.append(Verbatim([f"    {truncated(line, _LINE_WIDTH)}" for line in last_lines]))
    return Section(blocks, "Last output of ranks that failed")


# --- values and the recording ---


def _value_check_section(run: RealRun) -> Section:
    if not run.values:
        return Section([])
    count = {
        state: len(run.buffers_in_state(state))
        for state in ("equal", "close", "differs", "unknown")
    }
    text = f"Values: {count['equal']} of {len(run.values)} buffers bitwise equal to the simulation"
    if count["close"]:
        text += (
            f"; {count['close']} equal within rounding "
            "(the backend adds more than two terms in its own order)"
        )
    if count["unknown"]:
        text += f"; {count['unknown']} not compared (the simulation does not know their values)"
    differing = run.buffers_in_state("differs")[:_MAX_BUFFERS]
    details = [f"rank {check.rank}, {check.label}: {check.detail}" for check in differing]
    hidden = count["differs"] - _MAX_BUFFERS
    if hidden > 0:
        details.append(f"… and {hidden} more buffers that differ")
    return Section([Paragraph(text, further="  "), *paragraphs(details, "  ", "    ")])


def _recording_text(run: RealRun) -> str:
    """The size of the recording, its overhead, and how well the clocks of the ranks agree."""
    header = run.trace.header
    text = f"Trace: {len(run.trace)} calls"
    if not header["complete"]:
        text += ", incomplete"
    if run.overhead_ns:
        text += f"; recording overhead {run.overhead_ns} ns per call"
    if run.clock_error_ns:
        text += f"; clocks agree within {show_ns(run.clock_error_ns)}"
    else:
        text += "; one clock for all ranks"
    if header.get("times") == "device":
        error_ns = header["device_clock_error_ns"]
        text += f"; GPU times agree with the clocks within {show_ns(error_ns)}"
    return f"{text}."


# --- JSON ---


def real_run_json(run: RealRun) -> dict[str, object]:
    """The report for programs. Times are ns; a key keeps its meaning within a `schema_version`."""
    simulation = run.simulation
    return {
        "schema_version": 1,
        "file": simulation.scenario.file,
        "name": simulation.scenario.name,
        "outcome": run.outcome or None,
        "reason": run.reason,
        "backend": run.backend,
        "launcher": run.launcher,
        "world_size": simulation.program.world_size,
        "makespans_ns": list(run.makespans_ns),
        "simulated": {"outcome": simulation.outcome, "makespan_ns": simulation.makespan_ns},
        "agrees": run.agrees if run.outcome else None,
        "differences": list(run.differences),
        "agreement": run.agreement,
        "ended_by": run.ended_by or None,
        "culprits": list(run.culprits),
        "any_source_matches": [_receive_json(run, receive) for receive in run.taken],
        "ranks": [_rank_json(run, end) for end in run.final_state.ends],
        "findings": _findings_json(run.findings),
        "values": [_buffer_check_json(check) for check in run.values],
        "recording_ns_per_call": run.overhead_ns,
        "clock_error_ns": run.clock_error_ns,
        "complete": bool(run.trace.header["complete"]),
        "notes": list(run.notes),
    }


def _findings_json(findings: Sequence[Finding]) -> list[object]:
    return [dict(finding_json(finding)) for finding in findings]


def _receive_json(run: RealRun, receive: DivergingReceive) -> dict[str, object]:
    request = receive.request
    line = run.simulation.program.place(request.rank, request.position).line
    sources = {"source": receive.source, "simulated": receive.simulated}
    return {**request._asdict(), "line": line, **sources}


def _buffer_check_json(check: BufferCheck) -> dict[str, object]:
    return {"rank": check.rank, "tensor": check.label, "state": check.state, "detail": check.detail}


def _rank_json(run: RealRun, end: RankEnd) -> dict[str, object]:
    program = run.simulation.program
    has_calls_left = end.position < len(program.code(end.rank).calls)
    is_in_call = has_calls_left and end.status not in ("ended", "absent")
    place = program.place(end.rank, end.position) if is_in_call else None
    return {
        "rank": end.rank,
        "status": end.status,
        "position": end.position,
        "at_ns": end.at_ns,
        "message": end.message,
        "op": place.op if place else None,
        "file": place.file if place else None,
        "line": place.line if place else None,
        "stack": run.stacks.get(end.rank),
        "output": run.outputs.get(end.rank),
    }
