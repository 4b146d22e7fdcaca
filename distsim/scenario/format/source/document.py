"""YAML text to plain data that remembers its places, and what is wrong with it, each problem with
its place. Only this file knows YAML.

Scalars follow the core schema of YAML 1.2 (yaml.org/spec/1.2.2, 10.3): `on`, `no` and `12:30` are
texts, `010` is ten, `1e6` a float. Mappings become `PositionedMap`, lists `PositionedList`: a dict
and a list that keep the node they come from, so that a path of keys leads to a line and a column.
Duplicate keys, keys that are no names or integers, tags and alias bombs are problems.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import field
from typing import Any, NamedTuple

import yaml

from distsim.common.errors import ScenarioErrors, ScenarioProblem
from distsim.common.records import dataclass
from distsim.operations.core.field_types import single_errors
from distsim.scenario.format.source.syntax_errors import diagnose_syntax

DataPath = tuple[str | int, ...]

MAX_DEPTH = 100
#: Nodes that aliases may add to those that are written out.
MAX_ALIAS_NODES = 200_000

_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_OCTAL_OR_HEX = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_YAML_CONSTANTS: dict[str, object] = {
    "": None,
    "~": None,
    "null": None,
    "Null": None,
    "NULL": None,
    "true": True,
    "True": True,
    "TRUE": True,
    "false": False,
    "False": False,
    "FALSE": False,
}
_STR_TAG = "tag:yaml.org,2002:str"
_COLON_WITHOUT_SPACE = re.compile(r"([A-Za-z_]\w*):([{\[])")
_LINE_BREAK = re.compile("\r\n|[\r\n\x85\u2028\u2029]")


class NestingTooDeep(Exception):
    """Nested deeper than anybody writes. ``mark`` says where."""


class _YamlResolver:
    """Stands in for PyYAML's resolver of YAML 1.1 types: plain scalars get no tag here, and depth
    is bounded.
    """

    depth = 0

    def resolve(self, kind: Any, value: object, implicit: Any) -> str:
        return _STR_TAG if kind is yaml.ScalarNode and not implicit[0] else ""

    def descend_resolver(self, current_node: object, current_index: object) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise NestingTooDeep(current_node)

    def ascend_resolver(self) -> None:
        self.depth -= 1


def _compose_root(text: str) -> Any:
    """The root node of the only document, or None for an empty text. PyYAML's errors and TooDeep
    pass through.
    """
    loader = _loader_class()(text)
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


def _loader_class() -> Any:
    try:
        from yaml.cyaml import CParser  # type: ignore[attr-defined]
    except ImportError:
        return _PureYamlLoader
    return type(
        "_CLoader",
        (CParser, _YamlResolver),
        {"__init__": CParser.__init__, "dispose": lambda self: None},
    )


class _PureYamlLoader(
    yaml.reader.Reader,
    yaml.scanner.Scanner,
    yaml.parser.Parser,
    yaml.composer.Composer,
    _YamlResolver,
):
    """The same without libyaml; slower."""

    def __init__(self, text: str) -> None:
        yaml.reader.Reader.__init__(self, text)
        yaml.scanner.Scanner.__init__(self)
        yaml.parser.Parser.__init__(self)
        yaml.composer.Composer.__init__(self)


def scalar_node(text: str, like: Any = None) -> Any:
    """A plain scalar that stands where another node stands, or nowhere."""
    mark = yaml.Mark("", 0, 0, 0, "", 0)
    return yaml.ScalarNode(
        "", text, like.start_mark if like else mark, like.end_mark if like else mark
    )


def mapping_node(like: Any) -> Any:
    """An empty mapping that stands where another node stands."""
    return yaml.MappingNode("", [], like.start_mark, like.end_mark, flow_style=False)


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
    """A place in a text, from 1."""

    file: str
    line: int
    column: int
    source_line: str


@dataclass(eq=False)
class YamlDocument:
    """A text and its data. ``nodes`` is empty for data that was built in Python: then there are no
    places.
    """

    file: str
    text: str = ""
    root: Any = None
    #: id of a node that `--set` put in -> the text of the option, and how far the value is from its
    #: start
    overrides: dict[int, tuple[str, int]] = field(default_factory=dict)
    #: the root node
    node: Any = None
    _lines: list[str] | None = None

    @property
    def lines(self) -> list[str]:
        if self._lines is None:
            self._lines = _LINE_BREAK.split(self.text)
        return self._lines

    def line(self, number: int) -> str:
        return self.lines[number - 1] if 0 < number <= len(self.lines) else ""

    def at(self, path: Sequence[str | int]) -> Any:
        """The data at a path, or None where it ends early."""
        value = self.root
        for part in path:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                return None
        return value

    def mark(self, path: Sequence[str | int], at_key: bool = False) -> Any:
        """PyYAML's mark (from 0) of the value or key at a path, None without a text."""
        node = self._find(path, at_key)[0]
        return None if node is None else node.start_mark

    def spot(
        self, path: Sequence[str | int], at_key: bool = False, offset: int | None = None
    ) -> TextPosition | None:
        """Where the value (or key) at a path is written; where the path ends early, the innermost
        part that is there.
        """
        node, override, whole = self._find(path, at_key)
        return None if node is None else self.spot_of(node, override, offset if whole else None)

    def _find(
        self, path: Sequence[str | int], at_key: bool
    ) -> tuple[Any, tuple[str, int] | None, bool]:
        """The node, the override it comes from, and whether an offset into its text makes sense."""
        value, node, override = self.root, self.node, None
        last = len(path) - 1
        for k, part in enumerate(path):
            pair = _key_and_value_nodes(value, part)
            if pair is None:
                return node, override, False
            key_node, node = pair
            if self.overrides:
                override = self.overrides.get(id(node), override)
            if k == last and at_key and key_node is not None:
                return key_node, override, False
            value = value[part]
        return node, override, True

    def spot_of(
        self, node: Any, override: tuple[str, int] | None = None, offset: int | None = None
    ) -> TextPosition:
        line, column = node.start_mark.line + 1, node.start_mark.column + 1
        if (
            offset is not None
            and isinstance(node, yaml.ScalarNode)
            and node.end_mark.line == node.start_mark.line
        ):
            column += offset + (node.style in ("'", '"'))
        if override is not None:
            return TextPosition("--set", 1, column + override[1], override[0])
        return TextPosition(self.file, line, column, self.line(line))


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


