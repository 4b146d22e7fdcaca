"""Names: every name that a scenario uses must be known, and each has one meaning. Checked for all
ranks, reached or not.
"""

from __future__ import annotations

import keyword
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from distsim.common.expressions import Expression, ExpressionError
from distsim.common.message_text import did_you_mean, name_list, value_text
from distsim.common.quantities import QuantityExpression, QuantityKind, quantity_kind
from distsim.operations.core.field_types import InlineTensor, NameReference, PerRank
from distsim.operations.core.operation_base import Operation
from distsim.scenario.format.models.entries import (
    GROUP_NAMES,
    ITERATION_INDEX,
    RANK_NAMES,
    RESERVED_NAMES,
    VALUE_NAMES,
    Entry,
    ScenarioBlock,
    ScenarioRepeat,
    ScenarioStep,
    Selector,
)
from distsim.scenario.format.reading.step_reader import repeat_count_error
from distsim.scenario.format.source.document import DataPath, ProblemCollector

_INDEX_MEANING = "an index of a repeat"
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
#: Fields that take what they count with its unit as well.
_COUNT_FIELDS = {"bytes": "a size", "flops": "floating-point operations"}


@cache
def _fields_with_keys(row: type[Operation]) -> tuple[tuple[str, str], ...]:
    """Its fields, and what a file calls them."""
    return tuple((name, info.alias or name) for name, info in row.model_fields.items())


def leaf_values(value: Any, path: DataPath = ()) -> Iterator[tuple[DataPath, Any]]:
    """The expressions, references and inline tensors inside a field's value, each with the way to
    it.
    """
    if isinstance(value, PerRank):
        for rank, item in value.entries:
            yield from leaf_values(item, (*path, rank))
        yield from leaf_values(value.default, (*path, "else"))
    elif isinstance(value, tuple):
        for k, item in enumerate(value):
            yield from leaf_values(item, (*path, k))
    elif isinstance(value, InlineTensor):
        yield from leaf_values(value.shape, (*path, "shape"))
    elif isinstance(value, Expression | NameReference):
        yield path, value


