"""The state of lowering one class of ranks: its code so far, open handles, and values of names.

A class is a set of ranks that are lowered together, as long as they make the same calls. Where they
turn out to differ, `RankClassSplit` ends the walk, and each part is walked again as a separate
class.

The state is shared by the walk over the entries (`distsim.program.class_walker`) and the lowering
of single steps (`distsim.program.step_lowering`); it knows neither.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import cast

import numpy as np

from distsim.common.expressions import Expression
from distsim.operations.core.field_types import PerRank
from distsim.program.assemble import CodeBuilder
from distsim.program.call_builder import OpenHandles
from distsim.program.code import (
    BoolVector,
    FieldValue,
    IntVector,
    NameBindings,
    RankValues,
    collapse_uniform,
)
from distsim.program.step_traits import names_in_entries
from distsim.program.symbol_table import SymbolTable, bindings_for_rows
from distsim.scenario.format.models.entries import Entry

#: The values of the loop indices around an entry, by name.
LoopIndices = dict[str, int]


class RankClassSplit(Exception):
    """The ranks of a class do not make the same calls; only ranks with equal ``labels`` may."""

    def __init__(self, labels: IntVector) -> None:
        super().__init__(labels)
        self.labels = labels


class RankClassState:
    """What one walk over the program has built for the ranks of one class.

    Vectors are over ``ranks``. A *guard* is a mask over them: the ranks that reach an entry (None:
    all of them).
    """

    def __init__(self, names: SymbolTable, ranks: IntVector) -> None:
        self.names = names
        self.ranks = ranks
        self.builder = CodeBuilder(names.tables, ranks.tolist())
        self.handles = OpenHandles()
        self._bindings: dict[str, RankValues] = {
            name: collapse_uniform(value)
            for name, value in bindings_for_rows(names.world, ranks).items()
        }
        self._selected: dict[Hashable, BoolVector] = {}
        #: By id of an expression without loop indices: the expression, and its value.
        self._loop_invariant: dict[int, tuple[Expression, RankValues]] = {}

    # --- selectors ---
    def selected_ranks(
        self, entry: Entry, indices: LoopIndices, guard: BoolVector | None
    ) -> BoolVector:
        """The ranks that both the selector and the guard admit."""
        used = used_indices(entry.ranks, indices)
        key = (id(entry), used, None if guard is None else guard.tobytes())
        if key not in self._selected:
            if guard is None:
                mask = self.names.selected(entry, self.ranks, indices)
            else:
                mask = np.zeros(len(self.ranks), dtype=np.bool_)
                mask[guard] = self.names.selected(entry, self.ranks[guard], indices)
            self._selected[key] = mask
        return self._selected[key]

    # --- expressions ---
    def evaluate(
        self,
        value: FieldValue,
        indices: LoopIndices,
        guard: BoolVector | None,
        place: Entry,
        group_names: NameBindings | None = None,
    ) -> RankValues:
        """The value for the class's ranks; 0 for ranks that the guard excludes.

        ``group_names``: the values of group_rank and group_size, if the value uses them. This is
        called for each field of each step in each round of its loops, hence the early returns.
        """
        if isinstance(value, Expression):
            if value.constant is not None:
                return value.constant
            if guard is None and not group_names:
                if value.names.isdisjoint(indices):
                    return self._loop_invariant_value(value, place)
                if value.names <= indices.keys():
                    return self.names.indexed(value, indices, place)
        elif not isinstance(value, PerRank):
            return value
        bindings = self._bindings_for(value, {**indices, **(group_names or {})})
        if guard is None:
            return self.names.evaluate(value, bindings, place, self.ranks)
        inside = self.names.evaluate(
            value, bindings_for_rows(bindings, guard), place, self.ranks[guard]
        )
        if not isinstance(inside, np.ndarray):
            return inside
        full = np.zeros(len(self.ranks), dtype=inside.dtype)
        full[guard] = inside
        return cast("RankValues", full)

    def _loop_invariant_value(self, value: Expression, place: Entry) -> RankValues:
        known = self._loop_invariant.get(id(value))
        if known is None:
            found = self.names.evaluate(value, self._bindings_for(value, {}), place, self.ranks)
            known = self._loop_invariant[id(value)] = (value, found)
        return known[1]

    def _bindings_for(
        self, value: Expression | PerRank[object], local: NameBindings
    ) -> NameBindings:
        """The names that a value's expressions can see; ``local`` ones hide those of the world."""
        if not isinstance(value, Expression):
            return {**self._bindings, **local}
        # Of the many names of a world an expression uses few.
        bindings = {name: self._bindings[name] for name in value.names if name in self._bindings}
        bindings |= {name: local[name] for name in value.names if name in local}
        return bindings

    def names_in(self, entries: Iterable[Entry]) -> frozenset[str]:
        """All names that expressions in these entries use."""
        return names_in_entries(entries, self.names.used)


def used_indices(selector: object, indices: LoopIndices) -> tuple[tuple[str, int], ...]:
    """The loop indices that a selector uses, with their values."""
    if not indices or not isinstance(selector, Expression):
        return ()
    return tuple((name, value) for name, value in indices.items() if name in selector.names)
