"""A lock on a file that one process at a time may write, for as long as a command runs.

The lock is a file next to it, because `write_file` replaces the file itself, and a lock on the
replaced file would protect nothing. The kernel releases the lock if the process is killed. A lock
file that is left over therefore blocks no later command.

Some file systems of clusters support no locks (ENOSYS, ENOLCK, EOPNOTSUPP). There the command goes
on without one: a sweep that cannot run at all would be worse. The lock file is removed at once.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from distsim.common.errors import UsageError
from distsim.common.file_io import escape_control_characters

_UNSUPPORTED: Final = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_BUSY: Final = (errno.EAGAIN, errno.EACCES)


class FileLock:
    """Holds the lock on a file from the moment it is created until `release`.

    Raises UsageError if another process has it.
    """

    def __init__(self, path: Path) -> None:
        real_path = os.path.realpath(path)
        self._path = f"{real_path}.lock"
        self._descriptor: int | None = None
        while True:
            descriptor = self._try_lock(path)
            if descriptor is None or _is_same_file(descriptor, self._path):
                break
            # Its holder has removed the file between our opening and our locking it.
            os.close(descriptor)
        self._descriptor = descriptor

    def _try_lock(self, path: Path) -> int | None:
        """The descriptor of the locked file; None if no lock is possible here."""
        try:
            import fcntl
        except ImportError:  # not a POSIX system
            return None
        try:
            opened = _open_or_create(self._path)
        except OSError:
            # The folder is not writable, which writing the file itself reports better.
            return None
        try:
            fcntl.flock(opened.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(opened.descriptor)
            if error.errno in _BUSY:
                shown = escape_control_characters(os.fspath(path), one_line=True)
                raise UsageError(
                    f"another command is writing {shown}",
                    "wait until it ends, or name another file",
                ) from None
            if opened.is_new:
                # Only a file of our own: one that exists may be the lock of another process, if the
                # kernel has run out of locks (ENOLCK).
                with suppress(OSError):
                    os.unlink(self._path)
            if error.errno in _UNSUPPORTED:
                return None
            raise
        return opened.descriptor

    def release(self) -> None:
        """Remove the lock file and give up the lock. Later calls do nothing."""
        if self._descriptor is None:
            return
        with suppress(OSError):
            # The lock is still held, so no other process can have locked this file.
            os.unlink(self._path)
        os.close(self._descriptor)
        self._descriptor = None


class _OpenedFile(NamedTuple):
    """``is_new``: this process has created the file."""

    descriptor: int
    is_new: bool


def _open_or_create(path: str) -> _OpenedFile:
    with suppress(FileExistsError):
        return _OpenedFile(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), True)
    # O_CREAT again, because the file's owner may have removed it since the call above.
    return _OpenedFile(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), False)


def _is_same_file(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


__all__ = ["FileLock"]
