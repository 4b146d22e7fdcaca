"""Words for ranks, calls and lines, the same in every sentence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from distsim.hang_doctor.model.evidence import Evidence
from distsim.hang_doctor.model.evidence_records import EvidenceCall, StackFrame
from distsim.hang_doctor.model.operation_names import P2P_OPS

#: Ranges that are written out.
_MAX_RANGES = 6
_WAIT_CALLS = re.compile(
    r"\.(wait|result|join|synchronize)\(|wait_all|\b(recv|irecv|send|isend)\w*\(|batch_isend_irecv"
)


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0-2 and 5``."""
    numbers = sorted(set(ranks))
    if not numbers:
        return "no rank"
    text = ranges_text(numbers)
    return f"rank {text}" if len(numbers) == 1 else f"ranks {text}"


def ranges_text(numbers: Sequence[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    texts = [
        text
        for a, b in parts
        for text in ((f"{a}-{b}",) if b > a + 1 else (str(a), str(b))[: b - a + 1])
    ]
    if len(texts) > _MAX_RANGES:
        texts = [*texts[:_MAX_RANGES], f"others, {len(numbers)} in all"]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def verb_form(ranks: Sequence[int], one: str, many: str) -> str:
    return one if len(set(ranks)) == 1 else many


def call_text(evidence: Evidence, call: EvidenceCall) -> str:
    """``all_reduce, call 7 of the default group``; ``recv from rank 3``."""
    if call.op in P2P_OPS:
        towards = "to" if call.op == "send" else "from"
        peer = f"rank {call.peer}" if call.peer is not None else "a rank that is not told"
        return f"{call.op} {towards} {peer}{f', tag {call.tag}' if call.tag else ''}"
    op = call.op or "a call"
    if call.number < 0:
        return op
    shown = (
        evidence.groups[call.group].shown
        if call.group in evidence.groups
        else "a group that the lines do not name"
    )
    return f"{op}, call {call.number} of {shown}"


def short_file(file: str) -> str:
    """The last two parts of a path: enough to find it, whatever the machine."""
    return "/".join(Path(file).parts[-2:]) if file.count("/") > 1 else file


def source_line(frame: StackFrame | None) -> str:
    """The text of a line of the user's code, where the file lies here as well; empty elsewhere."""
    if frame is None or frame.line <= 0 or not frame.file.endswith(".py"):
        return ""
    try:
        path = Path(frame.file)
        if not path.is_file() or path.stat().st_size > 4 << 20:
            return ""
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return " ".join(lines[frame.line - 1].split("#")[0].split()) if frame.line <= len(lines) else ""


def may_hide_a_wait(frame: StackFrame | None) -> bool:
    """Could the rank be in a wait that its stack does not show? Functions in C do not; the line's
    text tells, where it is here.
    """
    text = source_line(frame)
    return not text or bool(_WAIT_CALLS.search(text))
