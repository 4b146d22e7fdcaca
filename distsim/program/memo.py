"""What is looked at once however often it comes: a step's traits, and what decides a call's validity, bytes and signature."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from distsim.expr import Expression
from distsim.ops.base import Op
from distsim.ops.fields import Inline, PerRank, Ref
from distsim.ops.local import Wait
from distsim.program.records import BufferVec
from distsim.scenario.entries import Block, Entry, Repeat, Step

_NOTHING: frozenset[str] = frozenset()
#: Types of values without names in them.
_PLAIN = frozenset((str, int, float, bool, type(None)))

#: What of a step `Requests` tells, for each of its calls.
_REQUESTS = ("handle", "handles")


#: Fields of `Call` that a local step fills, and where it has them.
_LOCAL_FIELDS = {"name": "name", "time_ns": "time", "flops": "flops", "mem_bytes": "bytes", "kernels": "kernels", "queue": "on",
                 "dtype": "dtype", "stream": "stream", "code": "code", "message": "message"}  # fmt: skip


GroupName = str | tuple[str, ...] | None


class Traits(NamedTuple):
    """What a step is, apart from the ranks and indices that it is reached with."""

    row: type[Op]
    handle: Ref | None  # its request's
    waits: tuple[Ref, ...] | None  # the handles that it waits for; None: it is no wait
    group: GroupName  # as the step names it
    others: tuple[GroupName, ...]  # groups of a batch's parts: a rank may make the first part or not
    names: frozenset[str]  # that its expressions use, those of handles left out
    key: Hashable  # steps of one key make the same call wherever the rest is the same


@cache
def fields_of(row: type[Op]) -> frozenset[str]:
    """The fields of an operation: asking a model for one that it has not is slow."""
    return frozenset(row.model_fields)


@cache
def local_fields(row: type[Op]) -> tuple[tuple[str, str], ...]:
    """Those of `_LOCAL_FIELDS` that an operation has."""
    return tuple((name, source) for name, source in _LOCAL_FIELDS.items() if source in fields_of(row))


def has_init(entries: Iterable[Entry]) -> bool:
    """Whether some entry is an init_process_group."""
    return any(type(e.op).op == "init_process_group" if isinstance(e, Step) else has_init(e.steps) for e in entries)


def traits_of(step: Step) -> Traits:
    op: Any = step.op
    row = type(step.op)
    has = fields_of(row)
    handle, group = op.handle if "handle" in has else None, op.group if "group" in has else None
    waits = None
    if isinstance(op, Wait):
        waits = op.handles if isinstance(op.handles, tuple) else (op.handles,)
    others: tuple[GroupName, ...] = ()
    if row.kind == "batch":
        others = tuple(dict.fromkeys(getattr(part.op, "group", None) for part in getattr(op, "ops", ())))
        group = next(iter(others), None)
    values = [(name, type(value), value) for name, value in op.__dict__.items() if name not in _REQUESTS]
    names = names_of(step.ranks).union(*[names_of(value) for _, kind, value in values if kind not in _PLAIN])
    key: Hashable = id(step)
    if row.kind in ("p2p", "collective", "wait") or row.op == "compute":
        key = (row, step.line, step.column, *values)
    return Traits(row, handle, waits, group, others, names, key)


def names_of(value: object) -> frozenset[str]:
    """All names that the expressions in an entry or in one of its values use."""
    if isinstance(value, Expression):
        return value.names
    if value is None or isinstance(value, (str, int, float)):
        return _NOTHING
    if isinstance(value, PerRank):
        return frozenset().union(*(names_of(v) for _, v in value.entries), names_of(value.default))
    if isinstance(value, Ref):
        return _NOTHING if value.index is None else value.index.names
    if isinstance(value, Inline):
        return names_of(value.shape)
    if isinstance(value, (tuple, list)):
        return _NOTHING.union(*map(names_of, value))
    if isinstance(value, Step):
        return names_of(value.ranks) | _names_of_op(value.op)
    if isinstance(value, (Block, Repeat)):
        inner = names_of(value.ranks) | names_of(value.steps)
        return inner | names_of(value.times) if isinstance(value, Repeat) else inner
    return _NOTHING


def names_in(entries: Iterable[Entry], known: dict[int, frozenset[str]]) -> frozenset[str]:
    """All names that expressions in some entries use; ``known``: those of entries and operations looked at before, by id."""
    found: frozenset[str] = frozenset()
    for entry in entries:
        names = known.get(id(entry))
        if names is None:
            names = known[id(entry)] = _names_at(entry, known)
        found |= names
    return found


def _names_at(entry: Entry, known: dict[int, frozenset[str]]) -> frozenset[str]:
    """Steps that are written alike have one operation."""
    if isinstance(entry, Step):
        own = known.get(id(entry.op))
        if own is None:
            own = known[id(entry.op)] = _names_of_op(entry.op)
    else:
        own = names_in(entry.steps, known) | (names_of(entry.times) if isinstance(entry, Repeat) else _NOTHING)
    return own if entry.ranks is None else own | names_of(entry.ranks)


def _names_of_op(op: Op) -> frozenset[str]:
    return _NOTHING.union(*[names_of(value) for value in op.__dict__.values() if type(value) not in _PLAIN])


def vec_key(value: object) -> Hashable:
    """Equal vectors have equal keys."""
    return (value.dtype.str, value.tobytes()) if isinstance(value, np.ndarray) else value


class VectorKeys:
    """As `vec_key`, for vectors that come again and again: each is read once, and kept."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[int, tuple[object, Hashable]] = {}  # by id: the vector, and its key

    def __call__(self, value: object) -> Hashable:
        if not isinstance(value, np.ndarray):
            return value
        known = self._known.get(id(value))
        if known is None:
            number = self._numbers.setdefault(vec_key(value), len(self._numbers))
            known = self._known[id(value)] = (value, ("vector", number))
        return known[1]


def facts_key(fields: Mapping[str, object]) -> Hashable:
    """Arguments of one key are alike to a row's columns: of a buffer, its sizes count, and which others are the same copy."""
    given, taken = fields.get("inputs"), fields.get("outputs")
    if type(given) is type(taken) is tuple and len(given) == len(taken) == 1 and given[0] is taken[0] and _one_copy(given[0]):
        rest = tuple([(name, _value_key(value)) for name, value in fields.items() if name not in ("inputs", "outputs")])
        return ("one buffer", bool(given[0].name), given[0].shape, given[0].dtype, rest)
    flat = [buffer for name in ("inputs", "outputs") for buffer in _buffers(fields.get(name))]
    copies = [(buffer.name, vec_key(buffer.index)) for buffer in flat]
    number = {copy: k for k, copy in reversed(list(enumerate(copies)))}
    exact = any(isinstance(buffer.index, np.ndarray) for buffer in flat)
    alike = tuple(copies if exact else ((bool(copy[0]), number[copy]) for copy in copies))
    return (alike, *((name, _value_key(value)) for name, value in fields.items()))


def _one_copy(value: object) -> bool:
    """Whether it is a buffer that is alike on all ranks."""
    return isinstance(value, BufferVec) and type(value.index) is int and all(type(n) is int for n in value.shape)


def _buffers(value: object) -> Iterator[BufferVec]:
    if isinstance(value, BufferVec):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _buffers(item)


def _value_key(value: object) -> Hashable:
    if isinstance(value, np.ndarray):
        return vec_key(value)
    if isinstance(value, BufferVec):
        return (tuple(map(vec_key, value.shape)), value.dtype)
    if isinstance(value, tuple):
        return tuple(map(_value_key, value))
    return (type(value), value)
