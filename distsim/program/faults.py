"""Faults of the file, resolved to ranks and positions of calls."""

from __future__ import annotations

from distsim.program.names import Names
from distsim.program.records import Fault, LinkFault, Program
from distsim.scenario.model import Scenario
from distsim.scenario.parts import FaultDecl


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
