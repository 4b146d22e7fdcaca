"""No regular expression of the package takes more than linear time, whatever text it gets.

Each pattern gets long texts that are made for it: a text that leads to a repetition, then the
repeated part very often, then a character that makes the match fail. A pattern that backtracks over
the repetition, or starts a search anew at each of its characters, takes thousands of times longer on
such a text than a linear one. That is far more than any load on the machine can cause.
"""

from __future__ import annotations

import ast
import re
import signal
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from re import _constants as code  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from types import FrameType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Characters of a text. Quadratic patterns take 4 to 400 million steps, linear ones 0.1 million.
LENGTH = 8_000
LIMIT_S = 0.02
#: Measurements end after this time.
PATIENCE_S = 0.1
FUNCTIONS = {
    "compile",
    "search",
    "match",
    "fullmatch",
    "findall",
    "finditer",
    "split",
    "sub",
    "subn",
}
#: Texts that many patterns repeat in some form.
COMMON = (" ", "a", "1", "_", ".", "-", "[", "(", '"', ",", ":", "/", "\n", "a.", "1,", " a", "a ")
ENDS = ("!", "\n!")


class Pattern(NamedTuple):
    place: str
    text: str | bytes
    flags: int
    #: The methods by which the package applies it. A search tries every position, a match only one.
    methods: frozenset[str] = frozenset({"search"})


@cache
def patterns() -> list[Pattern]:
    """Every constant pattern in the source of the package."""
    found = []
    for path in sorted((ROOT / "distsim").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if not re.search(r"\bre\.", source):
            continue  # most of them; walking through their trees would take long
        module = ast.parse(source)
        uses = _uses_by_position(module)
        for node in ast.walk(module):
            if isinstance(node, ast.Call) and _is_call_of_re(node):
                argument = node.args[0]
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str | bytes):
                    place = f"{path.relative_to(ROOT).as_posix()}:{node.lineno}"
                    methods = uses.get((node.lineno, node.col_offset), frozenset({"search"}))
                    found.append(Pattern(place, argument.value, _flags(node), methods))
    return found


def _uses_by_position(module: ast.Module) -> dict[tuple[int, int], frozenset[str]]:
    """How each pattern is applied, by the position of the call that defines or applies it."""
    used: dict[str, set[str]] = {}
    uses: dict[tuple[int, int], frozenset[str]] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute):
            owner = node.value
            if isinstance(owner, ast.Name) and node.attr in FUNCTIONS:
                used.setdefault(owner.id, set()).add(node.attr)
        if isinstance(node, ast.Call) and _is_call_of_re(node) and node.func.attr != "compile":  # type: ignore[attr-defined]
            uses[node.lineno, node.col_offset] = frozenset({node.func.attr})  # type: ignore[attr-defined]
    for node in ast.walk(module):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and target.id in used:
                uses[node.value.lineno, node.value.col_offset] = frozenset(used[target.id])
    return uses


def _is_call_of_re(node: ast.Call) -> bool:
    function = node.func
    if not isinstance(function, ast.Attribute) or not isinstance(function.value, ast.Name):
        return False
    return function.value.id == "re" and function.attr in FUNCTIONS and bool(node.args)


def _flags(node: ast.Call) -> int:
    names = {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}
    flags = 0
    for name in ("VERBOSE", "IGNORECASE", "MULTILINE", "DOTALL", "ASCII"):
        if name in names:
            flags |= getattr(re, name)
    return flags


# --- texts made for a pattern ---


def sample(tree: Any, choice: int = 0) -> str:
    """A text that a part of a pattern matches. ``choice`` selects branches and characters."""
    return "".join(_sample_item(op, value, choice) for op, value in tree)


def _sample_item(op: Any, value: Any, choice: int) -> str:
    if op is code.LITERAL:
        return chr(value)
    if op is code.NOT_LITERAL:
        return "b" if chr(value) == "a" else "a"
    if op is code.ANY:
        return "a"
    if op is code.IN:
        return _character_of(value, choice)
    if op is code.BRANCH:
        branches = value[1]
        return sample(branches[choice % len(branches)], choice)
    if op is code.SUBPATTERN:
        return sample(value[3], choice)
    if op is code.ATOMIC_GROUP:
        return sample(value, choice)
    if op in (code.MAX_REPEAT, code.MIN_REPEAT, code.POSSESSIVE_REPEAT):
        return sample(value[2], choice) * max(value[0], 1)
    return ""


def _character_of(members: Any, choice: int) -> str:
    allowed = re.compile(_class_text(members))
    candidates = 'a1_.-+ /:"[]()<>,=#%!\t\nZ' + "".join(map(chr, range(33, 127)))
    matching = [character for character in candidates if allowed.fullmatch(character)]
    return matching[choice % len(matching)] if matching else ""


