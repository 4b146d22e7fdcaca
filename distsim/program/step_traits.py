"""Properties of a step that hold wherever it is reached, and the names its expressions use.

The same steps are lowered again and again (loops, classes of ranks), so these properties are found
once for each step, by the caches of `distsim.program.symbol_table`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import cache
from typing import Any, NamedTuple

from distsim.common.expressions import Expression
from distsim.operations.core.field_types import InlineTensor, NameReference, PerRank
from distsim.operations.core.kernel_work import KernelWorkEntry
from distsim.operations.core.operation_base import Operation
from distsim.operations.local import WaitOperation
from distsim.scenario.format.models.entries import (
    Entry,
    ScenarioBlock,
    ScenarioRepeat,
    ScenarioStep,
)

_NO_NAMES: frozenset[str] = frozenset()
#: Types of values without names in them.
_PLAIN_TYPES = frozenset((str, int, float, bool, type(None)))

#: Fields that `CallRequests` describes, for each call of a step again.
_HANDLE_FIELDS = ("handle", "handles")


#: Fields of `ResolvedCall` that a local step sets, with the names of the step's fields.
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
    """Properties of a step that do not depend on the ranks and loop indices it is reached with."""

    row: type[Operation]
    handle: NameReference | None  # bound to its request
    waits: tuple[NameReference, ...] | None  # the handles that it waits for; None: not a wait
    group: GroupName  # as the step names it
    #: Groups of a batch's parts: some ranks may skip the first part.
    others: tuple[GroupName, ...]
    names: frozenset[str]  # used by its expressions, except those of handles
    key: Hashable  # steps with equal keys make the same call wherever everything else is equal


@cache
def field_names_of(row: type[Operation]) -> frozenset[str]:
    """The fields of an operation; asking a Pydantic model for a missing attribute is slow."""
    return frozenset(row.model_fields)


@cache
def local_fields(row: type[Operation]) -> tuple[tuple[str, str], ...]:
    """The pairs of `_LOCAL_FIELDS` that an operation has."""
    own = field_names_of(row)
    return tuple((name, source) for name, source in _LOCAL_FIELDS.items() if source in own)


def contains_init(entries: Iterable[Entry]) -> bool:
    """Whether some entry is an init_process_group, at any depth."""
    for entry in entries:
        if not isinstance(entry, ScenarioStep):
            if contains_init(entry.steps):
                return True
        elif type(entry.op).op == "init_process_group":
            return True
    return False


def traits_of(step: ScenarioStep) -> StepTraits:
    """What lowering needs to know about a step."""
    op: Any = step.op
    row = type(step.op)
    own = field_names_of(row)
    values = [
        (name, type(value), value)
        for name, value in op.__dict__.items()
        if name not in _HANDLE_FIELDS
    ]
    groups = _groups_named_by(op, row)
    return StepTraits(
        row=row,
        handle=op.handle if "handle" in own else None,
        waits=_awaited_handles(op),
        group=next(iter(groups), None),
        others=groups if row.kind == "batch" else (),
        names=expression_names(step.ranks).union(
            *[expression_names(value) for _, kind, value in values if kind not in _PLAIN_TYPES]
        ),
        key=_step_key(step, row, values),
    )


def _awaited_handles(op: object) -> tuple[NameReference, ...] | None:
    if not isinstance(op, WaitOperation):
        return None
    return op.handles if isinstance(op.handles, tuple) else (op.handles,)


def _groups_named_by(op: object, row: type[Operation]) -> tuple[GroupName, ...]:
    """The group of a step; the distinct groups of a batch's parts, in their order."""
    if row.kind == "batch":
        parts = getattr(op, "ops", ())
        return tuple(dict.fromkeys(getattr(part.op, "group", None) for part in parts))
    return (getattr(op, "group", None),) if "group" in field_names_of(row) else ()


def _step_key(
    step: ScenarioStep, row: type[Operation], values: list[tuple[str, type, object]]
) -> Hashable:
    """Kinds of steps with other state (batches, groups, …) are equal only to themselves."""
    if row.kind in ("p2p", "collective", "wait") or row.op == "compute":
        # The types are part of the key because 1, 1.0 and True are equal.
        return (row, step.line, step.column, *values)
    return id(step)


# --- names in expressions ---
def expression_names(value: object) -> frozenset[str]:
    """All names that the expressions in an entry, or in one of its values, use."""
    if isinstance(value, Expression):
        return value.names
    if value is None or isinstance(value, (str, int, float)):
        return _NO_NAMES
    if isinstance(value, PerRank):
        of_entries = [expression_names(item) for _, item in value.entries]
        return frozenset().union(*of_entries, expression_names(value.default))
    if isinstance(value, NameReference):
        return _NO_NAMES if value.index is None else value.index.names
    if isinstance(value, InlineTensor):
        return expression_names(value.shape)
    if isinstance(value, KernelWorkEntry):
        return expression_names(value.flops) | expression_names(value.nbytes)
    if isinstance(value, (tuple, list)):
        return _NO_NAMES.union(*map(expression_names, value))
    if isinstance(value, ScenarioStep):
        return expression_names(value.ranks) | _names_in_op(value.op)
    if isinstance(value, ScenarioBlock):
        return expression_names(value.ranks) | expression_names(value.steps)
    if isinstance(value, ScenarioRepeat):
        inner = expression_names(value.ranks) | expression_names(value.steps)
        return inner | expression_names(value.times)
    return _NO_NAMES


def names_in_entries(entries: Iterable[Entry], known: dict[int, frozenset[str]]) -> frozenset[str]:
    """All names that expressions in some entries use.

    ``known`` is a cache: the names of entries and operations that were visited before, by id.
    """
    found: frozenset[str] = frozenset()
    for entry in entries:
        names = known.get(id(entry))
        if names is None:
            names = known[id(entry)] = _names_in_entry(entry, known)
        found |= names
    return found


def _names_in_entry(entry: Entry, known: dict[int, frozenset[str]]) -> frozenset[str]:
    names = _names_inside(entry, known)
    return names if entry.ranks is None else names | expression_names(entry.ranks)


def _names_inside(entry: Entry, known: dict[int, frozenset[str]]) -> frozenset[str]:
    """The names in an entry, except those of its selector."""
    if isinstance(entry, ScenarioStep):
        # By operation: steps that are written the same share one operation.
        names = known.get(id(entry.op))
        if names is None:
            names = known[id(entry.op)] = _names_in_op(entry.op)
        return names
    names = names_in_entries(entry.steps, known)
    if isinstance(entry, ScenarioRepeat):
        return names | expression_names(entry.times)
    return names


def _names_in_op(op: Operation) -> frozenset[str]:
    values = [value for value in op.__dict__.values() if type(value) not in _PLAIN_TYPES]
    return _NO_NAMES.union(*map(expression_names, values))
