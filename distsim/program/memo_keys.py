"""What is looked at once however often it comes: a step's traits, and what decides a call's
validity, bytes and signature.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from distsim.common.expressions import Expression
from distsim.operations.core.field_types import InlineTensor, NameReference, PerRank
from distsim.operations.core.operation_base import Operation
from distsim.operations.local import WaitOperation
from distsim.program.code import BufferVector
from distsim.scenario.format.models.entries import (
    Entry,
    ScenarioBlock,
    ScenarioRepeat,
    ScenarioStep,
)

_NO_NAMES: frozenset[str] = frozenset()
#: Types of values without names in them.
_PLAIN_TYPES = frozenset((str, int, float, bool, type(None)))

#: What of a step `Requests` tells, for each of its calls.
_HANDLE_FIELDS = ("handle", "handles")


#: Fields of `Call` that a local step fills, and where it has them.
_LOCAL_FIELDS = {
    "name": "name",
    "time_ns": "time",
    "flops": "flops",
    "mem_bytes": "bytes",
    "kernels": "kernels",
    "queue": "on",
    "dtype": "dtype",
    "stream": "stream",
    "code": "code",
    "message": "message",
}


GroupName = str | tuple[str, ...] | None


class StepTraits(NamedTuple):
    """What a step is, apart from the ranks and indices that it is reached with."""

    row: type[Operation]
    handle: NameReference | None  # its request's
    waits: tuple[NameReference, ...] | None  # the handles that it waits for; None: it is no wait
    group: GroupName  # as the step names it
    others: tuple[
        GroupName, ...
    ]  # groups of a batch's parts: a rank may make the first part or not
    names: frozenset[str]  # that its expressions use, those of handles left out
    key: Hashable  # steps of one key make the same call wherever the rest is the same


@cache
def field_names_of(row: type[Operation]) -> frozenset[str]:
    """The fields of an operation: asking a model for one that it has not is slow."""
    return frozenset(row.model_fields)


@cache
def local_fields(row: type[Operation]) -> tuple[tuple[str, str], ...]:
    """Those of `_LOCAL_FIELDS` that an operation has."""
    return tuple(
        (name, source) for name, source in _LOCAL_FIELDS.items() if source in field_names_of(row)
    )


def contains_init(entries: Iterable[Entry]) -> bool:
    """Whether some entry is an init_process_group."""
    return any(
        type(e.op).op == "init_process_group"
        if isinstance(e, ScenarioStep)
        else contains_init(e.steps)
        for e in entries
    )


def traits_of(step: ScenarioStep) -> StepTraits:
    op: Any = step.op
    row = type(step.op)
    has = field_names_of(row)
    handle, group = op.handle if "handle" in has else None, op.group if "group" in has else None
    waits = None
    if isinstance(op, WaitOperation):
        waits = op.handles if isinstance(op.handles, tuple) else (op.handles,)
    others: tuple[GroupName, ...] = ()
    if row.kind == "batch":
        others = tuple(
            dict.fromkeys(getattr(part.op, "group", None) for part in getattr(op, "ops", ()))
        )
        group = next(iter(others), None)
    values = [
        (name, type(value), value)
        for name, value in op.__dict__.items()
        if name not in _HANDLE_FIELDS
    ]
    names = expression_names(step.ranks).union(
        *[expression_names(value) for _, kind, value in values if kind not in _PLAIN_TYPES]
    )
    key: Hashable = id(step)
    if row.kind in ("p2p", "collective", "wait") or row.op == "compute":
        key = (row, step.line, step.column, *values)
    return StepTraits(row, handle, waits, group, others, names, key)


def expression_names(value: object) -> frozenset[str]:
    """All names that the expressions in an entry or in one of its values use."""
    if isinstance(value, Expression):
        return value.names
    if value is None or isinstance(value, (str, int, float)):
        return _NO_NAMES
    if isinstance(value, PerRank):
        return frozenset().union(
            *(expression_names(v) for _, v in value.entries), expression_names(value.default)
        )
    if isinstance(value, NameReference):
        return _NO_NAMES if value.index is None else value.index.names
    if isinstance(value, InlineTensor):
        return expression_names(value.shape)
    if isinstance(value, (tuple, list)):
        return _NO_NAMES.union(*map(expression_names, value))
    if isinstance(value, ScenarioStep):
        return expression_names(value.ranks) | _names_in_op(value.op)
    if isinstance(value, (ScenarioBlock, ScenarioRepeat)):
        inner = expression_names(value.ranks) | expression_names(value.steps)
        return inner | expression_names(value.times) if isinstance(value, ScenarioRepeat) else inner
    return _NO_NAMES


def names_in_entries(entries: Iterable[Entry], known: dict[int, frozenset[str]]) -> frozenset[str]:
    """All names that expressions in some entries use; ``known``: those of entries and operations
    looked at before, by id.
    """
    found: frozenset[str] = frozenset()
    for entry in entries:
        names = known.get(id(entry))
        if names is None:
            names = known[id(entry)] = _names_in_entry(entry, known)
        found |= names
    return found


def _names_in_entry(entry: Entry, known: dict[int, frozenset[str]]) -> frozenset[str]:
    """Steps that are written alike have one operation."""
    if isinstance(entry, ScenarioStep):
        own = known.get(id(entry.op))
        if own is None:
            own = known[id(entry.op)] = _names_in_op(entry.op)
    else:
        own = names_in_entries(entry.steps, known) | (
            expression_names(entry.times) if isinstance(entry, ScenarioRepeat) else _NO_NAMES
        )
    return own if entry.ranks is None else own | expression_names(entry.ranks)


def _names_in_op(op: Operation) -> frozenset[str]:
    return _NO_NAMES.union(
        *[
            expression_names(value)
            for value in op.__dict__.values()
            if type(value) not in _PLAIN_TYPES
        ]
    )


def vector_key(value: object) -> Hashable:
    """Equal vectors have equal keys."""
    return (value.dtype.str, value.tobytes()) if isinstance(value, np.ndarray) else value


class VectorKeys:
    """As `vector_key`, for vectors that come again and again: each is read once, and kept."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[int, tuple[object, Hashable]] = {}  # by id: the vector, and its key

    def __call__(self, value: object) -> Hashable:
        if not isinstance(value, np.ndarray):
            return value
        known = self._known.get(id(value))
        if known is None:
            number = self._numbers.setdefault(vector_key(value), len(self._numbers))
            known = self._known[id(value)] = (value, ("vector", number))
        return known[1]


