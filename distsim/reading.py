"""Reading what is given, within bounds: so much of it, and never for longer than nothing comes."""

from __future__ import annotations

import errno
import io
import os
import select
import stat
from collections.abc import Iterator
from itertools import islice
from typing import Any

#: A pipe that nobody writes to is given up after so long.
IDLE_S = 30.0
#: Larger inputs of small files (scenarios, orders of events, schedules) are something else.
MAX_BYTES = 16 * 2**20


class _Patient(io.RawIOBase):
    """A stream that may let its reader wait, and that fails with TimeoutError when nothing comes."""

    def __init__(self, handle: int, mine: bool, patience_s: float | None) -> None:
        self._handle, self._mine, self._patience_s = handle, mine, patience_s
        self._poll = select.poll()
        self._poll.register(handle, select.POLLIN)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        patience = None if self._patience_s is None else int(self._patience_s * 1000)
        if not self._poll.poll(patience):
            raise TimeoutError(errno.ETIMEDOUT, f"nothing came for {self._patience_s:.0f} s")
        data = os.read(self._handle, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if self._mine and not self.closed:
            os.close(self._handle)
        super().close()


def open_bytes(source: str | os.PathLike[str] | int) -> io.BufferedReader:
    """A file, a device or a pipe for reading, by its path or its number. Raises OSError; reading raises TimeoutError.

    Whoever types at a terminal has all the time there is.
    """
    mine = not isinstance(source, int)
    handle = source if isinstance(source, int) else os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    mode = os.fstat(handle).st_mode
    if stat.S_ISDIR(mode):
        os.close(handle)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if stat.S_ISREG(mode):
        return open(handle, "rb", closefd=mine)
    return io.BufferedReader(_Patient(handle, mine, None if os.isatty(handle) else IDLE_S))


def read_bytes(source: str | os.PathLike[str] | int, most: int = MAX_BYTES) -> bytes:
    """All of an input. Raises OSError, and OSError of EFBIG for one that is larger than ``most``."""
    with open_bytes(source) as stream:
        data = stream.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"larger than {most // 2**20} MiB")
    return data


class LongLine(ValueError):
    """A line longer than any that is meant; ``number`` counts from 1."""

    def __init__(self, number: int, most: int) -> None:
        super().__init__(f"a line of more than {most:,} characters")
        self.number = number


def some_lines(lines: Iterator[str], count: int, characters: int) -> list[str]:
    """The next lines, ``count`` of them or those that make so many characters."""
    found: list[str] = []
    size = 0
    for line in islice(lines, count):
        found.append(line)
        size += len(line)
        if size > characters:
            break
    return found
