"""The diagnosis of `distsim doctor` as text of any width.

Each section is a generator of paragraphs. The JSON is in `distsim.output.json.diagnosis`, the
picture in `distsim.output.pictures.hang_graph`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from distsim.hang_doctor.analysis.diagnosis import Diagnosis
from distsim.hang_doctor.analysis.divergence import RecordedMismatch
from distsim.hang_doctor.analysis.hang_cause import HangCause
from distsim.hang_doctor.analysis.live_states import movement_text, own_process
from distsim.hang_doctor.analysis.wait_chains import position_text
from distsim.hang_doctor.model.evidence_records import EvidenceCall, InputFile, StackFrame
from distsim.hang_doctor.model.phrases import (
    call_text,
    process_state_text,
    ranks_text,
    short_file,
    source_line,
)
from distsim.output.report_record import Paragraph, Report, Section
from distsim.output.report_text import write_text
from distsim.output.text_layout import page_of_width

GRADE_TEXT = {
    "proved": "proved by the records",
    "suspected": "suspected, not proved",
    "unknown": "cause unknown",
}
_MAX_RANKS = 16
_MAX_FILES = 8
_MAX_OTHER_CAUSES = 4
_MAX_RANKS_OF_OTHER_CAUSE = 4
_MAX_NOTES = 6
#: File names that are listed with the rank that was taken from them.
_MAX_NAMES = 4
#: Numbers that differ from rank to rank in otherwise equal descriptions of calls.
_VARYING_NUMBER = re.compile(r"\b(rank|tag|call) \d+")
#: Where the part of a description begins that may differ from rank to rank.
_VARYING_PART = re.compile(r" to | from | \(|,")


class _Paragraph(NamedTuple):
    """A text to wrap, with the indents of its first line and of the others."""

    first_indent: str
    indent: str
    text: str


class _RankLine(NamedTuple):
    """What some ranks are doing, and at which frame of their stacks."""

    ranks: tuple[int, ...]
    activity: str
    frame: StackFrame | None


def doctor_text(diagnosis: Diagnosis, width: int = 100) -> str:
    """The whole report as text in ``width`` columns (40 to 200)."""
    with page_of_width(width):
        return write_text(doctor_report(diagnosis))


def doctor_report(diagnosis: Diagnosis) -> Report:
    """The causes, the main one first, what waits for what, open questions, and the files."""
    sections = (
        _main_cause_section(diagnosis),
        _other_causes_section(diagnosis),
        _wait_section(diagnosis),
        _last_common_section(diagnosis),
        _open_questions_section(diagnosis),
        _next_steps_section(diagnosis),
        _files_section(diagnosis),
    )
    return Report([_as_section(section) for section in sections])


def _as_section(section: Iterator[_Paragraph]) -> Section:
    return Section([Paragraph(p.text, p.first_indent, p.indent) for p in section])


# --- causes ---


def _main_cause_section(diagnosis: Diagnosis) -> Iterator[_Paragraph]:
    main = diagnosis.main
    if main is not None:
        yield from _main_cause_paragraphs(main)
        return
    known = diagnosis.evidence.ranks
    if known:
        text = f"no rank waits: {ranks_text(known)} have finished all recorded calls"
    else:
        text = "no file contains information about a rank"
    yield _Paragraph("", "  ", text)


def _main_cause_paragraphs(cause: HangCause) -> Iterator[_Paragraph]:
    yield _Paragraph("", "  ", f"{cause.title} [{GRADE_TEXT[cause.grade]}]")
    yield from _rank_paragraphs(cause, _MAX_RANKS)
    for detail in cause.details:
        yield _Paragraph("  ", "    ", detail)


def _other_causes_section(diagnosis: Diagnosis) -> Iterator[_Paragraph]:
    for cause in diagnosis.causes[1 : 1 + _MAX_OTHER_CAUSES]:
        yield _Paragraph("also: ", "  ", f"{cause.title} [{GRADE_TEXT[cause.grade]}]")
        yield from _rank_paragraphs(cause, _MAX_RANKS_OF_OTHER_CAUSE)
    hidden = len(diagnosis.causes) - 1 - _MAX_OTHER_CAUSES
    if hidden > 0:
        yield _Paragraph("", "", f"and {hidden} more in --format json")


def _rank_paragraphs(cause: HangCause, limit: int) -> Iterator[_Paragraph]:
    for line in _grouped_rank_lines(cause)[:limit]:
        ranks = ranks_text(line.ranks) if line.ranks else "a process"
        text = f"{ranks}: {line.activity}{_frame_text(line.frame)}"
        yield _Paragraph("  ", "    ", text)


def _grouped_rank_lines(cause: HangCause) -> list[_RankLine]:
    """The lines of a cause; ranks at the same source line in the same operation are joined."""
    groups: dict[tuple[str, str], list[_RankLine]] = {}
    for line in map(_RankLine._make, cause.lines):
        operation = _VARYING_NUMBER.sub(r"\1", line.activity)
        place = line.frame.place if line.frame else ""
        groups.setdefault((operation, place), []).append(line)
    return [_joined_rank_line(lines) for lines in groups.values()]


def _joined_rank_line(lines: Sequence[_RankLine]) -> _RankLine:
    first = lines[0]
    ranks = tuple(rank for line in lines for rank in line.ranks)
    if all(line.activity == first.activity for line in lines):
        return _RankLine(ranks, first.activity, first.frame)
    # The ranks differ in their peer, tag or call number, so that part is omitted.
    return _RankLine(ranks, _VARYING_PART.split(first.activity)[0], first.frame)


def _frame_text(frame: StackFrame | None) -> str:
    if frame is None:
        return ""
    text = f" at {short_file(frame.file)}:{frame.line}"
    if frame.name:
        text += f" in {frame.name}"
    source = source_line(frame)
    if source:
        text += f"  | {source}"
    return text


# --- the state of the ranks ---


def _wait_section(diagnosis: Diagnosis) -> Iterator[_Paragraph]:
    lines = [*_wait_lines(diagnosis), *_not_waiting_lines(diagnosis)]
    if lines:
        yield _Paragraph("", "", "State of the ranks")
    for line in lines[:_MAX_RANKS]:
        yield _Paragraph("  ", "    ", line)
    hidden = len(lines) - _MAX_RANKS
    if hidden > 0:
        yield _Paragraph("  ", "    ", f"and {hidden} more calls, in --format json")


class _Wait(NamedTuple):
    """A call and what it waits for.

    ``not_given``: awaited ranks whose calls no file shows. ``has_other_files``: some of them have a
    stack or a log. ``differing``: ranks whose call of this
    number does not match.
    """

    call: str
    missing: tuple[int, ...]
    not_given: tuple[int, ...]
    has_other_files: bool
    open_ended: bool
    differing: tuple[int, ...]


def _wait_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """A line for each pending call; ranks in the same call that wait for the same are joined."""
    ranks_by_wait: dict[_Wait, list[int]] = {}
    for rank, status in diagnosis.standing.ranks.items():
        for wait in status.waits:
            call = call_text(diagnosis.evidence, wait.call)
            differing = _differing_ranks(diagnosis, rank, wait.call)
            has_other_files = any(silent in diagnosis.standing.ranks for silent in wait.silent)
            key = _Wait(
                call, wait.missing, wait.silent, has_other_files, wait.open_ended, differing
            )
            ranks_by_wait.setdefault(key, []).append(rank)
    for wait_key, ranks in ranks_by_wait.items():
        yield f"{ranks_text(ranks)}: blocked in {wait_key.call}; {_awaited_text(wait_key)}"


def _differing_ranks(diagnosis: Diagnosis, rank: int, call: EvidenceCall) -> tuple[int, ...]:
    """The ranks that disagree with this rank, if its call is the first mismatch on its group."""
    mismatch = diagnosis.mismatches.get(call.group)
    if mismatch is None or not call.is_collective(mismatch.group, mismatch.number):
        return ()
    differing = [each for side in mismatch.sides if rank not in side.ranks for each in side.ranks]
    return tuple(sorted(differing)) if len(differing) < _rank_count(mismatch) else ()


def _rank_count(mismatch: RecordedMismatch) -> int:
    return sum(len(side.ranks) for side in mismatch.sides)


def _awaited_text(wait: _Wait) -> str:
    parts = []
    if wait.missing:
        parts.append(f"for {ranks_text(wait.missing)}")
    if wait.not_given:
        lack = "calls not recorded" if wait.has_other_files else "no files given"
        parts.append(f"for {ranks_text(wait.not_given)} ({lack})")
    if parts:
        return f"waiting {' and '.join(parts)}"
    if wait.open_ended:
        return "the records do not show which ranks are missing"
    if wait.differing:
        makes = "makes" if len(wait.differing) == 1 else "make"
        return f"{ranks_text(wait.differing)} {makes} a different call"
    return "all required ranks have arrived"


def _not_waiting_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """A line for each rank that has ended, or is in no call but at a known place."""
    statuses = diagnosis.standing.ranks
    not_waiting = [rank for rank, status in statuses.items() if not status.waits]
    for rank in not_waiting[:_MAX_RANKS]:
        status = statuses[rank]
        if status.end is not None:
            yield f"rank {rank}: {status.end.text}"
        elif status.frame is not None:
            activity = "outside any recorded call"
            if status.position is not None and status.position.op:
                activity = position_text(status.position)
            movement = movement_text(diagnosis.evidence.ranks[rank])
            movement = f"; {movement}" if movement else ""
            yield f"rank {rank}: {activity}{_frame_text(status.frame)}{movement}"
        elif (process := own_process(diagnosis.evidence.ranks[rank])) is not None:
            yield f"rank {rank}: process {process.pid} {process_state_text(process)}"


# --- the rest ---


def _last_common_section(diagnosis: Diagnosis) -> Iterator[_Paragraph]:
    for text in diagnosis.common:
        yield _Paragraph("last call ", "  ", text)


def _open_questions_section(diagnosis: Diagnosis) -> Iterator[_Paragraph]:
    evidence = diagnosis.evidence
    for text in evidence.disputes[:_MAX_NOTES]:
        yield _Paragraph("contradiction: ", "  ", text)
    for text in evidence.notes[:_MAX_NOTES]:
        yield _Paragraph("note: ", "  ", text)
    if evidence.orphans and not evidence.orphan_processes:
        text = f"stacks of unknown ranks: {len(evidence.orphans)}; name their files rank_N"
        yield _Paragraph("note: ", "  ", text)


def _next_steps_section(diagnosis: Diagnosis) -> Iterator[_Paragraph]:
    for text in diagnosis.collect:
        yield _Paragraph("next: ", "  ", text)


def _files_section(diagnosis: Diagnosis) -> Iterator[_Paragraph]:
    files = diagnosis.evidence.files
    by_kind: dict[str, list[InputFile]] = {}
    for file in files:
        if not file.problem:
            by_kind.setdefault(file.kind, []).append(file)
    for kind, files_of_kind in by_kind.items():
        text = f"{kind}, {_file_count(len(files_of_kind))}"
        ranks = {rank for file in files_of_kind for rank in file.ranks}
        if ranks:
            text += f" ({ranks_text(ranks)})"
        yield _Paragraph("read: ", "  ", text)

    yield from _file_name_paragraphs(files)
    empty = [file for file in files if file.kind == "empty"]
    if empty:
        yield _Paragraph("empty: ", "  ", _file_count(len(empty)))

    bad = [file for file in files if file.problem and file.kind != "empty"]
    for file in bad[:_MAX_FILES]:
        label = "read in part: " if file.ranks else "skipped "
        yield _Paragraph(label, "  ", f"{file.path}: {file.problem}")
    if len(bad) > _MAX_FILES:
        yield _Paragraph("", "  ", f"and {len(bad) - _MAX_FILES} more skipped files")


def _file_name_paragraphs(files: Sequence[InputFile]) -> Iterator[_Paragraph]:
    """Which rank was taken from which file name, because a wrong name makes a wrong diagnosis."""
    names = sorted(
        (file.rank_of_name, Path(file.path).name) for file in files if file.rank_of_name is not None
    )
    if not names:
        return
    shown = [f"{name} → rank {rank}" for rank, name in dict.fromkeys(names)]
    if len(shown) > _MAX_NAMES:
        shown = [*shown[:_MAX_NAMES], f"and {len(shown) - _MAX_NAMES} more"]
    yield _Paragraph("ranks taken from file names: ", "  ", ", ".join(shown))


def _file_count(count: int) -> str:
    return f"{count} file{'s' if count > 1 else ''}"
