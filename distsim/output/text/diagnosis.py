"""What `distsim doctor` says: text of any width, JSON, and who waits for whom as a picture."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

from distsim.hang_doctor.analysis.diagnosis import Diagnosis
from distsim.hang_doctor.analysis.hang_cause import HangCause
from distsim.hang_doctor.analysis.wait_chains import wait_edges
from distsim.hang_doctor.model.evidence_records import InputFile, StackFrame
from distsim.hang_doctor.model.phrases import (
    call_text,
    ranks_text,
    short_file,
    source_line,
    verb_form,
)
from distsim.output.pictures.drawing.box_diagram import (
    SMALL_SIZE,
    BoxDiagram,
    DiagramEdge,
    DiagramNode,
    LegendKey,
    TextLine,
    clipped,
)
from distsim.output.pictures.drawing.palette import (
    GREY,
    INK,
    LINE_COLOUR,
    PALE_FILL,
    RED,
    RED_FILL,
    WHITE,
)

#: Narrower or wider is not printed.
MIN_WIDTH, MAX_WIDTH = 40, 200
_GRADE_TEXT = {
    "proved": "proved by the records",
    "suspected": "suspected, not proved",
    "unknown": "open",
}
_MAX_RANKS, _MAX_FILES, _MAX_CAUSES = 16, 8, 4


def doctor_text(found: Diagnosis, width: int = 100) -> str:
    """The report, main cause first. ``width`` in columns, 40 to 200."""
    columns = min(max(width, MIN_WIDTH), MAX_WIDTH)
    lines: list[str] = []
    for part in (
        _main_cause_lines(found),
        _other_cause_lines(found),
        _wait_section(found),
        _last_common_lines(found),
        _open_question_lines(found),
        _next_step_lines(found),
        _file_lines(found),
    ):
        block = [
            text
            for first, rest, body in part
            for text in _wrapped_lines(first, rest, body, columns)
        ]
        if block:
            lines += ["", *block] if lines else block
    return "\n".join(lines)


def _wrapped_lines(first: str, rest: str, body: str, width: int) -> list[str]:
    return textwrap.wrap(
        body, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    ) or [first.rstrip()]


ReportLines = Iterator[tuple[str, str, str]]


def _main_cause_lines(found: Diagnosis) -> ReportLines:
    main = found.main
    if main is None:
        known = found.evidence.ranks
        yield (
            "",
            "  ",
            f"nobody waits in what I was given of {ranks_text(known)}"
            if known
            else "nothing that I can read tells of a rank",
        )
        return
    yield from _cause_lines(main)


def _cause_lines(cause: HangCause) -> ReportLines:
    yield "", "  ", f"{cause.title} [{_GRADE_TEXT[cause.grade]}]"
    for ranks, what, frame in _grouped_rank_lines(cause)[:_MAX_RANKS]:
        yield "  ", "    ", f"{ranks_text(ranks)}: {what}{_frame_text(frame)}"
    for detail in cause.details:
        yield "  ", "    ", detail


def _grouped_rank_lines(cause: HangCause) -> list[tuple[tuple[int, ...], str, StackFrame | None]]:
    """Ranks at one line in one operation together."""
    found: dict[tuple[str, str], list[tuple[tuple[int, ...], str, StackFrame | None]]] = {}
    for line in cause.lines:
        found.setdefault(
            (re.sub(r"\b(rank|tag|call) \d+", r"\1", line[1]), line[2].place if line[2] else ""), []
        ).append(line)
    grouped = []
    for same in found.values():
        what = (
            same[0][1]
            if len({w for _, w, _ in same}) == 1
            else re.split(r" to | from |,", same[0][1])[0]
        )
        grouped.append((tuple(r for ranks, _, _ in same for r in ranks), what, same[0][2]))
    return grouped


def _frame_text(frame: StackFrame | None) -> str:
    if frame is None:
        return ""
    text = source_line(frame)
    return f" at {short_file(frame.file)}:{frame.line}{f' in {frame.name}' if frame.name else ''}{f'  | {text}' if text else ''}"


def _other_cause_lines(found: Diagnosis) -> ReportLines:
    for cause in found.causes[1 : 1 + _MAX_CAUSES]:
        yield "also: ", "  ", f"{cause.title} [{_GRADE_TEXT[cause.grade]}]"
        for ranks, what, frame in _grouped_rank_lines(cause)[:4]:
            yield "  ", "    ", f"{ranks_text(ranks)}: {what}{_frame_text(frame)}"
    hidden = len(found.causes) - 1 - _MAX_CAUSES
    if hidden > 0:
        yield "", "", f"and {hidden} more in --format json"


def _wait_section(found: Diagnosis) -> ReportLines:
    rows = list(_wait_lines(found))
    if rows:
        yield "", "", "Who waits for whom"
    for row in rows[:_MAX_RANKS]:
        yield "  ", "    ", row
    if len(rows) > _MAX_RANKS:
        yield "  ", "    ", f"and {len(rows) - _MAX_RANKS} more calls, in --format json"


def _wait_lines(found: Diagnosis) -> Iterator[str]:
    """A line for each call that somebody is in: ranks in one call, waiting for the same,
    together.
    """
    rows: dict[tuple[str, tuple[int, ...], tuple[int, ...], bool], list[int]] = {}
    for rank, stand in found.standing.ranks.items():
        for wait in stand.waits:
            key = (call_text(found.evidence, wait.call), wait.missing, wait.silent, wait.open_ended)
            rows.setdefault(key, []).append(rank)
    for (call, missing, silent, unclear), ranks in rows.items():
        parts = [f"for {ranks_text(missing)}"] if missing else []
        parts += [f"for {ranks_text(silent)}, of whom nothing was given"] if silent else []
        parts += ["for whom, the records do not say"] if unclear and not parts else []
        parts = parts or ["and all whom it needs are there"]
        yield f"{ranks_text(ranks)} {verb_form(ranks, 'is', 'are')} in {call}, {' and '.join(parts)}"
    free = [r for r, s in found.standing.ranks.items() if not s.waits]
    for rank in free[:_MAX_RANKS]:
        stand = found.standing.ranks[rank]
        if stand.end is not None:
            yield f"rank {rank}: {stand.end.text}"
        elif stand.frame is not None:
            yield f"rank {rank} is in no call that was recorded{_frame_text(stand.frame)}"


def _last_common_lines(found: Diagnosis) -> ReportLines:
    for text in found.common:
        yield "last ", "  ", text


def _open_question_lines(found: Diagnosis) -> ReportLines:
    for text in found.evidence.disputes[:6]:
        yield "these disagree: ", "  ", text
    if found.absent:
        yield "not given: ", "  ", ranks_text(found.absent)
    for text in found.evidence.notes[:6]:
        yield "note: ", "  ", text
    if found.evidence.orphans:
        yield (
            "note: ",
            "  ",
            f"{len(found.evidence.orphans)} stacks do not say whose they are: name their files rank_N",
        )


def _next_step_lines(found: Diagnosis) -> ReportLines:
    for text in found.collect:
        yield "next: ", "  ", text


def _file_lines(found: Diagnosis) -> ReportLines:
    good = [f for f in found.evidence.files if not f.problem]
    empty = [f for f in found.evidence.files if f.kind == "empty"]
    bad = [f for f in found.evidence.files if f.problem and f.kind != "empty"]
    kinds: dict[str, list[InputFile]] = {}
    for file in good:
        kinds.setdefault(file.kind, []).append(file)
    for kind, files in kinds.items():
        ranks = {r for f in files for r in f.ranks}
        yield (
            "read: ",
            "  ",
            f"{kind}, {len(files)} file{'s' if len(files) > 1 else ''}{f' ({ranks_text(ranks)})' if ranks else ''}",
        )
    if empty:
        yield "empty: ", "  ", f"{len(empty)} file{'s' if len(empty) > 1 else ''}"
    for file in bad[:_MAX_FILES]:
        yield "not read: " if not file.ranks else "in part: ", "  ", f"{file.path}: {file.problem}"
    if len(bad) > _MAX_FILES:
        yield "", "  ", f"and {len(bad) - _MAX_FILES} more files that were not read"


# --- JSON ---


def doctor_json(found: Diagnosis) -> dict[str, object]:
    """The whole diagnosis as plain data."""
    return {
        "schema_version": 1,
        "culprits": list(found.culprits),
        "causes": [_cause_json(cause) for cause in found.causes],
        "waits": [
            {
                "rank": rank,
                "op": w.call.op,
                "group": w.call.group,
                "call": w.call.number,
                "peer": w.call.peer,
                "for": list(w.missing),
                "not_given": list(w.silent),
                "known": not w.open_ended,
                "line": w.frame.place if w.frame else None,
            }
            for rank, stand in found.standing.ranks.items()
            for w in stand.waits
        ],
        "ranks": [_rank_json(found, rank) for rank in found.standing.ranks],
        "groups": [
            {
                "name": g.name,
                "description": g.desc,
                "members": list(g.members) if g.members else None,
                "sure": g.sure,
            }
            for g in found.evidence.groups.values()
        ],
        "last_common": found.common,
        "not_given": list(found.absent),
        "disagree": found.evidence.disputes,
        "notes": found.evidence.notes,
        "collect": found.collect,
        "files": [
            {"path": f.path, "kind": f.kind, "ranks": list(f.ranks), "problem": f.problem}
            for f in found.evidence.files
        ],
    }


def _cause_json(cause: HangCause) -> dict[str, object]:
    lines = [
        {
            "ranks": list(r),
            "what": w,
            "line": f.place if f else None,
            "function": f.name if f else None,
        }
        for r, w, f in cause.lines
    ]
    return {
        "kind": cause.kind,
        "grade": cause.grade,
        "title": cause.title,
        "culprits": list(cause.culprits),
        "ranks": list(cause.ranks),
        "group": cause.group,
        "call": cause.number,
        "lines": lines,
        "details": cause.details,
    }


def _rank_json(found: Diagnosis, rank: int) -> dict[str, object]:
    given, stand = found.evidence.ranks[rank], found.standing.ranks[rank]
    return {
        "rank": rank,
        "line": stand.frame.place if stand.frame else None,
        "ended": stand.end.text if stand.end else None,
        "calls": len(given.calls),
        "last": {
            key: {"enqueued": s.enqueued, "completed": s.completed}
            for key, s in given.status.items()
        },
        "from": list(given.sources),
    }


# --- picture ---


def doctor_picture(found: Diagnosis) -> BoxDiagram:
    """Boxes are ranks, an arrow leads to the rank that is waited for; ranks of whom nothing was
    given are dashed.
    """
    main = found.main
    core = set((main.culprits or main.ranks) if main else ())
    awaited = {m for s in found.standing.ranks.values() for w in s.waits for m in w.missing}
    ranks = {
        r: s
        for r, s in found.standing.ranks.items()
        if s.waits or s.end or s.frame or r in core | awaited
    }
    drawn = sorted(ranks, key=lambda r: (r not in core, r))[:24]
    silent = sorted({m for r in drawn for w in ranks[r].waits for m in w.silent})[:8]
    nodes = [_rank_node(found, rank, rank in core) for rank in sorted(drawn)]
    nodes += [
        DiagramNode(
            f"rank{r}",
            (TextLine(f"rank {r}", bold=True), TextLine("not given", colour=GREY)),
            fill=WHITE,
            border=GREY,
            dashed=True,
        )
        for r in silent
    ]
    graph = wait_edges(found.standing)
    lines = [
        DiagramEdge(
            f"rank{r}",
            f"rank{m}",
            colour=RED if {r, m} & core else GREY,
            width=2.2 if {r, m} & core else 1.2,
        )
        for r in sorted(drawn)
        for m in sorted(graph.get(r, {}))
        if m in drawn
    ][:200]
    lines += [
        DiagramEdge(f"rank{r}", f"rank{m}", colour=GREY, dashed=True)
        for r in sorted(drawn)
        for w in ranks[r].waits
        for m in w.silent
        if m in silent
    ][:60]
    hidden = len(ranks) - len(drawn)
    title = clipped(main.title if main else "nobody waits", 110)
    if not nodes:
        nodes = [DiagramNode("none", (TextLine("nothing is known of any rank", bold=True),))]
    keys = (
        LegendKey(RED, "what the cause concerns"),
        LegendKey(INK, "waits for this rank", "solid"),
        LegendKey(INK, "nothing was given of it", "dashed"),
    )
    return BoxDiagram(
        title,
        _GRADE_TEXT[main.grade] if main else "",
        tuple(nodes),
        tuple(lines),
        legend=keys,
        notes=(f"and {hidden} more ranks, not drawn",) if hidden else (),
    )


def _rank_node(found: Diagnosis, rank: int, core: bool) -> DiagramNode:
    stand = found.standing.ranks[rank]
    what = (
        call_text(found.evidence, stand.waits[0].call)
        if stand.waits
        else stand.end.text
        if stand.end
        else "in no recorded call"
    )
    lines = [
        TextLine(f"rank {rank}", bold=True, size=14, colour=RED if core else INK),
        TextLine(clipped(what, 48)),
    ]
    if stand.frame is not None:
        lines.append(
            TextLine(
                clipped(f"{short_file(stand.frame.file)}:{stand.frame.line}", 48),
                colour=GREY,
                size=SMALL_SIZE,
            )
        )
    fill, border, width = (RED_FILL, RED, 2.2) if core else (PALE_FILL, LINE_COLOUR, 1.0)
    return DiagramNode(f"rank{rank}", tuple(lines), fill=fill, border=border, width=width)
