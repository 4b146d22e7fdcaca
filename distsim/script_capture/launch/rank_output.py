"""Write the output of a rank in whole lines.

All ranks write to the same terminal or file. Python writes a line in several pieces (`print` with
two arguments writes four), so the lines of ranks would be mixed. Here a line is one write. This
covers what Python code writes; C++ code writes to the descriptor itself.
"""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, TextIO

#: The descriptors of standard output and standard error.
_STDOUT: Final = 1
_STDERR: Final = 2


class _WholeLines(io.RawIOBase):
    """A binary stream that passes on complete lines, and the rest when it is flushed.

    A carriage return ends a line too: progress bars use it. ``prefix`` begins each line.
    """

    def __init__(self, descriptor: int, prefix: bytes) -> None:
        self._descriptor = descriptor
        self._prefix = prefix
        self._pending = b""
        self._lock = threading.RLock()
        # A forked child would write the rest again.
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.RLock()
        self._pending = b""

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Write the complete lines of what is there now."""
        chunk = bytes(data)
        with self._lock:
            text = self._pending + chunk
            end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
            self._pending = text[end:]
            self._emit(text[:end])
        return len(chunk)

    def flush(self) -> None:
        """Write an incomplete line as well."""
        with self._lock:
            rest, self._pending = self._pending, b""
            self._emit(rest)

    def _emit(self, text: bytes) -> None:
        if self._prefix:
            lines = text.splitlines(keepends=True)
            text = b"".join(self._with_prefix(line) for line in lines)
        while text:
            text = text[os.write(self._descriptor, text) :]

    def _with_prefix(self, line: bytes) -> bytes:
        # A traceback has the rank already.
        return line if line.startswith(b"[rank") else self._prefix + line


def write_whole_lines(prefix: str = "") -> None:
    """Let `sys.stdout` and `sys.stderr` of this process write whole lines."""
    for name in ("stdout", "stderr"):
        stream: TextIO = getattr(sys, name)
        try:
            descriptor = stream.fileno()
        except (OSError, ValueError):  # replaced by something without a descriptor
            continue
        stream.flush()
        raw: Any = _WholeLines(descriptor, prefix.encode())
        lines = io.TextIOWrapper(
            raw, encoding=stream.encoding, errors=stream.errors, write_through=True
        )
        # The replaced stream would close the descriptor if it were freed.
        setattr(lines, "_replaced", stream)  # noqa: B010
        setattr(sys, name, lines)


@contextmanager
def output_on_stderr() -> Iterator[None]:
    """Let everything that is written to standard output go to standard error.

    This includes processes that are started meanwhile, and C++ code. So standard output has the
    report only, for a program that reads it.
    """
    sys.stdout.flush()
    kept = os.dup(_STDOUT)
    os.dup2(_STDERR, _STDOUT)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, _STDOUT)
        os.close(kept)


__all__ = ["output_on_stderr", "write_whole_lines"]
