"""What is wrong with a text that is no YAML, told at the line that is wrong: parsers notice an open
bracket only far below it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_CLOSING_BRACKETS = {"[": "]", "{": "}"}
_TOKEN = re.compile(
    r"""(?P<comment>(?:^|(?<=\s))\#.*)
    |(?P<double>"(?:\\.|[^"\\])*")
    |(?P<single>'(?:\'\'|[^'])*')
    |(?P<open>[\[{])|(?P<close>[\]}])
    |(?P<quote>(?:(?<=[\s\[{,:])|^)["'])""",
    re.MULTILINE | re.VERBOSE,
)


class SyntaxDiagnosis(NamedTuple):
    """Where (from 1), what, and what to do."""

    line: int
    column: int
    message: str
    hint: str


def diagnose_syntax(
    lines: Sequence[str], line: int, column: int, said: str
) -> SyntaxDiagnosis | None:
    """The likely cause of what a parser said at a place (from 1); None where nothing plain is
    found.
    """
    line = max(1, min(line, len(lines)))
    fault = _unbalanced_bracket(lines) or stray_comma(lines, line, column)
    if fault is None and "mapping values" in said:
        fault = misplaced_colon(lines, line, column)
    return fault or _wrong_indentation(lines, line)


def _unbalanced_bracket(lines: Sequence[str]) -> SyntaxDiagnosis | None:
    """A bracket or a quote that is never closed, or one that closes nothing."""
    text = "\n".join(lines)
    stack: list[tuple[str, int]] = []
    for match in _TOKEN.finditer(text):
        if match["quote"]:
            return _diagnosis_at(
                lines,
                match.start(),
                f"the quote {match[0]} is not closed",
                f"put another {match[0]} where the text ends",
            )
        if match["open"]:
            if not _starts_flow_value(text, match.start(), bool(stack)):
                continue
            if stack and _outer_bracket_is_unclosed(lines, text, stack[-1][1], match.start()):
                return _unclosed_bracket(lines, *stack[-1])
            stack.append((match[0], match.start()))
        elif match["close"]:
            if not stack:
                if _starts_flow_value(text, match.start(), False):
                    return _diagnosis_at(
                        lines,
                        match.start(),
                        f"`{match[0]}` closes nothing",
                        "delete it, or open it before",
                    )
                continue
            bracket, opened = stack.pop()
            if _CLOSING_BRACKETS[bracket] != match[0]:
                return _diagnosis_at(
                    lines,
                    match.start(),
                    f"`{match[0]}` can't close the `{bracket}` of line {_line_number(text, opened)}",
                    f"write `{_CLOSING_BRACKETS[bracket]}`",
                )
    return _unclosed_bracket(lines, *stack[-1]) if stack else None


def _starts_flow_value(text: str, at: int, inside: bool) -> bool:
    """Does a bracket stand where a value begins, or inside another one? Elsewhere it is a part of a
    plain text.
    """
    before = text[text.rfind("\n", 0, at) + 1 : at].rstrip()
    return (
        inside
        or text[at] in "]}"
        or not before
        or before[-1] in ":-?,[{"
        or before.endswith(("- ", ": "))
    )


def _outer_bracket_is_unclosed(lines: Sequence[str], text: str, opened: int, now: int) -> bool:
    """Is the line of the second bracket one of the block around the first, so that the first was
    left open?
    """
    first, second = _line_number(text, opened), _line_number(text, now)
    if first == second:
        return False
    return any(
        _indent(lines[k]) <= _indent(lines[first - 1])
        and re.match(r"\s*(?:- |[\w ]+:(?:\s|$))", lines[k])
        for k in range(first, second)
    )


def _unclosed_bracket(lines: Sequence[str], bracket: str, opened: int) -> SyntaxDiagnosis:
    return _diagnosis_at(
        lines,
        opened,
        f"`{bracket}` is not closed",
        f"put `{_CLOSING_BRACKETS[bracket]}` where it ends",
    )


def _line_number(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def _diagnosis_at(lines: Sequence[str], offset: int, message: str, hint: str) -> SyntaxDiagnosis:
    for number, line in enumerate(lines, 1):
        if offset <= len(line):
            return SyntaxDiagnosis(number, offset + 1, message, hint)
        offset -= len(line) + 1
    return SyntaxDiagnosis(len(lines), 1, message, hint)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _wrong_indentation(lines: Sequence[str], at: int) -> SyntaxDiagnosis | None:
    """The first line, up to the error's, whose indentation fits none of the lines that it could
    belong to.
    """
    levels: list[int] = []
    before = ""
    for number, line in enumerate(lines[:at], 1):
        bare = re.sub(r"(?:^|\s)#.*", "", line).rstrip()
        if not bare:
            continue
        blanks, left = _indent(line), [level for level in levels if level > _indent(line)]
        levels = [level for level in levels if level <= blanks]
        if levels and blanks > levels[-1]:
            if left:
                return _indent_between_levels(number, blanks, levels[-1], left[0])
            if not before.endswith((":", "-", "|", ">", ",", "[", "{")):
                return _indented_below_value(lines, number, blanks, levels[-1])
        levels += [blanks] * (not levels or levels[-1] != blanks)
        if bare.lstrip().startswith("- "):
            levels.append(blanks + len(bare.lstrip()) - len(bare.lstrip()[1:].lstrip()))
        before = bare
    return None


def _indent_between_levels(number: int, blanks: int, low: int, high: int) -> SyntaxDiagnosis:
    said = f"this line is indented by {blanks} blanks, the lines around it by {low} or {high}"
    return SyntaxDiagnosis(
        number, blanks + 1, said, f"indent it by {high}, or by {low} if it belongs further out"
    )


def _indented_below_value(
    lines: Sequence[str], number: int, blanks: int, level: int
) -> SyntaxDiagnosis:
    """A line that is indented further than one which holds a value, or lacks its colon."""
    above = next(
        k
        for k in range(number - 2, -1, -1)
        if lines[k].strip() and not lines[k].lstrip().startswith("#")
    )
    word = lines[above].strip()
    if re.fullmatch(r"[\w.-]+", word):
        return SyntaxDiagnosis(
            above + 1,
            _indent(lines[above]) + 1,
            f"a colon is missing after {word}",
            f"write `{word}:`",
        )
    said = f"this line is indented by {blanks} blanks, and the line before it holds a value already"
    return SyntaxDiagnosis(number, blanks + 1, said, f"indent it by {level}, as the line before")


def misplaced_colon(lines: Sequence[str], number: int, column: int) -> SyntaxDiagnosis | None:
    """A second `key: ` on a line, a key under a line that is no key."""
    line = lines[number - 1]
    keys = list(re.finditer(r"([\w.-]+):(?=\s|$)", line[: column + 1]))
    if len(keys) > 1 and "{" not in line:
        first, rest = keys[0][1], line[keys[0].end() :].strip()
        if first in ("about", "name", "message", "fail"):
            return SyntaxDiagnosis(
                number,
                column,
                "a text with a colon and a blank in it needs quotes",
                f'write `{first}: "{rest}"`',
            )
        value, _, more = rest.partition(",")
        apart = f"write `{first}: {value}`, and `{more.strip()}` on a line of its own"
        remedy = f"write `{first}: {{{rest}}}`" if ":" in value else apart
        return SyntaxDiagnosis(
            number, column, f"two keys on one line, {first} and {keys[1][1]}", remedy
        )
    above = lines[number - 2].strip() if number > 1 else ""
    glued = re.fullmatch(r"(?:- )?([\w.-]+):(\S+)", above)
    if glued:
        return SyntaxDiagnosis(
            number - 1,
            lines[number - 2].index(":") + 1,
            "a blank is missing after the colon",
            f"write `{glued[1]}: {glued[2]}`",
        )
    bare = re.fullmatch(r"(?:- )?([\w.-]+)", above)
    if bare:
        return SyntaxDiagnosis(
            number - 1,
            _indent(lines[number - 2]) + 1,
            f"a colon is missing after {bare[1]}",
            f"write `{above}:`",
        )
    return None


def stray_comma(lines: Sequence[str], number: int, column: int) -> SyntaxDiagnosis | None:
    """A comma after a closed bracket, outside all others."""
    line = lines[number - 1]
    if line[column - 1 : column] == "," and line[: column - 1].rstrip().endswith(("]", "}")):
        return SyntaxDiagnosis(
            number,
            column,
            "a comma outside brackets",
            "delete it: entries of a list end with their line",
        )
    return None


__all__ = ["SyntaxDiagnosis", "diagnose_syntax"]
