"""What enters and leaves distsim: inputs read within bounds, files written in one piece, control
characters shown instead of sent.

Of an input so much is read, and nobody waits for longer than nothing comes. Every file that distsim
writes goes through `write_file`. A regular file is written beside and renamed, so a reader never
sees half of it; a link is followed; whatever is no regular file (a terminal, a pipe, a device) is
written into, and never replaced.
"""

from __future__ import annotations

import errno
import io
import os
import re
import select
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from distsim.common.errors import EnvironmentFault, UsageError

__all__ = [
    "READ_TIMEOUT_S",
    "MAX_INPUT_BYTES",
    "LineTooLong",
    "is_stream",
    "open_bytes",
    "read_bytes",
    "read_lines",
    "escape_control_characters",
    "escape_json_control_characters",
    "write_file",
]

#: A pipe that nobody writes to is given up after so long.
READ_TIMEOUT_S = 30.0
#: Larger inputs of small files (scenarios, orders of events, schedules) are something else.
MAX_INPUT_BYTES = 16 * 2**20

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
#: Names of streams that this process has open already.
_STREAM_PATH = re.compile(
    r"/dev/std(?:in|out|err)|/dev/fd/(\d+)|/proc/(self|thread-self|\d+)/fd/(\d+)"
)
_STANDARD_STREAMS = {"/dev/stdin": "0", "/dev/stdout": "1", "/dev/stderr": "2"}

#: Control characters (C0, DEL, C1), line separators and marks that turn the direction of writing; a
#: line's end and a tab are meant.
_CONTROL_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_LINE_BREAK_ESCAPES = {"\n": r"\n", "\t": r"\t"}


def escape_control_characters(text: str, one_line: bool = False) -> str:
    r"""A text with its control characters written out, as ``\x1b``; with ``one_line`` its ends of
    lines as well.
    """
    shown = _CONTROL_CHARACTERS.sub(_escape, text)
    if one_line and ("\n" in shown or "\t" in shown):
        shown = shown.replace("\n", _LINE_BREAK_ESCAPES["\n"]).replace(
            "\t", _LINE_BREAK_ESCAPES["\t"]
        )
    return shown


def escape_json_control_characters(text: str) -> str:
    r"""JSON with the control characters that its encoder lets through as ``\u009b``."""
    return _CONTROL_CHARACTERS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if match[0] == "\r":
        return r"\r"
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def write_file(path: str | os.PathLike[str], data: str | bytes | Iterable[str | bytes]) -> None:
    """Write a file whole or not at all; what is no regular file is written into.

    Raises UsageError where the folder is not there or may not be written, EnvironmentFault where
    the disk is full.
    """
    pieces = (
        p if isinstance(p, bytes) else p.encode("utf-8", "backslashreplace")
        for p in _as_pieces(data)
    )
    shown = escape_control_characters(os.fspath(path), one_line=True)
    try:
        handle, target = _own_stream(path)
        if handle is not None:
            _write_stream(os.dup(handle), pieces)
        elif not _is_regular_or_new(target):
            _write_stream(os.open(target, os.O_WRONLY | os.O_NOCTTY), pieces)
        else:
            _replace_file(target, pieces)
    except OSError as error:
        if error.errno in _DISK_ERRORS:
            raise EnvironmentFault(
                f"can't write {shown}: {error.strerror}",
                "make room there, or write to another disk",
            ) from None
        raise UsageError(f"can't write {shown}: {error.strerror}", _write_remedy(error)) from None
    except ValueError as error:  # a NUL in the name
        raise UsageError(
            f"can't write {shown}: {error}",
            "name a file in a folder that exists and may be written",
        ) from None


