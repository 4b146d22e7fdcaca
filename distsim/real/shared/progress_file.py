"""The files that a rank writes while it runs: its progress, and the times of its calls.

Key idea: the files are mapped into memory. A rank writes a few 64-bit words at each call, which
costs a few hundred ns, and the launcher can read them even while torch is stuck in C++. The
contents survive the death of the rank by any signal, because the pages belong to the file.

Users know the progress file as a "board".
"""

from __future__ import annotations

import mmap
import os
from array import array
from enum import IntEnum
from pathlib import Path
from typing import Final, NamedTuple

from distsim.common.errors import EnvironmentFault

_WORDS: Final = 16
_MESSAGE_BYTES: Final = 1024
FILE_BYTES: Final = _WORDS * 8 + _MESSAGE_BYTES

#: The message that a launcher gives a rank whose process was stopped from outside.
STOPPED_MESSAGE: Final = "its process is stopped (SIGSTOP)"


class RankPhase(IntEnum):
    """How far a rank is. From WRITING on it makes no further call."""

    NEW = 0  #: not started
    LOADING = 1  #: the process runs, torch is being imported
    CONNECTING = 2  #: in init_process_group, or creating the groups of the scenario
    READY = 3  #: waits for the common start of a repetition
    RUNNING = 4  #: between two calls
    IN_CALL = 5
    WRITING = 6  #: past its last call, writing the contents of its buffers
    ENDED = 7  #: came to the end of its program, and has written everything
    RAISED = 8
    EXITED = 9
    STRUCK = 10  #: a fault of the scenario killed it
    BROKEN = 11  #: the environment failed before the program began


class ProgressField(IntEnum):
    """The words of a progress file."""

    PID = 0
    PHASE = 1
    POSITION = 2
    PROGRESS = 3  #: grows with every change
    SINCE_NS = 4  #: CLOCK_MONOTONIC of the last change
    BUSY_UNTIL_NS = 5  #: computing or sleeping on purpose until then
    REPETITION = 6
    CODE = 7  #: exit status
    TEXT = 8  #: length of the message in bytes
    DEVICE = 9  #: position of the call that the device is at, plus 1; 0: not behind
    CLOCK_ERROR_NS = 10  #: largest error of device times on the host's clock


#: In place of the position of a device's call: the device is not behind its host.
NO_DEVICE_POSITION: Final = -1


class ProgressSnapshot(NamedTuple):
    """A progress file at one moment.

    ``device``: the position of the call that the device is at, if it is behind its host.
    """

    rank: int
    pid: int
    phase: RankPhase
    position: int
    progress: int
    since_ns: int
    busy_until_ns: int
    repetition: int
    code: int
    message: str
    device: int = NO_DEVICE_POSITION
    clock_error_ns: int = 0


class ProgressFile:
    """The mapped progress file of one rank. Raises EnvironmentFault if it cannot be created.

    ``words`` may be written at any time; a rank calls `advance` at every change of its state.
    """

    def __init__(self, path: Path, create: bool = False) -> None:
        if create:
            _write_empty(path)
        self._map = _map_file(path, FILE_BYTES)
        self._view = memoryview(self._map)
        self.words = self._view[: _WORDS * 8].cast("q")

    def advance(self, phase: int, position: int, now_ns: int) -> None:
        """Write where the rank is from now on.

        It runs twice per call of a rank, hence the literal indices instead of `ProgressField`.
        PROGRESS, by which the launcher notices a change, is written last.
        """
        words = self.words
        words[2] = position
        words[1] = phase
        words[4] = now_ns
        words[3] += 1

    def write_message(self, text: str) -> None:
        """Leave a message, such as the error that ended the rank."""
        data = text.encode("utf-8", "replace")[:_MESSAGE_BYTES]
        self._view[_WORDS * 8 : _WORDS * 8 + len(data)] = data
        self.words[ProgressField.TEXT] = len(data)

    def snapshot(self, rank: int) -> ProgressSnapshot:
        """What the file contains now."""
        return parse_snapshot(bytes(self._view), rank)

    def raw(self) -> bytes:
        """The whole file, to be sent to another machine."""
        return bytes(self._view)

    def close(self) -> None:
        """Unmap the file."""
        self.words.release()
        self._view.release()
        self._map.close()


