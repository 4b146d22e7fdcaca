"""What a rank writes while it runs, into mapped files: a progress board, which says where it is,
and the times of its calls.

A rank writes a few 64-bit words at each call (a few hundred ns); the launcher only looks, even
while the library is stuck. What is written survives the rank's death, by whatever signal, because
the pages belong to the file.
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

#: What a launcher says of a rank whose process somebody has stopped.
STOPPED_MESSAGE: Final = "its process is stopped (SIGSTOP)"


class RankPhase(IntEnum):
    """How far a rank is. From WRITING on it makes no further call."""

    NEW = 0  #: not started
    LOADING = 1  #: the process runs, torch is being imported
    CONNECTING = 2  #: in init_process_group, or making the groups of the file
    READY = 3  #: waits for the common start
    RUNNING = 4  #: between two calls
    IN_CALL = 5
    WRITING = 6  #: past its last call, writes down what it holds
    ENDED = 7  #: came to the end of its program, and has written everything
    RAISED = 8
    EXITED = 9
    STRUCK = 10  #: a fault of the scenario killed it
    BROKEN = 11  #: the surroundings failed before the program began


class ProgressField(IntEnum):
    """Which word of a board holds what."""

    PID = 0
    PHASE = 1
    POSITION = 2
    PROGRESS = 3  #: grows with every change
    SINCE_NS = 4  #: CLOCK_MONOTONIC of the last change
    BUSY_UNTIL_NS = 5  #: at work or asleep on purpose until then
    REPETITION = 6
    CODE = 7
    TEXT = 8  #: bytes of the message
    DEVICE = 9  #: the call that a device is at, plus 1; 0 where it is not behind its host
    CLOCK_ERROR_NS = 10  #: by how much times of a device may be off the host's clock


class ProgressSnapshot(NamedTuple):
    """A board at one moment."""

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
    device: int = -1  #: position of the call that the device is at, -1: none
    clock_error_ns: int = 0


class ProgressFile:
    """One rank's board, mapped. ``words`` may be written at will; `step` is what a rank does at
    every change.

    Raises EnvironmentFault where it can't be created.
    """

    def __init__(self, path: Path, create: bool = False) -> None:
        if create:
            _write_empty(path)
        self._map = _map_file(path, FILE_BYTES)
        self._view = memoryview(self._map)
        self.words = self._view[: _WORDS * 8].cast("q")

    def step(self, phase: int, position: int, now_ns: int) -> None:
        """Say where the rank is from now on."""
        words = self.words
        words[2] = position
        words[1] = phase
        words[4] = now_ns
        words[3] += 1

    def say(self, text: str) -> None:
        """Leave a message: the error that ended the rank."""
        data = text.encode("utf-8", "replace")[:_MESSAGE_BYTES]
        self._view[_WORDS * 8 : _WORDS * 8 + len(data)] = data
        self.words[ProgressField.TEXT] = len(data)

    def see(self, rank: int) -> ProgressSnapshot:
        return parse_snapshot(bytes(self._view), rank)

    def raw(self) -> bytes:
        """The whole board, to be sent to another machine."""
        return bytes(self._view)

    def close(self) -> None:
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
    """Write an empty board: a file with holes would end its user with SIGBUS where the disk is
    full.
    """
    try:
        path.write_bytes(bytes(FILE_BYTES))
    except OSError as fault:
        raise EnvironmentFault(
            f"can't write {path}: {fault.strerror}",
            "make room there, or set TMPDIR to another folder",
        ) from None


def parse_snapshot(data: bytes, rank: int) -> ProgressSnapshot:
    """Read a board's bytes."""
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
    """What the launcher tells its ranks, the other way round: which repetition may start, when, and
    that all is over.
    """

    def __init__(self, path: Path, create: bool = False) -> None:
        self._board = ProgressFile(path, create)

    def go(self, repetition: int, start_ns: int) -> None:
        self._board.words[1] = start_ns
        self._board.words[0] = repetition + 1

    def started_ns(self, repetition: int) -> int:
        """The common start of a repetition; 0 while it is not to begin yet."""
        return self._board.words[1] if self._board.words[0] > repetition else 0

    def stop(self) -> None:
        self._board.words[2] = 1

    @property
    def stopped(self) -> bool:
        return self._board.words[2] != 0

    def close(self) -> None:
        self._board.close()


# --- times of calls ---

#: Columns of a line. ``source``: the global rank whose message a receive from any source took.
#: ``launched``: when a device came to the work; -1 where the host does it.
TIME_COLUMNS: Final = ("posted", "returned", "finished", "waited", "source", "launched")
ROW_WIDTH: Final = len(TIME_COLUMNS)
POSTED, RETURNED, FINISHED, WAITED, SOURCE, LAUNCHED = range(ROW_WIDTH)


class CallTimeTable:
    """The table of one rank and one repetition, a line per row of the trace: ``cells[row * WIDTH +
    column]``, -1 where nothing was written. A killed run still shows the call that hung.
    """

    def __init__(self, path: Path, rows: int) -> None:
        with open(path, "wb") as file:
            array("q", [-1] * (max(rows, 1) * ROW_WIDTH)).tofile(file)
        self.cells = memoryview(_map_file(path, max(rows, 1) * ROW_WIDTH * 8)).cast("q")


def read_call_times(data: bytes) -> dict[str, array[int]]:
    """The columns of a table, from its bytes; an incomplete last line is left out."""
    whole = len(data) // (ROW_WIDTH * 8) * ROW_WIDTH * 8
    cells = array("q")
    cells.frombytes(data[:whole])
    return {name: cells[i::ROW_WIDTH] for i, name in enumerate(TIME_COLUMNS)}
