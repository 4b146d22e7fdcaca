"""One walk over a scenario's program for one class of ranks: blocks, repeats and selectors.

Key idea: a class is walked as a whole. Where a selector, a repeat count or a handle's index differs
between its ranks, `RankClassSplit` ends the walk. A selector that uses a loop index is the
exception: it stays with the call as a guard, because splitting for each round would leave classes
of single ranks (design §3, rule 3).

A repeat is walked round by round only until two rounds in a row are equal; the rest are copies.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple, cast

import numpy as np

from distsim.common.expressions import Expression
from distsim.program.code import BoolVector, CodeCall, IntVector, SharedCode
from distsim.program.rank_class import LoopIndices, RankClassSplit, RankClassState
from distsim.program.step_lowering import StepLowering
from distsim.program.symbol_table import SymbolTable
from distsim.scenario.format.models.entries import (
    ITERATION_INDEX,
    Entry,
    ScenarioBlock,
    ScenarioRepeat,
    ScenarioStep,
)


class RepeatRound(NamedTuple):
    """What one round of a repeat's body appended, and the handles that are open after it."""

    calls: list[CodeCall]
    guards: list[BoolVector | None]
    open: Hashable


class RankClassWalker:
    """Walks the program once, for the ranks of one class."""

    def __init__(self, names: SymbolTable, ranks: IntVector, max_calls: int) -> None:
        self.names = names
        self.max_calls = max_calls
        self.state = RankClassState(names, ranks)
        self.steps = StepLowering(self.state)

    def code(self) -> SharedCode:
        """The code of the class; raises RankClassSplit if its ranks need different codes."""
        scenario = self.names.scenario
        builder = self.state.builder
        starts = [0]
        self._rounds(scenario.iterations, scenario.program, ITERATION_INDEX, {}, None, starts)
        end = len(builder.calls)
        return builder.finish([*starts, end] if scenario.iterations > 1 else [0, end])

    # --- entries ---
    def _walk(
        self, entries: Iterable[Entry], indices: LoopIndices, guard: BoolVector | None
    ) -> None:
        for entry in entries:
            inner = guard
            if entry.ranks is not None:
                selected = self.state.selected_ranks(entry, indices, guard)
                if not selected.any():
                    continue
                if not selected.all():
                    inner = self._narrowed_guard(entry, selected, indices, guard)
            if isinstance(entry, ScenarioStep):
                self.steps.add(entry, indices, inner)
            elif isinstance(entry, ScenarioBlock):
                self._walk(entry.steps, indices, inner)
            else:
                self._repeat(entry, indices, inner)

    def _narrowed_guard(
        self,
        entry: Entry,
        selected: BoolVector,
        indices: LoopIndices,
        guard: BoolVector | None,
    ) -> BoolVector:
        """The guard inside an entry that selects some ranks of the class; splits it if it can."""
        if guard is not None and (selected == guard).all():
            return guard
        if isinstance(entry.ranks, Expression) and entry.ranks.names & indices.keys():
            return selected
        raise RankClassSplit(selected.astype(np.int64))

    # --- repeats ---
    def _repeat(
        self, entry: ScenarioRepeat, indices: LoopIndices, guard: BoolVector | None
    ) -> None:
        times = self.state.evaluate(entry.times, indices, guard, entry)
        if isinstance(times, np.ndarray):
            raise RankClassSplit(cast("IntVector", times))
        if isinstance(times, bool) or not isinstance(times, int):
            self.names.problem(entry, f"repeat: times must be an integer, found {times}")
        self._rounds(times, entry.steps, entry.index, indices, guard, None)

    def _rounds(
        self,
        times: int,
        steps: Iterable[Entry],
        index: str | None,
        indices: LoopIndices,
        guard: BoolVector | None,
        starts: list[int] | None,
    ) -> None:
        """Append ``times`` rounds of a body; ``starts`` collects the position of each later one.

        Once two rounds in a row have appended the same calls and left the same handles open, all
        further rounds do so too, and are copied.
        """
        calls = self.state.builder.calls
        rounds_may_be_equal = index is None or index not in self.state.names_in(steps)
        previous: RepeatRound | None = None
        for number in range(times):
            start = len(calls)
            if starts is not None and number:
                starts.append(start)
            self._walk(steps, {**indices, index: number} if index else indices, guard)
            size = len(calls) - start
            self._check_size(start + size * (times - number))
            if not rounds_may_be_equal:
                continue
            current = self._round_since(start)
            if current == previous:
                self._append_copies(current, times - number - 1, size, starts)
                return
            previous = current

    def _check_size(self, calls: int) -> None:
        """Refuse a program that will have so many calls on one rank."""
        if calls > self.max_calls:
            self.names.problem(
                ("program",),
                (
                    f"the program makes more than {self.max_calls:,} calls on one rank; use "
                    "fewer repetitions"
                ),
            )

    def _round_since(self, start: int) -> RepeatRound:
        builder = self.state.builder
        return RepeatRound(builder.calls[start:], builder.guards[start:], self._handles_at(start))

    def _handles_at(self, start: int) -> Hashable:
        """The handles after a round, in a form that is equal for equal rounds.

        A request of this round counts by its distance from the round's start, an older one by its
        position.
        """
        handles = self.state.handles
        opened: list[Hashable] = []
        for handle, position in handles.open.items():
            if position >= start:
                opened.append((handle, position - start))
            else:
                opened.append((handle, ("before", position)))
        return (tuple(opened), frozenset(handles.waited))

    def _append_copies(
        self, last: RepeatRound, count: int, size: int, starts: list[int] | None
    ) -> None:
        """Append ``count`` copies of the last round, which has ``size`` calls."""
        builder, handles = self.state.builder, self.state.handles
        end = len(builder.calls)
        if starts is not None:
            starts.extend(end + k * size for k in range(count))
        builder.calls += last.calls * count
        builder.guards += last.guards * count
        # Requests of the last round now belong to its last copy.
        shift = count * size
        for positions in (handles.open, handles.waited):
            for handle, position in positions.items():
                if position >= end - size:
                    positions[handle] = position + shift
