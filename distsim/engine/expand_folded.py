"""The run of a section told of all ranks: each has the times of the rank that stands for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from distsim.engine.run_record import SimulatedRun
from distsim.findings.final_state import FinalState, RankEnd
from distsim.program.model import Program
from distsim.trace.model import Trace


class LazyTrace(Trace):
    """The trace of all ranks' calls, made when somebody first looks at it."""

    def __init__(self, make: Callable[[], Trace]) -> None:
        self._make = make

    @cached_property
    def _whole(self) -> Trace:
        return self._make()

    @cached_property
    def header(self):  # type: ignore[no-untyped-def, override]
        return self._whole.header

    @cached_property
    def tables(self):  # type: ignore[no-untyped-def, override]
        return self._whole.tables

    @cached_property
    def columns(self):  # type: ignore[no-untyped-def, override]
        return self._whole.columns


def expand_run(found: SimulatedRun, program: Program, make: Callable[[], Trace]) -> SimulatedRun:
    """A section's run as one of the whole ``program``. ``make``: how its trace is got, if it is
    wanted.
    """
    return replace(
        found,
        program=program,
        trace=LazyTrace(make),
        final_state=expand_blocked_state(found.program, found.final_state) or found.final_state,
        section=found,
    )


def expand_blocked_state(section: Program, left: FinalState | None) -> FinalState | None:
    """How all ranks ended. Of ranks that are blocked, those that stand for others tell what they
    wait for.
    """
    if section.representative_of is None or left is None:
        return left
    ends = {end.rank: end for end in left.ends}
    said = {of: (end.status, end.position, end.at_ns, end.message) for of, end in ends.items()}
    told = tuple(
        [RankEnd(rank, *said[of]) for rank, of in enumerate(section.representative_of.tolist())]
    )
    return FinalState(told, left.blocked, left.unreceived)
