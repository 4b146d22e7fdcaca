"""Input and output of files: bounded reads, atomic writes, escaped control characters.

Reads have a limit on the size, and a timeout for streams that deliver nothing. All files that
distsim writes go through `write_file`. A regular file is written to a temporary file in the same
folder, which is then renamed, so that a reader never sees a partial file. Symbolic links are
followed. Anything that is not a regular file (a terminal, a pipe, a device) is written to directly
and never replaced.
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
    "files_below",
    "write_file",
]

#: Timeout for a pipe that delivers no data.
READ_TIMEOUT_S = 30.0
#: Limit for files that are small by nature (scenarios, orders of events, schedules). A larger input
#: is not such a file.
MAX_INPUT_BYTES = 16 * 2**20

#: Errors of the machine, not of the file's name. EFBIG: the process has a limit on the size of
#: files (`ulimit -f`), or the file system has one.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)
#: Paths that name a file descriptor.
_STREAM_PATH = re.compile(
    r"/dev/std(?:in|out|err)|/dev/fd/(\d+)|/proc/(self|thread-self|\d+)/fd/(\d+)"
)
_STANDARD_STREAMS = {"/dev/stdin": "0", "/dev/stdout": "1", "/dev/stderr": "2"}

#: Control characters (C0, DEL, C1), line separators, marks that change the text direction, and lone
#: surrogates. Line feeds and tabs are allowed.
_CONTROL_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_LINE_BREAK_ESCAPES = {"\n": r"\n", "\t": r"\t"}


def escape_control_characters(text: str, one_line: bool = False) -> str:
    r"""A text with its control characters escaped, as ``\x1b``.

    ``one_line`` also escapes line breaks and tabs.
    """
    shown = _CONTROL_CHARACTERS.sub(_escape, text)
    if one_line and ("\n" in shown or "\t" in shown):
        shown = shown.replace("\n", _LINE_BREAK_ESCAPES["\n"]).replace(
            "\t", _LINE_BREAK_ESCAPES["\t"]
        )
    return shown


def escape_json_control_characters(text: str) -> str:
    r"""JSON text in which control characters that the encoder leaves are escaped, as ``\u009b``."""
    return _CONTROL_CHARACTERS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if match[0] == "\r":
        return r"\r"
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def write_file(path: str | os.PathLike[str], data: str | bytes | Iterable[str | bytes]) -> None:
    """Write a file completely or not at all; write directly to anything but a regular file.

    Raises UsageError if the folder does not exist or is not writable, EnvironmentFault if the disk
    is full.
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
                f"cannot write {shown}: {error.strerror}", _disk_remedy(error)
            ) from None
        raise UsageError(f"cannot write {shown}: {error.strerror}", _write_remedy(error)) from None
    except ValueError as error:  # a NUL in the name
        raise UsageError(
            f"cannot write {shown}: {error}",
            "name a file in a writable folder",
        ) from None


def files_below(
    folder: str | os.PathLike[str], unreadable: list[OSError] | None = None
) -> list[Path]:
    """The regular files in a folder and its subfolders, sorted; links to folders are not followed.

    Subfolders that cannot be read are added to ``unreadable``. If it is None, they raise
    UsageError.
    """
    errors: list[OSError] = [] if unreadable is None else unreadable
    found: list[Path] = []
    for parent, _, names in os.walk(folder, onerror=errors.append):
        found += [
            Path(parent, name) for name in names if os.path.isfile(os.path.join(parent, name))
        ]
    if unreadable is None and errors:
        name = escape_control_characters(str(errors[0].filename), one_line=True)
        raise UsageError(
            f"cannot read the folder {name}: {errors[0].strerror}",
            "name files, or a folder that you may read",
        )
    return sorted(found)


