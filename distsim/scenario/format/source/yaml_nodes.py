"""YAML texts as PyYAML's nodes, types of scalars, and data as YAML.

Scalars follow the core schema of YAML 1.2 (yaml.org/spec/1.2.2, 10.3), not PyYAML's 1.1: `on`, `no`
and `12:30` are texts, `010` is ten, `1e6` a float.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

#: Limit for nested collections.
MAX_DEPTH = 100
#: Limit for the nodes that aliases add to those that are written out.
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
STR_TAG = "tag:yaml.org,2002:str"


class NestingTooDeep(Exception):
    """A text nests collections deeper than `MAX_DEPTH`; its argument is the node."""


class _YamlResolver:
    """Replaces PyYAML's resolver of YAML 1.1 types.

    Plain scalars get no tag (`plain_scalar` gives them their type), and the depth is bounded.
    """

    depth = 0

    def resolve(self, kind: Any, value: object, implicit: Any) -> str:
        return STR_TAG if kind is yaml.ScalarNode and not implicit[0] else ""

    def descend_resolver(self, current_node: object, current_index: object) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise NestingTooDeep(current_node)

    def ascend_resolver(self) -> None:
        self.depth -= 1


def compose_root(text: str) -> Any:
    """The root node of the only document, or None for an empty text.

    Raises PyYAML's errors and NestingTooDeep.
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
    """The loader without libyaml; slower."""

    def __init__(self, text: str) -> None:
        yaml.reader.Reader.__init__(self, text)
        yaml.scanner.Scanner.__init__(self)
        yaml.parser.Parser.__init__(self)
        yaml.composer.Composer.__init__(self)


def scalar_node(text: str, like: Any = None) -> Any:
    """A plain scalar with the place of another node, or without a place."""
    if like:
        return yaml.ScalarNode("", text, like.start_mark, like.end_mark)
    nowhere = yaml.Mark("", 0, 0, 0, "", 0)
    return yaml.ScalarNode("", text, nowhere, nowhere)


def mapping_node(like: Any) -> Any:
    """An empty mapping with the place of another node."""
    return yaml.MappingNode("", [], like.start_mark, like.end_mark, flow_style=False)


def plain_scalar(node: Any) -> Any:
    """The value of a scalar node: None, a boolean, a number or a text.

    Very long numbers stay texts; their conversion would take quadratic time.
    """
    text = node.value
    if node.tag == STR_TAG:
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


def dump_yaml(data: Any) -> str:
    """Plain data as YAML that reads back as the same data; leaves of the tree on one line."""
    return yaml.dump(
        data,
        Dumper=_YamlDumper,
        sort_keys=False,
        allow_unicode=True,
        width=110,
        default_flow_style=None,
    )


class _YamlDumper(yaml.SafeDumper):
    """Quotes every text that the core schema, or a reader of YAML 1.1, would misread."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text_node(dumper: yaml.SafeDumper, value: str) -> Any:
    if not value.isprintable():
        return dumper.represent_scalar(STR_TAG, value, style='"')
    plain = isinstance(plain_scalar(yaml.ScalarNode("", value)), str) and value != "<<"
    return dumper.represent_scalar(STR_TAG, value, style=None if plain else "'")


def _float_node(dumper: yaml.SafeDumper, value: float) -> Any:
    text = repr(value)
    if "." not in text:
        text = text.replace("e", ".0e")  # YAML 1.1 reads `1e6` as a text
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


_YamlDumper.add_representer(str, _text_node)
_YamlDumper.add_representer(float, _float_node)
