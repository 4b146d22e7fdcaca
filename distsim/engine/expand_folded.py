"""Expands the run of a folded program, which has only representative ranks, to all ranks.

Key idea: each rank has the times and the end of its representative. The trace of all ranks can be
large and is often not needed, so it is made when it is first read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from distsim.engine.run_record import SimulatedRun
from distsim.findings.final_state import FinalState, RankEnd
from distsim.program.model import Program
from distsim.trace.model import Trace


class LazyTrace(Trace):
    """The trace of all ranks' calls, made when one of its attributes is first read."""

    def __init__(self, make: Callable[[], Trace]) -> None:
        self._make = make

    @cached_property
    def _whole(self) -> Trace:
        return self._make()

    @cached_property
    def header(self):  # type: ignore[no-untyped-def, override]
        """The header of the trace of all ranks."""
        return self._whole.header

    @cached_property
    def tables(self):  # type: ignore[no-untyped-def, override]
        """The tables of the trace of all ranks."""
        return self._whole.tables

    @cached_property
    def columns(self):  # type: ignore[no-untyped-def, override]
        """The columns of the trace of all ranks."""
        return self._whole.columns


def expand_run(
    section_run: SimulatedRun, program: Program, make: Callable[[], Trace]
) -> SimulatedRun:
    """The run of the representatives as a run of the whole program. ``make`` makes its trace."""
    expanded = expand_blocked_state(section_run.program, section_run.final_state)
    return replace(
        section_run,
        program=program,
        trace=LazyTrace(make),
        final_state=expanded or section_run.final_state,
        section=section_run,
    )


def expand_blocked_state(section: Program, final_state: FinalState | None) -> FinalState | None:
    """The final state of all ranks, from that of the representatives.

    Only the ends are expanded: the representatives among the blocked ranks show what the others
    wait for too.
    """
    if section.representative_of is None or final_state is None:
        return final_state
    end_of = {end.rank: end for end in final_state.ends}
    ends: list[RankEnd] = []
    for rank, representative in enumerate(section.representative_of.tolist()):
        end = end_of[representative]
        ends.append(RankEnd(rank, end.status, end.position, end.at_ns, end.message))
    return FinalState(tuple(ends), final_state.blocked, final_state.unreceived)
