"""The faults of a scenario, resolved to ranks and to positions of calls."""

from __future__ import annotations

from distsim.program.model import LinkFault, Program, RankFault
from distsim.program.symbol_table import SymbolTable
from distsim.scenario.format.models.sections import FaultDecl
from distsim.scenario.model import Scenario

#: Kinds of faults that hold for a rank as a whole, and strike at no particular call.
_KINDS_WITHOUT_POSITION = ("slow", "late", "absent")


def rank_faults(scenario: Scenario, program: Program, names: SymbolTable) -> tuple[RankFault, ...]:
    """One `RankFault` for each rank that a fault of the file names, in file order."""
    found: list[RankFault] = []
    for fault in scenario.faults:
        found += [_rank_fault(fault, program, rank) for rank in _faulty_ranks(fault, names)]
    return tuple(found)


def link_faults(scenario: Scenario) -> tuple[LinkFault, ...]:
    """Slower links, as the file states them."""
    return tuple(
        LinkFault(fault.link, tuple(fault.nodes or ()), fault.factor)
        for fault in scenario.faults
        if fault.link is not None
    )


def _faulty_ranks(fault: FaultDecl, names: SymbolTable) -> list[int]:
    if fault.link is not None:
        return []
    if fault.rank is not None:
        return [fault.rank]
    return [int(rank) for rank in names.ranks[names.selected(fault, names.ranks, {})]]


def _rank_fault(fault: FaultDecl, program: Program, rank: int) -> RankFault:
    return RankFault(
        rank=rank,
        kind=fault.kind,
        position=_fault_position(fault, program, rank),
        at_ns=fault.at_ns,
        factor=fault.factor,
        code=fault.code,
        delay_ns=fault.delay_ns,
    )


def _fault_position(fault: FaultDecl, program: Program, rank: int) -> int | None:
    """The position of the call before which the fault strikes; the end, if there is no such call.

    Iterations and calls count from 0; calls count from the start of the iteration, if one is given.
    """
    if fault.at_ns is not None or fault.kind in _KINDS_WITHOUT_POSITION:
        return None
    code = program.code(rank)
    end = len(code.calls)
    positions = list(code.positions(program.row_of[rank]))
    if fault.iteration is not None:
        in_range = fault.iteration < len(code.iterations)
        start = code.iterations[fault.iteration] if in_range else end
        if not fault.before_call:
            return start
        positions = [position for position in positions if position >= start]
    number = fault.before_call or 0
    return positions[number] if number < len(positions) else end
