"""Change some data of a YAML file in its text.

Lines whose data stay the same are kept as they are, with their comments.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from distsim.scenario.format.source.document import PositionedList, PositionedMap, YamlDocument
from distsim.scenario.format.source.yaml_nodes import dump_yaml


class _LineSplice(NamedTuple):
    """Lines ``start`` to ``stop`` (from 0, exclusive) are replaced by ``lines``."""

    start: int
    stop: int
    lines: list[str]


def patched_text(document: YamlDocument, data: object) -> str:
    """The document's text with ``data`` in place of its root."""
    lines = list(document.lines)
    splices = [*_key_splices(document, data), *_line_splices(document, document.root, data)]
    for splice in sorted(splices, reverse=True):
        kept = _with_comments(lines[splice.start : splice.stop], splice.lines)
        lines[splice.start : splice.stop] = kept
    return "\n".join(lines)


def _with_comments(old: list[str], new: list[str]) -> list[str]:
    """The new lines, with the comments of the lines that they replace.

    A comment on the first line stays there; the other ones get lines of their own before it. If
    lines are only removed, comments on them go as well, and those between them stay.
    """
    if not new:
        return [line for line in old if line.lstrip().startswith("#")]
    kept: list[str] = []
    first = new[0]
    indent = first[: len(first) - len(first.lstrip())]
    for number, line in enumerate(old):
        comment = _comment_of(line)
        if not comment or any(comment in each for each in new):
            continue
        if number == 0 and comment != line.strip():
            first = f"{first}  {comment}"
        else:
            kept.append(indent + comment)
    return [*kept, first, *new[1:]]


def _comment_of(line: str) -> str:
    """The comment of a line, from its `#`; empty if it has none."""
    quote = ""
    for k, character in enumerate(line):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character == "#" and (k == 0 or line[k - 1] == " "):
            return line[k:]
    return ""


def unified_diff(before: str, after: str, file: str) -> str:
    """A diff for `patch -p1`; empty if nothing changed."""
    relative = file.lstrip("/")
    return "".join(
        difflib.unified_diff(
            before.splitlines(True), after.splitlines(True), f"a/{relative}", f"b/{relative}"
        )
    )


def line_numbers_before(before: str, after: str) -> dict[int, int]:
    """By line number of a changed text, the number of the same line before the change.

    A changed line keeps its number, and a moved line the number of its former place; an added line
    has none.
    """
    old, new = before.splitlines(), after.splitlines()
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    numbers: dict[int, int] = {}
    removed: dict[str, int] = {}
    changed: dict[int, int] = {}
    for _, old_start, old_end, new_start, new_end in matcher.get_opcodes():
        if old[old_start:old_end] == new[new_start:new_end]:
            numbers.update(_numbered(new_start, new_end, old_start, old_end))
            continue
        changed.update(_numbered(new_start, new_end, old_start, old_end))
        removed |= {old[k].strip(): k + 1 for k in range(old_start, old_end)}
    moved = {k + 1: removed.get(line.strip(), 0) for k, line in enumerate(new)}
    moved = {number: former for number, former in moved.items() if former}
    return {**changed, **moved, **numbers}


def _numbered(new_start: int, new_end: int, old_start: int, old_end: int) -> dict[int, int]:
    """The lines of a range, and their numbers in the old range, as far as both have lines."""
    new_numbers = range(new_start + 1, new_end + 1)
    return dict(zip(new_numbers, range(old_start + 1, old_end + 1), strict=False))


def _key_splices(document: YamlDocument, new: Any) -> Iterator[_LineSplice]:
    """Keys of the root that are added (before the program) or removed."""
    old = document.root
    if not isinstance(old, PositionedMap) or not isinstance(new, dict):
        return
    pairs = {key.value: (key, value) for key, value in old.node.value}
    for key, (at, node) in pairs.items():
        if key not in new:
            yield _LineSplice(at.start_mark.line, _last_line(node) + 1, [])
    added = {key: value for key, value in new.items() if key not in old}
    if added:
        start = pairs["program"][0].start_mark.line
        lines: list[str] = []
        for key, value in added.items():
            lines += _mapping_entry_lines(key, value)
        yield _LineSplice(start, start, lines)


