"""A YAML text with its data, and the place of every value in it.

Key idea: mappings become `PositionedMap` and lists `PositionedList`, a dict and a list that keep
the node they come from. A path of keys therefore leads to a line and a column, without positions in
the data itself. A scenario built in Python has a document without text, and its values have no
places.
Only `distsim.scenario.format.source` knows YAML.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import field
from typing import Any, NamedTuple

import yaml

from distsim.common.errors import ScenarioErrors, ScenarioProblem
from distsim.common.records import dataclass
from distsim.scenario.format.source.syntax_errors import diagnose_syntax
from distsim.scenario.format.source.yaml_nodes import (
    MAX_DEPTH,
    STR_TAG,
    NestingTooDeep,
    compose_root,
    plain_scalar,
)

#: Keys and indices that lead from the root to a value.
DataPath = tuple[str | int, ...]

_COLON_WITHOUT_SPACE = re.compile(r"(?<!\w)([A-Za-z_]\w*):([{\[])")
_LINE_BREAK = re.compile("\r\n|[\r\n\x85\u2028\u2029]")


class PositionedMap(dict[object, object]):
    """A mapping that knows its node."""

    __slots__ = ("node",)
    node: Any


class PositionedList(list[object]):
    """A list that knows its node, and the node of each of its items."""

    __slots__ = ("node", "nodes")
    node: Any
    nodes: list[Any]


class TextPosition(NamedTuple):
    """A place in a text; line and column count from 1."""

    file: str
    line: int
    column: int
    source_line: str


class Override(NamedTuple):
    """A `--set` option, and the offset of the value in its text."""

    text: str
    offset: int


class _FoundNode(NamedTuple):
    """A node in the text; None in a document without text."""

    node: Any
    #: The override that the node comes from.
    override: Override | None = None
    #: Whether it is the value at the path, and not a key or a part before the path's end.
    is_value: bool = False


@dataclass(eq=False)
class YamlDocument:
    """A text and its data.

    ``node`` is the root node of the text, None for data that was built in Python.
    """

    file: str
    text: str = ""
    root: Any = None
    #: By id of a node that `--set` has put in.
    overrides: dict[int, Override] = field(default_factory=dict)
    node: Any = None
    _lines: list[str] | None = None

    @property
    def lines(self) -> list[str]:
        """The lines of the text."""
        if self._lines is None:
            self._lines = _LINE_BREAK.split(self.text)
        return self._lines

    def line(self, number: int) -> str:
        """A line of the text, counted from 1."""
        return self.lines[number - 1] if 0 < number <= len(self.lines) else ""

    def at(self, path: Sequence[str | int]) -> Any:
        """The data at a path, or None if the path leads nowhere."""
        value = self.root
        for part in path:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                return None
        return value

    def mark(self, path: Sequence[str | int], at_key: bool = False) -> Any:
        """PyYAML's mark (from 0) of the value or key at a path, None without a text."""
        node = self._find(path, at_key).node
        return None if node is None else node.start_mark

    def spot(
        self, path: Sequence[str | int], at_key: bool = False, offset: int | None = None
    ) -> TextPosition | None:
        """The place of the value (or key) at a path; None without a text.

        If the data ends before the path does, the place of the last value on the way.
        """
        found = self._find(path, at_key)
        if found.node is None:
            return None
        return self.spot_of(found.node, found.override, offset if found.is_value else None)

    def _find(self, path: Sequence[str | int], at_key: bool) -> _FoundNode:
        value, node = self.root, self.node
        override: Override | None = None
        last = len(path) - 1
        for k, part in enumerate(path):
            pair = _key_and_value_nodes(value, part)
            if pair is None:
                return _FoundNode(node, override)
            key_node, node = pair
            if self.overrides:
                override = self.overrides.get(id(node), override)
            if k == last and at_key and key_node is not None:
                return _FoundNode(key_node, override)
            value = value[part]
        return _FoundNode(node, override, is_value=True)

    def spot_of(
        self, node: Any, override: Override | None = None, offset: int | None = None
    ) -> TextPosition:
        """The place of a node, or of the character at ``offset`` in its text."""
        line, column = node.start_mark.line + 1, node.start_mark.column + 1
        if offset is not None and _is_single_line_scalar(node):
            is_quoted = node.style in ("'", '"')
            column += offset + is_quoted
        if override is not None:
            return TextPosition("--set", 1, column + override.offset, override.text)
        return TextPosition(self.file, line, column, self.line(line))


