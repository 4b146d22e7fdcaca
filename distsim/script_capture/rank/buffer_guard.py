"""Tensors of a call under way: does the script change them before it waits?

torch counts in-place changes of a tensor (`Tensor._version`), of all views of one memory together.
So where the count has moved, some of the bytes decide: another part of a flat buffer may be
written.
"""

from __future__ import annotations

import ast
import linecache
import os
from collections.abc import Iterator, Sequence
from ctypes import string_at
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

from distsim.script_capture.rank.call_sites import CallOrigin
from distsim.script_capture.rank.tensor_payloads import has_plain_memory

if TYPE_CHECKING:
    from torch import Tensor

#: Tensors of a call that are looked at; bytes of each: all where they are few, else that many
#: stretches of so many.
_MAX_TENSORS: Final = 8
_FULL_COMPARE_BYTES: Final = 2048
_SAMPLE_COUNT: Final = 16
_SAMPLE_BYTES: Final = 64


class TensorSnapshot(NamedTuple):
    """A tensor as it was when its call was made."""

    tensor: Tensor
    version: int
    sample: tuple[bytes, ...]


def snapshot_tensors(ins: Sequence[Tensor], outs: Sequence[Tensor]) -> tuple[TensorSnapshot, ...]:
    """What a call uses, now. Tensors that torch does not count, or whose bytes lie elsewhere, are
    left out.
    """
    tensors = ins if outs is ins else [*ins, *outs]
    return tuple(
        TensorSnapshot(t, t._version, _sampled_bytes(t))
        for t in tensors[:_MAX_TENSORS]
        if has_plain_memory(t) and not t.is_inference()
    )


def tensors_changed(tensors: Sequence[TensorSnapshot]) -> bool:
    """Was one of them changed since?"""
    return any(
        one.tensor._version != one.version and _sampled_bytes(one.tensor) != one.sample
        for one in tensors
    )


def _sampled_bytes(tensor: Tensor) -> tuple[bytes, ...]:
    at, count = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    if count <= _FULL_COMPARE_BYTES:
        return (string_at(at, count) if count else b"",)
    step = (count - _SAMPLE_BYTES) / (_SAMPLE_COUNT - 1)
    return tuple(string_at(at + int(k * step), _SAMPLE_BYTES) for k in range(_SAMPLE_COUNT))


# --- which line did it ---
def changing_line(call: CallOrigin, wait: CallOrigin) -> tuple[CallOrigin, str]:
    """The line between a call and its wait that changes what the call was given, and its name
    there. Else the wait's line and "".
    """
    names = set(_argument_names(_syntax_tree(call[0]), call[1]))
    if call[0] == wait[0] and call[2] == wait[2]:
        for line, name in _in_place_writes(_syntax_tree(call[0])):
            if name in names and call[1] < line <= wait[1]:
                return (call[0], line, call[2], ""), name
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
        if isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or node.lineno):
            for given in (*node.args, *(k.value for k in node.keywords)):
                yield from (name for name in (_base_name(part) for part in ast.walk(given)) if name)


def _in_place_writes(tree: ast.Module) -> list[tuple[int, str]]:
    """Lines that change something in place, and what: ``x += 1``, ``x[0] = 1``, ``x.zero_()``,
    ``out=x``.
    """
    found = []
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.AugAssign):
            targets = [node.target]
        elif isinstance(node, ast.Assign):
            targets = [target for target in node.targets if isinstance(target, ast.Subscript)]
        elif isinstance(node, ast.Call):
            targets = [keyword.value for keyword in node.keywords if keyword.arg == "out"]
            if (
                isinstance(node.func, ast.Attribute)
                and node.func.attr.endswith("_")
                and not node.func.attr.startswith("_")
            ):
                targets.append(node.func.value)
        found += [(target.lineno, name) for target in targets if (name := _base_name(target))]
    return sorted(found)


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
