"""Phrases for ranks, calls and source lines, so that a report always uses the same words.

Everything here returns text (or judges the text of a source line) and changes nothing.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from distsim.hang_doctor.model.evidence import Evidence
from distsim.hang_doctor.model.evidence_records import (
    UNKNOWN_GROUP,
    EvidenceCall,
    ProcessState,
    StackFrame,
)
from distsim.hang_doctor.model.operation_names import P2P_OPS

#: More ranges are not listed one by one.
_MAX_RANGES = 6
#: Larger source files are not searched for a line.
_MAX_SOURCE_BYTES = 4 << 20
#: The states of /proc/PID/stat.
_PROCESS_STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "is in an uninterruptible wait",
    "T": "is stopped",
    "t": "is stopped by a debugger",
    "Z": "has exited",
    "X": "has exited",
    "gone": "has exited",
}
#: Calls that wait in C++, so that a stack ends at the line that contains them.
_WAIT_CALLS = re.compile(
    r"\.(wait|result|join|synchronize)\(|wait_all|\b(recv|irecv|send|isend)\w*\(|batch_isend_irecv"
)


class _Range(NamedTuple):
    first: int
    last: int


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0-2 and 5``."""
    numbers = sorted(set(ranks))
    if not numbers:
        return "no rank"
    text = ranges_text(numbers)
    return f"rank {text}" if len(numbers) == 1 else f"ranks {text}"


def ranges_text(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges: ``0-2, 5 and 7``."""
    texts: list[str] = []
    for first, last in _ranges(numbers):
        if first == last:
            texts.append(str(first))
        elif first + 1 == last:
            texts += [str(first), str(last)]
        else:
            texts.append(f"{first}-{last}")
    if len(texts) > _MAX_RANGES:
        texts = [*texts[:_MAX_RANGES], f"others, {len(numbers)} in all"]
    if len(texts) == 1:
        return texts[0]
    return f"{', '.join(texts[:-1])} and {texts[-1]}"


def _ranges(numbers: Sequence[int]) -> list[_Range]:
    found: list[_Range] = []
    for number in numbers:
        if found and number == found[-1].last + 1:
            found[-1] = _Range(found[-1].first, number)
        else:
            found.append(_Range(number, number))
    return found


def verb_form(ranks: Sequence[int], one: str, many: str) -> str:
    """``one`` for a single rank, else ``many``."""
    return one if len(set(ranks)) == 1 else many


def call_text(evidence: Evidence, call: EvidenceCall) -> str:
    """``all_reduce (default group, call 7)``; ``recv from rank 3``."""
    if call.op in P2P_OPS:
        return _message_text(call)
    op = call.op or "a call"
    if call.number < 0:
        return op
    group = UNKNOWN_GROUP
    if call.group in evidence.groups:
        group = evidence.groups[call.group].label
    name = group.removeprefix("the ").removeprefix("an ")
    return f"{op} ({name}, call {call.number})"


def _message_text(call: EvidenceCall) -> str:
    towards = "to" if call.op == "send" else "from"
    peer = f"rank {call.peer}" if call.peer is not None else "an unknown rank"
    tag = f", tag {call.tag}" if call.tag else ""
    return f"{call.op} {towards} {peer}{tag}"


def short_file(file: str) -> str:
    """The last two parts of a path, which suffice to find the file on any machine."""
    return "/".join(Path(file).parts[-2:]) if file.count("/") > 1 else file


def source_line(frame: StackFrame | None) -> str:
    """The source text of a frame's line, without comment; empty if the file is not found here."""
    if frame is None or frame.line <= 0 or not frame.file.endswith(".py"):
        return ""
    try:
        path = Path(frame.file)
        if not path.is_file() or path.stat().st_size > _MAX_SOURCE_BYTES:
            return ""
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    if frame.line > len(lines):
        return ""
    code = lines[frame.line - 1].split("#")[0]
    return " ".join(code.split())


def may_hide_a_wait(frame: StackFrame | None) -> bool:
    """Whether the rank may be in a wait that its stack does not show.

    Stacks do not show functions in C++. If the source line is available, its text decides;
    otherwise a hidden wait is possible.
    """
    text = source_line(frame)
    return not text or bool(_WAIT_CALLS.search(text))


def process_state_text(process: ProcessState) -> str:
    """``sleeps in futex_wait_queue, uses 0 % of a CPU``."""
    text = _PROCESS_STATES.get(process.state, f"is in state {process.state or 'unknown'}")
    if text == "has exited":
        return text
    if process.wait_channel:
        text += f" in {process.wait_channel}"
    return f"{text}, uses {process.cpu_share:.0%} of a CPU"


def signal_name(number: int) -> str:
    """``SIGKILL``; a number without a name as ``signal 77``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
