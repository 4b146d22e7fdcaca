"""The names that a scenario defines: each name that is used must be known, and has one meaning.

`NameScope` collects the definitions, in the order in which a file may use them, and checks single
expressions and selectors. The steps of a program are checked by
`distsim.scenario.format.reading.program_names`.

Names are checked whether a rank reaches them or not. Values are not checked here, except where one
evaluation (for rank 0, or of constants) shows a mistake at once; lowering evaluates all ranks.
"""

from __future__ import annotations

import keyword
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from distsim.common.expressions import Expression, ExpressionError
from distsim.common.message_text import did_you_mean, name_list, value_text
from distsim.common.quantities import QuantityExpression, QuantityKind, quantity_kind
from distsim.operations.core.field_types import InlineTensor, NameReference, PerRank
from distsim.operations.core.kernel_work import KernelWorkEntry
from distsim.scenario.format.models.entries import (
    GROUP_NAMES,
    RANK_NAMES,
    RESERVED_NAMES,
    VALUE_NAMES,
    Selector,
)
from distsim.scenario.format.source.document import DataPath
from distsim.scenario.format.source.problems import ProblemCollector

#: Fields that accept the quantity that they count, as well as a plain number.
_COUNT_FIELDS = {"bytes": "a size", "flops": "floating-point operations"}


def leaf_values(value: Any, path: DataPath = ()) -> Iterator[tuple[DataPath, Any]]:
    """The expressions, references and inline tensors inside a field's value, each with its path."""
    if isinstance(value, PerRank):
        for rank, item in value.entries:
            yield from leaf_values(item, (*path, rank))
        yield from leaf_values(value.default, (*path, "else"))
    elif isinstance(value, tuple):
        for k, item in enumerate(value):
            yield from leaf_values(item, (*path, k))
    elif isinstance(value, InlineTensor):
        yield from leaf_values(value.shape, (*path, "shape"))
    elif isinstance(value, KernelWorkEntry):
        yield from leaf_values(value.flops, (*path, "flops"))
        yield from leaf_values(value.nbytes, (*path, "bytes"))
    elif isinstance(value, Expression | NameReference):
        yield path, value


