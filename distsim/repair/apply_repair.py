"""Replace a scenario file by its repaired text.

The file is replaced in one step, so that it is never half-written. Lines that the repair does not
change keep their comments, their format and their line ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from distsim.common.errors import UsageError
from distsim.common.file_io import is_stream, read_bytes, write_file

_CRLF = "\r\n"


class RepairableFile(NamedTuple):
    """A scenario file before its repair.

    ``content``: its bytes. ``text``: its text; if all lines end in CRLF, with LF
    instead.
    """

    path: Path
    content: bytes
    text: str


def open_for_repair(path: Path, *, writable: bool) -> RepairableFile:
    """Read a file before the search for repairs, which may take long.

    ``writable``: also check that the file can be replaced. Raises UsageError.
    """
    import os

    if is_stream(path) or not path.is_file():
        raise UsageError(f"{path}: only a file can be repaired", "name a scenario file")
    may_be_replaced = os.access(path, os.W_OK) and os.access(path.resolve().parent, os.W_OK)
    if writable and not may_be_replaced:
        raise UsageError(
            f"{path}: the file is not writable, so it was not repaired",
            "make the file and its folder writable, or use --diff to print the patch",
        )
    content = read_bytes(path)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text", "save the file as UTF-8") from None
    return RepairableFile(path, content, text.replace(_CRLF, "\n") if _uses_crlf(content) else text)


def write_repaired(file: RepairableFile, text: str) -> None:
    """Replace the file by the repaired text.

    Raises UsageError if the file has changed since it was read, or cannot be written.
    """
    if not file.path.is_file() or read_bytes(file.path) != file.content:
        raise UsageError(
            f"{file.path}: the file changed during the search for a repair, so it was not written",
            "run `distsim check --fix` again",
        )
    write_file(file.path, text.replace("\n", _CRLF) if _uses_crlf(file.content) else text)


def _uses_crlf(content: bytes) -> bool:
    """Whether every line ends as on Windows; in a mixed file, line ends are part of the text."""
    return 0 < content.count(b"\n") == content.count(b"\r\n")
