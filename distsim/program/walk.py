"""Walks a scenario's entries for one class of ranks and lays their calls out."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple, cast

import numpy as np

from distsim.expr import Expression
from distsim.ops.fields import PerRank
from distsim.program.assemble import CodeBuilder
from distsim.program.drafts import Handles
from distsim.program.memo import names_in
from distsim.program.names import Names
from distsim.program.records import BoolVector, Code, CodeCall, Env, IntVector, Numbers, Written, narrow
from distsim.program.steps import StepLowering
from distsim.scenario.entries import Block, Entry, Repeat, Step
from distsim.scenario.model import Scenario
from distsim.scenario.scope import ITERATION


class Split(Exception):
    """The class is no class: ``labels`` (one per rank) tells its parts apart."""

    def __init__(self, labels: IntVector) -> None:
        super().__init__(labels)
        self.labels = labels


class Round(NamedTuple):
    """What one round of a body laid out: its calls, who makes them, and the handles that are open after it."""

    calls: list[CodeCall]
    guards: list[BoolVector | None]
    open: tuple[Hashable, ...]


class Walker:
    """One walk over the program for the ranks of one class."""

    def __init__(self, scenario: Scenario, names: Names, ranks: IntVector) -> None:
        self.scenario, self.names, self.ranks = scenario, names, ranks
        self.builder = CodeBuilder(names.shelf, ranks.tolist())
        self.handles = Handles()
        self.env = {name: narrow(v[ranks]) if isinstance(v, np.ndarray) else v for name, v in names.world.items()}
        self.steps = StepLowering(self)
        self.limit = 0
        self._selected: dict[Hashable, BoolVector] = {}
        self._steady: dict[int, tuple[Expression, Numbers]] = {}  # by id: expressions of what no loop changes, with their values

    def code(self, limit: int) -> Code:
        self.limit = limit
        starts = [0]
        try:
            self._times(self.scenario.iterations, self.scenario.program, ITERATION, {}, None, starts)
        finally:
            del self.steps  # they lead back here: while nobody collects, all that they keep would stay
        starts.append(len(self.builder.calls))
        return self.builder.finish(starts if self.scenario.iterations > 1 else (0, len(self.builder.calls)))

    # --- entries ---
    def walk(self, entries: Iterable[Entry], indices: dict[str, int], guard: BoolVector | None) -> None:
        for entry in entries:
            inner = guard
            if entry.ranks is not None:
                mask = self._mask(entry, indices, guard)
                if not mask.any():
                    continue
                if not mask.all():
                    inner = self._guard(entry, mask, indices, guard)
            if isinstance(entry, Step):
                self.steps.add(entry, indices, inner)
            elif isinstance(entry, Block):
                self.walk(entry.steps, indices, inner)
            else:
                self._repeat(entry, indices, inner)

    def _mask(self, entry: Entry, indices: dict[str, int], guard: BoolVector | None) -> BoolVector:
        """Which ranks the selector admits, of those that the guard admits."""
        used = self._used_indices(entry.ranks, indices)
        key = (id(entry), used, None if guard is None else guard.tobytes())
        if key not in self._selected:
            if guard is None:
                self._selected[key] = self.names.selected(entry, self.ranks, indices)
            else:
                mask = np.zeros(len(self.ranks), dtype=np.bool_)
                mask[guard] = self.names.selected(entry, self.ranks[guard], indices)
                self._selected[key] = mask
        return self._selected[key]

    def _guard(self, entry: Entry, mask: BoolVector, indices: dict[str, int], guard: BoolVector | None) -> BoolVector | None:
        if guard is not None and (mask == guard).all():
            return guard
        if isinstance(entry.ranks, Expression) and entry.ranks.names & indices.keys():
            return mask
        raise Split(mask.astype(np.int64))

    def _used_indices(self, selector: object, indices: dict[str, int]) -> tuple[tuple[str, int], ...]:
        if not indices or not isinstance(selector, Expression):
            return ()
        return tuple((name, value) for name, value in indices.items() if name in selector.names)

    # --- repeats ---
    def _repeat(self, entry: Repeat, indices: dict[str, int], guard: BoolVector | None) -> None:
        times = self.evaluate(entry.times, indices, guard, entry)
        if isinstance(times, np.ndarray):
            raise Split(cast("IntVector", times))
        if isinstance(times, bool) or not isinstance(times, int):
            self.names.problem(entry, f"repeat: times must be an integer, found {times}")
        self._times(times, entry.steps, entry.index, indices, guard, None)

    def _times(self, times: int, steps: Iterable[Entry], index: str | None, indices: dict[str, int], guard: BoolVector | None,
               starts: list[int] | None) -> None:  # fmt: skip
        """Lay a body out `times` times.

        Once two rounds in a row gave the same calls and left the same open handles, the rest is copied.
        """
        steady = index is None or index not in self.names_in(steps)
        before: Round | None = None
        for i in range(times):
            start = len(self.builder.calls)
            if starts is not None and i:
                starts.append(start)
            self.walk(steps, {**indices, index: i} if index else indices, guard)
            size = len(self.builder.calls) - start
            if start + size * (times - i) > self.limit:
                self.names.problem(
                    ("program",), f"the program makes more than {self.limit:,} calls on one rank; repeat less often"
                )
            state = Round(self.builder.calls[start:], self.builder.guards[start:], self._open(start)) if steady else None
            if state is not None and state == before:
                self._copy(state, times - i - 1, size, starts)
                return
            before = state

    def _open(self, start: int) -> tuple[Hashable, ...]:
        """The open handles: those of this round by their distance from its start, older ones as they are."""
        opened = {h: p - start if p >= start else ("before", p) for h, p in self.handles.open.items()}
        return (tuple(opened.items()), frozenset(self.handles.spent))

    def _copy(self, state: Round, rounds: int, size: int, starts: list[int] | None) -> None:
        start = len(self.builder.calls)
        if starts is not None:
            starts.extend(start + k * size for k in range(rounds))
        self.builder.calls += state.calls * rounds
        self.builder.guards += state.guards * rounds
        shift = rounds * size
        for handle, position in self.handles.open.items():
            if position >= start - size:
                self.handles.open[handle] = position + shift
        for handle, position in self.handles.spent.items():
            if position >= start - size:
                self.handles.spent[handle] = position + shift

    # --- expressions ---
    def evaluate(
        self, value: Written, indices: dict[str, int], guard: BoolVector | None, place: Entry, more: Env | None = None
    ) -> Numbers:
        """The value for the class's ranks; where a guard shuts ranks out, theirs is 0."""
        if isinstance(value, Expression):
            if value.constant is not None:
                return value.constant
        elif not isinstance(value, PerRank):
            return value
        if guard is None and not more and isinstance(value, Expression) and value.names.isdisjoint(indices):
            if id(value) not in self._steady:
                self._steady[id(value)] = (value, self.names.evaluate(value, self._seen(value, {}), place, self.ranks))
            return self._steady[id(value)][1]
        if guard is None and not more and isinstance(value, Expression) and value.names <= indices.keys():
            return self.names.indexed(value, indices, place)
        env = self._seen(value, {**indices, **(more or {})})
        if guard is None:
            return self.names.evaluate(value, env, place, self.ranks)
        env = {k: v[guard] if isinstance(v, np.ndarray) else v for k, v in env.items()}
        inside = self.names.evaluate(value, env, place, self.ranks[guard])
        if not isinstance(inside, np.ndarray):
            return inside
        full = np.zeros(len(self.ranks), dtype=inside.dtype)
        full[guard] = inside
        return cast("Numbers", full)

    def _seen(self, value: Expression | PerRank[object], more: Env) -> Env:
        """What a value's expressions can see, of many names no more than they use."""
        if isinstance(value, Expression):
            return {
                name: more[name] if name in more else self.env[name] for name in value.names if name in more or name in self.env
            }
        return {**self.env, **more}

    def names_in(self, entries: Iterable[Entry]) -> frozenset[str]:
        """All names that expressions in these entries use."""
        return names_in(entries, self.names.used)