def _line_splices(document: YamlDocument, old: Any, new: Any) -> Iterator[_LineSplice]:
    if isinstance(old, PositionedMap):
        pairs = {key.value: (key, value) for key, value in old.node.value}
        for key, value in new.items():
            if key not in old or old[key] == value:
                continue
            if _both_in_block_style(old[key], value):
                yield from _line_splices(document, old[key], value)
            else:
                at, node = pairs[str(key)]
                yield _replacement(document, at, node, _mapping_entry_lines(key, value))
    else:
        yield from _list_splices(document, old, new)


def _both_in_block_style(old: object, new: object) -> bool:
    """Whether both are written over several lines, so that parts of them can be changed."""
    if isinstance(old, PositionedMap) and isinstance(new, dict):
        return not old.node.flow_style and list(old) == list(new)
    if not isinstance(old, PositionedList) or not isinstance(new, list):
        return False
    return bool(old) and bool(new) and not old.node.flow_style


def _list_splices(
    document: YamlDocument, old: PositionedList, new: list[object]
) -> Iterator[_LineSplice]:
    matcher = difflib.SequenceMatcher(
        None, [json.dumps(x) for x in old], [json.dumps(x) for x in new], autojunk=False
    )
    indent = " " * old.node.start_mark.column
    for tag, old_start, old_end, new_start, new_end in matcher.get_opcodes():
        if tag == "equal":
            continue
        if old_end - old_start == new_end - new_start:
            # As many items as before: change each item on its own, which keeps more lines.
            for old_at, new_at in zip(
                range(old_start, old_end), range(new_start, new_end), strict=True
            ):
                if _both_in_block_style(old[old_at], new[new_at]):
                    yield from _line_splices(document, old[old_at], new[new_at])
                else:
                    node = old.nodes[old_at]
                    yield _replacement(document, node, node, _list_item_lines(new[new_at]))
            continue
        start = old.nodes[0].start_mark.line
        if old_start:
            start = _last_line(old.nodes[old_start - 1]) + 1
        stop = _last_line(old.nodes[old_end - 1]) + 1 if old_end > old_start else start
        lines: list[str] = []
        for item in new[new_start:new_end]:
            first, *rest = _list_item_lines(item)
            lines += [f"{indent}- {first}", *(f"{indent}  {line}" for line in rest)]
        yield _with_line_prefix(document, _LineSplice(start, stop, lines), old.node.start_mark)


def _with_line_prefix(document: YamlDocument, splice: _LineSplice, mark: Any) -> _LineSplice:
    """Keep the text before a list that begins on the line of its parent, as in `- - x`."""
    before = document.lines[mark.line][: mark.column]
    if splice.start == mark.line and before.strip() and splice.lines:
        return splice._replace(lines=[before + splice.lines[0].lstrip(), *splice.lines[1:]])
    return splice


def _mapping_entry_lines(key: object, value: object) -> list[str]:
    """The lines of a mapping's entry, in block style.

    A mapping with only scalars would be written on one line, in braces; the additional entry
    prevents that.
    """
    lines = dump_yaml({key: value, "end of it": [[]]}).splitlines()
    return lines[: lines.index(next(line for line in lines if line.startswith("end of it:")))]


def _list_item_lines(item: object) -> list[str]:
    """The lines of a list's item, in block style and without the dash.

    A list with only scalars would be written on one line.
    """
    if not isinstance(item, dict | list):
        return [dump_yaml({"k": item, "z": [[]]}).splitlines()[0].removeprefix("k: ")]
    return [line[2:] for line in dump_yaml([item]).splitlines()]


def _replacement(document: YamlDocument, at: Any, node: Any, lines: list[str]) -> _LineSplice:
    line, column = at.start_mark.line, at.start_mark.column
    first = document.lines[line][:column] + lines[0]
    return _LineSplice(
        line, _last_line(node) + 1, [first, *(" " * column + rest for rest in lines[1:])]
    )


def _last_line(node: Any) -> int:
    """The last line of a node, from 0.

    The end mark of a block lies behind the blank lines after it, so a block ends with its last
    child.
    """
    if isinstance(node.value, list) and node.value and not node.flow_style:
        parts: list[Any] = []
        for child in node.value:
            parts += child if isinstance(child, tuple) else (child,)
        return max(_last_line(part) for part in parts)
    end = node.end_mark
    return int(max(node.start_mark.line, end.line - (end.column == 0)))


__all__ = ["line_numbers_before", "patched_text", "unified_diff"]
