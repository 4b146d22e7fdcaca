"""Read stacks of threads: py-spy (text and JSON), faulthandler, torch's dump_traceback.

Texts are read line by line (``StackReader``), because stacks often lie between other lines of a
log. What a stack means is the subject of ``analysis.stack_position``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from distsim.hang_doctor.model.evidence_records import StackFrame, ThreadStack

_PYSPY_THREAD = re.compile(r'^Thread (0x[0-9a-fA-F]+|\d+) \(([^)]*)\)(?:: "(.*)")?\s*$')
_PYSPY_FRAME = re.compile(r"^ {2,8}(\S.*?) \(([^()]*?)(?::(\d+))?\)\s*$")
_PYSPY_VALUE = re.compile(r"^\s{8,}([\w.]+): (.*)$")
_PYSPY_HEAD = re.compile(r"^Process (\d+): (.*)$")
_PYSPY_VALUE_HEADS = ("Arguments:", "Locals:", "Arguments::", "Locals::")
_FAULT_THREAD = re.compile(
    r"^(?:Current thread|Thread) (0x[0-9a-fA-F]+)(?: \[(.*?)\])? \(most recent call first\):\s*$"
)
_FAULT_FRAME = re.compile(r'^\s*File "([^"]*)", line (\d+) in (.*)$')
_FAULT_NO_FRAME = ("<no Python frame>", "...")
_COMMAND_RANK = re.compile(r"--(?:node_)?rank[= ](\d{1,7})\b")
#: Functions in which every thread but the main one starts.
_THREAD_BOOTSTRAP = (
    "_bootstrap",
    "_bootstrap_inner",
    "Thread._bootstrap",
    "Thread._bootstrap_inner",
)
#: Characters of a variable's value that are kept.
_MAX_VALUE_LENGTH = 200


@dataclass
class _OpenThread:
    """A thread whose frames are being read. ``is_fault``: in faulthandler's format."""

    name: str
    is_fault: bool
    frames: list[StackFrame] = field(default_factory=list)
    #: The variables of the latest frame; more may follow on the next lines.
    latest_values: dict[str, str] = field(default_factory=dict)

    def add_frame(self, function: str, file: str, line: int) -> None:
        self.latest_values = {}
        self.frames.append(StackFrame(function, file, line, self.latest_values))

    def stack(self, source: str) -> ThreadStack | None:
        if not self.frames:
            return None
        is_main = _is_main_thread(self.name, self.frames)
        return ThreadStack(self.name, is_main, tuple(self.frames), source)


def _is_main_thread(name: str, frames: Sequence[StackFrame]) -> bool:
    """By the name, or, where the tool prints none, by the absence of a thread's bootstrap."""
    if name == "MainThread":
        return True
    return not any(frame.name in _THREAD_BOOTSTRAP for frame in frames)


class StackReader:
    """Takes lines one by one and returns each stack when it ends.

    ``command_rank`` is the rank on the command line of the process, if py-spy printed one.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.command_rank: int | None = None
        self._open: _OpenThread | None = None

    def take(self, line: str) -> tuple[bool, ThreadStack | None]:
        """Whether the line belongs to a stack, and the stack that ended before it."""
        process = _PYSPY_HEAD.match(line)
        if process is not None:
            ended = self.close()
            rank = _COMMAND_RANK.search(process[2])
            self.command_rank = int(rank[1]) if rank else None
            return True, ended
        thread = _opened_thread(line)
        if thread is not None:
            ended = self.close()
            self._open = thread
            return True, ended
        if self._open is None:
            return False, None
        if self._take_frame(self._open, line):
            return True, None
        if not line.strip() and not self._open.frames:
            return True, None
        return False, self.close()

    def _take_frame(self, thread: _OpenThread, line: str) -> bool:
        """Add the line to the open thread; False if it does not belong to it."""
        if thread.is_fault:
            return _take_fault_frame(thread, line)
        return _take_pyspy_frame(thread, line)

    def close(self) -> ThreadStack | None:
        """End the open stack and return it."""
        thread = self._open
        self._open = None
        return thread.stack(self.source) if thread else None


def _opened_thread(line: str) -> _OpenThread | None:
    """The thread whose headline this is."""
    fault = _FAULT_THREAD.match(line)
    if fault is not None:
        return _OpenThread(fault[2] or fault[1], is_fault=True)
    pyspy = _PYSPY_THREAD.match(line)
    if pyspy is not None:
        return _OpenThread(pyspy[3] or pyspy[1], is_fault=False)
    return None


def _take_fault_frame(thread: _OpenThread, line: str) -> bool:
    frame = _FAULT_FRAME.match(line)
    if frame is None:
        return line.strip() in _FAULT_NO_FRAME
    thread.add_frame(frame[3].strip(), frame[1], int(frame[2]))
    return True


def _take_pyspy_frame(thread: _OpenThread, line: str) -> bool:
    if line.strip() in _PYSPY_VALUE_HEADS:
        return True
    value = _PYSPY_VALUE.match(line)
    if value is not None and thread.frames:
        # Arguments come before locals and win over a local of the same name.
        thread.latest_values.setdefault(value[1], value[2][:_MAX_VALUE_LENGTH])
        return True
    frame = _PYSPY_FRAME.match(line)
    if frame is None:
        # A value of several lines, such as a tensor, continues with an indent.
        return bool(thread.latest_values) and line[:1] == " " and bool(line.strip())
    function = frame[1].split(".")[-1]
    thread.add_frame(function, frame[2], int(frame[3] or 0))
    return True


# --- JSON of py-spy ---


def is_pyspy_json(data: object) -> bool:
    """Whether this looks like the output of ``py-spy dump --json``."""
    if not isinstance(data, list) or not data:
        return False
    return all(_is_pyspy_thread(thread) for thread in data[:4])


def _is_pyspy_thread(thread: object) -> bool:
    return isinstance(thread, dict) and "frames" in thread and "thread_id" in thread


def read_pyspy_json(threads: list[Any], source: str) -> Iterator[ThreadStack]:
    """The stacks of ``py-spy dump --json``."""
    for thread in threads:
        frames = _pyspy_json_frames(thread)
        if frames:
            name = str(thread.get("thread_name") or thread.get("thread_id"))
            yield ThreadStack(name, _is_main_thread(name, frames), tuple(frames), source)


def _pyspy_json_frames(thread: object) -> list[StackFrame]:
    given = thread.get("frames") if isinstance(thread, dict) else None
    if not isinstance(given, list):
        return []
    frames = []
    for frame in given:
        if not isinstance(frame, dict):
            continue
        name, line = frame.get("name"), frame.get("line")
        if isinstance(name, str) and isinstance(line, int):
            function = name.split(".")[-1]
            file = str(frame.get("filename", ""))
            frames.append(StackFrame(function, file, line, _frame_locals(frame.get("locals"))))
    return frames


def _frame_locals(given: object) -> dict[str, str]:
    if not isinstance(given, list):
        return {}
    return {
        str(value.get("name")): str(value.get("repr"))[:_MAX_VALUE_LENGTH]
        for value in given
        if isinstance(value, dict)
    }