def _map_file(path: Path, size: int) -> mmap.mmap:
    handle = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(handle, size)
    finally:
        os.close(handle)


def _write_empty(path: Path) -> None:
    """Write an empty progress file.

    A file with holes would kill its user with SIGBUS when the disk is full.
    """
    try:
        path.write_bytes(bytes(FILE_BYTES))
    except OSError as fault:
        raise EnvironmentFault(
            f"cannot write {path}: {fault.strerror}",
            "free some space there, or set TMPDIR to another folder",
        ) from None


def parse_snapshot(data: bytes, rank: int) -> ProgressSnapshot:
    """A snapshot from the bytes of a progress file."""
    words = memoryview(data)[: _WORDS * 8].cast("q")
    length = min(max(words[ProgressField.TEXT], 0), _MESSAGE_BYTES)
    text = data[_WORDS * 8 : _WORDS * 8 + length].decode("utf-8", "replace")
    return ProgressSnapshot(
        rank,
        words[ProgressField.PID],
        RankPhase(words[ProgressField.PHASE]),
        words[ProgressField.POSITION],
        words[ProgressField.PROGRESS],
        words[ProgressField.SINCE_NS],
        words[ProgressField.BUSY_UNTIL_NS],
        words[ProgressField.REPETITION],
        words[ProgressField.CODE],
        text,
        words[ProgressField.DEVICE] - 1,
        words[ProgressField.CLOCK_ERROR_NS],
    )


class ControlFile:
    """The launcher's messages to its ranks: which repetition may start, when, and the end of all.

    It has the layout of a progress file, but its words have their own meaning, see `_ControlField`.
    """

    def __init__(self, path: Path, create: bool = False) -> None:
        self._file = ProgressFile(path, create)

    def start_repetition(self, repetition: int, start_ns: int) -> None:
        """Let the ranks start a repetition at this time."""
        # The time first: a rank that sees the new count must also see its start.
        self._file.words[_ControlField.START_NS] = start_ns
        self._file.words[_ControlField.STARTED] = repetition + 1

    def started_ns(self, repetition: int) -> int:
        """The common start of a repetition; 0 while it may not begin yet."""
        if self._file.words[_ControlField.STARTED] <= repetition:
            return 0
        return self._file.words[_ControlField.START_NS]

    def stop(self) -> None:
        """Tell the ranks to end."""
        self._file.words[_ControlField.STOPPED] = 1

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._file.words[_ControlField.STOPPED] != 0

    def close(self) -> None:
        """Unmap the file."""
        self._file.close()


class _ControlField(IntEnum):
    """The words of a control file."""

    STARTED = 0  #: number of repetitions that were started
    START_NS = 1  #: the common start of the last one, CLOCK_MONOTONIC
    STOPPED = 2


# --- times of calls ---

#: Columns of a row. ``source``: the global rank whose message a receive from any source took.
#: ``launched``: when a device started the work; -1 if the host does it.
TIME_COLUMNS: Final = ("posted", "returned", "finished", "waited", "source", "launched")
ROW_WIDTH: Final = len(TIME_COLUMNS)
POSTED, RETURNED, FINISHED, WAITED, SOURCE, LAUNCHED = range(ROW_WIDTH)


class CallTimeTable:
    """The mapped table of one rank and one repetition, with a row for each row of the trace.

    ``cells[row * ROW_WIDTH + column]`` is -1 until it is written. So the table of a killed run
    still shows the call that hung.
    """

    def __init__(self, path: Path, rows: int) -> None:
        with open(path, "wb") as file:
            array("q", [-1] * (max(rows, 1) * ROW_WIDTH)).tofile(file)
        self.cells = memoryview(_map_file(path, max(rows, 1) * ROW_WIDTH * 8)).cast("q")


def read_call_times(data: bytes) -> dict[str, array[int]]:
    """The columns of a table, from its bytes; an incomplete last row is ignored."""
    row_bytes = ROW_WIDTH * 8
    complete_rows = len(data) // row_bytes
    cells = array("q")
    cells.frombytes(data[: complete_rows * row_bytes])
    return {name: cells[i::ROW_WIDTH] for i, name in enumerate(TIME_COLUMNS)}
