"""The lines of the user's files that a rank executes, in order, and the stack of its last call.

A rank may be killed at any moment, when no rank can proceed. So it writes its lines to shared
memory, which the parent reads after the run. Tracing slows Python down, hence it is only done in a
second run, which looks for the line at which ranks diverge.

Only the main thread is traced, and only up to `_MAX_LINES` lines.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final, NamedTuple

import numpy as np

#: Lines after which a rank is traced no further.
_MAX_LINES: Final = 1 << 20
#: An entry is the number of a file and a line of it.
_LINE_BITS: Final = 24
_MAX_FILES: Final = 1 << (32 - _LINE_BITS)
#: The memory begins with two numbers: how many entries there are, and how many bytes of file names,
#: each name followed by a zero byte.
_COUNT, _NAMES_SIZE = 0, 1
_NAMES_START: Final = 8
_NAMES_BYTES: Final = 1 << 16
_ENTRIES_START: Final = _NAMES_START + _NAMES_BYTES
#: The stack of the last call: the number of its bytes, and a line of text for each frame.
_STACK_START: Final = _ENTRIES_START + 4 * _MAX_LINES
_STACK_BYTES: Final = 1 << 15

#: What Python calls at each event of a frame.
_TraceFunction = Callable[[FrameType, str, Any], Any]


class TracedLine(NamedTuple):
    """A line of a file, whose path is written as in reports."""

    file: str
    line: int


class StackFrame(NamedTuple):
    """A function that is running, and its current line."""

    file: str
    line: int
    function: str


class LineTrace:
    """The trace of one rank: made before the fork, written by the rank, read by its parent."""

    def __init__(self) -> None:
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._memory = mmap.mmap(-1, _STACK_START + 4 + _STACK_BYTES, flags)

    # --- in the rank ---
    def start(self, is_own: Callable[[str], bool], shown: Callable[[str], str]) -> None:
        """Trace this thread from here on.

        ``is_own``: whether a file is the user's. ``shown``: its path as reports write it.
        """
        view = memoryview(self._memory)
        header = view[:_NAMES_START].cast("I")
        entries = view[_ENTRIES_START:_STACK_START].cast("I")
        by_file: dict[str, _TraceFunction | None] = {}

        def trace_call(frame: FrameType, event: str, argument: object) -> _TraceFunction | None:
            file = frame.f_code.co_filename
            if file not in by_file:
                number = None
                if is_own(file):
                    number = self._add_file(header, shown(file))
                by_file[file] = None if number is None else line_tracer(number << _LINE_BITS)
            return by_file[file]

        def line_tracer(file_bits: int) -> _TraceFunction:
            def trace_line(frame: FrameType, event: str, argument: object) -> _TraceFunction | None:
                if event == "line":
                    count = header[_COUNT]
                    if count == _MAX_LINES:
                        sys.settrace(None)
                        return None
                    entries[count] = file_bits | frame.f_lineno
                    header[_COUNT] = count + 1
                return trace_line

            return trace_line

        sys.settrace(trace_call)

    def _add_file(self, header: memoryview, name: str) -> int | None:
        """The number of a new file; None if there is no room for it."""
        data = name.encode() + b"\0"
        size = header[_NAMES_SIZE]
        number = bytes(self._memory[_NAMES_START : _NAMES_START + size]).count(0)
        if size + len(data) > _NAMES_BYTES or number == _MAX_FILES:
            return None
        self._memory[_NAMES_START + size : _NAMES_START + size + len(data)] = data
        header[_NAMES_SIZE] = size + len(data)
        return number

    def write_stack(self, frames: Sequence[StackFrame]) -> None:
        """Replace the stack by that of a new call; the outermost frame comes first."""
        lines = [f"{line}\t{function}\t{file}" for file, line, function in frames]
        data = "\n".join(lines).encode()
        if len(data) > _STACK_BYTES:
            data = b""
        self._memory[_STACK_START : _STACK_START + 4] = len(data).to_bytes(4, "little")
        self._memory[_STACK_START + 4 : _STACK_START + 4 + len(data)] = data

    # --- in the parent ---
    def stack(self) -> tuple[StackFrame, ...]:
        """The stack of the rank's last call; empty if it made none."""
        size = int.from_bytes(self._memory[_STACK_START : _STACK_START + 4], "little")
        text = self._memory[_STACK_START + 4 : _STACK_START + 4 + size].decode()
        frames = (line.split("\t", 2) for line in text.splitlines())
        return tuple(StackFrame(file, int(line), function) for line, function, file in frames)

    def lines(self) -> list[TracedLine]:
        """The lines that the rank executed; equal lines are one object."""
        count, names_size = np.frombuffer(self._memory, dtype=np.uint32, count=2).tolist()
        names = self._memory[_NAMES_START : _NAMES_START + names_size].decode().split("\0")
        entries = np.frombuffer(self._memory, np.uint32, count, offset=_ENTRIES_START)
        known = {
            entry: TracedLine(names[entry >> _LINE_BITS], entry & ((1 << _LINE_BITS) - 1))
            for entry in np.unique(entries).tolist()
        }
        return [known[entry] for entry in entries.tolist()]


__all__ = ["LineTrace", "StackFrame", "TracedLine"]