class NameScope:
    """The names that a scenario defines, and checks of expressions against them.

    ``axes``, ``groups``, ``tensors`` and ``handles`` hold all names of their kind. This includes
    names whose declaration cannot be read, so that the use of such a name is not reported as a
    second mistake.
    """

    def __init__(
        self, problems: ProblemCollector, axes: Mapping[str, int], world_size: int | None
    ) -> None:
        self.problems = problems
        self.axes = dict(axes)
        self.groups: set[str] = {"world"}
        self.tensors: dict[str, object] = {}
        self.handles: set[str] = set()
        self._undeclared_tensors: set[str] = set()
        #: By name, its one meaning, as messages word it.
        self.meaning: dict[str, str] = dict.fromkeys(
            RESERVED_NAMES, ("a built-in name of expressions")
        )
        #: The names that every expression of the program may use, in the order of definition.
        self.names: dict[str, None] = dict.fromkeys(RANK_NAMES)
        #: Values that are the same on every rank.
        self.constants: dict[str, Any] = {} if world_size is None else {"world_size": world_size}
        #: The vars that are quantities, and what they measure.
        self.kinds: dict[str, QuantityKind] = {}
        #: The values on rank 0.
        self.sample: dict[str, object] = {
            **dict.fromkeys(RANK_NAMES, 0),
            "world_size": world_size or 1,
        }

    # --- definitions ---
    def define(self, name: object, what: str, path: DataPath) -> None:
        """Give a name its one meaning."""
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            message = (
                f"expected a name made of letters, digits and _ for {what}, "
                f"found {value_text(name)}"
            )
            self.problems.add(path, message, at_key=True)
        elif name in self.meaning:
            message = f"{name} is already {self.meaning[name]}; {what} needs another name"
            self.problems.add(path, message, at_key=True)
        else:
            self.meaning[name] = what

    def define_axes(self) -> None:
        """Define the axes of the mesh and their sizes."""
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
            self.expression(value, ("vars", name), later=variables)
            self.define(name, "a var", ("vars", name))
            self.names[name] = None
            self._evaluate_var(name, value)
            with suppress(ExpressionError):  # `expression` has reported it
                kind = quantity_kind(value, self.kinds)
                if kind:
                    self.kinds[name] = kind

    def _evaluate_var(self, name: str, value: Expression) -> None:
        """Note a var's value on rank 0, and its constant value, as far as they are known."""
        if value.names <= self.sample.keys():
            with suppress(ExpressionError):
                self.sample[name] = value.evaluate(self.sample)
        if value.names <= self.constants.keys():
            try:
                self.constants[name] = value.evaluate(self.constants)
            except ExpressionError as error:
                self.problems.add(("vars", name), str(error), offset=error.offset)

    def define_groups(self, groups: Mapping[str, Any], world_size: int | None) -> None:
        """Define the names of groups, and check their ranks."""
        for name, group in groups.items():
            path: DataPath = ("groups", name)
            self.define(name, "a group", path)
            self.groups.add(name)
            for axis in group.axes or ():
                if axis not in self.axes:
                    self.problems.add((*path, "axes"), self.unknown_axis_message(axis))
            if group.by is not None:
                self.expression(group.by, (*path, "by"))
            if world_size is None:
                continue
            outside = [rank for rank in group.ranks or () if rank >= world_size]
            if outside:
                self.problems.add(
                    path,
                    f"rank {outside[0]} of the group {name} is outside the world "
                    f"of {world_size} ranks",
                )

    def define_tensors(self, tensors: Mapping[str, Any]) -> None:
        """Define the names of tensors."""
        self.tensors = dict(tensors)
        for name, tensor in tensors.items():
            path: DataPath = ("tensors", name)
            if not isinstance(name, str) or not name.isidentifier():
                self.problems.add(
                    path,
                    "expected a name made of letters, digits and _ for a tensor, "
                    f"found {value_text(name)}",
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
        local_names: Collection[str] = (),
        later: Collection[str] = (),
        shift: int = 0,
    ) -> None:
        """Every name that an expression uses must be known.

        ``local_names``: names that are known only here, such as loop indices. ``later``: vars that
        are defined further down. ``shift``: offset of the expression in its text.
        """
        if isinstance(value, QuantityExpression) or self.kinds:
            self._check_units(value, path, shift)
        for name, offset in value.offsets:
            if name not in self.names and name not in local_names:
                message = self._unknown_name_message(name, local_names, later)
                self.problems.add(path, message, offset=shift + offset)

    def _check_units(self, value: Expression, path: DataPath, shift: int) -> None:
        """Units must fit each other, and the result must be what the field takes."""
        try:
            if isinstance(value, QuantityExpression):
                value.check(self.kinds)
                return
            kind = quantity_kind(value, self.kinds)
        except ExpressionError as error:
            self.problems.add(path, str(error), offset=shift + error.offset)
            return
        counted = _COUNT_FIELDS.get(str(path[-1]), "a number")
        if kind not in (None, "", counted) and path[0] != "vars":
            self.problems.add(path, f"expected {counted}, but {value.text} is {kind}", offset=shift)

    def _unknown_name_message(
        self, name: str, local_names: Collection[str], later: Collection[str]
    ) -> str:
        if name in later:
            return f"the variable {name} is defined further down; variables are evaluated in order"
        if name in GROUP_NAMES:
            return f"{name} is only available in a step with `group:`"
        if name in VALUE_NAMES:
            return f"{name} is only available in `value:`"
        known = dict.fromkeys((*self.names, *local_names))
        return (
            f"unknown name {name} in an expression; available names: "
            f"{name_list(known, 20)}{did_you_mean(name, known)}"
        )

    def field(self, value: Any, path: DataPath, local_names: Collection[str] = ()) -> None:
        """Check the names of all expressions inside a field's value."""
        for leaf_path, leaf in leaf_values(value):
            if isinstance(leaf, Expression):
                self.expression(leaf, (*path, *leaf_path), local_names)

    def selector(self, ranks: Selector, path: DataPath, local_names: Collection[str] = ()) -> None:
        """Listed ranks must be in the world; a condition must be true or false for rank 0.

        All names of a condition must be known. Lowering checks it for the other ranks.
        """
        selector_path = (*path, "ranks")
        if ranks is None:
            return
        if not isinstance(ranks, Expression):
            self.ranks_in_world(ranks, selector_path)
            return
        self.expression(ranks, selector_path, local_names)
        if ranks.constant is not None and not isinstance(ranks.constant, bool):
            self.problems.add(
                selector_path,
                (
                    f"`ranks: {ranks.text}` in quotes is a number, not a condition; write a rank "
                    "without quotes"
                ),
            )
            return
        if not all(name in self.sample or name in local_names for name in ranks.names):
            return
        # Any value of a loop index will do: only the type of the result matters.
        bindings = {name: self.sample.get(name, 0) for name in ranks.names}
        with suppress(ExpressionError):
            if not isinstance(ranks.evaluate(bindings), bool):
                is_name = ranks.text.isidentifier()
                example = f"`{ranks.text} == 0`" if is_name else "`stage == 0`"
                self.problems.add(
                    selector_path,
                    (
                        f"a condition must be true or false, but {ranks.text} is a number; write "
                        f"for example {example}"
                    ),
                )

    def ranks_in_world(self, ranks: Iterable[int], path: DataPath) -> None:
        """Every rank that the file names must be in the world."""
        world_size = self.constants.get("world_size")
        if world_size is None:
            return
        outside = [rank for rank in ranks if rank >= world_size]
        if outside:
            self.problems.add(
                path,
                f"rank {outside[0]} is outside the world of {world_size} ranks "
                f"(0 to {world_size - 1})",
            )

    # --- messages ---
    def unknown_axis_message(self, axis: str) -> str:
        """The message for an axis that the mesh does not have."""
        known = f"axes of the mesh: {name_list(self.axes)}"
        return f"unknown axis {axis}; {known}{did_you_mean(axis, self.axes)}"

    def report_unknown_tensor(self, path: DataPath, name: str, *, at_key: bool = False) -> None:
        """Report the use of a tensor that is not declared.

        If the name resembles a declared one, each use is a mistake of its own. Otherwise the
        declaration is missing, which is reported once.
        """
        advice = did_you_mean(name, self.tensors)
        if not advice and name in self._undeclared_tensors:
            return
        self._undeclared_tensors.add(name)
        known = f"declared tensors: {name_list(self.tensors)}"
        self.problems.add(path, f"unknown tensor {name}; {known}{advice}", at_key=at_key)
