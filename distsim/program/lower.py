"""Scenario → Program: names resolved, blocks and repeats laid out, each class of ranks given its
code.

A class is walked as a whole: every expression is evaluated once for all its ranks. Where a
selector, a repeat count or a handle's index differs inside the class, the class is split and walked
again, so that in the end all ranks of a class run the same list of calls. A selector that uses a
loop index stays a guard of the call instead (design §3, rule 3).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple, cast

import numpy as np

from distsim.common.arrays import dense_row_ids, sorted_unique
from distsim.common.errors import ScenarioErrors, ScenarioProblem
from distsim.common.expressions import Expression
from distsim.findings.finding_types import Finding, SourceLocation
from distsim.operations.core.field_types import PerRank
from distsim.program.assemble import CodeBuilder, ProgramTables
from distsim.program.call_builder import OpenHandles
from distsim.program.code import (
    BoolVector,
    CodeCall,
    FieldValue,
    IntVector,
    LinkFault,
    NameBindings,
    Program,
    RankFault,
    RankValues,
    SharedCode,
    TensorSpec,
    collapse_uniform,
)
from distsim.program.memo_keys import names_in_entries
from distsim.program.step_lowering import StepLowering
from distsim.program.symbol_table import SymbolTable
from distsim.scenario.format.models.entries import (
    Entry,
    ScenarioBlock,
    ScenarioRepeat,
    ScenarioStep,
)
from distsim.scenario.format.models.sections import FaultDecl
from distsim.scenario.format.reading.name_scope import ITERATION_INDEX
from distsim.scenario.model import Scenario

#: Calls of all codes together that are laid out at most; a file that wants more is refused (16
#: bytes a call and more).
MAX_LOWERED_CALLS = 20_000_000
#: Ranks of a world whose start-up is worked out where a rank is absent and the file says nothing
#: else of it.
_MAX_RANKS_FOR_ABSENT_STARTUP = 4096
#: Keys of `launch` that matter to a start-up.
_STARTUP_LAUNCH_KEYS = ("env", "hosts", "ports_taken", "files_left", "by")


def lower(scenario: Scenario) -> Program:
    """Lay a scenario out as calls.

    Raises ScenarioErrors for what only shows when expressions get their values: a division by zero,
    a selector that is no condition, a rank that a per-rank mapping leaves out, a program that is
    too long.
    """
    names = SymbolTable(scenario)
    shelf = names.shelf
    codes = [
        code
        for ranks in _initial_classes(scenario, names)
        for code in _codes_of_class(scenario, names, ranks)
    ]
    codes.sort(key=lambda code: code.ranks)
    code_of, row_of = [0] * names.world_size, [0] * names.world_size
    for number, code in enumerate(codes):
        for row, rank in enumerate(code.ranks):
            code_of[rank], row_of[rank] = number, row
    program = Program(
        name=scenario.name,
        file=scenario.file,
        world_size=names.world_size,
        nodes=scenario.world.nodes,
        local_size=scenario.world.ranks_per_node,
        backend=scenario.backend,
        options=_set_options(scenario),
        sites=shelf.sites,
        groups=shelf.groups,
        tensors=_tensor_specs(scenario, names),
        codes=codes,
        code_of=code_of,
        row_of=row_of,
        findings=(*shelf.findings(), *_empty_selector_findings(scenario, names)),
        link_faults=link_faults(scenario),
        mesh=dict(scenario.mesh),
        seed=scenario.seed,
        jitter=scenario.jitter,
        names=names.world,
        from_file=True,
    )
    program.faults = rank_faults(scenario, program, names)
    if _needs_startup_simulation(scenario, program):
        from distsim.program.startup import scenario_startup, startup_findings

        program.startup = scenario_startup(scenario, program, names)
        program.findings = (*startup_findings(program, program.startup), *program.findings)
    return program


def _needs_startup_simulation(scenario: Scenario, program: Program) -> bool:
    """Does the file say anything of the first init_process_group that could matter?"""
    if program.world_size <= _MAX_RANKS_FOR_ABSENT_STARTUP and any(
        fault.kind == "absent" for fault in program.faults
    ):
        return True
    if scenario.options.init_method is not None or any(
        getattr(scenario.launch, name) for name in _STARTUP_LAUNCH_KEYS
    ):
        return True
    told = ("init_method", "store", "rank_argument", "world_size_argument", "device_id")
    entries = (
        call for code in program.codes for call in code.calls if call.op == "init_process_group"
    )
    return any(name in call.fields for call in entries for name in told)


def _set_options(scenario: Scenario) -> dict[str, object]:
    return {k: v for k, v in dict(scenario.options).items() if v is not None}


def _tensor_specs(scenario: Scenario, names: SymbolTable) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(name, t.dtype, names.copies[name], names.shapes[name], t.value)
        for name, t in scenario.tensors.items()
    }


def _initial_classes(scenario: Scenario, names: SymbolTable) -> list[np.ndarray]:
    """A first cut by selectors and repeat counts that use no loop index: it spares most walks that
    would end in a split.
    """
    labels: list[np.ndarray] = []

    def look(entries: Iterable[Entry], here: np.ndarray, indices: frozenset[str]) -> None:
        for entry in entries:
            inside = here
            if entry.ranks is not None and not _uses_index(entry.ranks, indices):
                mask = names.selected(entry, here, {})
                label = np.full(names.world_size, -1)
                label[here] = mask
                labels.append(label)
                inside = here[mask]
            if isinstance(entry, ScenarioRepeat):
                look(entry.steps, inside, indices | {entry.index} if entry.index else indices)
            elif isinstance(entry, ScenarioBlock):
                look(entry.steps, inside, indices)

    look(scenario.program, np.arange(names.world_size), frozenset({ITERATION_INDEX}))
    if not labels:
        return [np.arange(names.world_size)]
    classes = dense_row_ids(labels, names.world_size)
    return [np.flatnonzero(classes == c) for c in range(int(classes.max()) + 1)]


def _uses_index(selector: object, indices: frozenset[str]) -> bool:
    return isinstance(selector, Expression) and bool(selector.names & indices)


def _codes_of_class(scenario: Scenario, names: SymbolTable, ranks: np.ndarray) -> list[SharedCode]:
    """The codes of a class: one, or those of the parts it falls into."""
    todo, done = [ranks], []
    while todo:
        part = todo.pop()
        try:
            done.append(RankClassWalker(scenario, names, part).code(MAX_LOWERED_CALLS))
        except RankClassSplit as split:
            todo += [part[split.labels == label] for label in sorted_unique(split.labels).tolist()]
    return done


def _empty_selector_findings(scenario: Scenario, names: SymbolTable) -> list[Finding]:
    """DS901: a selector that no rank satisfies (guards with loop indices are not judged)."""
    found = []

    def look(entries: Iterable[Entry], indices: frozenset[str]) -> None:
        for entry in entries:
            judged = entry.ranks is not None and not _uses_index(entry.ranks, indices)
            if judged and not names.selected(entry, names.ranks, {}, lenient=True).any():
                op = type(entry.op).op if isinstance(entry, ScenarioStep) else "block"
                place = SourceLocation(scenario.file, entry.line, entry.column, op)
                found.append(
                    Finding(
                        "DS901",
                        "warning",
                        f"the selector of this {op} selects no rank",
                        places=(place,),
                    )
                )
            if isinstance(entry, (ScenarioBlock, ScenarioRepeat)):
                inner = (
                    indices | {entry.index}
                    if isinstance(entry, ScenarioRepeat) and entry.index
                    else indices
                )
                look(entry.steps, inner)

    look(scenario.program, frozenset({ITERATION_INDEX}))
    return found


__all__ = ["MAX_LOWERED_CALLS", "ScenarioProblem", "ScenarioErrors", "ProgramTables", "lower"]


# --- faults of the file, resolved to ranks and positions of calls ---
def rank_faults(scenario: Scenario, program: Program, names: SymbolTable) -> tuple[RankFault, ...]:
    """One `RankFault` for each rank that a fault of the file names, in file order."""
    found = []
    for fault in scenario.faults:
        if fault.link is not None:
            continue
        for rank in _faulty_ranks(fault, names):
            position = _fault_position(fault, program, rank)
            found.append(
                RankFault(
                    rank,
                    fault.kind,
                    position,
                    fault.at_ns,
                    fault.factor,
                    fault.code,
                    fault.delay_ns,
                )
            )
    return tuple(found)


def link_faults(scenario: Scenario) -> tuple[LinkFault, ...]:
    """Slower links, as the file states them."""
    return tuple(
        LinkFault(f.link, tuple(f.nodes or ()), f.factor)
        for f in scenario.faults
        if f.link is not None
    )


def _faulty_ranks(fault: FaultDecl, names: SymbolTable) -> list[int]:
    if fault.rank is not None:
        return [fault.rank]
    return [int(r) for r in names.ranks[names.selected(fault, names.ranks, {})]]


def _fault_position(fault: FaultDecl, program: Program, rank: int) -> int | None:
    """The call before which the fault strikes: iterations and calls are counted from 0."""
    if fault.at_ns is not None or fault.kind in ("slow", "late", "absent"):
        return None
    code = program.code(rank)
    positions = list(code.positions(program.row_of[rank]))
    if fault.iteration is None:
        count = fault.before_call or 0
        return positions[count] if count < len(positions) else len(code.calls)
    start = (
        code.iterations[fault.iteration]
        if fault.iteration < len(code.iterations)
        else len(code.calls)
    )
    if fault.before_call:
        inside = [p for p in positions if p >= start]
        return inside[fault.before_call] if fault.before_call < len(inside) else len(code.calls)
    return start


# --- the walk of one class ---


class RankClassSplit(Exception):
    """The class is no class: ``labels`` (one per rank) tells its parts apart."""

    def __init__(self, labels: IntVector) -> None:
        super().__init__(labels)
        self.labels = labels


class RepeatRound(NamedTuple):
    """What one round of a body laid out: its calls, who makes them, and the handles that are open
    after it.
    """

    calls: list[CodeCall]
    guards: list[BoolVector | None]
    open: tuple[Hashable, ...]


class RankClassWalker:
    """One walk over the program for the ranks of one class."""

    def __init__(self, scenario: Scenario, names: SymbolTable, ranks: IntVector) -> None:
        self.scenario, self.names, self.ranks = scenario, names, ranks
        self.builder = CodeBuilder(names.shelf, ranks.tolist())
        self.handles = OpenHandles()
        self.env = {
            name: collapse_uniform(v[ranks]) if isinstance(v, np.ndarray) else v
            for name, v in names.world.items()
        }
        self.steps = StepLowering(self)
        self.limit = 0
        self._selected: dict[Hashable, BoolVector] = {}
        self._steady: dict[
            int, tuple[Expression, RankValues]
        ] = {}  # by id: expressions of what no loop changes, with their values

    def code(self, limit: int) -> SharedCode:
        self.limit = limit
        starts = [0]
        try:
            self._times(
                self.scenario.iterations, self.scenario.program, ITERATION_INDEX, {}, None, starts
            )
        finally:
            del (
                self.steps
            )  # they lead back here: while nobody collects, all that they keep would stay
        starts.append(len(self.builder.calls))
        return self.builder.finish(
            starts if self.scenario.iterations > 1 else (0, len(self.builder.calls))
        )

    # --- entries ---
    def walk(
        self, entries: Iterable[Entry], indices: dict[str, int], guard: BoolVector | None
    ) -> None:
        for entry in entries:
            inner = guard
            if entry.ranks is not None:
                mask = self._mask(entry, indices, guard)
                if not mask.any():
                    continue
                if not mask.all():
                    inner = self._guard(entry, mask, indices, guard)
            if isinstance(entry, ScenarioStep):
                self.steps.add(entry, indices, inner)
            elif isinstance(entry, ScenarioBlock):
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

    def _guard(
        self, entry: Entry, mask: BoolVector, indices: dict[str, int], guard: BoolVector | None
    ) -> BoolVector | None:
        if guard is not None and (mask == guard).all():
            return guard
        if isinstance(entry.ranks, Expression) and entry.ranks.names & indices.keys():
            return mask
        raise RankClassSplit(mask.astype(np.int64))

    def _used_indices(
        self, selector: object, indices: dict[str, int]
    ) -> tuple[tuple[str, int], ...]:
        if not indices or not isinstance(selector, Expression):
            return ()
        return tuple((name, value) for name, value in indices.items() if name in selector.names)

    # --- repeats ---
    def _repeat(
        self, entry: ScenarioRepeat, indices: dict[str, int], guard: BoolVector | None
    ) -> None:
        times = self.evaluate(entry.times, indices, guard, entry)
        if isinstance(times, np.ndarray):
            raise RankClassSplit(cast("IntVector", times))
        if isinstance(times, bool) or not isinstance(times, int):
            self.names.problem(entry, f"repeat: times must be an integer, found {times}")
        self._times(times, entry.steps, entry.index, indices, guard, None)

    def _times(
        self,
        times: int,
        steps: Iterable[Entry],
        index: str | None,
        indices: dict[str, int],
        guard: BoolVector | None,
        starts: list[int] | None,
    ) -> None:
        """Lay a body out `times` times.

        Once two rounds in a row gave the same calls and left the same open handles, the rest is
        copied.
        """
        steady = index is None or index not in self.names_in(steps)
        before: RepeatRound | None = None
        for i in range(times):
            start = len(self.builder.calls)
            if starts is not None and i:
                starts.append(start)
            self.walk(steps, {**indices, index: i} if index else indices, guard)
            size = len(self.builder.calls) - start
            if start + size * (times - i) > self.limit:
                self.names.problem(
                    ("program",),
                    f"the program makes more than {self.limit:,} calls on one rank; repeat less often",
                )
            state = (
                RepeatRound(
                    self.builder.calls[start:], self.builder.guards[start:], self._open(start)
                )
                if steady
                else None
            )
            if state is not None and state == before:
                self._copy(state, times - i - 1, size, starts)
                return
            before = state

    def _open(self, start: int) -> tuple[Hashable, ...]:
        """The open handles: those of this round by their distance from its start, older ones as
        they are.
        """
        opened = {
            h: p - start if p >= start else ("before", p) for h, p in self.handles.open.items()
        }
        return (tuple(opened.items()), frozenset(self.handles.spent))

    def _copy(self, state: RepeatRound, rounds: int, size: int, starts: list[int] | None) -> None:
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
        self,
        value: FieldValue,
        indices: dict[str, int],
        guard: BoolVector | None,
        place: Entry,
        more: NameBindings | None = None,
    ) -> RankValues:
        """The value for the class's ranks; where a guard shuts ranks out, theirs is 0."""
        if isinstance(value, Expression):
            if value.constant is not None:
                return value.constant
        elif not isinstance(value, PerRank):
            return value
        if (
            guard is None
            and not more
            and isinstance(value, Expression)
            and value.names.isdisjoint(indices)
        ):
            if id(value) not in self._steady:
                self._steady[id(value)] = (
                    value,
                    self.names.evaluate(value, self._seen(value, {}), place, self.ranks),
                )
            return self._steady[id(value)][1]
        if (
            guard is None
            and not more
            and isinstance(value, Expression)
            and value.names <= indices.keys()
        ):
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
        return cast("RankValues", full)

    def _seen(self, value: Expression | PerRank[object], more: NameBindings) -> NameBindings:
        """What a value's expressions can see, of many names no more than they use."""
        if isinstance(value, Expression):
            return {
                name: more[name] if name in more else self.env[name]
                for name in value.names
                if name in more or name in self.env
            }
        return {**self.env, **more}

    def names_in(self, entries: Iterable[Entry]) -> frozenset[str]:
        """All names that expressions in these entries use."""
        return names_in_entries(entries, self.names.used)