def plain_scalar(node: Any) -> Any:
    """What a scalar node stands for: None, a boolean, a number or a text."""
    text = node.value
    if node.tag == _STR_TAG:
        return text
    if text in _YAML_CONSTANTS:
        return _YAML_CONSTANTS[text]
    first = text[0]
    if first.isdigit() or first in "+-.":
        if len(text) <= 40 and _INT.fullmatch(text):
            return int(text)
        if len(text) <= 400 and _FLOAT.fullmatch(text):
            return float(text)
        if len(text) <= 40 and _OCTAL_OR_HEX.fullmatch(text):
            return int(text, 0)
        if _NOT_FINITE.fullmatch(text):
            return float(text.replace(".", "", 1))
    return text


def compose(document: YamlDocument) -> object:
    """The root node of a document's text. Raises ScenarioErrors for what is no YAML, is empty, or
    holds several documents.
    """
    try:
        node = _compose_root(document.text)
    except yaml.MarkedYAMLError as error:
        raise ScenarioErrors((_yaml_problem(document, error),)) from None
    except yaml.reader.ReaderError as error:
        line = document.text.count("\n", 0, error.position) + 1
        column = error.position - document.text.rfind("\n", 0, error.position)
        text = (
            f"the character U+{error.character:04X} is not allowed in YAML"
            if isinstance(error.character, int)
            else str(error.reason)
        )
        hint = "delete it, or write it as an escape in double quotes"
        raise ScenarioErrors(
            (ScenarioProblem(document.file, line, column, text, document.line(line), hint),)
        ) from None
    except NestingTooDeep as error:
        spot = document.spot_of(error.args[0])
        message = f"nested deeper than {MAX_DEPTH} levels"
        hint = "close the brackets, or write it flatter"
        raise ScenarioErrors(
            (ScenarioProblem(spot.file, spot.line, spot.column, message, spot.source_line, hint),)
        ) from None
    if node is None or (
        isinstance(node, yaml.ScalarNode) and node.value == "" and node.tag != _STR_TAG
    ):
        hint = "`distsim new` writes a starter scenario"
        raise ScenarioErrors(
            (
                ScenarioProblem(
                    document.file, 1, 1, "the file is empty; expected a scenario", "", hint
                ),
            )
        )
    return node


