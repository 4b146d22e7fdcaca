"""A real run as text in 80 columns and as JSON: how it ended, whether as simulated, where every
rank was, who is to blame.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from distsim.common.units import show_ns
from distsim.findings.final_state import RankEnd
from distsim.findings.finding_types import Finding
from distsim.output.json.simulation_result import finding_json
from distsim.output.text.finding_list import findings_lines
from distsim.output.text_layout import (
    page_width,
    ranks_label,
    table_lines,
    truncated,
    wrapped_lines,
)
from distsim.real.results.posted_calls import DivergingReceive
from distsim.real.results.rank_ends import is_consequence
from distsim.real.results.real_run import RealRun
from distsim.real.results.value_check import BufferCheck

#: Frames of a stack, lines of a failed rank's output, buffers, receives, that are shown; JSON has
#: all.
_MAX_FRAMES, _MAX_OUTPUT_LINES, _MAX_BUFFERS, _MAX_RECEIVES = 3, 3, 8, 8


def real_run_text(run: RealRun) -> str:
    """The report of `distsim run --real`."""
    file = run.simulation.scenario.file
    failed = run.outcome != "completes" or run.reason != "done"
    sections = [
        _header_lines(run),
        ["Ranks", *_rank_table(run)] if failed else [],
        _cause_lines(run) if failed else [],
        findings_lines(run.findings, file) if failed else [],
        _stack_lines(run) if failed else [],
        _output_lines(run) if failed else [],
        _different_receive_lines(run),
        _value_check_lines(run),
        _recording_lines(run),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _header_lines(run: RealRun) -> list[str]:
    simulation = run.simulation
    said = simulation.outcome
    if run.reason == "interrupted":
        text = f"ended {f'by {run.ended_by}' if run.ended_by else 'from outside'}; what was recorded so far is kept"
    elif run.outcome == "completes":
        text = f"completes in {_makespan_text(run.makespans_ns)}"
        text += (
            f"; simulated {show_ns(simulation.makespan_ns)}"
            if said == "completes"
            else f"; the simulation says {said}"
        )
    else:
        text = f"{run.outcome}; the simulation says {said}"
    agree = (
        f"the run ended {run.agreement or 'as simulated'}"
        if run.agrees
        else "NOT as simulated: " + "; ".join(run.differences)
    )
    ranks = simulation.program.world_size
    lines = wrapped_lines(f"{simulation.scenario.name or simulation.scenario.file}: {text}")
    lines += wrapped_lines(
        f"{ranks} ranks for real on {run.backend}, started by {run.launcher}, compute {run.trace.header['compute']}"
    )
    if run.reason != "interrupted":
        lines += wrapped_lines(agree)
    for note in run.notes:
        lines += wrapped_lines(note)
    return lines


def _makespan_text(makespans_ns: Sequence[int]) -> str:
    if len(makespans_ns) < 2:
        return show_ns(makespans_ns[0]) if makespans_ns else "no time"
    low, high = min(makespans_ns), max(makespans_ns)
    median = round(statistics.median(makespans_ns))
    return f"{show_ns(median)} (median of {len(makespans_ns)}, {show_ns(low)} to {show_ns(high)})"


# --- where everybody was ---


def _rank_table(run: RealRun) -> list[str]:
    """The call that each rank was in, with its place."""
    ends = run.final_state.ends
    lines = table_lines(
        ("rank", "state", "call", "where"),
        [
            (str(e.rank), _state_text(e, _was_still_running(run)), *_call_cells(run, e))
            for e in ends
        ],
        left=(1, 2, 3),
    )
    width = max(map(len, lines)) + 2
    texts = ["message" if any(e.message for e in ends) else "", *(e.message for e in ends)]
    return [
        f"{line:<{width}}{truncated(text, max(8, page_width() - width))}".rstrip()
        for line, text in zip(lines, texts, strict=True)
    ]


def _call_cells(run: RealRun, end: RankEnd) -> tuple[str, str]:
    program = run.simulation.program
    if end.status == "absent" or (end.status == "ended" and not end.message):
        return "", ""
    if end.position >= len(program.code(end.rank).calls):
        return "", "after its last call"
    place = program.place(end.rank, end.position)
    started = bool(run.makespans_ns and run.makespans_ns[-1]) or end.position
    if end.status == "blocked" and not started and run.trace.makespan_ns == 0:
        return "init_process_group", "before its first call"
    near = (
        f"line {place.line}"
        if place.file == run.simulation.scenario.file
        else truncated(f"{place.file}:{place.line}", 24)
    )
    return place.op, near


def _was_still_running(run: RealRun) -> bool:
    """It was ended from outside while it got on."""
    return run.reason == "interrupted" and not run.findings and not run.culprits


def _state_text(end: RankEnd, ran: bool = False) -> str:
    words = {
        "blocked": "running" if ran else "stuck",
        "silent": "stuck",
        "ended": "ended" if not end.message else "left",
        "absent": "never started",
    }
    return words.get(end.status, end.status)


def _cause_lines(run: RealRun) -> list[str]:
    if not run.culprits:
        return []
    ends = {end.rank: end for end in run.final_state.ends}
    first = ends[run.culprits[0]]
    who = ranks_label(list(run.culprits))
    said = (
        first.message
        if first.message.startswith(first.status)
        else f"{_state_text(first)}, {first.message}".removesuffix(", ")
    )
    why = f": {said}" if first.status != "blocked" and not is_consequence(first) else ""
    return wrapped_lines(f"The cause: {who}{why}. {_hang_reason(run)}", "", "  ")


def _hang_reason(run: RealRun) -> str:
    if run.reason != "standstill":
        return ""
    return (
        f"Nothing moved for {show_ns(run.timeout_ns)}."
        if not _any_rank_failed(run)
        else "Nothing moved after that."
    )


def _any_rank_failed(run: RealRun) -> bool:
    return any(end.status in ("raised", "crashed", "killed") for end in run.final_state.ends)


def _stack_lines(run: RealRun) -> list[str]:
    """The innermost frames of the ranks that were stuck, equal ones together."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, text in sorted(run.stacks.items()):
        frames = [
            line.strip().removeprefix("File ")
            for line in text.splitlines()
            if line.startswith("  File ")
        ]
        groups.setdefault(tuple(frames[:_MAX_FRAMES]), []).append(rank)
    lines = ["Python stacks, innermost first"] if groups else []
    for frames_, ranks in groups.items():
        lines.append(f"  {ranks_label(ranks)}")
        lines += [f"    {_frame_tail(frame)}" for frame in frames_]
    return lines


