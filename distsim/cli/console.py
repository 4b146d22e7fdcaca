"""What the command line writes: data to standard output, notes to standard error, files in one piece."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

if TYPE_CHECKING:
    from distsim.errors import EnvironmentFault

#: The reader of a pipe has gone, the terminal has been closed.
_NOBODY_READS = (errno.EPIPE, errno.EIO)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)

#: Words that are coloured on a terminal: pattern -> style.
HIGHLIGHTS = (
    (r"(?m)^passed\b|\bcompletes(?= in \d)|(?<=verdict )ok\b", "green"),
    (r"(?m)^(failed|unreadable|error)\b|\b(hangs|raises|crashes|wrong-data|undefined)(?= after| at once)", "bold red"),
    (r"(?<=verdict )(invalid|mismatch|deadlock|race)\b", "bold red"),
    (r"(?m)^warning\b|(?<=verdict )leak\b", "yellow"),
    (r"(?m)^note\b|^ +help(?=:)", "cyan"),
    (r"(?m)^[A-Z][a-z ]+$|(?<=^error )DS\d{3}|(?<=^warning )DS\d{3}", "bold"),
)


def out(text: str) -> None:
    """Write data to standard output, with its last line ended. A reader that has gone away is no error.

    Raises EnvironmentFault where it can't be written, as on a full disk.
    """
    try:
        if coloured(sys.stdout):
            _out_in_colour(text)
        else:
            print(text)
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in _NOBODY_READS:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise _full("standard output", error) from None
        _leave_quietly()


def _full(what: str | Path, error: OSError) -> EnvironmentFault:
    from distsim.errors import EnvironmentFault

    return EnvironmentFault(f"can't write {what}: {error.strerror}", "make room there, or write to another disk")


def _leave_quietly() -> NoReturn:
    """End as a process does that SIGPIPE ends; Python's own flush at exit then finds an open file."""
    import typer

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise typer.Exit(128 + 13)


def coloured(stream: TextIO) -> bool:
    """https://no-color.org: any non-empty NO_COLOR switches colour off."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _out_in_colour(text: str) -> None:
    from rich.console import Console
    from rich.text import Text

    styled = Text(text)
    for pattern, style in HIGHLIGHTS:
        styled.highlight_regex(pattern, style)
    Console(highlight=False, soft_wrap=True).print(styled)


def note(text: str) -> None:
    """Write to standard error, where it does not mix with data."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def write_file(path: Path, data: str | bytes | Iterable[str]) -> None:
    """Write a file whole or not at all: into a temporary file beside it, then renamed.

    Raises UsageError where the folder is not there or may not be written, EnvironmentFault where the disk is full.
    """
    import tempfile

    from distsim.errors import UsageError

    pieces = [data] if isinstance(data, str | bytes) else data
    temporary = ""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = file.name
            file.writelines(p if isinstance(p, bytes) else p.encode("utf-8") for p in pieces)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        if error.errno in _FULL:
            raise _full(path, error) from None
        raise UsageError(
            f"can't write {path}: {error.strerror}", "name a file in a folder that exists and may be written"
        ) from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def to_json(record: Any) -> str:
    """JSON as all commands print it: UTF-8, two blanks of indent, keys in the order given."""
    import json

    return json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False)
