"""Scenario → Program: names resolved, blocks and repeats laid out, each class of ranks given its code.

A class is walked as a whole: every expression is evaluated once for all its ranks. Where a selector, a repeat count or a handle's index
differs inside the class, the class is split and walked again, so that in the end all ranks of a class run the same list of calls.
A selector that uses a loop index stays a guard of the call instead (design §3, rule 3).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from distsim.arrays import distinct, numbered
from distsim.errors import Problem, ScenarioErrors
from distsim.expr import Expression
from distsim.findings.record import Finding, Place
from distsim.program.assemble import Shelf
from distsim.program.names import Names
from distsim.program.records import Code, Fault, LinkFault, Program, TensorSpec
from distsim.program.walk import Split, Walker
from distsim.scenario.entries import Block, Entry, Repeat, Step
from distsim.scenario.model import Scenario
from distsim.scenario.parts import FaultDecl
from distsim.scenario.scope import ITERATION

#: Calls of all codes together that are laid out at most; a file that wants more is refused (16 bytes a call and more).
MAX_CALLS = 20_000_000
#: Ranks of a world whose start-up is worked out where a rank is absent and the file says nothing else of it.
_MOST_WITHOUT = 4096
#: Keys of `launch` that matter to a start-up.
_SAID = ("env", "hosts", "ports_taken", "files_left", "by")


def lower(scenario: Scenario) -> Program:
    """Lay a scenario out as calls.

    Raises ScenarioErrors for what only shows when expressions get their values: a division by zero, a selector that is no condition,
    a rank that a per-rank mapping leaves out, a program that is too long.
    """
    names = Names(scenario)
    shelf = names.shelf
    codes = [code for ranks in _classes(scenario, names) for code in _code(scenario, names, ranks)]
    codes.sort(key=lambda code: code.ranks)
    code_of, row_of = [0] * names.world_size, [0] * names.world_size
    for number, code in enumerate(codes):
        for row, rank in enumerate(code.ranks):
            code_of[rank], row_of[rank] = number, row
    program = Program(
        name=scenario.name, file=scenario.file, world_size=names.world_size, nodes=scenario.world.nodes,
        local_size=scenario.world.ranks_per_node, backend=scenario.backend, options=_options(scenario), sites=shelf.sites,
        groups=shelf.groups, tensors=_tensors(scenario, names), codes=codes, code_of=code_of, row_of=row_of,
        findings=(*shelf.findings(), *_unselected(scenario, names)), link_faults=link_faults(scenario), mesh=dict(scenario.mesh),
        seed=scenario.seed, jitter=scenario.jitter, names=names.world, from_file=True,
    )  # fmt: skip
    program.faults = rank_faults(scenario, program, names)
    if _starts_oddly(scenario, program):
        from distsim.program.entrance import startup_findings, startup_of

        program.startup = startup_of(scenario, program, names)
        program.findings = (*startup_findings(program, program.startup), *program.findings)
    return program


def _starts_oddly(scenario: Scenario, program: Program) -> bool:
    """Does the file say anything of the first init_process_group that could matter?"""
    if program.world_size <= _MOST_WITHOUT and any(fault.kind == "absent" for fault in program.faults):
        return True
    if scenario.options.init_method is not None or any(getattr(scenario.launch, name) for name in _SAID):
        return True
    told = ("init_method", "store", "said_rank", "said_world", "device_id")
    entries = (call for code in program.codes for call in code.calls if call.op == "init_process_group")
    return any(name in call.fields for call in entries for name in told)


def _options(scenario: Scenario) -> dict[str, object]:
    return {k: v for k, v in dict(scenario.options).items() if v is not None}


def _tensors(scenario: Scenario, names: Names) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(name, t.dtype, names.copies[name], names.shapes[name], t.value) for name, t in scenario.tensors.items()
    }


def _classes(scenario: Scenario, names: Names) -> list[np.ndarray]:
    """A first cut by selectors and repeat counts that use no loop index: it spares most walks that would end in a split."""
    labels: list[np.ndarray] = []

    def look(entries: Iterable[Entry], here: np.ndarray, indices: frozenset[str]) -> None:
        for entry in entries:
            inside = here
            if entry.ranks is not None and not _uses(entry.ranks, indices):
                mask = names.selected(entry, here, {})
                label = np.full(names.world_size, -1)
                label[here] = mask
                labels.append(label)
                inside = here[mask]
            if isinstance(entry, Repeat):
                look(entry.steps, inside, indices | {entry.index} if entry.index else indices)
            elif isinstance(entry, Block):
                look(entry.steps, inside, indices)

    look(scenario.program, np.arange(names.world_size), frozenset({ITERATION}))
    if not labels:
        return [np.arange(names.world_size)]
    classes = numbered(labels, names.world_size)
    return [np.flatnonzero(classes == c) for c in range(int(classes.max()) + 1)]


def _uses(selector: object, indices: frozenset[str]) -> bool:
    return isinstance(selector, Expression) and bool(selector.names & indices)


def _code(scenario: Scenario, names: Names, ranks: np.ndarray) -> list[Code]:
    """The codes of a class: one, or those of the parts it falls into."""
    todo, done = [ranks], []
    while todo:
        part = todo.pop()
        try:
            done.append(Walker(scenario, names, part).code(MAX_CALLS))
        except Split as split:
            todo += [part[split.labels == label] for label in distinct(split.labels).tolist()]
    return done


def _unselected(scenario: Scenario, names: Names) -> list[Finding]:
    """DS901: a selector that no rank satisfies (guards with loop indices are not judged)."""
    found = []

    def look(entries: Iterable[Entry], indices: frozenset[str]) -> None:
        for entry in entries:
            judged = entry.ranks is not None and not _uses(entry.ranks, indices)
            if judged and not names.selected(entry, names.ranks, {}, lenient=True).any():
                op = type(entry.op).op if isinstance(entry, Step) else "block"
                place = Place(scenario.file, entry.line, entry.column, op)
                found.append(Finding("DS901", "warning", f"the selector of this {op} selects no rank", places=(place,)))
            if isinstance(entry, (Block, Repeat)):
                inner = indices | {entry.index} if isinstance(entry, Repeat) and entry.index else indices
                look(entry.steps, inner)

    look(scenario.program, frozenset({ITERATION}))
    return found


__all__ = ["MAX_CALLS", "Problem", "ScenarioErrors", "Shelf", "lower"]


# --- faults of the file, resolved to ranks and positions of calls ---
def rank_faults(scenario: Scenario, program: Program, names: Names) -> tuple[Fault, ...]:
    """One `Fault` for each rank that a fault of the file names, in file order."""
    found = []
    for fault in scenario.faults:
        if fault.link is not None:
            continue
        for rank in _ranks(fault, names):
            position = _position(fault, program, rank)
            found.append(Fault(rank, fault.kind, position, fault.at_ns, fault.factor, fault.code, fault.delay_ns))
    return tuple(found)


def link_faults(scenario: Scenario) -> tuple[LinkFault, ...]:
    """Slower links, as the file states them."""
    return tuple(LinkFault(f.link, tuple(f.nodes or ()), f.factor) for f in scenario.faults if f.link is not None)


def _ranks(fault: FaultDecl, names: Names) -> list[int]:
    if fault.rank is not None:
        return [fault.rank]
    return [int(r) for r in names.ranks[names.selected(fault, names.ranks, {})]]


def _position(fault: FaultDecl, program: Program, rank: int) -> int | None:
    """The call before which the fault strikes: iterations and calls are counted from 0."""
    if fault.at_ns is not None or fault.kind in ("slow", "late", "absent"):
        return None
    code = program.code(rank)
    positions = list(code.positions(program.row_of[rank]))
    if fault.iteration is None:
        count = fault.before_call or 0
        return positions[count] if count < len(positions) else len(code.calls)
    start = code.iterations[fault.iteration] if fault.iteration < len(code.iterations) else len(code.calls)
    if fault.before_call:
        inside = [p for p in positions if p >= start]
        return inside[fault.before_call] if fault.before_call < len(inside) else len(code.calls)
    return start