def is_stream(path: str | os.PathLike[str]) -> bool:
    """Whether the path is a terminal, a pipe or a device.

    Such a path is written to directly, whatever its name.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _disk_remedy(error: OSError) -> str:
    if error.errno == errno.EFBIG:
        return "raise the limit on the size of files (`ulimit -f`), or write to another file system"
    return "free some space, or write to another disk"


def _write_remedy(error: OSError) -> str:
    if error.errno == errno.EPIPE:
        return "the reader of this pipe has closed it; name a file"
    return "name a file in a writable folder"


def _as_pieces(data: str | bytes | Iterable[str | bytes]) -> Iterable[str | bytes]:
    return [data] if isinstance(data, str | bytes) else data


def _own_stream(path: str | os.PathLike[str]) -> tuple[int | None, str]:
    """(file descriptor, target) of a path.

    The descriptor is the one of this process that the path names, or None. The target is the path
    with its links resolved.
    """
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
    """Whether the target is a regular file or does not exist yet.

    Raises OSError for a folder, and for a place where no file can be created.
    """
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        return True
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return stat.S_ISREG(mode)


def _write_stream(handle: int, pieces: Iterable[bytes]) -> None:
    """Write to an open stream and close it.

    Standard output and error are flushed first, so that earlier output precedes this one.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    with os.fdopen(handle, "wb") as file:
        file.writelines(pieces)


def _replace_file(target: str, pieces: Iterable[bytes]) -> None:
    """Write a temporary file in the same folder and rename it to the target.

    An existing file keeps its mode bits. A target that is not writable is refused, although a
    rename could replace it.
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
    """Make the rename durable; ignore errors, because some file systems cannot sync a folder."""
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
    """A raw stream that raises TimeoutError if no data arrives in time."""

    def __init__(self, handle: int, owns_handle: bool, timeout_s: float | None) -> None:
        self._handle = handle
        self._owns_handle = owns_handle
        self._timeout_s = timeout_s
        self._poll = select.poll()
        self._poll.register(handle, select.POLLIN)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        timeout_ms = None if self._timeout_s is None else int(self._timeout_s * 1000)
        if not self._poll.poll(timeout_ms):
            raise TimeoutError(errno.ETIMEDOUT, f"received no data for {self._timeout_s:.0f} s")
        data = os.read(self._handle, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if self._owns_handle and not self.closed:
            os.close(self._handle)
        super().close()


def open_bytes(source: str | os.PathLike[str] | int) -> io.BufferedReader:
    """Open a file, a device or a pipe for reading, by path or file descriptor.

    Raises OSError; reading raises TimeoutError if nothing arrives. A terminal has no timeout,
    because a person may type at any speed.
    """
    if isinstance(source, int):
        handle, owns_handle = source, False
    else:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
        handle, owns_handle = os.open(source, flags), True
    mode = os.fstat(handle).st_mode
    if stat.S_ISDIR(mode):
        os.close(handle)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if stat.S_ISREG(mode):
        return open(handle, "rb", closefd=owns_handle)
    timeout_s = None if os.isatty(handle) else READ_TIMEOUT_S
    return io.BufferedReader(_TimeoutReader(handle, owns_handle, timeout_s))


def read_bytes(source: str | os.PathLike[str] | int, most: int = MAX_INPUT_BYTES) -> bytes:
    """The whole content of an input.

    Raises OSError, with EFBIG if the input is larger than ``most`` bytes.
    """
    with open_bytes(source) as stream:
        data = stream.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"larger than {most // 2**20} MiB")
    return data


class LineTooLong(ValueError):
    """A line exceeds the limit; ``number`` counts from 1."""

    def __init__(self, number: int, most: int) -> None:
        super().__init__(f"a line of more than {most:,} characters")
        self.number = number


def read_lines(lines: Iterator[str], count: int, characters: int) -> list[str]:
    """The next ``count`` lines, or fewer if these have more than ``characters`` characters."""
    found: list[str] = []
    size = 0
    for line in islice(lines, count):
        found.append(line)
        size += len(line)
        if size > characters:
            break
    return found