def _different_receive_lines(run: RealRun) -> list[str]:
    """Receives from any source that took another rank's message than in the simulation: what may
    differ because of it does.
    """
    rows = []
    for (rank, position, part), source, other in run.taken[:_MAX_RECEIVES]:
        place = run.simulation.program.place(rank, position)
        call = f"{place.op}, part {part}" if part >= 0 else place.op
        rows.append(
            (
                f"rank {rank}",
                call,
                f"line {place.line}",
                f"took rank {source}'s message, simulated rank {other}'s",
            )
        )
    more = len(run.taken) - _MAX_RECEIVES
    lines = table_lines(("", "", "", ""), rows, left=(0, 1, 2, 3))[1:] if rows else []
    return [
        *(["Receives from any source"] if rows else []),
        *lines,
        *([f"  … and {more} more"] if more > 0 else []),
    ]


def _frame_tail(frame: str) -> str:
    """A frame in 76 columns: the end of its path says more than its beginning."""
    return frame if len(frame) <= 76 else f"…{frame[-75:]}"


def _output_lines(run: RealRun) -> list[str]:
    lines = ["Last output of ranks that failed"] if run.outputs else []
    for rank, text in sorted(run.outputs.items()):
        lines.append(f"  rank {rank}")
        lines += [
            f"    {truncated(line, 76)}" for line in text.strip().splitlines()[-_MAX_OUTPUT_LINES:]
        ]
    return lines


# --- values and the recording ---


def _value_check_lines(run: RealRun) -> list[str]:
    if not run.values:
        return []
    count = {
        state: len(run.buffers_in_state(state))
        for state in ("equal", "close", "differs", "unknown")
    }
    text = f"Values: {count['equal']} of {len(run.values)} buffers equal to the simulated ones, bit for bit"
    if count["close"]:
        text += f"; {count['close']} within rounding (more than two terms are added in the back end's own order)"
    if count["unknown"]:
        text += f"; {count['unknown']} without simulated numbers"
    lines = wrapped_lines(text, "", "  ")
    for one in run.buffers_in_state("differs")[:_MAX_BUFFERS]:
        lines += wrapped_lines(f"rank {one.rank}, {one.label}: {one.detail}", "  ", "    ")
    more = count["differs"] - _MAX_BUFFERS
    return [*lines, f"  … and {more} more buffers that differ"] if more > 0 else lines


def _recording_lines(run: RealRun) -> list[str]:
    calls = len(run.trace)
    error = (
        "one clock for all ranks"
        if not run.clock_error_ns
        else f"clocks agree within {show_ns(run.clock_error_ns)}"
    )
    part = "" if run.trace.header["complete"] else ", not complete"
    if run.trace.header.get("times") == "device":
        error += f"; times of the GPUs within {show_ns(run.trace.header['device_clock_error_ns'])} of them"
    cost = f"recording took {run.overhead_ns} ns a call; " if run.overhead_ns else ""
    return wrapped_lines(f"Trace: {calls} calls{part}; {cost}{error}.", "", "  ")


def real_run_json(run: RealRun) -> dict[str, object]:
    """The same for programs; a key keeps its meaning while `schema_version` stays. Times are ns."""
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
        "taken": [_receive_json(run, one) for one in run.taken],
        "ranks": [_rank_json(run, end) for end in run.final_state.ends],
        "findings": _findings_json(run.findings),
        "values": [_buffer_check_json(one) for one in run.values],
        "recording_ns_per_call": run.overhead_ns,
        "clock_error_ns": run.clock_error_ns,
        "complete": bool(run.trace.header["complete"]),
        "notes": list(run.notes),
    }


def _findings_json(found: Sequence[Finding]) -> list[object]:
    return [dict(finding_json(one)) for one in found]


def _receive_json(run: RealRun, one: DivergingReceive) -> dict[str, object]:
    line = run.simulation.program.place(one.request.rank, one.request.position).line
    return {**one.request._asdict(), "line": line, "source": one.source, "simulated": one.simulated}


def _buffer_check_json(one: BufferCheck) -> dict[str, object]:
    return {"rank": one.rank, "tensor": one.label, "state": one.state, "detail": one.detail}


def _rank_json(run: RealRun, end: RankEnd) -> dict[str, object]:
    program = run.simulation.program
    inside = end.position < len(program.code(end.rank).calls) and end.status not in (
        "ended",
        "absent",
    )
    place = program.place(end.rank, end.position) if inside else None
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
