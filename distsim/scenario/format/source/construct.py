"""Nodes to data, with hints where YAML reads a text otherwise than people mean it.

Two mistakes are recognised and read as they were meant, so that no further problem follows from
them: an unquoted comma in an expression (`{dst: min(a, b)}`), and a colon without its blank
(`{dst:1}`). Duplicate keys, keys that are no names or integers, tags and alias bombs are problems.
"""

from __future__ import annotations

import re
from typing import Any

from distsim.common.errors import ScenarioProblem
from distsim.common.file_io import escape_control_characters
from distsim.common.message_text import value_text
from distsim.scenario.format.schema.remedies import remedy
from distsim.scenario.format.source.document import PositionedList, PositionedMap, YamlDocument
from distsim.scenario.format.source.problems import ProblemCollector
from distsim.scenario.format.source.yaml_nodes import MAX_ALIAS_NODES, plain_scalar

_MISSING_BLANK = re.compile(r"([A-Za-z_]\w*):(\S.*)", re.DOTALL)
_ALLOWED_TAGS = ("", "tag:yaml.org,2002:str", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map")
_TOO_LARGE_INTEGER = re.compile(r"[-+]?[0-9]{41,}")

#: Keys whose values may have several lines.
_MULTILINE_KEYS = ("about",)
#: Keys whose values are shown in reports, on one line.
_LABEL_KEYS = ("name", "message", "fail", "on", "stream", "source", "error_band")
_EXPRESSION_TEXT = re.compile(r"[\w\s+\-*/%<>=!().,@]*")


def construct(document: YamlDocument, node: object, problems: ProblemCollector) -> Any:
    """The data of a node; mistakes are added to ``problems``.

    None if aliases unfold to endless data.
    """
    try:
        return _DataConstructor(document, problems).build(node)
    except _AliasBomb:
        return None


class _AliasBomb(Exception):
    """Aliases unfold to more nodes than any scenario needs."""


class _DataConstructor:
    """Builds the data of one document.

    ``nodes_left`` counts down to an alias bomb; ``open_nodes`` are the ids of the collections that
    are being built, in which an alias would be endless.
    """

    def __init__(self, document: YamlDocument, problems: ProblemCollector) -> None:
        self.document = document
        self.problems = problems
        self.nodes_left = MAX_ALIAS_NODES + len(document.text)
        self.open_nodes: set[int] = set()

    def _problem(
        self, node: object, message: str, hint: str = "", offset: int | None = None
    ) -> None:
        spot = self.document.spot_of(node, self.document.overrides.get(id(node)), offset)
        hint = hint or remedy((), message)
        self.problems.keep(
            ScenarioProblem(spot.file, spot.line, spot.column, message, spot.source_line, hint)
        )

    def build(self, node: Any) -> Any:
        self.nodes_left -= 1
        if self.nodes_left < 0:
            self._problem(
                node,
                "aliases (`*name`) expand to more than 200 000 nodes",
                "use `repeat` for the repeated part",
            )
            raise _AliasBomb
        if node.id == "scalar":
            return self._scalar(node)
        if node.tag not in _ALLOWED_TAGS:
            self._problem(
                node, f"a tag ({value_text(node.tag)}) is not allowed in a scenario", "leave it out"
            )
        if id(node) in self.open_nodes:
            self._problem(
                node, "an alias (`*name`) is inside the part that it repeats", "write that part out"
            )
            raise _AliasBomb
        self.open_nodes.add(id(node))
        value = self._mapping(node) if node.id == "mapping" else self._sequence(node)
        self.open_nodes.discard(id(node))
        return value

    def _scalar(self, node: Any) -> Any:
        if node.tag not in _ALLOWED_TAGS:
            self._problem(
                node,
                f"a tag ({value_text(node.tag)}) is not allowed in a scenario",
                "remove it, or quote the string",
            )
            return node.value
        if node.tag == "" and _TOO_LARGE_INTEGER.fullmatch(node.value):
            self._problem(
                node, "the number is too large: integers go up to 2**53 (9007199254740992)"
            )
            return 1
        value = plain_scalar(node)
        return escape_control_characters(value) if isinstance(value, str) else value

    # --- sequences ---
    def _sequence(self, node: Any) -> PositionedList:
        result = PositionedList()
        result.node = node
        result.nodes = []
        items = node.value
        position = 0
        while position < len(items):
            item = items[position]
            result.nodes.append(item)
            count = 0
            if node.flow_style and _has_open_parenthesis(item):
                count = _scalars_until_balanced(items[position:])
            if count == 0:
                result.append(self.build(item))
                position += 1
                continue
            # `[min(a, b)]` has two items; read them as one expression.
            text = ", ".join(part.value for part in items[position : position + count])
            self._comma_problem(item, text)
            result.append(text)
            position += count
        return result

    # --- mappings ---
    def _mapping(self, node: Any) -> PositionedMap:
        result = PositionedMap()
        result.node = node
        pairs = node.value
        position = 0
        while position < len(pairs):
            key_node, value_node = pairs[position]
            position += 1
            if node.flow_style and _has_open_parenthesis(value_node):
                # `{dst: min(a, b)}` has the keys `dst` and `b)`, the latter without a value.
                empty_keys = [key for key, value in pairs[position:] if _is_empty(value)]
                count = _scalars_until_balanced([value_node, *empty_keys])
                if count:
                    rest = [key.value for key, _ in pairs[position : position + count - 1]]
                    text = ", ".join([value_node.value, *rest])
                    self._comma_problem(value_node, text)
                    key = self._checked_key(result, key_node)
                    if key is not None:
                        result[key] = text
                    position += count - 1
                    continue
            if self._lacks_blank(result, key_node, value_node):
                continue
            key = self._checked_key(result, key_node)
            if key is not None:
                result[key] = _single_line_label(key_node.value, self.build(value_node))
        return result

    def _comma_problem(self, node: object, text: str) -> None:
        self._problem(
            node,
            f'quote an expression that contains a comma: "{text}"',
            "inside { } and [ ], a comma ends an unquoted string in YAML",
        )

    def _lacks_blank(self, result: PositionedMap, key_node: Any, value_node: Any) -> bool:
        """Report keys such as `dst:1`, and read them as `dst: 1`."""
        if key_node.id != "scalar" or key_node.tag != "" or ":" not in key_node.value:
            return False
        match = _MISSING_BLANK.fullmatch(key_node.value)
        if match is None:
            return False
        key, text = match[1], match[2]
        self._problem(
            key_node, f"a space is missing after the colon: write `{key}: {text}`", offset=len(key)
        )
        if _is_empty(value_node):
            is_integer = text.isascii() and text.isdigit() and len(text) < 16
            result[key] = int(text) if is_integer else text
        return True

    def _checked_key(self, result: PositionedMap, key_node: Any) -> str | int | None:
        """The key of a pair; None, with a problem noted, if the pair must be skipped."""
        if key_node.id != "scalar":
            self._problem(
                key_node,
                f"a key must be a name or an integer, found a {key_node.id}",
                "write the keys of the mapping here",
            )
            return None
        key = self._scalar(key_node)
        if isinstance(key, str):
            key = escape_control_characters(key, one_line=True)
        if isinstance(key, bool) or not isinstance(key, str | int):
            self._problem(
                key_node,
                f"a key must be a name or an integer, found {value_text(key)}",
                "quote it if it is a string",
            )
            return None
        if key == "<<" and key_node.tag == "":
            self._problem(
                key_node, "merge keys (`<<`) are not part of YAML 1.2", "write the keys out"
            )
            return None
        if key in result:
            line = _line_of_key(result, key)
            self._problem(key_node, f"the key {key} is listed twice; first in line {line}")
            return None
        return key


def _line_of_key(mapping: PositionedMap, key: str | int) -> int:
    """The line of the first use of a key."""
    key_nodes = [node for node, _ in mapping.node.value if node.id == "scalar"]
    first = next(node for node in key_nodes if plain_scalar(node) == key)
    return int(first.start_mark.line) + 1


def _single_line_label(key: object, value: object) -> object:
    """A label with its line breaks escaped, so that they do not break reports.

    A text that may be an expression keeps them.
    """
    if not isinstance(value, str) or key in _MULTILINE_KEYS:
        return value
    if key not in _LABEL_KEYS and _EXPRESSION_TEXT.fullmatch(value):
        return value
    return escape_control_characters(value, one_line=True)


def _is_empty(node: Any) -> bool:
    return bool(node.id == "scalar" and node.value == "" and node.tag == "")


def _has_open_parenthesis(node: Any) -> bool:
    if node.id != "scalar" or node.tag != "":
        return False
    return bool(node.value.count("(") > node.value.count(")"))


def _scalars_until_balanced(nodes: list[Any]) -> int:
    """How many of the plain scalars, from the first on, make a text whose parentheses close.

    0 if none do.
    """
    depth = 0
    for count, node in enumerate(nodes, 1):
        if node.id != "scalar" or node.tag != "":
            return 0
        depth += node.value.count("(") - node.value.count(")")
        if depth == 0:
            return count
    return 0
