"""Compare the lines that two ranks executed, as `diff` compares files.

The lines of two ranks are equal up to a branch, differ, and are equal again. A difference ends at
the nearest place where both ranks are behind the branch.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Final, NamedTuple

from distsim.script_capture.rank.line_trace import TracedLine

#: So many equal lines in a row end a difference.
_RESYNC_LINES: Final = 3
#: Lines of each rank that are searched for the end of a difference.
_RESYNC_WINDOW: Final = 5000
_LOOP_KEYWORDS: Final = ("for ", "while ", "async for ")
_OPENING_BRACKET: Final = re.compile(r"[\[({]")
_FOR: Final = re.compile(r"\bfor\b")
_IN: Final = re.compile(r"\bin\b")


class LineRange(NamedTuple):
    """The first and the last line of a statement."""

    first: int
    last: int


class TraceDifference(NamedTuple):
    """What one rank executes, and the other does not, before both execute the same lines again.

    The difference starts behind the line ``own_start - 1`` of one rank and ``other_start - 1`` of
    the other. ``is_last``: they are not seen to execute the same lines again, because a rank ends,
    or is blocked, before.
    """

    own_start: int
    other_start: int
    own_end: int
    other_end: int
    is_last: bool


def trace_differences(
    own: Sequence[TracedLine], other: Sequence[TracedLine]
) -> Iterator[TraceDifference]:
    """The differences, in order. None follows where a rank executes no further line."""
    i = j = 0
    while True:
        while i < len(own) and j < len(other) and own[i] == other[j]:
            i, j = i + 1, j + 1
        if i == 0 or i == len(own) or j == len(other):
            return
        difference = _difference_at(own, other, i, j)
        yield difference
        i, j = difference.own_end, difference.other_end


def _difference_at(
    own: Sequence[TracedLine], other: Sequence[TracedLine], i: int, j: int
) -> TraceDifference:
    """The difference at (i, j). It ends at the nearest place where the ranks are together again.

    It is sought only up to where a rank executes the branch again. Otherwise a rank that skips the
    rest of a loop's body would seem to execute the loop's first lines once more.
    """
    branch = own[i - 1]
    if is_loop(linecache.getline(*branch).strip()):
        # One rank may run the loop more often, for example over more parameters.
        own_left, other_left = _index_behind(own, branch, i), _index_behind(other, branch, j)
        has_left = own_left < len(own) and other_left < len(other)
        if has_left and own[own_left] == other[other_left]:
            return TraceDifference(i, j, own_left, other_left, is_last=False)
    own_end = _next_index(own, branch, i)
    other_end = _next_index(other, branch, j)
    own_window = range(i, min(i + _RESYNC_WINDOW, own_end))
    other_window = range(j, min(j + _RESYNC_WINDOW, other_end))
    nearest = _nearest_common(
        {k: own[k] for k in own_window if _is_behind(own[k], branch)},
        {k: other[k] for k in other_window if _is_behind(other[k], branch)},
    )
    if nearest is not None:
        return TraceDifference(i, j, *nearest, is_last=False)
    # The branch may be the end of its function: then several equal lines show where it returned.
    nearest = _nearest_common(
        {k: tuple(own[k : k + _RESYNC_LINES]) for k in own_window},
        {k: tuple(other[k : k + _RESYNC_LINES]) for k in other_window},
    )
    if nearest is None:
        is_last = own_end == len(own) or other_end == len(other)
        return TraceDifference(i, j, own_end, other_end, is_last)
    k, found = nearest
    # A few equal lines at the end may be a function that both ranks call, from different lines.
    is_at_end = len(own) - k < _RESYNC_LINES or len(other) - found < _RESYNC_LINES
    return TraceDifference(i, j, k, found, is_at_end and k > i and found > j)


def _next_index(lines: Sequence[TracedLine], line: TracedLine, start: int) -> int:
    """The index of the next execution of a line; the number of lines if there is none."""
    for k in range(start, len(lines)):
        if lines[k] == line:
            return k
    return len(lines)


def _index_behind(lines: Sequence[TracedLine], loop: TracedLine, start: int) -> int:
    """The index at which a rank has left a loop; the number of lines if it is not seen to."""
    for k in range(start, min(start + _RESYNC_WINDOW, len(lines))):
        if lines[k] != loop and _is_behind(lines[k], loop):
            return k
    return len(lines)


def _nearest_common(
    own: Mapping[int, object], other: Mapping[int, object]
) -> tuple[int, int] | None:
    """The indices, with the least sum, at which both ranks have the same value."""
    first: dict[object, int] = {}
    for k, value in other.items():
        first.setdefault(value, k)
    pairs = [(k, first[value]) for k, value in own.items() if value in first]
    return min(pairs, key=sum, default=None)


# --- the structure of the script ---
def is_loop(text: str) -> bool:
    """Whether a line starts a loop, or contains one."""
    if text.startswith(_LOOP_KEYWORDS):
        return True
    return _has_comprehension(text) and not text.startswith("if ")


def _has_comprehension(text: str) -> bool:
    """Whether a bracket, ``for`` and ``in`` follow each other.

    One pattern for all three would take quadratic time on a line of many brackets.
    """
    end = 0
    for pattern in (_OPENING_BRACKET, _FOR, _IN):
        found = pattern.search(text, end)
        if found is None:
            return False
        end = found.end()
    return True


def _is_behind(line: TracedLine, branch: TracedLine) -> bool:
    """Whether a line of the branch's function is outside of what the branch contains."""
    if line.file != branch.file or indentation(line) > indentation(branch):
        return False
    functions = _functions_by_line(branch.file)
    return functions.get(line.line) == functions.get(branch.line)


@cache
def _functions_by_line(file: str) -> Mapping[int, int]:
    """The first line of the innermost function that contains a line; absent outside of all."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return {}
    found: dict[int, int] = {}
    # Breadth first, so that inner functions override those around them.
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            found.update(dict.fromkeys(lines, node.lineno))
    return found


def is_in_branch(line: TracedLine) -> bool:
    """Whether a line is inside an ``if`` statement."""
    branches = statements_of_kinds(line.file, (ast.If,))
    return any(branch.first < line.line <= branch.last for branch in branches)


@cache
def statements_of_kinds(file: str, kinds: tuple[type[ast.stmt], ...]) -> tuple[LineRange, ...]:
    """The lines of all statements of these kinds; none if the file cannot be read or parsed."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    found = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    return tuple(LineRange(node.lineno, node.end_lineno or node.lineno) for node in found)


def indentation(line: TracedLine) -> int:
    """The column at which a line of code starts."""
    code = linecache.getline(*line)
    return len(code) - len(code.lstrip())


__all__ = [
    "LineRange",
    "TraceDifference",
    "indentation",
    "is_in_branch",
    "is_loop",
    "statements_of_kinds",
    "trace_differences",
]
