"""`--set name=value`: values of a file replaced before it is read.

Works on nodes rather than data, so that a problem with the new value can show it in its option.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distsim.common.errors import ScenarioErrors, ScenarioProblem, UsageError
from distsim.common.message_text import did_you_mean, name_list
from distsim.scenario.format.models.top_level import TOP_LEVEL_KEYS
from distsim.scenario.format.source.document import Override, YamlDocument, compose
from distsim.scenario.format.source.yaml_nodes import mapping_node, plain_scalar, scalar_node

#: Top-level keys that a dotted path may create.
_CREATABLE_KEYS = ("options", "launch", "expect", "vars", "mesh")
_REMEDY = (
    "`--set name=value` sets a variable or a top-level key; `--set tensors.grad.dtype=float16` "
    "sets any other key"
)


def apply_overrides(document: YamlDocument, root: object, sets: Sequence[str]) -> object:
    """The root node with every ``name=value`` applied, in order.

    Raises UsageError for a path that leads nowhere.
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
        offset = len(text) - len(value)
        node = _value_node(text, offset)
        _set_node(root, keys, node, text)
        document.overrides[id(node)] = Override(text, offset)
    return root


def _key_path(root: object, name: str) -> list[str]:
    """The keys that a name means: a var, else a top-level key, else a dotted path."""
    variables = _value_of_key(root, "vars")
    if _is_mapping(variables) and _value_of_key(variables, name) is not None:
        return ["vars", name]
    if "." in name:
        return name.split(".")
    if name not in TOP_LEVEL_KEYS:
        known = [*_key_names(variables), *TOP_LEVEL_KEYS]
        raise UsageError(
            (
                f"--set {name}: no variable or key has this name (known: "
                f"{name_list(known, 30)}){did_you_mean(name, known)}"
            ),
            _REMEDY,
        )
    return [name]


def _value_node(text: str, start: int) -> object:
    """The value's node, read as YAML; the value starts at ``start`` in the option's text."""
    part = YamlDocument("--set", text[start:])
    if not part.text.strip():
        return scalar_node("")
    try:
        return compose(part)
    except ScenarioErrors as errors:
        first = errors.problems[0]
        column = first.column + start
        problem = ScenarioProblem(first.file, 1, column, first.message, text, first.hint)
        raise ScenarioErrors((problem,)) from None


def _set_node(root: Any, keys: list[str], node: Any, text: str) -> None:
    """Replace the node at the path ``keys``."""
    container = root
    for depth, key in enumerate(keys):
        if container.id == "sequence":
            index = _list_index(container, key, keys[:depth])
            if depth == len(keys) - 1:
                container.value[index] = node
            container = container.value[index]
        elif _is_mapping(container):
            container = _enter_mapping(container, keys, depth, node)
        else:
            raise UsageError(
                f"--set {text}: {'.'.join(keys[:depth])} is `{container.value}` and has no keys",
                _scalar_parent_remedy(keys, container, text),
            )


def _scalar_parent_remedy(keys: list[str], scalar: Any, text: str) -> str:
    """The remedy for a key of a text; for a cluster, a mapping that extends the preset."""
    if keys[0] == "world":
        return "give both numbers: `--set 'world={nodes: 2, ranks_per_node: 8}'`"
    if keys[0] != "cluster" or len(keys) < 2:
        return _REMEDY
    _, _, value = text.partition("=")
    body = value.strip()
    for key in reversed(keys[1:]):
        body = f"{{{key}: {body}}}"
    changed = f"{{preset: {scalar.value}, {body[1:]}"
    return f"change a preset with a mapping: `--set 'cluster={changed}'`"


def _expand_preset(root: Any) -> None:
    """`cluster: dgx-h100` as `cluster: {preset: dgx-h100}`, so that a key of it can be set.

    A file's name stays: the file has its own keys.
    """
    for k, (key_node, node) in enumerate(root.value):
        if not _node_is_key(key_node, "cluster") or node.id != "scalar":
            continue
        if not str(plain_scalar(node)).endswith((".yaml", ".yml")):
            expanded = mapping_node(node)
            expanded.value.append((scalar_node("preset", node), node))
            root.value[k] = (key_node, expanded)


def _list_index(container: Any, key: str, path: list[str]) -> int:
    size = len(container.value)
    is_number = key.isascii() and key.isdigit() and len(key) <= 9
    if not is_number or int(key) >= size:
        items = f"items 0 to {size - 1}" if size else "no items"
        raise UsageError(f"--set: {'.'.join(path)} is a list with {items}, found {key}", _REMEDY)
    return int(key)


def _enter_mapping(container: Any, keys: list[str], depth: int, node: Any) -> Any:
    """The node under ``keys[depth]`` of a mapping.

    The last key gets ``node``; a missing key on the way is created where that is allowed.
    """
    key = keys[depth]
    is_last = depth == len(keys) - 1
    for k, (key_node, value_node) in enumerate(container.value):
        if not _node_is_key(key_node, key):
            continue
        if not is_last:
            return value_node
        container.value[k] = (key_node, node)
        return node
    _check_creatable(container, keys, depth)
    created = node if is_last else mapping_node(node)
    container.value.append((scalar_node(key, node), created))
    return created


def _check_creatable(container: Any, keys: list[str], depth: int) -> None:
    """Raise UsageError if the key at ``depth`` must not be created."""
    key = keys[depth]
    if depth == 0 and key not in TOP_LEVEL_KEYS:
        raise UsageError(
            f"--set {'.'.join(keys)}: unknown key {key} (known: {name_list(TOP_LEVEL_KEYS, 20)})"
            f"{did_you_mean(key, TOP_LEVEL_KEYS)}",
            _REMEDY,
        )
    is_last = depth == len(keys) - 1
    is_creatable = key in _CREATABLE_KEYS if depth == 0 else keys[0] == "cluster"
    if is_last or is_creatable:
        return
    known = _key_names(container)
    parent = ".".join(keys[:depth]) or "the file"
    raise UsageError(
        f"--set {'.'.join(keys)}: {parent} has no key {key} (has: {name_list(known)})"
        f"{did_you_mean(key, known)}",
        _REMEDY,
    )


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
    if not _is_mapping(node):
        return []
    return [key_node.value for key_node, _ in node.value if key_node.id == "scalar"]
