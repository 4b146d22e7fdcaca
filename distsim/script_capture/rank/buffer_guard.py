"""Detect a tensor that the script changes while a request still uses it.

torch counts the in-place changes of a tensor (`Tensor._version`), for all views of one memory
together. So a changed count is only a hint: the script may have written another part of a flat
buffer. Then a comparison of some of the bytes decides.
"""

from __future__ import annotations

import ast
import linecache
import os
from collections.abc import Iterator, Sequence
from ctypes import string_at
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

from distsim.script_capture.protocol.message_types import CallOrigin
from distsim.script_capture.rank.tensor_payloads import has_plain_memory

if TYPE_CHECKING:
    from torch import Tensor

#: Tensors of a call that are guarded.
_MAX_TENSORS: Final = 8
#: Tensors up to this size are compared as a whole, larger ones by samples.
_FULL_COMPARE_BYTES: Final = 2048
_SAMPLE_COUNT: Final = 16
_SAMPLE_BYTES: Final = 64


class TensorSnapshot(NamedTuple):
    """A tensor as it was when its call was made."""

    tensor: Tensor
    version: int
    sample: tuple[bytes, ...]


def snapshot_tensors(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> tuple[TensorSnapshot, ...]:
    """What a call uses, now.

    Without tensors whose changes torch does not count, or whose bytes cannot be read.
    """
    tensors = inputs if outputs is inputs else [*inputs, *outputs]
    return tuple(
        TensorSnapshot(tensor, tensor._version, _sampled_bytes(tensor))
        for tensor in tensors[:_MAX_TENSORS]
        if has_plain_memory(tensor) and not tensor.is_inference()
    )


def tensors_changed(snapshots: Sequence[TensorSnapshot]) -> bool:
    """Whether one of the tensors was changed since."""
    return any(
        snapshot.tensor._version != snapshot.version
        and _sampled_bytes(snapshot.tensor) != snapshot.sample
        for snapshot in snapshots
    )


def _sampled_bytes(tensor: Tensor) -> tuple[bytes, ...]:
    address = tensor.data_ptr()
    size = tensor.numel() * tensor.element_size()
    if size <= _FULL_COMPARE_BYTES:
        return (string_at(address, size) if size else b"",)
    step = (size - _SAMPLE_BYTES) / (_SAMPLE_COUNT - 1)
    return tuple(string_at(address + int(k * step), _SAMPLE_BYTES) for k in range(_SAMPLE_COUNT))


# --- which line changed the tensor ---
def changing_line(call: CallOrigin, wait: CallOrigin) -> tuple[CallOrigin, str]:
    """The line between a call and its wait that changes an argument of the call, and its name.

    If none is found in the source, the wait's line and "".
    """
    arguments = set(_argument_names(_syntax_tree(call.file), call.line))
    if call.file == wait.file and call.function == wait.function:
        for line, name in _in_place_writes(_syntax_tree(call.file)):
            if name in arguments and call.line < line <= wait.line:
                return CallOrigin(call.file, line, call.function, ""), name
    return wait, ""


@cache
def _syntax_tree(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(os.path.abspath(file))))
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def _argument_names(tree: ast.Module, line: int) -> Iterator[str]:
    """Names in the arguments of calls on a line."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if not node.lineno <= line <= (node.end_lineno or node.lineno):
            continue
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            for part in ast.walk(argument):
                name = _base_name(part)
                if name:
                    yield name


def _in_place_writes(tree: ast.Module) -> list[tuple[int, str]]:
    """Lines that change a variable in place, and its name.

    Recognised are ``x += 1``, ``x[0] = 1``, ``x.zero_()`` and ``out=x``.
    """
    found = []
    for node in ast.walk(tree):
        for target in _written_expressions(node):
            name = _base_name(target)
            if name:
                found.append((target.lineno, name))
    return sorted(found)


def _written_expressions(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.AugAssign):
        return [node.target]
    if isinstance(node, ast.Assign):
        return [target for target in node.targets if isinstance(target, ast.Subscript)]
    if isinstance(node, ast.Call):
        written = [keyword.value for keyword in node.keywords if keyword.arg == "out"]
        if isinstance(node.func, ast.Attribute) and _is_in_place_method(node.func.attr):
            written.append(node.func.value)
        return written
    return []


def _is_in_place_method(name: str) -> bool:
    """By torch's convention; a leading underscore marks an internal or a special method."""
    return name.endswith("_") and not name.startswith("_")


def _base_name(node: ast.AST) -> str:
    """``x`` of ``x``, ``x[0]``, ``x.data`` and ``x.view(-1)``."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return ""
    return node.id