def is_stream(path: str | os.PathLike[str]) -> bool:
    """Is there something that is no regular file (a terminal, a pipe, a device)? It is written
    into, whatever its name.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _write_remedy(error: OSError) -> str:
    if error.errno == errno.EPIPE:
        return "whoever reads this pipe has gone; name a file"
    return "name a file in a folder that exists and may be written"


def _as_pieces(data: str | bytes | Iterable[str | bytes]) -> Iterable[str | bytes]:
    return [data] if isinstance(data, str | bytes) else data


def _own_stream(path: str | os.PathLike[str]) -> tuple[int | None, str]:
    """(the stream of this process that a path names, or None; the path behind its links)."""
    target = os.path.abspath(path)
    for _ in range(40):
        match = _STREAM_PATH.fullmatch(target)
        if match is not None and match[2] in (None, "self", "thread-self", str(os.getpid())):
            return int(match[1] or match[3] or _STANDARD_STREAMS[target]), target
        if not os.path.islink(target):
            return None, os.path.join(
                os.path.realpath(os.path.dirname(target)), os.path.basename(target)
            )
        target = os.path.normpath(
            os.path.join(os.path.realpath(os.path.dirname(target)), os.readlink(target))
        )
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _is_regular_or_new(target: str) -> bool:
    """A regular file, or none yet. Raises OSError for a folder, and for a place where nothing can
    be made.
    """
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        return True
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return stat.S_ISREG(mode)


def _write_stream(handle: int, pieces: Iterable[bytes]) -> None:
    """Write to an open stream and close it, after what was printed before."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    with os.fdopen(handle, "wb") as file:
        file.writelines(pieces)


def _replace_file(target: str, pieces: Iterable[bytes]) -> None:
    """Write beside and rename; a file that was there keeps its mode bits, and one that may not be
    written is refused.
    """
    import tempfile

    before = os.stat(target) if os.path.exists(target) else None
    if before is not None and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    folder = os.path.dirname(target)
    handle, temporary = tempfile.mkstemp(
        prefix=f".{os.path.basename(target)[:100]}.", suffix=".part", dir=folder
    )
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(pieces)
            file.flush()
            if before is not None:
                with suppress(OSError):
                    os.fchown(file.fileno(), before.st_uid, before.st_gid)
            os.fchmod(
                file.fileno(),
                stat.S_IMODE(before.st_mode) if before is not None else 0o666 & ~_umask(),
            )
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync_folder(folder)


def _sync_folder(folder: str) -> None:
    """The new name lasts too; some file systems can't say so of a folder."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


# --- reading ---
class _TimeoutReader(io.RawIOBase):
    """A stream that may let its reader wait, and that fails with TimeoutError when nothing
    comes.
    """

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
    """A file, a device or a pipe for reading, by its path or its number. Raises OSError; reading
    raises TimeoutError.

    Whoever types at a terminal has all the time there is.
    """
    mine = not isinstance(source, int)
    handle = (
        source
        if isinstance(source, int)
        else os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    )
    mode = os.fstat(handle).st_mode
    if stat.S_ISDIR(mode):
        os.close(handle)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if stat.S_ISREG(mode):
        return open(handle, "rb", closefd=mine)
    return io.BufferedReader(
        _TimeoutReader(handle, mine, None if os.isatty(handle) else READ_TIMEOUT_S)
    )


def read_bytes(source: str | os.PathLike[str] | int, most: int = MAX_INPUT_BYTES) -> bytes:
    """All of an input. Raises OSError, and OSError of EFBIG for one that is larger than
    ``most``.
    """
    with open_bytes(source) as stream:
        data = stream.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"larger than {most // 2**20} MiB")
    return data


class LineTooLong(ValueError):
    """A line longer than any that is meant; ``number`` counts from 1."""

    def __init__(self, number: int, most: int) -> None:
        super().__init__(f"a line of more than {most:,} characters")
        self.number = number


def read_lines(lines: Iterator[str], count: int, characters: int) -> list[str]:
    """The next lines, ``count`` of them or those that make so many characters."""
    found: list[str] = []
    size = 0
    for line in islice(lines, count):
        found.append(line)
        size += len(line)
        if size > characters:
            break
    return found
