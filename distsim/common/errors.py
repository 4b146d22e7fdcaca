"""The exceptions that distsim raises on purpose, by who can fix the problem.

::

    DistsimError
    ├── UserError             exit 2: the input or the command is wrong; the text has the remedy
    │   ├── ScenarioErrors    all problems of one scenario
    │   └── UsageError        a wrong argument, option, name or file
    ├── InternalError         exit 3: distsim is wrong; please report it
    └── EnvironmentFault      exit 4: the machine, not the scenario: a missing library, a full disk

All exceptions take positional arguments only, because simpy rebuilds exceptions from their
``args``.
"""

from __future__ import annotations

import errno
from textwrap import wrap
from traceback import clear_frames
from typing import ClassVar, NamedTuple

#: Longer source lines are cut around the caret.
_MAX_LINE_WIDTH = 100


class ScenarioProblem(NamedTuple):
    """One invalid place in a scenario.

    ``line`` and ``column`` count from 1. Both are 0 if there is no text (the file does not exist,
    or the scenario was built in Python); then ``path`` names the place: ``program[0].send.dst``.
    ``hint`` is a line of advice, or empty.
    """

    file: str
    line: int
    column: int
    message: str
    source_line: str = ""
    hint: str = ""
    path: str = ""

    @property
    def place(self) -> str:
        """``file:line:column``, or the file and the path if there is no text."""
        if self.line:
            return f"{self.file}:{self.line}:{self.column}"
        return f"{self.file}: {self.path}" if self.path else self.file

    def render(self, width: int | None = None) -> str:
        """The place and the message, the source line with a caret under the place, and the advice.

        ``width`` is the number of columns available. None means no wrapping: each part stays on one
        line of any length, for other programs to read.
        """
        lines = _wrapped_lines(f"{self.place}: {self.message}", width)
        if self.line and self.source_line.strip():
            text, caret = _visible_window(
                self.source_line,
                self.column,
                _MAX_LINE_WIDTH if width is None else min(_MAX_LINE_WIDTH, width - 2),
            )
            lines += [f"  {text}", f"  {caret}^"]
        if self.hint:
            lines += _wrapped_lines(f"  help: {self.hint}", width)
        return "\n".join(lines)


def _wrapped_lines(text: str, width: int | None) -> list[str]:
    """The text wrapped at blanks to ``width`` columns; unchanged if ``width`` is None.

    A word longer than ``width`` gets a line of its own.
    """
    if width is None:
        return [text]
    return [
        line
        for part in text.splitlines()
        for line in wrap(
            part, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
        )
    ]


def _visible_window(line: str, column: int, widest: int = _MAX_LINE_WIDTH) -> tuple[str, str]:
    """The part of a line around a column, and the blanks that put a caret under that column.

    Tabs stay tabs in both, so that the caret lines up at any tab width.
    """
    start = max(0, column - 1 - widest * 3 // 4) if len(line) > widest else 0
    before, text = line[start : column - 1], line[start : start + widest]
    visible = "".join(map(_visible_character, text))
    return visible, "".join("\t" if character == "\t" else " " for character in before)


def _visible_character(character: str) -> str:
    if character.isprintable() or character == "\t":
        return character
    return "\N{REPLACEMENT CHARACTER}"


class DistsimError(Exception):
    """Base class of all exceptions that distsim raises on purpose."""

    exit_code: ClassVar[int] = 3

    def render_for_width(self, width: int | None) -> str:
        """The text for a terminal of ``width`` columns; None if the width is unknown."""
        return "\n".join(_wrapped_lines(str(self), width))


class UserError(DistsimError):
    """The user's input is wrong; the message states how to correct it."""

    exit_code: ClassVar[int] = 2


class ScenarioErrors(UserError):
    """All problems of one scenario, sorted by place. ``problems`` is never empty."""

    def __init__(self, problems: tuple[ScenarioProblem, ...]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        return self.render_for_width(None)

    def render_for_width(self, width: int | None) -> str:
        """All problems, wrapped for a terminal of ``width`` columns."""
        return "\n".join(problem.render(width) for problem in self.problems)


class _ErrorWithRemedy(DistsimError):
    """An error with a message and a remedy (which may be empty)."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message, remedy)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n  help: {self.remedy}" if self.remedy else self.message


class UsageError(_ErrorWithRemedy, UserError):
    """A wrong argument or option."""


class InternalError(DistsimError):
    """A bug in distsim: an invariant does not hold."""

    exit_code: ClassVar[int] = 3


class EnvironmentFault(_ErrorWithRemedy):
    """The environment fails: a missing library, a file that cannot be written, a lost machine."""

    exit_code: ClassVar[int] = 4


#: Exceptions that Python raises for oversized input.
RESOURCE_ERRORS = (RecursionError, MemoryError, OverflowError)
#: What the dynamic loader writes when a library does not fit into memory (glibc: elf/dl-load.c,
#: elf/dl-map-segments.h).
_LOADER_WITHOUT_MEMORY = ("cannot allocate memory", "failed to map segment")


def raise_if_out_of_memory(error: ImportError | OSError) -> None:
    """Raise MemoryError if a library cannot be loaded because memory ran out.

    Otherwise the remedy would be to install a library that is installed.
    """
    if is_out_of_memory(error):
        raise MemoryError from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    text = str(error).lower()
    return isinstance(error, ImportError | OSError) and any(
        words in text for words in _LOADER_WITHOUT_MEMORY
    )


def resource_error(error: BaseException, where: str) -> UsageError:
    """The error message for a `RESOURCE_ERRORS` exception, with the place and the remedy.

    Frees the local variables in the exception's frames first, because otherwise there may be no
    memory left to report anything.
    """
    clear_frames(error.__traceback__)
    place = f"{where}: " if where else ""
    if isinstance(error, RecursionError):
        return UsageError(
            f"{place}the input is nested too deeply",
            "use fewer levels of steps or brackets",
        )
    if is_out_of_memory(error):
        smaller = (
            "take fewer ranks, iterations or repeats; "
            "`simulate --no-verdict --no-values` needs less"
        )
        return UsageError(f"{place}not enough free memory", smaller)
    return UsageError(
        f"{place}times or sizes add up to more than 64 bits can count (292 years in ns)",
        "make them smaller",
    )
