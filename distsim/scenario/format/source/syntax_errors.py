"""The likely cause of a YAML syntax error, at the line that has to be changed.

A parser notices an open bracket only far below it. This module reads the text again, and looks for
the few mistakes that people make most.
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
    """A mistake: its place (from 1), what it is, and the remedy."""

    line: int
    column: int
    message: str
    hint: str


def diagnose_syntax(
    lines: Sequence[str], line: int, column: int, parser_message: str
) -> SyntaxDiagnosis | None:
    """The likely cause of a parser's error at a place (from 1); None if none is found."""
    line = max(1, min(line, len(lines)))
    found = _unbalanced_bracket(lines) or stray_comma(lines, line, column)
    if found is None and "mapping values" in parser_message:
        found = misplaced_colon(lines, line, column)
    return found or _wrong_indentation(lines, line)


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
                f"add another {match[0]} at the end of the string",
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
                        f"`{match[0]}` has no opening bracket",
                        "delete it, or add the opening bracket",
                    )
                continue
            bracket, opened = stack.pop()
            if _CLOSING_BRACKETS[bracket] != match[0]:
                return _diagnosis_at(
                    lines,
                    match.start(),
                    (
                        f"`{match[0]}` cannot close the `{bracket}` of line "
                        f"{_line_number(text, opened)}"
                    ),
                    f"write `{_CLOSING_BRACKETS[bracket]}`",
                )
    return _unclosed_bracket(lines, *stack[-1]) if stack else None


def _starts_flow_value(text: str, offset: int, inside: bool) -> bool:
    """Whether a bracket is at the start of a value, or inside another bracket.

    Elsewhere it is a part of a plain text.
    """
    if inside or text[offset] in "]}":
        return True
    before = text[text.rfind("\n", 0, offset) + 1 : offset].rstrip()
    return not before or before[-1] in ":-?,[{"


def _outer_bracket_is_unclosed(lines: Sequence[str], text: str, opened: int, now: int) -> bool:
    """Whether a line between two brackets belongs to the block around the first one.

    Then the first bracket was left open.
    """
    first, second = _line_number(text, opened), _line_number(text, now)
    indent = _indent(lines[first - 1])
    return any(
        _indent(line) <= indent and re.match(r"\s*+(?:- |\w[\w ]*:(?:\s|$))", line)
        for line in lines[first:second]
    )


def _unclosed_bracket(lines: Sequence[str], bracket: str, opened: int) -> SyntaxDiagnosis:
    return _diagnosis_at(
        lines,
        opened,
        f"`{bracket}` is not closed",
        f"add `{_CLOSING_BRACKETS[bracket]}` at its end",
    )


def _line_number(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def _diagnosis_at(lines: Sequence[str], offset: int, message: str, hint: str) -> SyntaxDiagnosis:
    for number, line in enumerate(lines, 1):
        if offset <= len(line):
            return SyntaxDiagnosis(number, offset + 1, message, hint)
        offset -= len(line) + 1
    return SyntaxDiagnosis(len(lines), 1, message, hint)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _wrong_indentation(lines: Sequence[str], last: int) -> SyntaxDiagnosis | None:
    """The first line, up to line ``last``, whose indentation fits none of its possible parents."""
    levels: list[int] = []  # of the blocks around the line
    before = ""
    for number, line in enumerate(lines[:last], 1):
        bare = re.sub(r"(?:^|\s)#.*", "", line).rstrip()
        if not bare:
            continue
        blanks = _indent(line)
        ended = [level for level in levels if level > blanks]
        levels = [level for level in levels if level <= blanks]
        if levels and blanks > levels[-1]:
            if ended:
                return _indent_between_levels(number, blanks, levels[-1], ended[0])
            if not before.endswith((":", "-", "|", ">", ",", "[", "{")):
                return _indented_below_value(lines, number, blanks, levels[-1])
        if not levels or levels[-1] != blanks:
            levels.append(blanks)
        content = bare.lstrip()
        if content.startswith("- "):
            # The text after a dash opens a block of its own.
            levels.append(blanks + len(content) - len(content[1:].lstrip()))
        before = bare
    return None


def _indent_between_levels(number: int, blanks: int, low: int, high: int) -> SyntaxDiagnosis:
    message = (
        f"this line is indented by {blanks} spaces, but the lines around it by {low} or {high}"
    )
    remedy = f"indent it by {high} spaces, or by {low} if it belongs to the outer level"
    return SyntaxDiagnosis(number, blanks + 1, message, remedy)


def _indented_below_value(
    lines: Sequence[str], number: int, blanks: int, level: int
) -> SyntaxDiagnosis:
    """A line that is indented further than one which holds a value, or lacks its colon."""
    above = number - 2
    while not lines[above].strip() or lines[above].lstrip().startswith("#"):
        above -= 1
    word = lines[above].strip()
    if re.fullmatch(r"[\w.-]+", word):
        return SyntaxDiagnosis(
            above + 1,
            _indent(lines[above]) + 1,
            f"a colon is missing after {word}",
            f"write `{word}:`",
        )
    message = (
        f"this line is indented by {blanks} spaces, but the key on the previous line already has "
        "a value"
    )
    return SyntaxDiagnosis(
        number, blanks + 1, message, (f"indent it by {level}, like the previous line")
    )


def misplaced_colon(lines: Sequence[str], number: int, column: int) -> SyntaxDiagnosis | None:
    """A second `key: ` on a line, a key under a line that is no key."""
    line = lines[number - 1]
    keys = list(re.finditer(r"(?<![\w.-])([\w.-]+):(?=\s|$)", line[: column + 1]))
    if len(keys) > 1 and "{" not in line:
        first, rest = keys[0][1], line[keys[0].end() :].strip()
        if first in ("about", "name", "message", "fail"):
            return SyntaxDiagnosis(
                number,
                column,
                "a string that contains `: ` needs quotes",
                f'write `{first}: "{rest}"`',
            )
        value, _, second = rest.partition(",")
        if ":" in value:
            remedy = f"write `{first}: {{{rest}}}`"
        else:
            remedy = f"write `{first}: {value}`, and `{second.strip()}` on its own line"
        return SyntaxDiagnosis(
            number, column, f"two keys on one line, {first} and {keys[1][1]}", remedy
        )
    above = lines[number - 2].strip() if number > 1 else ""
    glued = re.fullmatch(r"(?:- )?([\w.-]+):(\S+)", above)
    if glued:
        return SyntaxDiagnosis(
            number - 1,
            lines[number - 2].index(":") + 1,
            "a space is missing after the colon",
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
            "delete it: each entry of a list ends with its line",
        )
    return None