def _is_single_line_scalar(node: Any) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.end_mark.line == node.start_mark.line


def _key_and_value_nodes(value: Any, part: str | int) -> tuple[Any, Any] | None:
    """The nodes of a key and its value inside a container."""
    if isinstance(value, PositionedList) and isinstance(part, int) and 0 <= part < len(value):
        return None, value.nodes[part]
    if isinstance(value, PositionedMap) and part in value:
        for key_node, value_node in value.node.value:
            if isinstance(key_node, yaml.ScalarNode) and plain_scalar(key_node) == part:
                return key_node, value_node
        return None, value.node
    return None


# --- composing ---
def compose(document: YamlDocument) -> object:
    """The root node of a document's text.

    Raises ScenarioErrors for a text that is no YAML, is empty, or holds several documents.
    """
    try:
        node = compose_root(document.text)
    except yaml.MarkedYAMLError as error:
        raise ScenarioErrors((_yaml_problem(document, error),)) from None
    except yaml.reader.ReaderError as error:
        raise ScenarioErrors((_character_problem(document, error),)) from None
    except NestingTooDeep as error:
        spot = document.spot_of(error.args[0])
        message = f"nested deeper than {MAX_DEPTH} levels"
        hint = "close the brackets, or use fewer levels"
        raise ScenarioErrors(
            (ScenarioProblem(spot.file, spot.line, spot.column, message, spot.source_line, hint),)
        ) from None
    if _is_empty(node):
        message = "the file is empty; expected a scenario"
        hint = "`distsim new` writes a starter scenario"
        raise ScenarioErrors((ScenarioProblem(document.file, 1, 1, message, "", hint),))
    return node


def _is_empty(node: Any) -> bool:
    if node is None:
        return True
    return isinstance(node, yaml.ScalarNode) and node.value == "" and node.tag != STR_TAG


def _character_problem(document: YamlDocument, error: yaml.reader.ReaderError) -> ScenarioProblem:
    line = document.text.count("\n", 0, error.position) + 1
    column = error.position - document.text.rfind("\n", 0, error.position)
    message = str(error.reason)
    if isinstance(error.character, int):
        message = f"the character U+{error.character:04X} is not allowed in YAML"
    hint = "delete it, or write it as an escape in double quotes"
    return ScenarioProblem(document.file, line, column, message, document.line(line), hint)


def _yaml_problem(document: YamlDocument, error: yaml.MarkedYAMLError) -> ScenarioProblem:
    """PyYAML's error with the likely cause, most specific first."""
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    what = str(error.problem or error.context or "broken")
    hint = ""
    glued = _COLON_WITHOUT_SPACE.search(document.line(line)[:column])
    if "expected a single document" in str(error.context):
        what = "a scenario file contains one document, but a second one starts here"
        hint = "remove the line `---`, or split the file"
    elif "\\t" in what or "\t" in document.line(line)[:column]:
        hint = "indent with spaces; YAML does not allow tabs here"
    elif glued is not None:
        column = glued.end(1) + 1
        what = "a space is missing after the colon"
        hint = f"write `{glued[1]}: {glued[2]}`"
    elif "undefined alias" in what:
        hint = (
            "an alias `*name` needs an anchor `&name` before it; quote a string that starts with "
            "`*`"
        )
    elif (found := diagnose_syntax(document.lines, line, column, what)) is not None:
        line, column, what, hint = found
    elif "mapping values are not allowed" in what:
        hint = "quote a string that contains `: `; write each key on its own line or inside { }"
    elif error.context and error.context_mark and error.context_mark.line + 1 != line:
        hint = f"see also line {error.context_mark.line + 1}: {error.context}"
    else:
        hint = (
            "check the previous line too; quote a string that contains one of : # { [ or starts "
            "with a special character"
        )
    return ScenarioProblem(
        document.file, line, column, f"broken YAML: {what}", document.line(line), hint
    )
