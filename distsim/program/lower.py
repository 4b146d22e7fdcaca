"""Lowering: a scenario becomes a program of calls, one code for each class of ranks.

Key idea: ranks are lowered together as long as they make the same calls. `_initial_classes` divides
the world by the selectors that can be evaluated at once; `RankClassWalker` walks each class and
reports where its ranks still differ; then the parts are walked again.

Sources: design §3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from distsim.common.arrays import dense_row_ids, sorted_unique
from distsim.common.expressions import Expression
from distsim.findings.finding_types import Finding, SourceLocation
from distsim.program.class_walker import RankClassWalker
from distsim.program.code import IntVector, SharedCode
from distsim.program.faults import link_faults, rank_faults
from distsim.program.model import Program, TensorSpec
from distsim.program.rank_class import RankClassSplit
from distsim.program.symbol_table import SymbolTable
from distsim.scenario.format.models.entries import (
    ITERATION_INDEX,
    Entry,
    ScenarioRepeat,
    ScenarioStep,
)
from distsim.scenario.model import Scenario

#: Limit for the calls of all codes together; larger files are refused (a call takes 16 bytes or
#: more).
MAX_LOWERED_CALLS = 20_000_000
#: Limit for simulating the start-up of a world in which a rank is absent and the file contains
#: nothing else about the start-up.
_MAX_RANKS_FOR_ABSENT_STARTUP = 4096
#: Keys of `launch` that matter to a start-up.
_STARTUP_LAUNCH_KEYS = ("env", "hosts", "ports_taken", "files_left", "by")
#: Fields of an init_process_group call that matter to a start-up.
_STARTUP_CALL_FIELDS = ("init_method", "store", "rank_argument", "world_size_argument", "device_id")


def lower(scenario: Scenario) -> Program:
    """Lay a scenario out as calls.

    Raises ScenarioErrors for mistakes that only show when expressions get their values: a division
    by zero, a selector that is no condition, a rank that a per-rank mapping omits, a program that
    is too long.
    """
    names = SymbolTable(scenario)
    codes = _codes(scenario, names)
    code_of, row_of = [0] * names.world_size, [0] * names.world_size
    for number, code in enumerate(codes):
        for row, rank in enumerate(code.ranks):
            code_of[rank] = number
            row_of[rank] = row
    program = Program(
        name=scenario.name,
        file=scenario.file,
        world_size=names.world_size,
        nodes=scenario.world.nodes,
        local_size=scenario.world.ranks_per_node,
        backend=scenario.backend,
        options=_set_options(scenario),
        sites=names.tables.sites,
        groups=names.tables.groups,
        tensors=_tensor_specs(scenario, names),
        codes=codes,
        code_of=code_of,
        row_of=row_of,
        findings=(*names.tables.findings(), *_empty_selector_findings(scenario, names)),
        link_faults=link_faults(scenario),
        mesh=dict(scenario.mesh),
        seed=scenario.seed,
        jitter=scenario.jitter,
        names=names.world,
        from_file=True,
    )
    program.faults = rank_faults(scenario, program, names)
    if any(finding.code == "DS101" for finding in program.findings):
        from distsim.program.partner_waits import findings_with_waits

        program.findings = findings_with_waits(program)
    if _needs_startup_simulation(scenario, program):
        # Imported only if needed: most scenarios imply their start-up.
        from distsim.program.startup import scenario_startup, startup_findings

        program.startup = scenario_startup(scenario, program, names)
        program.findings = (*startup_findings(program, program.startup), *program.findings)
    return program


def _set_options(scenario: Scenario) -> dict[str, object]:
    return {name: value for name, value in dict(scenario.options).items() if value is not None}


def _tensor_specs(scenario: Scenario, names: SymbolTable) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(name, tensor.dtype, names.copies[name], names.shapes[name], tensor.value)
        for name, tensor in scenario.tensors.items()
    }


# --- start-up ---
def _needs_startup_simulation(scenario: Scenario, program: Program) -> bool:
    """Whether anything in the file may make the first init_process_group fail or wait."""
    has_absent_rank = any(fault.kind == "absent" for fault in program.faults)
    if has_absent_rank and program.world_size <= _MAX_RANKS_FOR_ABSENT_STARTUP:
        return True
    if scenario.options.init_method is not None:
        return True
    if any(getattr(scenario.launch, key) for key in _STARTUP_LAUNCH_KEYS):
        return True
    return any(_sets_startup_field(code) for code in program.codes)


def _sets_startup_field(code: SharedCode) -> bool:
    """Whether an init_process_group of the code sets a field that matters to a start-up."""
    inits = [call for call in code.calls if call.op == "init_process_group"]
    return any(name in call.fields for call in inits for name in _STARTUP_CALL_FIELDS)


# --- classes of ranks ---
def _codes(scenario: Scenario, names: SymbolTable) -> list[SharedCode]:
    """The codes of all ranks, in the order of their first ranks."""
    codes: list[SharedCode] = []
    for ranks in _initial_classes(scenario, names):
        codes += _codes_of_class(names, ranks)
    return sorted(codes, key=lambda code: code.ranks)


def _initial_classes(scenario: Scenario, names: SymbolTable) -> list[IntVector]:
    """A first division, by the selectors that use no loop index.

    It spares most walks that would end in a split.
    """
    labels: list[IntVector] = []

    def label_ranks(entries: Iterable[Entry], ranks: IntVector, indices: frozenset[str]) -> None:
        for entry in entries:
            inside = ranks
            if entry.ranks is not None and not _uses_index(entry.ranks, indices):
                selected = names.selected(entry, ranks, {})
                label = np.full(names.world_size, -1)  # -1: the ranks do not reach the entry
                label[ranks] = selected
                labels.append(label)
                inside = ranks[selected]
            if not isinstance(entry, ScenarioStep):
                label_ranks(entry.steps, inside, _indices_inside(entry, indices))

    every_rank = np.arange(names.world_size)
    label_ranks(scenario.program, every_rank, frozenset({ITERATION_INDEX}))
    if not labels:
        return [every_rank]
    classes = dense_row_ids(labels, names.world_size)
    return [np.flatnonzero(classes == number) for number in range(int(classes.max()) + 1)]


def _codes_of_class(names: SymbolTable, ranks: IntVector) -> list[SharedCode]:
    """The codes of a class: one, or those of the parts it has to be split into."""
    pending, done = [ranks], []
    while pending:
        part = pending.pop()
        try:
            done.append(RankClassWalker(names, part, MAX_LOWERED_CALLS).code())
        except RankClassSplit as split:
            labels = sorted_unique(split.labels).tolist()
            pending += [part[split.labels == label] for label in labels]
    return done


def _uses_index(selector: object, indices: frozenset[str]) -> bool:
    return isinstance(selector, Expression) and bool(selector.names & indices)


def _indices_inside(entry: Entry, indices: frozenset[str]) -> frozenset[str]:
    """The names of the loop indices that are known inside an entry."""
    if isinstance(entry, ScenarioRepeat) and entry.index:
        return indices | {entry.index}
    return indices


# --- findings ---
class _NestedEntry(NamedTuple):
    entry: Entry
    indices: frozenset[str]  # names of the loop indices around it


def _nested_entries(entries: Iterable[Entry], indices: frozenset[str]) -> Iterator[_NestedEntry]:
    """All entries, at any depth, each before those inside it."""
    for entry in entries:
        yield _NestedEntry(entry, indices)
        if not isinstance(entry, ScenarioStep):
            yield from _nested_entries(entry.steps, _indices_inside(entry, indices))


def _empty_selector_findings(scenario: Scenario, names: SymbolTable) -> list[Finding]:
    """DS901: a selector that no rank satisfies.

    Selectors that use a loop index are not judged: they may select a rank in some round.
    """
    found = []
    for entry, indices in _nested_entries(scenario.program, frozenset({ITERATION_INDEX})):
        if entry.ranks is None or _uses_index(entry.ranks, indices):
            continue
        op = type(entry.op).op if isinstance(entry, ScenarioStep) else "block"
        if names.selected(entry, names.ranks, {}, lenient=True).any():
            continue
        message = f"`ranks` of this {op} selects no rank"
        place = SourceLocation(scenario.file, entry.line, entry.column, op)
        found.append(Finding("DS901", "warning", message, places=(place,)))
    return found