def _class_text(members: Any) -> str:
    categories = {
        code.CATEGORY_DIGIT: r"\d",
        code.CATEGORY_NOT_DIGIT: r"\D",
        code.CATEGORY_SPACE: r"\s",
        code.CATEGORY_NOT_SPACE: r"\S",
        code.CATEGORY_WORD: r"\w",
        code.CATEGORY_NOT_WORD: r"\W",
    }
    text = ""
    for op, value in members:
        if op is code.NEGATE:
            text += "^"
        elif op is code.LITERAL:
            text += re.escape(chr(value))
        elif op is code.RANGE:
            text += f"{re.escape(chr(value[0]))}-{re.escape(chr(value[1]))}"
        else:
            text += categories[value]
    return f"[{text}]"


def repetitions(tree: Any, before: str = "") -> Iterator[tuple[str, str]]:
    """(text before it, repeated text) for each repetition in a pattern."""
    for op, value in tree:
        if op in (code.MAX_REPEAT, code.MIN_REPEAT, code.POSSESSIVE_REPEAT):
            for choice in range(4):
                repeated = sample(value[2], choice)
                yield before, repeated
                yield before, repeated + sample(value[2], choice + 1)
            yield from repetitions(value[2], before)
        elif op is code.SUBPATTERN:
            yield from repetitions(value[3], before)
        elif op is code.BRANCH:
            for branch in value[1]:
                yield from repetitions(branch, before)
        elif op in (code.ASSERT, code.ASSERT_NOT):
            yield from repetitions(value[1], before)
        before += _sample_item(op, value, 0)
    # The whole pattern without its end, for a search that starts at each occurrence.
    for choice in range(3):
        whole = sample(tree, choice)
        yield "", whole[:-1]
        yield "", whole


def hard_texts(pattern: Pattern) -> list[str]:
    text = pattern.text
    tree = parser.parse(text, pattern.flags)
    starts = {*repetitions(tree), *(("", unit) for unit in COMMON)}
    return [
        before + unit * (LENGTH // len(unit)) + end
        for before, unit in sorted(starts)
        if unit
        for end in ENDS
    ]


# --- the measurement ---


class TooSlow(BaseException):
    pass


def _stop(number: int, frame: FrameType | None) -> None:
    raise TooSlow


def slow_text(pattern: Pattern) -> str | None:
    """A text on which the pattern is not linear, None if there is none among those made for it."""
    compiled: Any = re.compile(pattern.text, pattern.flags)
    apply = compiled.search
    if pattern.methods <= {"match", "fullmatch"}:
        apply = compiled.fullmatch if pattern.methods == {"fullmatch"} else compiled.match
    previous = signal.signal(signal.SIGVTALRM, _stop)
    try:
        for text in hard_texts(pattern):
            subject = text.encode("latin-1", "replace") if isinstance(pattern.text, bytes) else text
            if _cpu_time(apply, subject) > LIMIT_S and _is_more_than_linear(apply, subject):
                return text[:200]
    finally:
        signal.signal(signal.SIGVTALRM, previous)
    return None


def _is_more_than_linear(apply: Callable[[Any], object], subject: str | bytes) -> bool:
    """Whether a text takes more than three times as long as half of it.

    The shortest of five measurements counts, because the machine may be busy. Twice as much would
    be linear, and four times as much quadratic.
    """
    whole = min(_cpu_time(apply, subject) for _ in range(5))
    if whole > PATIENCE_S:
        return True
    half = min(_cpu_time(apply, subject[: len(subject) // 2]) for _ in range(5))
    return whole > LIMIT_S and whole > 3 * half


def _cpu_time(apply: Callable[[Any], object], subject: str | bytes) -> float:
    """The CPU time of one call in s, ended after PATIENCE_S."""
    started = time.process_time()
    signal.setitimer(signal.ITIMER_VIRTUAL, PATIENCE_S)
    try:
        apply(subject)
    except TooSlow:
        pass
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return time.process_time() - started


def test_no_pattern_takes_more_than_linear_time() -> None:
    found = {
        pattern.place: text for pattern in patterns() if (text := slow_text(pattern)) is not None
    }

    assert found == {}, sorted(found)


def test_all_patterns_are_found() -> None:
    assert len(patterns()) > 90


@pytest.mark.parametrize(
    "text",
    [
        r"\s+\d{4}-\d\d$",
        r"(\.(txt|log))+$",
        r"^[\w.-]*(?:rank|node)[\w.-]* (?=x)",
        r"(?P<host>[\w.-]+):(?P<pid>\d+)",
        r"\[/?\S*?\.(cc|cpp):\d+\]",
        r"(a|a)*b",
        r"(\w+\s?)*:",
    ],
)
def test_patterns_with_quadratic_and_exponential_time_are_noticed(text: str) -> None:
    assert slow_text(Pattern("", text, 0)) is not None