def arguments_key(fields: Mapping[str, object]) -> Hashable:
    """Arguments of one key are alike to a row's columns: of a buffer, its sizes count, and which
    others are the same copy.
    """
    given, taken = fields.get("inputs"), fields.get("outputs")
    if (
        type(given) is type(taken) is tuple
        and len(given) == len(taken) == 1
        and given[0] is taken[0]
        and _is_uniform_buffer(given[0])
    ):
        rest = tuple(
            [
                (name, _value_key(value))
                for name, value in fields.items()
                if name not in ("inputs", "outputs")
            ]
        )
        return ("one buffer", bool(given[0].name), given[0].shape, given[0].dtype, rest)
    flat = [buffer for name in ("inputs", "outputs") for buffer in _flat_buffers(fields.get(name))]
    copies = [(buffer.name, vector_key(buffer.index)) for buffer in flat]
    number = {copy: k for k, copy in reversed(list(enumerate(copies)))}
    exact = any(isinstance(buffer.index, np.ndarray) for buffer in flat)
    alike = tuple(copies if exact else ((bool(copy[0]), number[copy]) for copy in copies))
    return (alike, *((name, _value_key(value)) for name, value in fields.items()))


def _is_uniform_buffer(value: object) -> bool:
    """Whether it is a buffer that is alike on all ranks."""
    return (
        isinstance(value, BufferVector)
        and type(value.index) is int
        and all(type(n) is int for n in value.shape)
    )


def _flat_buffers(value: object) -> Iterator[BufferVector]:
    if isinstance(value, BufferVector):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _flat_buffers(item)


def _value_key(value: object) -> Hashable:
    if isinstance(value, np.ndarray):
        return vector_key(value)
    if isinstance(value, BufferVector):
        return (tuple(map(vector_key, value.shape)), value.dtype)
    if isinstance(value, tuple):
        return tuple(map(_value_key, value))
    return (type(value), value)
