"""The names in a program's entries, checked against what the scenario defines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from distsim.backends import BACKEND_PROFILES
from distsim.common.expressions import Expression, ExpressionError
from distsim.common.message_text import did_you_mean, name_list, unknown_value_text, value_text
from distsim.operations.core.field_types import NameReference
from distsim.operations.core.operation_base import Operation
from distsim.scenario.format.models.entries import (
    GROUP_NAMES,
    ITERATION_INDEX,
    RESERVED_NAMES,
    Entry,
    ScenarioBlock,
    ScenarioRepeat,
    ScenarioStep,
)
from distsim.scenario.format.reading.name_scope import NameScope, leaf_values
from distsim.scenario.format.reading.operation_fields import fields_with_keys
from distsim.scenario.format.reading.step_reader import repeat_count_error
from distsim.scenario.format.source.document import DataPath

_INDEX_MEANING = "the index of a repeat"
_NEW_GROUP_MEANING = "a group of new_group"
#: Fields that torch takes as integers.
_INTEGER_FIELDS = {
    "dst": "a rank",
    "src": "a rank",
    "group_dst": "a group rank",
    "group_src": "a group rank",
    "assume_src": "a rank",
    "tag": "a tag",
    "input_splits": "rows",
    "output_splits": "rows",
}
_INT32_LIMIT = 2**31


class _NestedEntry(NamedTuple):
    entry: Entry
    indices: tuple[str, ...]  # names of the repeats around it


def _nested_entries(entries: Iterable[Entry], indices: tuple[str, ...]) -> Iterator[_NestedEntry]:
    """Every entry, at any depth, each before those inside it; parts of a batch are entries too."""
    for entry in entries:
        yield _NestedEntry(entry, indices)
        if isinstance(entry, ScenarioBlock):
            yield from _nested_entries(entry.steps, indices)
        elif isinstance(entry, ScenarioRepeat):
            inner = (*indices, entry.index) if entry.index else indices
            yield from _nested_entries(entry.steps, inner)
        elif type(entry.op).kind == "batch":
            yield from _nested_entries(getattr(entry.op, "ops", ()), indices)


class ProgramNameChecker:
    """Checks the entries of a program.

    First all entries add what they define (handles, groups, indices), then all uses are checked: a
    rank may reach them in another order than the file's.
    """

    def __init__(self, scope: NameScope) -> None:
        self.scope = scope
        self.problems = scope.problems

    def check(self, entries: tuple[Entry, ...]) -> None:
        """Report every wrong name in the entries."""
        for entry, _ in _nested_entries(entries, ()):
            self._define_names(entry)
        for entry, indices in _nested_entries(entries, (ITERATION_INDEX,)):
            self._check_entry(entry, list(indices))

    # --- definitions ---
    def _define_names(self, entry: Entry) -> None:
        if isinstance(entry, ScenarioRepeat):
            self._define_index(entry)
        elif isinstance(entry, ScenarioStep):
            if type(entry.op).op == "new_group" and not self._define_group(entry):
                return
            self._define_handle(entry)

    def _define_index(self, entry: ScenarioRepeat) -> None:
        """Several repeats may use the same index, unless they are nested (`_check_entry`)."""
        if entry.index is None or self.scope.meaning.get(entry.index) == _INDEX_MEANING:
            return
        self.scope.define(entry.index, _INDEX_MEANING, (*entry.path, "repeat", "index"))

    def _define_group(self, step: ScenarioStep) -> bool:
        """The group of a new_group step; False if it has no name, which the reader reports."""
        name = getattr(step.op, "name", None)
        if not isinstance(name, str):
            return False
        is_redefined = self.scope.meaning.get(name) == _NEW_GROUP_MEANING
        if name not in self.scope.groups or not is_redefined:
            self.scope.define(name, _NEW_GROUP_MEANING, self._field_path(step, "name"))
        self.scope.groups.add(name)
        return True

    def _define_handle(self, step: ScenarioStep) -> None:
        handle = getattr(step.op, "handle", None)
        if handle is None:
            return
        if handle.name == "all":
            self.problems.add(
                self._field_path(step, "as"),
                "`all` cannot be the name of a handle: `wait: all` waits for every open request",
            )
            return
        self.scope.handles.add(handle.name)

    # --- uses ---
    def _check_entry(self, entry: Entry, indices: list[str]) -> None:
        self.scope.selector(entry.ranks, entry.path, indices)
        if isinstance(entry, ScenarioRepeat):
            if isinstance(entry.index, str) and entry.index in indices:
                self.problems.add(
                    (*entry.path, "repeat", "index"),
                    f"{entry.index} is already the index of an enclosing repeat",
                )
            self._check_times(entry, indices)
        elif isinstance(entry, ScenarioStep):
            self._check_step(entry, indices)

    def _check_times(self, entry: ScenarioRepeat, indices: list[str]) -> None:
        path = (*entry.path, "repeat", "times")
        constants = self.scope.constants
        self.scope.field(entry.times, path, indices)
        for leaf_path, times in leaf_values(entry.times):
            # The reader has checked the counts that are plain numbers.
            if times.constant is not None or not times.names <= constants.keys():
                continue
            try:
                reason = repeat_count_error(times.evaluate(constants), 1)
            except ExpressionError as error:
                reason = str(error)
            if reason is not None:
                self.problems.add((*path, *leaf_path), reason)

    def _check_step(self, step: ScenarioStep, indices: list[str]) -> None:
        op = step.op
        row = type(op)
        local_names = list(indices)
        if getattr(op, "group", None) is not None:
            local_names += GROUP_NAMES
        values, given = op.__dict__, op.model_fields_set
        for name, key in fields_with_keys(row):
            value = values.get(name)
            if value is None or name not in given:
                continue
            if name == "ops":
                continue  # the parts of a batch are entries of the walk
            if name == "backend":
                self._check_backend(value, self._field_path(step, key))
                continue
            if name in _INTEGER_FIELDS:
                self._check_integers(name, value, self._field_path(step, key))
            if self._is_obviously_known(row, name, value, local_names):
                continue
            path = self._field_path(step, key)
            if name == "group":
                self._check_group(value, path)
            elif row.op == "assign" and name == "value":
                self._check_assigned_value(value, path, indices)
            else:
                self._check_field(row, name, value, path, local_names)

    def _check_backend(self, value: object, path: DataPath) -> None:
        """Check a backend name; torch also accepts one per device, as `cpu:gloo,cuda:nccl`."""
        if not isinstance(value, str):
            return  # the model reports this
        for part in value.split(","):
            backend = part.rpartition(":")[2].strip()
            if backend not in BACKEND_PROFILES:
                message = unknown_value_text(backend, BACKEND_PROFILES)
                self.problems.error(path, ValueError(message))

    def _is_obviously_known(
        self, row: type[Operation], name: str, value: Any, local_names: list[str]
    ) -> bool:
        """A quick answer for most fields, without paths of leaves; False means: look closely."""
        kind = type(value)
        if name == "group":
            return kind is str and value in self.scope.groups
        if kind is NameReference:
            index = value.index
            if index is not None and not self._knows_all(index.names, local_names):
                return False
            known = self.scope.handles if row.kind == "wait" else self.scope.tensors
            return name == "handle" or value.name in known
        if kind is tuple:
            return all(
                type(item) is NameReference
                and self._is_obviously_known(row, name, item, local_names)
                for item in value
            )
        if kind is Expression:
            if not value.names:
                return True
            # Quantities have units to check; the expressions of `assign` may name tensors.
            if self.scope.kinds or row.op == "assign":
                return False
            return self._knows_all(value.names, local_names)
        return kind in (str, int, float, bool)

    def _knows_all(self, names: Iterable[str], local_names: list[str]) -> bool:
        return all(name in self.scope.names or name in local_names for name in names)

    def _check_integers(self, name: str, value: object, path: DataPath) -> None:
        """Plain numbers must be what torch takes there: integers of 32 bits, no true or false."""
        for leaf_path, leaf in leaf_values(value):
            found = getattr(leaf, "constant", None)
            if found is None:
                continue
            if isinstance(found, bool) or found != int(found):
                self.problems.add(
                    (*path, *leaf_path),
                    f"expected {_INTEGER_FIELDS[name]}, an integer, found {value_text(found)}",
                )
            # Splits are counts; a negative one is a finding of the program (DS101, DS112).
            elif "splits" not in name and not -_INT32_LIMIT <= found < _INT32_LIMIT:
                self.problems.add(
                    (*path, *leaf_path),
                    f"{name}: expected a 32-bit integer, as in torch, found {int(found)}",
                )

    def _check_field(
        self, row: type[Operation], name: str, value: Any, path: DataPath, local_names: list[str]
    ) -> None:
        for leaf_path, leaf in leaf_values(value):
            full_path = (*path, *leaf_path)
            if isinstance(leaf, Expression):
                self.scope.expression(leaf, full_path, local_names)
                continue
            if row.kind == "wait":
                self._check_handle(leaf, full_path)
            elif name != "handle" and leaf.name not in self.scope.tensors:
                self.scope.report_unknown_tensor(full_path, leaf.name)
            if leaf.index is not None:
                shift = len(leaf.name) + 1  # the index follows the name and @
                self.scope.expression(leaf.index, full_path, local_names, shift=shift)

    def _check_handle(self, reference: NameReference, path: DataPath) -> None:
        name = reference.name
        if name in self.scope.handles or name == "all":
            return
        known = sorted(self.scope.handles)
        self.problems.add(
            path,
            f"unknown handle {name}: no call defines it with `as` "
            f"(known: {name_list(known)}){did_you_mean(name, known)}",
        )

    def _check_assigned_value(self, value: Any, path: DataPath, indices: list[str]) -> None:
        """The value of `assign` may also name tensors, which mean their elements."""
        scope = self.scope
        ambiguous = scope.tensors.keys() & {*scope.names, *RESERVED_NAMES}
        scope.field(value, path, [*indices, "index", *scope.tensors])
        for leaf_path, leaf in leaf_values(value):
            for name in sorted(leaf.names & ambiguous):
                other = scope.meaning.get(name, "another name")
                self.problems.add(
                    (*path, *leaf_path), f"{name} is a tensor and {other}; rename one of them"
                )

    def _check_group(self, value: str | tuple[str, ...], path: DataPath) -> None:
        if isinstance(value, str):
            if value not in self.scope.groups:
                known = sorted(self.scope.groups)
                self.problems.add(
                    path,
                    (
                        f"unknown group {value}; known groups: "
                        f"{name_list(known)}{did_you_mean(value, known)}"
                    ),
                )
            return
        for k, axis in enumerate(value):
            if axis not in self.scope.axes:
                self.problems.add((*path, k), self.scope.unknown_axis_message(axis))
        if len(set(value)) < len(value):
            self.problems.add(path, "the list contains an axis twice")

    def _field_path(self, step: ScenarioStep, key: str) -> DataPath:
        """Where a field is written: under its key; a lone scalar, under the operation's name."""
        value = self.problems.document.at(step.path)
        if not isinstance(value, Mapping):
            return step.path
        for name, fields in value.items():
            if name != "ranks":
                is_inside = isinstance(fields, Mapping) and key in fields
                return (*step.path, name, key) if is_inside else (*step.path, name)
        return step.path
