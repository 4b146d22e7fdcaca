"""Nodes to data, with a word on what YAML reads otherwise than people mean it.

Recognised, and read as meant so that no problem follows from them: an unquoted comma in an
expression (`{dst: min(a, b)}`), a colon without its blank (`{dst:1}`).
"""

from __future__ import annotations

import re
from typing import Any

from distsim.common.file_io import escape_control_characters
from distsim.common.message_text import value_text
from distsim.scenario.format.schema.remedies import remedy
from distsim.scenario.format.source.document import (
    MAX_ALIAS_NODES,
    PositionedList,
    PositionedMap,
    ProblemCollector,
    YamlDocument,
    plain_scalar,
)

_MISSING_BLANK = re.compile(r"([A-Za-z_]\w*):(\S.*)", re.DOTALL)
_ALLOWED_TAGS = ("", "tag:yaml.org,2002:str", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map")
_TOO_LARGE_INTEGER = re.compile(r"[-+]?[0-9]{41,}")


#: What may stand on several lines: prose, and expressions.
_MULTILINE_KEYS = ("about",)
_LABEL_KEYS = ("name", "message", "fail", "on", "stream", "source", "error_band")
_EXPRESSION_TEXT = re.compile(r"[\w\s+\-*/%<>=!().,@]*")


def _single_line_label(key: object, value: object) -> object:
    """A label's ends of lines are shown, not sent; what reads as an expression keeps them."""
    if (
        not isinstance(value, str)
        or key in _MULTILINE_KEYS
        or (key not in _LABEL_KEYS and _EXPRESSION_TEXT.fullmatch(value))
    ):
        return value
    return escape_control_characters(value, one_line=True)


class _AliasBomb(Exception):
    """Aliases unfold to more than anybody means."""


class _DataConstructor:
    def __init__(self, document: YamlDocument, problems: ProblemCollector) -> None:
        self.document = document
        self.problems = problems
        self.left = MAX_ALIAS_NODES + len(document.text)
        self.open: set[int] = set()

    def problem(self, node: object, message: str, hint: str = "", shift: int | None = None) -> None:
        from distsim.common.errors import ScenarioProblem

        spot = self.document.spot_of(node, self.document.overrides.get(id(node)), shift)
        self.problems.keep(
            ScenarioProblem(
                spot.file,
                spot.line,
                spot.column,
                message,
                spot.source_line,
                hint or remedy((), message),
            )
        )

    def build(self, node: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            self.problem(
                node,
                "aliases (`*name`) unfold to too much: more than 200 000 nodes",
                "write the repeated part once, with `repeat`",
            )
            raise _AliasBomb
        kind = node.id
        if kind == "scalar":
            return self.scalar(node)
        if node.tag not in _ALLOWED_TAGS:
            self.problem(
                node, f"a tag ({value_text(node.tag)}) is not allowed in a scenario", "leave it out"
            )
        if id(node) in self.open:
            self.problem(
                node, "an alias (`*name`) stands inside what it repeats", "write that part out"
            )
            raise _AliasBomb
        self.open.add(id(node))
        value = self.mapping(node) if kind == "mapping" else self.sequence(node)
        self.open.discard(id(node))
        return value

    def scalar(self, node: Any) -> Any:
        if node.tag not in _ALLOWED_TAGS:
            self.problem(
                node,
                f"a tag ({value_text(node.tag)}) is not allowed in a scenario",
                "leave it out; quote what is a text",
            )
            return node.value
        if node.tag == "" and _TOO_LARGE_INTEGER.fullmatch(node.value):
            self.problem(
                node, "the number is too large: integers go up to 2**53 (9007199254740992)"
            )
            return 1
        value = plain_scalar(node)
        return escape_control_characters(value) if isinstance(value, str) else value

    def sequence(self, node: Any) -> PositionedList:
        result = PositionedList()
        result.node, result.nodes = node, []
        items = node.value
        k = 0
        while k < len(items):
            taken = (
                _scalars_until_balanced(items[k:])
                if node.flow_style and _has_open_parenthesis(items[k])
                else 0
            )
            if taken:
                text = ", ".join(item.value for item in items[k : k + taken])
                self.comma(items[k], text)
                result.append(text)
            else:
                taken = 1
                result.append(self.build(items[k]))
            result.nodes.append(items[k])
            k += taken
        return result

    def mapping(self, node: Any) -> PositionedMap:
        result = PositionedMap()
        result.node = node
        pairs = node.value
        k = 0
        while k < len(pairs):
            key_node, value_node = pairs[k]
            k += 1
            if node.flow_style and _has_open_parenthesis(value_node):
                taken = _scalars_until_balanced(
                    [value_node, *(key for key, value in pairs[k:] if _is_empty(value))]
                )
                if taken:
                    text = ", ".join(
                        [value_node.value, *(key.value for key, _ in pairs[k : k + taken - 1])]
                    )
                    self.comma(value_node, text)
                    self.put(result, key_node, lambda text=text: text)
                    k += taken - 1
                    continue
            if self.lacks_blank(result, key_node, value_node):
                continue
            self.put(
                result,
                key_node,
                lambda node=value_node, key=key_node.value: _single_line_label(
                    key, self.build(node)
                ),
            )
        return result

    def comma(self, node: object, text: str) -> None:
        self.problem(
            node,
            f'quote an expression that holds a comma: "{text}"',
            "inside { } and [ ] YAML ends a plain text at a comma",
        )

    def lacks_blank(self, result: PositionedMap, key_node: Any, value_node: Any) -> bool:
        """Note `dst:1` and the like, and read it as `dst: 1`."""
        if key_node.id != "scalar" or key_node.tag != "" or ":" not in key_node.value:
            return False
        match = _MISSING_BLANK.fullmatch(key_node.value)
        if match is None:
            return False
        self.problem(
            key_node,
            f"a blank is missing after the colon: write `{match[1]}: {match[2]}`",
            shift=len(match[1]),
        )
        if _is_empty(value_node):
            number = match[2]
            result[match[1]] = (
                int(number)
                if number.isascii() and number.isdigit() and len(number) < 16
                else number
            )
        return True

    def put(self, result: PositionedMap, key_node: Any, build: Any) -> None:
        if key_node.id != "scalar":
            self.problem(
                key_node,
                f"a key must be a name or an integer, found a {key_node.id}",
                "write the mapping out, key by key",
            )
            return
        key = self.scalar(key_node)
        key = escape_control_characters(key, one_line=True) if isinstance(key, str) else key
        if isinstance(key, bool) or not isinstance(key, str | int):
            self.problem(
                key_node,
                f"a key must be a name or an integer, found {value_text(key)}",
                "quote it, if it is a text",
            )
            return
        if key == "<<" and key_node.tag == "":
            self.problem(
                key_node, "merge keys (`<<`) are not part of YAML 1.2", "write the keys out"
            )
            return
        if key in result:
            first = next(
                k for k, _ in result.node.value if k.id == "scalar" and plain_scalar(k) == key
            )
            self.problem(
                key_node,
                f"the key {key} stands here twice; first in line {first.start_mark.line + 1}",
            )
            return
        result[key] = build()


def _is_empty(node: Any) -> bool:
    return bool(node.id == "scalar" and node.value == "" and node.tag == "")


def _has_open_parenthesis(node: Any) -> bool:
    return bool(
        node.id == "scalar" and node.tag == "" and node.value.count("(") > node.value.count(")")
    )


def _scalars_until_balanced(nodes: list[Any]) -> int:
    """How many of the plain scalars from the first on make a text whose parentheses close; 0 when
    none do.
    """
    depth = 0
    for k, node in enumerate(nodes):
        if node.id != "scalar" or node.tag != "":
            return 0
        depth += node.value.count("(") - node.value.count(")")
        if depth == 0:
            return k + 1
    return 0


def construct(document: YamlDocument, node: object, problems: ProblemCollector) -> Any:
    """The data of a node. What is wrong goes to ``problems``; None when aliases make it endless."""
    try:
        return _DataConstructor(document, problems).build(node)
    except _AliasBomb:
        return None
