"""`--set name=value`: a value of the file replaced before it is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distsim.errors import Problem, ScenarioErrors, UsageError
from distsim.names import listing, near
from distsim.scenario.document import Document, compose, mapping_node, plain_scalar, scalar_node
from distsim.scenario.read import KEYS

#: Top-level keys that a dotted path may bring into being.
_OPEN = ("options", "launch", "expect", "vars", "mesh")
_REMEDY = "`--set name=value` sets a var or a top-level key; `--set tensors.grad.dtype=float16` any other key"


def apply(document: Document, root: object, sets: Sequence[str]) -> object:
    """The root node with every ``name=value`` put in, in order. Raises UsageError for a path that leads nowhere."""
    for text in sets:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name:
            raise UsageError(f"expected name=value, found `{text}`", _REMEDY)
        if not _is_mapping(root):
            return root
        keys = _keys(root, name)
        if keys[0] == "cluster" and len(keys) > 1:
            _open_preset(root)
        node = _value(text, len(text) - len(value))
        _put(root, keys, node, text)
        document.overrides[id(node)] = (text, len(text) - len(value))
    return root


def _keys(root: object, name: str) -> list[str]:
    """The way to what a name sets: a var, else a top-level key, else a dotted path."""
    variables = _child(root, "vars")
    if _is_mapping(variables) and _child(variables, name) is not None:
        return ["vars", name]
    if "." in name:
        return name.split(".")
    if name not in KEYS:
        known = [*_names(variables), *KEYS]
        raise UsageError(
            f"--set {name}: there is no var and no key of this name (known: {listing(known, 30)}){near(name, known)}", _REMEDY
        )
    return [name]


def _value(text: str, start: int) -> object:
    """The value's node, read as YAML."""
    part = Document("--set", text[start:])
    if not part.text.strip():
        return scalar_node("")
    try:
        return compose(part)
    except ScenarioErrors as errors:
        first = errors.problems[0]
        raise ScenarioErrors((Problem(first.file, 1, first.column + start, first.message, text, first.hint),)) from None


def _put(root: Any, keys: list[str], node: Any, text: str) -> None:
    here = root
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        if here.id == "sequence":
            k = _item(here, key, keys[:depth])
            if last:
                here.value[k] = node
            here = here.value[k]
        elif _is_mapping(here):
            here = _enter(here, key, keys, depth, node)
        else:
            raise UsageError(
                f"--set {text}: {'.'.join(keys[:depth])} has no keys, it is `{here.value}`", _inside(keys, here, text)
            )


def _inside(keys: list[str], here: Any, text: str) -> str:
    """What to do where a text has no keys: a preset is changed as a mapping."""
    if keys[0] != "cluster" or len(keys) < 2:
        return _REMEDY
    value = text.partition("=")[2].strip()
    for key in reversed(keys[1:]):
        value = f"{{{key}: {value}}}"
    return f"a preset is changed as a mapping: `--set 'cluster={{preset: {here.value}, {value[1:]}'`"


def _open_preset(root: Any) -> None:
    """`cluster: dgx-h100` as `cluster: {preset: dgx-h100}`, so that a key of it can be set. A file's name stays: it has its own keys."""
    for k, (key_node, node) in enumerate(root.value):
        if _is(key_node, "cluster") and node.id == "scalar" and not str(plain_scalar(node)).endswith((".yaml", ".yml")):
            opened = mapping_node(node)
            opened.value.append((scalar_node("preset", node), node))
            root.value[k] = (key_node, opened)


def _item(here: Any, key: str, above: list[str]) -> int:
    if not key.isascii() or not key.isdigit() or len(key) > 9 or int(key) >= len(here.value):
        size = len(here.value)
        have = f"items 0 to {size - 1}" if size else "no items"
        raise UsageError(f"--set: {'.'.join(above)} is a list with {have}, found {key}", _REMEDY)
    return int(key)


def _enter(here: Any, key: str, keys: list[str], depth: int, node: Any) -> Any:
    """The node under a key of a mapping; the last key is set, made if need be."""
    last = depth == len(keys) - 1
    for k, (key_node, value_node) in enumerate(here.value):
        if _is(key_node, key):
            if last:
                here.value[k] = (key_node, node)
            return node if last else value_node
    if depth == 0 and key not in KEYS:
        raise UsageError(f"--set {'.'.join(keys)}: unknown key {key} (known: {listing(KEYS, 20)}){near(key, KEYS)}", _REMEDY)
    if not last and not (depth == 0 and key in _OPEN) and not (depth and keys[0] == "cluster"):
        known = _names(here)
        above = ".".join(keys[:depth]) or "the file"
        raise UsageError(f"--set {'.'.join(keys)}: {above} has no key {key} (has: {listing(known)}){near(key, known)}", _REMEDY)
    made = node if last else mapping_node(node)
    here.value.append((scalar_node(key, node), made))
    return made


def _is(key_node: Any, key: str) -> bool:
    return bool(key_node.id == "scalar") and str(plain_scalar(key_node)) == key


def _is_mapping(node: Any) -> bool:
    return node is not None and node.id == "mapping"


def _child(node: Any, key: str) -> Any:
    if _is_mapping(node):
        for key_node, value_node in node.value:
            if _is(key_node, key):
                return value_node
    return None


def _names(node: Any) -> list[str]:
    return [key.value for key, _ in node.value if key.id == "scalar"] if _is_mapping(node) else []