def _yaml_problem(document: YamlDocument, error: yaml.MarkedYAMLError) -> ScenarioProblem:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    what = str(error.problem or error.context or "broken")
    hint = ""
    if "expected a single document" in str(error.context):
        what, hint = (
            "a scenario file holds one document; here another one starts",
            "remove the line `---`, or split the file",
        )
    elif "\\t" in what or "\t" in document.line(line)[:column]:
        hint = "indent with blanks; YAML takes no tabs there"
    elif (glued := _COLON_WITHOUT_SPACE.search(document.line(line)[:column])) is not None:
        column, what, hint = (
            glued.end(1) + 1,
            "a blank is missing after the colon",
            f"write `{glued[1]}: {glued[2]}`",
        )
    elif "undefined alias" in what:
        hint = "an alias `*name` repeats what an anchor `&name` marks before it; quote a text that starts with `*`"
    elif (found := diagnose_syntax(document.lines, line, column, what)) is not None:
        line, column, what, hint = found
    elif "mapping values are not allowed" in what:
        hint = "quote a text that holds a colon and a blank; a key stands on a line of its own or inside { }"
    elif error.context and error.context_mark and error.context_mark.line + 1 != line:
        hint = f"see line {error.context_mark.line + 1} as well: {error.context}"
    else:
        hint = "see the line before as well; quote a text that holds one of : # { [ or starts with a sign"
    return ScenarioProblem(
        document.file, line, column, f"broken YAML: {what}", document.line(line), hint
    )


def dump_yaml(data: Any) -> str:
    """Plain data as YAML that this module reads back as the same data; leaves of the tree on one
    line.
    """
    return yaml.dump(
        data,
        Dumper=_YamlDumper,
        sort_keys=False,
        allow_unicode=True,
        width=110,
        default_flow_style=None,
    )


class _YamlDumper(yaml.SafeDumper):
    """Quotes every text that the core schema, or a reader of YAML 1.1, would take for something
    else.
    """

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text_node(dumper: yaml.SafeDumper, value: str) -> Any:
    if not value.isprintable():
        return dumper.represent_scalar(_STR_TAG, value, style='"')
    plain = isinstance(plain_scalar(yaml.ScalarNode("", value)), str) and value != "<<"
    return dumper.represent_scalar(_STR_TAG, value, style=None if plain else "'")


def _float_node(dumper: yaml.SafeDumper, value: float) -> Any:
    text = repr(value)
    return dumper.represent_scalar(
        "tag:yaml.org,2002:float", text if "." in text else text.replace("e", ".0e")
    )


_YamlDumper.add_representer(str, _text_node)
_YamlDumper.add_representer(float, _float_node)


# --- what is wrong ---


#: More than these are not shown: they follow from the first ones more often than not.
_MAX_PROBLEMS = 200


def path_text(path: Iterable[str | int]) -> str:
    """``("program", 0, "send", "dst")`` as ``program[0].send.dst``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


class ProblemCollector:
    """The problems of one document so far. ``add`` never raises; ``raise_any`` does, with all of
    them in order of place.
    """

    def __init__(self, document: YamlDocument) -> None:
        self.document = document
        self.found: dict[tuple[str, int, int, str, str], ScenarioProblem] = {}

    def __bool__(self) -> bool:
        return bool(self.found)

    def add(
        self,
        path: DataPath,
        message: str,
        hint: str = "",
        at_key: bool = False,
        offset: int | None = None,
    ) -> None:
        """Note a problem with the value at ``path`` (``at_key``: with its key; ``offset``: at that
        character of the text).
        """
        self.keep(problem_at(self.document, path, message, hint, at_key, offset))

    def keep(self, found: ScenarioProblem) -> None:
        key = (found.file, found.line, found.column, found.path, found.message)
        self.found.setdefault(key, found)

    def error(self, path: DataPath, error: ValueError) -> None:
        """Note a field parser's errors; they may know the way from the field to the culprit, and
        the character.
        """
        for one in single_errors(error):
            self.add(
                (*path, *getattr(one, "path", ())), str(one), offset=getattr(one, "offset", None)
            )

    def raise_any(self) -> None:
        if self.found:
            ordered = sorted(
                self.found.values(),
                key=lambda p: (p.file != self.document.file, p.line, p.column, p.path, p.message),
            )
            raise ScenarioErrors(tuple(ordered[:_MAX_PROBLEMS]))


def problem_at(
    document: YamlDocument,
    path: DataPath,
    message: str,
    hint: str = "",
    at_key: bool = False,
    offset: int | None = None,
) -> ScenarioProblem:
    """A problem with the value at a path; without a text to point at, with the path in place of a
    line.
    """
    spot = document.spot(path, at_key, offset)
    if not hint:
        from distsim.scenario.format.schema.remedies import remedy

        hint = remedy(path, message)
    if spot is None:
        return ScenarioProblem(document.file, 0, 0, message, "", hint, path_text(path))
    return ScenarioProblem(spot.file, spot.line, spot.column, message, spot.source_line, hint)