class NameScope:
    """Checks names against what a scenario defines. ``axes``, ``groups``, ``tensors``: the names
    that could be read.
    """

    def __init__(
        self, problems: ProblemCollector, axes: Mapping[str, int], world_size: int | None
    ) -> None:
        self.problems = problems
        self.axes = dict(axes)
        self.groups: set[str] = {"world"}
        self.tensors: dict[str, object] = {}
        self.handles: set[str] = set()
        self.meaning: dict[str, str] = dict.fromkeys(RESERVED_NAMES, "a word of expressions")
        self.names: dict[str, None] = dict.fromkeys(RANK_NAMES)
        #: What is the same number on every rank.
        self.constants: dict[str, Any] = {} if world_size is None else {"world_size": world_size}
        #: The vars that are quantities, and what they measure.
        self.kinds: dict[str, QuantityKind] = {}
        #: What rank 0 sees.
        self.sample: dict[str, object] = {
            **dict.fromkeys(RANK_NAMES, 0),
            "world_size": world_size or 1,
        }

    # --- definitions ---
    def define(self, name: object, what: str, path: DataPath) -> None:
        """One name, one meaning."""
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            self.problems.add(
                path,
                f"expected a name made of letters, digits and _ for {what}, found {value_text(name)}",
                at_key=True,
            )
            return
        if name in self.meaning:
            self.problems.add(
                path,
                f"{name} is already {self.meaning[name]}; {what} needs another name",
                at_key=True,
            )
            return
        self.meaning[name] = what

    def define_axes(self) -> None:
        for axis, size in self.axes.items():
            self.define(axis, "an axis of the mesh", ("mesh", axis))
            self.define(f"{axis}_size", f"the size of the axis {axis}", ("mesh", axis))
            self.names |= dict.fromkeys((axis, f"{axis}_size"))
            self.constants[f"{axis}_size"] = size
            self.sample |= {axis: 0, f"{axis}_size": size}
            self.groups.add(axis)

    def define_vars(self, variables: Mapping[str, Expression]) -> None:
        """In order: a var may use those before it."""
        for name, value in variables.items():
            self.expression(value, ("vars", name), (), variables)
            self.define(name, "a var", ("vars", name))
            self.names[name] = None
            self.fold(name, value)
            with suppress(ExpressionError):  # noted where it stands
                if kind := quantity_kind(value, self.kinds):
                    self.kinds[name] = kind

    def fold(self, name: str, value: Expression) -> None:
        """A var's value, where it is the same on every rank, and rank 0's."""
        if value.names <= self.sample.keys():
            with suppress(ExpressionError):
                self.sample[name] = value.evaluate(self.sample)
        if value.names <= self.constants.keys():
            try:
                self.constants[name] = value.evaluate(self.constants)
            except ExpressionError as error:
                self.problems.add(("vars", name), str(error), offset=error.offset)

    def define_groups(self, groups: Mapping[str, Any], world_size: int | None) -> None:
        for name, group in groups.items():
            path: DataPath = ("groups", name)
            self.define(name, "a group", path)
            self.groups.add(name)
            for axis in group.axes or ():
                if axis not in self.axes:
                    self.problems.add(
                        (*path, "axes"),
                        f"unknown axis {axis}; the mesh has {name_list(self.axes)}{did_you_mean(axis, self.axes)}",
                    )
            if group.by is not None:
                self.expression(group.by, (*path, "by"))
            outside = [r for r in group.ranks or () if world_size is not None and r >= world_size]
            if outside:
                self.problems.add(
                    path,
                    f"rank {outside[0]} of the group {name} is outside the world of {world_size} ranks",
                )

    def define_tensors(self, tensors: Mapping[str, Any]) -> None:
        self.tensors = dict(tensors)
        for name, tensor in tensors.items():
            path: DataPath = ("tensors", name)
            if not isinstance(name, str) or not name.isidentifier():
                self.problems.add(
                    path,
                    f"expected a name made of letters, digits and _ for a tensor, found {value_text(name)}",
                    at_key=True,
                )
            if isinstance(tensor.shape, tuple):
                self.field(tensor.shape, (*path, "shape"))
            self.field(tensor.copies, (*path, "copies"))
            self.field(tensor.value, (*path, "value"), VALUE_NAMES)

    # --- uses ---
    def expression(
        self,
        value: Expression,
        path: DataPath,
        more: Collection[str] = (),
        later: Collection[str] = (),
    ) -> None:
        """Every name that an expression uses must be known here."""
        self._expression(value, path, 0, more, later)

    def _units(self, value: Expression, path: DataPath, shift: int) -> None:
        """Units fit each other, and what comes out is what the field takes."""
        try:
            if isinstance(value, QuantityExpression):
                return value.check(self.kinds)
            kind = quantity_kind(value, self.kinds)
        except ExpressionError as error:
            return self.problems.add(path, str(error), offset=shift + error.offset)
        counted = _COUNT_FIELDS.get(str(path[-1]), "a number")
        if kind not in (None, "", counted) and path[0] != "vars":
            self.problems.add(path, f"expected {counted}, but {value.text} is {kind}", offset=shift)

    def _expression(
        self,
        value: Expression,
        path: DataPath,
        shift: int,
        more: Collection[str],
        later: Collection[str] = (),
    ) -> None:
        if isinstance(value, QuantityExpression) or self.kinds:
            self._units(value, path, shift)
        for name, offset in value.offsets:
            if name in self.names or name in more:
                continue
            if name in later:
                message = f"the var {name} is defined further down; vars are evaluated in order"
            elif name in GROUP_NAMES:
                message = f"{name} is known beside a `group:` only"
            elif name in VALUE_NAMES:
                message = f"{name} is known in `value:` only"
            else:
                words = dict.fromkeys((*self.names, *more))
                message = f"unknown name {name} in an expression; known here are {name_list(words, 20)}{did_you_mean(name, words)}"
            self.problems.add(path, message, offset=shift + offset)

    def field(self, value: Any, path: DataPath, more: Collection[str] = ()) -> None:
        """The names of all expressions inside a field's value."""
        for way, leaf in leaf_values(value):
            if isinstance(leaf, Expression):
                self._expression(leaf, (*path, *way), 0, more)

    def selector(self, ranks: Selector, path: DataPath, more: list[str]) -> None:
        """A condition's names must be known, and rank 0 must get true or false from it (lowering
        asks the other ranks).
        """
        if not isinstance(ranks, Expression):
            return
        where = (*path, "ranks")
        self.expression(ranks, where, more)
        if ranks.constant is not None and not isinstance(ranks.constant, bool):
            self.problems.add(
                where,
                f"`ranks: {ranks.text}` in quotes is a number, not true or false; name a rank without quotes",
            )
        elif all(name in self.sample or name in more for name in ranks.names):
            with suppress(ExpressionError):
                if not isinstance(
                    ranks.evaluate({name: self.sample.get(name, 0) for name in ranks.names}), bool
                ):
                    example = (
                        f"`{ranks.text} == 0`" if ranks.text.isidentifier() else "`stage == 0`"
                    )
                    message = f"a condition must be true or false, and {ranks.text} is a number; write {example} or the like"
                    self.problems.add(where, message)

    def entries(self, entries: tuple[Entry, ...]) -> None:
        """Check the program: first gather what its steps define, then look at every use."""
        for entry, _ in _walk_entries(entries, ()):
            self._gather(entry)
        for entry, index in _walk_entries(entries, (ITERATION_INDEX,)):
            self._use(entry, list(index))

    def _gather(self, entry: Entry) -> None:
        if (
            isinstance(entry, ScenarioRepeat)
            and entry.index is not None
            and self.meaning.get(entry.index) != _INDEX_MEANING
        ):
            self.define(entry.index, _INDEX_MEANING, (*entry.path, "repeat", "index"))
        if not isinstance(entry, ScenarioStep):
            return
        row = type(entry.op)
        if row.op == "new_group":
            name = getattr(entry.op, "name", None)
            if not isinstance(name, str):
                return  # a problem of its own
            if name not in self.groups or self.meaning.get(name) != "a group of new_group":
                self.define(name, "a group of new_group", self._field_path(entry, "name"))
            self.groups.add(name)
        handle = getattr(entry.op, "handle", None)
        if handle is not None:
            if handle.name == "all":
                self.problems.add(
                    self._field_path(entry, "as"),
                    "`all` is no handle: `wait: all` waits for every open one",
                )
                return
            self.handles.add(handle.name)

    def _use(self, entry: Entry, index: list[str]) -> None:
        self.selector(entry.ranks, entry.path, index)
        if isinstance(entry, ScenarioRepeat):
            if isinstance(entry.index, str) and entry.index in index:
                self.problems.add(
                    (*entry.path, "repeat", "index"),
                    f"{entry.index} is already the index of a repeat around this one",
                )
            self._times(entry, index)
        elif isinstance(entry, ScenarioStep):
            self._step(entry, index)

    def _times(self, entry: ScenarioRepeat, index: list[str]) -> None:
        path = (*entry.path, "repeat", "times")
        self.field(entry.times, path, index)
        for way, times in leaf_values(entry.times):
            if times.constant is None and times.names <= self.constants.keys():
                try:
                    reason = repeat_count_error(times.evaluate(self.constants), 1)
                except ExpressionError as error:
                    reason = str(error)
                if reason is not None:
                    self.problems.add((*path, *way), reason)

    def _step(self, step: ScenarioStep, index: list[str]) -> None:
        op = step.op
        row = type(op)
        more = [*index, *(GROUP_NAMES if getattr(op, "group", None) is not None else ())]
        values, given = op.__dict__, op.model_fields_set
        for name, key in _fields_with_keys(row):
            value = values.get(name)
            if value is None or name not in given or name == "ops":
                continue  # the steps of a batch are entries of the walk
            if name in _INTEGER_FIELDS:
                self._constants(name, value, self._field_path(step, key))
            if self._plainly_known(row, name, value, more):
                continue
            if name == "group":
                self._group(value, self._field_path(step, key))
            elif row.op == "assign" and name == "value":
                self._assigned(value, self._field_path(step, key), index)
            else:
                self._uses(row, name, value, self._field_path(step, key), more)

    def _plainly_known(self, row: type[Operation], name: str, value: Any, more: list[str]) -> bool:
        """The quick answer for most fields; False means: look closely."""
        kind = type(value)
        if name == "group":
            return kind is str and value in self.groups
        if kind is NameReference:
            if value.index is not None and not all(
                n in self.names or n in more for n in value.index.names
            ):
                return False
            return (
                value.name in (self.handles if row.kind == "wait" else self.tensors)
                or name == "handle"
            )
        if kind is tuple:
            return all(
                type(one) is NameReference and self._plainly_known(row, name, one, more)
                for one in value
            )
        if kind is Expression:
            return not value.names or (
                not self.kinds
                and row.op != "assign"
                and all(n in self.names or n in more for n in value.names)
            )
        return kind in (str, int, float, bool)

    def _constants(self, name: str, value: object, path: DataPath) -> None:
        """Plain numbers are what torch takes there: integers within 32 bits, no true or false."""
        for way, leaf in leaf_values(value):
            found = getattr(leaf, "constant", None)
            if found is None:
                continue
            if isinstance(found, bool) or found != int(found):
                self.problems.add(
                    (*path, *way),
                    f"expected {_INTEGER_FIELDS[name]}, an integer, found {value_text(found)}",
                )
            elif (
                "splits" not in name and not -(2**31) <= found < 2**31
            ):  # a negative one is a finding (DS101, DS112)
                self.problems.add(
                    (*path, *way),
                    f"{name}: expected an integer of 32 bits, as torch takes it, found {int(found)}",
                )

    def _uses(
        self, row: type[Operation], name: str, value: Any, path: DataPath, more: list[str]
    ) -> None:
        for way, leaf in leaf_values(value):
            where = (*path, *way)
            if isinstance(leaf, Expression):
                self._expression(leaf, where, 0, more)
                continue
            if row.kind == "wait":
                if leaf.name not in self.handles and leaf.name != "all":
                    known_ones = sorted(self.handles)
                    hint = f"(known: {name_list(known_ones)}){did_you_mean(leaf.name, known_ones)}"
                    self.problems.add(
                        where, f"unknown handle {leaf.name}: no step binds it with `as` {hint}"
                    )
            elif name != "handle" and leaf.name not in self.tensors:
                message = f"unknown tensor {leaf.name}; declared are {name_list(self.tensors)}{did_you_mean(leaf.name, self.tensors)}"
                self.problems.add(where, message)
            if leaf.index is not None:
                self._expression(leaf.index, where, len(leaf.name) + 1, more)

    def _assigned(self, value: Any, path: DataPath, index: list[str]) -> None:
        """`assign`'s value may also name tensors, whose elements it stands for."""
        both = [name for name in self.tensors if name in self.names or name in RESERVED_NAMES]
        self.field(value, path, [*index, "index", *self.tensors])
        for way, leaf in leaf_values(value):
            for name in sorted(leaf.names & set(both)):
                self.problems.add(
                    (*path, *way),
                    f"{name} is a tensor and {self.meaning.get(name, 'another name')}; rename one of them",
                )

    def _group(self, value: str | tuple[str, ...], path: DataPath) -> None:
        known = sorted(self.groups)
        if isinstance(value, str):
            if value not in self.groups:
                message = f"unknown group {value}; there are {name_list(known)}{did_you_mean(value, known)}"
                self.problems.add(path, message)
            return
        for k, axis in enumerate(value):
            if axis not in self.axes:
                message = f"unknown axis {axis}; the mesh has {name_list(self.axes)}{did_you_mean(axis, self.axes)}"
                self.problems.add((*path, k), message)
        if len(set(value)) < len(value):
            self.problems.add(path, "an axis stands here twice")

    def _field_path(self, step: ScenarioStep, key: str) -> DataPath:
        """Where a field is written: under its name, or, for a lone scalar, under the
        operation's.
        """
        value = self.problems.document.at(step.path)
        if not isinstance(value, Mapping):
            return step.path
        for name, fields in value.items():
            if name != "ranks":
                inside = isinstance(fields, Mapping) and key in fields
                return (*step.path, name, key) if inside else (*step.path, name)
        return step.path


def _walk_entries(
    entries: Iterable[Entry], index: tuple[str, ...]
) -> Iterator[tuple[Entry, tuple[str, ...]]]:
    """Every entry, with the indices of the repeats around it."""
    for entry in entries:
        yield entry, index
        if isinstance(entry, ScenarioBlock):
            yield from _walk_entries(entry.steps, index)
        elif isinstance(entry, ScenarioRepeat):
            yield from _walk_entries(entry.steps, (*index, entry.index) if entry.index else index)
        elif type(entry.op).kind == "batch":
            yield from _walk_entries(getattr(entry.op, "ops", ()), index)
