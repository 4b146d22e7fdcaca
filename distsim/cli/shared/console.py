"""What the command line writes: data to standard output, notes to standard error; files as
`distsim.common.file_io` writes them.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn, TextIO

from distsim.common.file_io import (
    escape_control_characters,
    escape_json_control_characters,
    write_file,
)

#: The reader of a pipe has gone, the terminal has been closed.
_CLOSED_OUTPUT_ERRORS = (errno.EPIPE, errno.EIO)

_CI_COMMAND = re.compile(r"^([ \t]*)::", re.MULTILINE)
#: Work shorter than this shows no bar and no line.
PROGRESS_DELAY_S = 2.0
#: Words that are coloured on a terminal: pattern -> style.
HIGHLIGHTS = (
    (r"(?m)^passed\b|\bcompletes(?= in \d)|(?<=verdict )ok\b", "green"),
    (
        r"(?m)^(failed|unreadable|error)\b|\b(hangs|raises|crashes|wrong-data|undefined)(?= after| at once)",
        "bold red",
    ),
    (r"(?<=verdict )(invalid|mismatch|deadlock|race)\b", "bold red"),
    (r"(?m)^warning\b|(?<=verdict )leak\b", "yellow"),
    (r"(?m)^note\b|^ +help(?=:)", "cyan"),
    (r"(?m)^[A-Z][a-z ]+$|(?<=^error )DS\d{3}|(?<=^warning )DS\d{3}", "bold"),
)


def out(text: str, commands: bool = False) -> None:
    """Write data to standard output, with its last line ended; control characters in it are shown.
    A reader that has gone away is no error.

    ``commands``: the text is meant for GitHub, whose log takes lines that begin with `::` for
    commands.

    Raises EnvironmentFault where it can't be written, as on a full disk.
    """
    text = (
        escape_control_characters(text)
        if commands
        else _escape_ci_commands(escape_control_characters(text))
    )
    try:
        if uses_colour(sys.stdout):
            _out_in_colour(text)
        else:
            print(text)
        sys.stdout.flush()
    except OSError as error:
        _raise_output_error(error)


def out_bytes(data: bytes) -> None:
    """Write a picture to standard output. Raises EnvironmentFault where it can't be written."""
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except OSError as error:
        _raise_output_error(error)


def _escape_ci_commands(text: str) -> str:
    """No text of a file gives orders to the log of a CI job: a line that would be one gets a
    blank.
    """
    return (
        _CI_COMMAND.sub(r"\1: :", text).replace("##[", "## [")
        if "::" in text or "##[" in text
        else text
    )


def _raise_output_error(error: OSError) -> NoReturn:
    """Standard output takes nothing more; Python's own flush at exit then finds an open file."""
    import typer

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if error.errno in _CLOSED_OUTPUT_ERRORS:
        raise typer.Exit(128 + 13)  # as a process ends that SIGPIPE ends
    from distsim.common.errors import EnvironmentFault

    if error.errno == errno.EBADF:
        raise EnvironmentFault(
            "can't write standard output: it is closed", "`> /dev/null` throws the report away"
        ) from None
    raise EnvironmentFault(
        f"can't write standard output: {error.strerror}",
        "make room there, or write to another disk",
    ) from None


def terminal_columns() -> int | None:
    """How wide the terminal is that is written to, or what COLUMNS says; None where nobody says."""
    given = os.environ.get("COLUMNS", "")
    if given.isascii() and given.isdigit() and int(given):
        return int(given)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (OSError, ValueError):
        return None


def note_columns() -> int | None:
    """How wide notes may be, 40 to 200: as the terminal is, and None where another program reads
    them, line by line.
    """
    given = terminal_columns() if sys.stderr.isatty() else None
    return None if given is None else min(max(given, 40), 200)


def uses_colour(stream: TextIO) -> bool:
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
    try:
        print(_escape_ci_commands(escape_control_characters(text)), file=sys.stderr, flush=True)
    except OSError:  # nobody can be told
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def to_json(record: object) -> str:
    """JSON as all commands print it: UTF-8 (ASCII where the stream is not), two blanks of indent,
    keys in the order given.
    """
    import json

    plain = not (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    text = json.dumps(record, indent=2, ensure_ascii=plain, allow_nan=False)
    return escape_json_control_characters(text).replace("##[", "##\\u005b")


__all__ = [
    "HIGHLIGHTS",
    "uses_colour",
    "terminal_columns",
    "note",
    "note_columns",
    "out",
    "out_bytes",
    "to_json",
    "write_file",
]


@contextmanager
def progress_phases(shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Gives a function that says what is being done, beside the time it has taken, for work whose
    length nobody knows.
    """
    if not shown or not uses_colour(sys.stderr):
        yield lambda _: None
        return
    from threading import Timer

    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    line = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = line.add_task("", total=None)
    start = Timer(PROGRESS_DELAY_S, line.start)
    start.daemon = True
    start.start()
    try:
        yield lambda words: line.update(task, description=words)
    finally:
        start.cancel()
        line.stop()
