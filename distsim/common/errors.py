"""What can go wrong, and whose matter it is.

::

    DistsimError
    ├── UserError             exit 2: the input or the command is wrong; the text says where and what to do
    │   ├── ScenarioErrors    all problems of one scenario
    │   └── UsageError        a wrong argument, option, name or file
    ├── InternalError         exit 3: distsim is wrong; please report it
    └── EnvironmentFault      exit 4: the machine, not the scenario: a missing library, a full disk

All take positional arguments only, so that they survive simpy, which rebuilds exceptions from their
``args``.
"""

from __future__ import annotations

from textwrap import wrap
from traceback import clear_frames
from typing import ClassVar, NamedTuple

#: Longer source lines are cut around the caret.
_MAX_LINE_WIDTH = 100


class ScenarioProblem(NamedTuple):
    """One thing in a scenario that can't be read.

    ``line`` and ``column`` count from 1; both are 0 when there is no text (the file is not there,
    or the scenario was built in Python), and ``path`` then says where: ``program[0].send.dst``.
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
        """``file:line:column``, or the file and the path where there is no text."""
        if self.line:
            return f"{self.file}:{self.line}:{self.column}"
        return f"{self.file}: {self.path}" if self.path else self.file

    def render(self, width: int | None = None) -> str:
        """The place and the message, the source line, a caret under the place, the advice.

        ``width``: columns that there are; None: each a line of its own, however long, as other
        programs read them.
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
    """Lines of at most so many columns, broken at blanks; a word that is wider stands on one of its
    own. None: as it is.
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
    """The part of a line around a column, and the blanks that put a caret under it. Tabs stay tabs
    in both.
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
    """Anything that distsim raises on purpose."""

    exit_code: ClassVar[int] = 3

    def render_for_width(self, width: int | None) -> str:
        """The text for a terminal of so many columns; None: nobody says."""
        return "\n".join(_wrapped_lines(str(self), width))


class UserError(DistsimError):
    """The user's input is wrong; the message says how to put it right."""

    exit_code: ClassVar[int] = 2


class ScenarioErrors(UserError):
    """All problems of one scenario, sorted by place. ``problems`` is never empty."""

    def __init__(self, problems: tuple[ScenarioProblem, ...]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        return self.render_for_width(None)

    def render_for_width(self, width: int | None) -> str:
        """Each problem for a terminal of so many columns."""
        return "\n".join(problem.render(width) for problem in self.problems)


class _ErrorWithRemedy(DistsimError):
    """What is wrong, and the remedy."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message, remedy)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n  help: {self.remedy}" if self.remedy else self.message


class UsageError(_ErrorWithRemedy, UserError):
    """A wrong argument or option."""


class InternalError(DistsimError):
    """A fault of distsim's own: an invariant does not hold."""

    exit_code: ClassVar[int] = 3


class EnvironmentFault(_ErrorWithRemedy):
    """The surroundings fail: a library is missing, a file can't be written, a machine is gone."""

    exit_code: ClassVar[int] = 4


#: What input that is out of all bounds makes Python raise.
RESOURCE_ERRORS = (RecursionError, MemoryError, OverflowError)


def resource_error(error: BaseException, where: str) -> UsageError:
    """A refusal of such an input, with the place and the remedy. What the frames of the error hold
    is freed: else there may be no room.
    """
    clear_frames(error.__traceback__)
    place = f"{where}: " if where else ""
    if isinstance(error, RecursionError):
        return UsageError(
            f"{place}the input is nested too deeply",
            "write it flatter, with fewer levels of steps or brackets",
        )
    if isinstance(error, MemoryError):
        smaller = "take fewer ranks, iterations or repeats; `simulate --no-verdict --no-values` needs less"
        return UsageError(f"{place}it takes more memory than is free", smaller)
    return UsageError(
        f"{place}times or sizes add up to more than 64 bits can count (292 years in ns)",
        "make them smaller",
    )
