"""What a rank writes while it runs, into mapped files: a progress board, which says where it is, and the times of its calls.

A rank writes a few 64-bit words at each call (a few hundred ns); the launcher only looks, even while the library is stuck. What is
written survives the rank's death, by whatever signal, because the pages belong to the file.
"""

from __future__ import annotations

import mmap
import os
from array import array
from enum import IntEnum
from pathlib import Path
from typing import Final, NamedTuple

from distsim.errors import EnvironmentFault

_WORDS: Final = 16
_TEXT: Final = 1024
SIZE: Final = _WORDS * 8 + _TEXT

#: What a launcher says of a rank whose process somebody has stopped.
STOPPED: Final = "its process is stopped (SIGSTOP)"


class Phase(IntEnum):
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


class Word(IntEnum):
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


class Seen(NamedTuple):
    """A board at one moment."""

    rank: int
    pid: int
    phase: Phase
    position: int
    progress: int
    since_ns: int
    busy_until_ns: int
    repetition: int
    code: int
    message: str
    device: int = -1  #: position of the call that the device is at, -1: none
    clock_error_ns: int = 0


class Board:
    """One rank's board, mapped. ``words`` may be written at will; `step` is what a rank does at every change.

    Raises EnvironmentFault where it can't be created.
    """

    def __init__(self, path: Path, create: bool = False) -> None:
        if create:
            _fill(path)
        self._map = _mapped(path, SIZE)
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
        data = text.encode("utf-8", "replace")[:_TEXT]
        self._view[_WORDS * 8 : _WORDS * 8 + len(data)] = data
        self.words[Word.TEXT] = len(data)

    def see(self, rank: int) -> Seen:
        return seen(bytes(self._view), rank)

    def raw(self) -> bytes:
        """The whole board, to be sent to another machine."""
        return bytes(self._view)

    def close(self) -> None:
        self.words.release()
        self._view.release()
        self._map.close()


def _mapped(path: Path, size: int) -> mmap.mmap:
    handle = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(handle, size)
    finally:
        os.close(handle)


def _fill(path: Path) -> None:
    """Write an empty board: a file with holes would end its user with SIGBUS where the disk is full."""
    try:
        path.write_bytes(bytes(SIZE))
    except OSError as fault:
        raise EnvironmentFault(
            f"can't write {path}: {fault.strerror}", "make room there, or set TMPDIR to another folder"
        ) from None


def seen(data: bytes, rank: int) -> Seen:
    """Read a board's bytes."""
    words = memoryview(data)[: _WORDS * 8].cast("q")
    length = min(max(words[Word.TEXT], 0), _TEXT)
    text = data[_WORDS * 8 : _WORDS * 8 + length].decode("utf-8", "replace")
    return Seen(
        rank, words[Word.PID], Phase(words[Word.PHASE]), words[Word.POSITION], words[Word.PROGRESS], words[Word.SINCE_NS],
        words[Word.BUSY_UNTIL_NS], words[Word.REPETITION], words[Word.CODE], text, words[Word.DEVICE] - 1, words[Word.CLOCK_ERROR_NS],
    )  # fmt: skip


class Bulletin:
    """What the launcher tells its ranks, the other way round: which repetition may start, when, and that all is over."""

    def __init__(self, path: Path, create: bool = False) -> None:
        self._board = Board(path, create)

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

#: Columns of a line. ``source``: the global rank whose message a receive from any source took. ``launched``: when a device came to the
#: work; -1 where the host does it.
COLUMNS: Final = ("posted", "returned", "finished", "waited", "source", "launched")
WIDTH: Final = len(COLUMNS)
POSTED, RETURNED, FINISHED, WAITED, SOURCE, LAUNCHED = range(WIDTH)


class CallTimes:
    """The table of one rank and one repetition, a line per row of the trace: ``cells[row * WIDTH + column]``, -1 where nothing was
    written. A killed run still shows the call that hung.
    """

    def __init__(self, path: Path, rows: int) -> None:
        with open(path, "wb") as file:
            array("q", [-1] * (max(rows, 1) * WIDTH)).tofile(file)
        self.cells = memoryview(_mapped(path, max(rows, 1) * WIDTH * 8)).cast("q")


def read_times(data: bytes) -> dict[str, array[int]]:
    """The columns of a table, from its bytes; an incomplete last line is left out."""
    whole = len(data) // (WIDTH * 8) * WIDTH * 8
    cells = array("q")
    cells.frombytes(data[:whole])
    return {name: cells[i::WIDTH] for i, name in enumerate(COLUMNS)}
