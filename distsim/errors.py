"""What can go wrong, and whose matter it is.

::

    DistsimError
    ├── UserError             exit 2: the input or the command is wrong; the text says where and what to do
    │   ├── ScenarioErrors    all problems of one scenario
    │   └── UsageError        a wrong argument, option, name or file
    ├── InternalError         exit 3: distsim is wrong; please report it
    └── EnvironmentFault      exit 4: the machine, not the scenario: a missing library, a full disk

All take positional arguments only, so that they survive simpy, which rebuilds exceptions from their ``args``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

#: Longer source lines are cut around the caret.
_WIDEST_LINE = 100


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One thing in a scenario that can't be read.

    ``line`` and ``column`` count from 1; both are 0 when there is no text (the file is not there, or the scenario was built
    in Python), and ``path`` then says where: ``program[0].send.dst``. ``hint`` is a line of advice, or empty.
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

    def render(self) -> str:
        """The place and the message, the source line, a caret under the place, the advice: at most four lines."""
        lines = [f"{self.place}: {self.message}"]
        if self.line and self.source_line.strip():
            text, caret = _window(self.source_line, self.column)
            lines += [f"  {text}", f"  {caret}^"]
        if self.hint:
            lines.append(f"  help: {self.hint}")
        return "\n".join(lines)


def _window(line: str, column: int) -> tuple[str, str]:
    """The part of a line around a column, and the blanks that put a caret under it. Tabs stay tabs in both."""
    start = max(0, column - 1 - _WIDEST_LINE * 3 // 4) if len(line) > _WIDEST_LINE else 0
    before, text = line[start : column - 1], line[start : start + _WIDEST_LINE]
    visible = "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    return visible, "".join("\t" if c == "\t" else " " for c in before)


class DistsimError(Exception):
    """Anything that distsim raises on purpose."""

    exit_code: ClassVar[int] = 3


class UserError(DistsimError):
    """The user's input is wrong; the message says how to put it right."""

    exit_code: ClassVar[int] = 2


class ScenarioErrors(UserError):
    """All problems of one scenario, sorted by place. ``problems`` is never empty."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(problem.render() for problem in self.problems)


class UsageError(UserError):
    """A wrong argument or option: what is wrong, and the remedy."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message, remedy)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n  help: {self.remedy}" if self.remedy else self.message


class InternalError(DistsimError):
    """A fault of distsim's own: an invariant does not hold."""

    exit_code: ClassVar[int] = 3


class EnvironmentFault(DistsimError):
    """The surroundings fail: a library is missing, a file can't be written, a machine is gone."""

    exit_code: ClassVar[int] = 4

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message, remedy)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n  help: {self.remedy}" if self.remedy else self.message


#: What input that is out of all bounds makes Python raise.
OUT_OF_BOUNDS = (RecursionError, MemoryError, OverflowError)


def out_of_bounds(error: BaseException, where: str) -> UsageError:
    """A refusal of such an input, with the place and the remedy."""
    place = f"{where}: " if where else ""
    if isinstance(error, RecursionError):
        return UsageError(f"{place}the input is nested too deeply", "write it flatter, with fewer levels of steps or brackets")
    if isinstance(error, MemoryError):
        smaller = "take fewer ranks, iterations or repeats; `simulate --no-verdict --no-values` needs less"
        return UsageError(f"{place}it takes more memory than is free", smaller)
    return UsageError(f"{place}times or sizes add up to more than 64 bits can count (292 years in ns)", "make them smaller")
