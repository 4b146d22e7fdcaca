"""The streams of the command line: data goes to standard output, notes go to standard error.

Texts may contain strings of untrusted files. Everything that is printed is therefore freed of
control characters, and of lines that the log of a CI system would interpret as commands.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn, TextIO

from distsim.common.file_io import (
    escape_control_characters,
    escape_json_control_characters,
    write_file,
)

if TYPE_CHECKING:
    from rich.progress import Progress

#: Errors of a write after the reader of the pipe or the terminal has closed.
_CLOSED_OUTPUT_ERRORS = (errno.EPIPE, errno.EIO)
#: The exit status of a process that SIGPIPE (13) has ended.
_SIGPIPE_STATUS = 128 + 13
#: Columns of notes on a terminal.
_MIN_NOTE_COLUMNS = 40
_MAX_NOTE_COLUMNS = 200

#: A line that GitHub Actions takes for a command (`::error …`).
_CI_COMMAND = re.compile(r"^([ \t]*)::", re.MULTILINE)
#: Progress is shown only for work that takes longer.
PROGRESS_DELAY_S = 2.0
#: The bars whose blocks run now.
_bars: list[Progress] = []
#: Patterns that are coloured on a terminal, and their styles.
HIGHLIGHTS = (
    (r"(?m)^passed\b|\bcompletes(?= in \d)|(?<=verdict )ok\b", "green"),
    (
        r"(?m)^(failed|unreadable|error)\b"
        r"|\b(hangs|raises|crashes|wrong-data|undefined)(?= after| at once)",
        "bold red",
    ),
    (r"(?<=verdict )(invalid|mismatch|deadlock|race)\b", "bold red"),
    (r"(?m)^warning\b|(?<=verdict )leak\b", "yellow"),
    (r"(?m)^note\b|^ +help(?=:)", "cyan"),
    (r"(?m)^[A-Z][a-z ]+$|(?<=^error )DS\d{3}|(?<=^warning )DS\d{3}", "bold"),
)


def out(text: str, commands: bool = False) -> None:
    """Write data to standard output, with a final newline and control characters escaped.

    ``commands``: the text contains commands for GitHub's log (lines that begin with `::`), which
    are escaped otherwise.

    A reader that has closed the pipe is no error. Raises EnvironmentFault if the text cannot be
    written, for example on a full disk.
    """
    text = escape_control_characters(text)
    if not commands:
        text = _escape_ci_commands(text)
    try:
        if uses_colour(sys.stdout):
            _out_in_colour(text)
        else:
            print(text)
        sys.stdout.flush()
    except OSError as error:
        _raise_output_error(error)


def out_markdown(text: str) -> None:
    """Write Markdown to standard output: laid out on a terminal, otherwise unchanged.

    Raises EnvironmentFault if the text cannot be written.
    """
    if not uses_colour(sys.stdout):
        out(text)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    try:
        Console().print(Markdown(escape_control_characters(text)))
    except OSError as error:
        _raise_output_error(error)


def out_bytes(data: bytes) -> None:
    """Write a picture to standard output. Raises EnvironmentFault if that is impossible."""
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except OSError as error:
        _raise_output_error(error)


def _escape_ci_commands(text: str) -> str:
    """Insert a space into text that the log of a CI job would obey: `::error`, `##[error]`."""
    if "::" in text or "##[" in text:
        return _CI_COMMAND.sub(r"\1: :", text).replace("##[", "## [")
    return text


def _raise_output_error(error: OSError) -> NoReturn:
    """Raise the error of a failed write to standard output."""
    import typer

    # Python flushes standard output once more at exit, and would report the same error again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if error.errno in _CLOSED_OUTPUT_ERRORS:
        raise typer.Exit(_SIGPIPE_STATUS)
    from distsim.common.errors import EnvironmentFault

    if error.errno == errno.EBADF:
        raise EnvironmentFault(
            "cannot write standard output: it is closed", "use `> /dev/null` to discard the report"
        ) from None
    raise EnvironmentFault(
        f"cannot write standard output: {error.strerror}",
        "free some space, or write to another disk",
    ) from None


def terminal_columns() -> int | None:
    """The width of the terminal on standard output, or of COLUMNS; None if there is neither."""
    variable = os.environ.get("COLUMNS", "")
    if variable.isascii() and variable.isdigit() and int(variable):
        return int(variable)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (OSError, ValueError):
        return None


def note_columns() -> int | None:
    """The width of notes; None if standard error is no terminal.

    Programs that read notes line by line get them unwrapped.
    """
    columns = terminal_columns() if sys.stderr.isatty() else None
    if columns is None:
        return None
    return min(max(columns, _MIN_NOTE_COLUMNS), _MAX_NOTE_COLUMNS)


def uses_colour(stream: TextIO) -> bool:
    """Whether a stream is a terminal with colours.

    Any non-empty NO_COLOR switches colour off (https://no-color.org).
    """
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _out_in_colour(text: str) -> None:
    from rich.console import Console
    from rich.text import Text

    styled = Text(text)
    for pattern, style in HIGHLIGHTS:
        styled.highlight_regex(pattern, style)
    Console(highlight=False, soft_wrap=True).print(styled)


def note(text: str) -> None:
    """Write to standard error, so that it does not mix with data."""
    try:
        print(_escape_ci_commands(escape_control_characters(text)), file=sys.stderr, flush=True)
    except OSError:
        # There is no stream left to report this on. Python's flush at exit must not fail either.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def to_json(record: object) -> str:
    """JSON as all commands print it: indented by two, keys in the given order.

    Characters beyond ASCII are escaped only if the encoding of the stream is no UTF.
    """
    import json

    ascii_only = not (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    text = json.dumps(record, indent=2, ensure_ascii=ascii_only, allow_nan=False)
    return escape_json_control_characters(text).replace("##[", "##\\u005b")


@contextmanager
def progress_phases(shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Give a function that shows the current phase and the elapsed time on a terminal.

    This is for work of unknown length; `distsim.cli.shared.progress` has bars for known lengths.
    """
    if not shown or not uses_colour(sys.stderr):
        yield lambda _: None
        return
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
    with shown_after_delay(line):
        yield lambda phase: line.update(task, description=phase)


@contextmanager
def shown_after_delay(bar: Progress) -> Iterator[None]:
    """Show a bar while the block runs, from `PROGRESS_DELAY_S` after its start on."""
    from threading import Timer

    start = Timer(PROGRESS_DELAY_S, bar.start)
    start.daemon = True
    start.start()
    _bars.append(bar)
    try:
        yield
    finally:
        start.cancel()
        bar.stop()
        _bars.remove(bar)


def stop_progress() -> None:
    """Remove all bars, and show the cursor: the process ends before the blocks of the bars do."""
    for bar in _bars:
        bar.stop()


__all__ = [
    "HIGHLIGHTS",
    "note",
    "note_columns",
    "out",
    "out_bytes",
    "progress_phases",
    "shown_after_delay",
    "stop_progress",
    "terminal_columns",
    "to_json",
    "uses_colour",
    "write_file",
]
