"""`--set name=value`: a value of the file replaced before it is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distsim.common.errors import ScenarioErrors, ScenarioProblem, UsageError
from distsim.common.message_text import did_you_mean, name_list
from distsim.scenario.format.reading.scenario_reader import TOP_LEVEL_KEYS
from distsim.scenario.format.source.document import (
    YamlDocument,
    compose,
    mapping_node,
    plain_scalar,
    scalar_node,
)

#: Top-level keys that a dotted path may bring into being.
_CREATABLE_KEYS = ("options", "launch", "expect", "vars", "mesh")
_REMEDY = "`--set name=value` sets a var or a top-level key; `--set tensors.grad.dtype=float16` any other key"


def apply_overrides(document: YamlDocument, root: object, sets: Sequence[str]) -> object:
    """The root node with every ``name=value`` put in, in order. Raises UsageError for a path that
    leads nowhere.
    """
    for text in sets:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name:
            raise UsageError(f"expected name=value, found `{text}`", _REMEDY)
        if not _is_mapping(root):
            return root
        keys = _key_path(root, name)
        if keys[0] == "cluster" and len(keys) > 1:
            _expand_preset(root)
        node = _value_node(text, len(text) - len(value))
        _set_node(root, keys, node, text)
        document.overrides[id(node)] = (text, len(text) - len(value))
    return root


def _key_path(root: object, name: str) -> list[str]:
    """The way to what a name sets: a var, else a top-level key, else a dotted path."""
    variables = _value_of_key(root, "vars")
    if _is_mapping(variables) and _value_of_key(variables, name) is not None:
        return ["vars", name]
    if "." in name:
        return name.split(".")
    if name not in TOP_LEVEL_KEYS:
        known = [*_key_names(variables), *TOP_LEVEL_KEYS]
        raise UsageError(
            f"--set {name}: there is no var and no key of this name (known: {name_list(known, 30)}){did_you_mean(name, known)}",
            _REMEDY,
        )
    return [name]


def _value_node(text: str, start: int) -> object:
    """The value's node, read as YAML."""
    part = YamlDocument("--set", text[start:])
    if not part.text.strip():
        return scalar_node("")
    try:
        return compose(part)
    except ScenarioErrors as errors:
        first = errors.problems[0]
        raise ScenarioErrors(
            (ScenarioProblem(first.file, 1, first.column + start, first.message, text, first.hint),)
        ) from None


def _set_node(root: Any, keys: list[str], node: Any, text: str) -> None:
    here = root
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        if here.id == "sequence":
            k = _list_index(here, key, keys[:depth])
            if last:
                here.value[k] = node
            here = here.value[k]
        elif _is_mapping(here):
            here = _enter_mapping(here, key, keys, depth, node)
        else:
            raise UsageError(
                f"--set {text}: {'.'.join(keys[:depth])} has no keys, it is `{here.value}`",
                _scalar_parent_remedy(keys, here, text),
            )


def _scalar_parent_remedy(keys: list[str], here: Any, text: str) -> str:
    """What to do where a text has no keys: a preset is changed as a mapping."""
    if keys[0] != "cluster" or len(keys) < 2:
        return _REMEDY
    value = text.partition("=")[2].strip()
    for key in reversed(keys[1:]):
        value = f"{{{key}: {value}}}"
    return (
        f"a preset is changed as a mapping: `--set 'cluster={{preset: {here.value}, {value[1:]}'`"
    )


def _expand_preset(root: Any) -> None:
    """`cluster: dgx-h100` as `cluster: {preset: dgx-h100}`, so that a key of it can be set. A
    file's name stays: it has its own keys.
    """
    for k, (key_node, node) in enumerate(root.value):
        if (
            _node_is_key(key_node, "cluster")
            and node.id == "scalar"
            and not str(plain_scalar(node)).endswith((".yaml", ".yml"))
        ):
            opened = mapping_node(node)
            opened.value.append((scalar_node("preset", node), node))
            root.value[k] = (key_node, opened)


def _list_index(here: Any, key: str, above: list[str]) -> int:
    if not key.isascii() or not key.isdigit() or len(key) > 9 or int(key) >= len(here.value):
        size = len(here.value)
        have = f"items 0 to {size - 1}" if size else "no items"
        raise UsageError(f"--set: {'.'.join(above)} is a list with {have}, found {key}", _REMEDY)
    return int(key)


def _enter_mapping(here: Any, key: str, keys: list[str], depth: int, node: Any) -> Any:
    """The node under a key of a mapping; the last key is set, made if need be."""
    last = depth == len(keys) - 1
    for k, (key_node, value_node) in enumerate(here.value):
        if _node_is_key(key_node, key):
            if last:
                here.value[k] = (key_node, node)
            return node if last else value_node
    if depth == 0 and key not in TOP_LEVEL_KEYS:
        raise UsageError(
            f"--set {'.'.join(keys)}: unknown key {key} (known: {name_list(TOP_LEVEL_KEYS, 20)}){did_you_mean(key, TOP_LEVEL_KEYS)}",
            _REMEDY,
        )
    if (
        not last
        and not (depth == 0 and key in _CREATABLE_KEYS)
        and not (depth and keys[0] == "cluster")
    ):
        known = _key_names(here)
        above = ".".join(keys[:depth]) or "the file"
        raise UsageError(
            f"--set {'.'.join(keys)}: {above} has no key {key} (has: {name_list(known)}){did_you_mean(key, known)}",
            _REMEDY,
        )
    made = node if last else mapping_node(node)
    here.value.append((scalar_node(key, node), made))
    return made


def _node_is_key(key_node: Any, key: str) -> bool:
    return bool(key_node.id == "scalar") and str(plain_scalar(key_node)) == key


def _is_mapping(node: Any) -> bool:
    return node is not None and node.id == "mapping"


def _value_of_key(node: Any, key: str) -> Any:
    if _is_mapping(node):
        for key_node, value_node in node.value:
            if _node_is_key(key_node, key):
                return value_node
    return None


def _key_names(node: Any) -> list[str]:
    return [key.value for key, _ in node.value if key.id == "scalar"] if _is_mapping(node) else []
