"""A program before its detectors: which of them it concerns, and, made when the first of these asks, where its calls meet."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final

from distsim.program.features import Feature
from distsim.program.records import Program
from distsim.standstill import Standstill

if TYPE_CHECKING:
    from distsim.check.call_index import CallIndex
    from distsim.check.layout import Layout

#: Detector -> what concerns it: in a program that uses none of these it has nothing to find. Each is the module of this folder.
CONCERNS: Final[dict[str, frozenset[Feature]]] = {
    "leaks": frozenset({"requests"}),
    "races": frozenset({"requests", "streams"}),
    "remote": frozenset({"remote"}),
    "signals": frozenset({"signals"}),
    "names": frozenset({"branches"}),
    "messages": frozenset({"messages"}),
    "remarks": frozenset({"requests", "branches", "timeouts"}),
}


class Subject:
    """What detectors are asked about."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._concerned = frozenset(name for name, uses in CONCERNS.items() if not uses.isdisjoint(program.features))

    def concerns(self, detector: str) -> bool:
        """Whether a detector may find something."""
        return detector in self._concerned

    @cached_property
    def layout(self) -> Layout:
        """Where the program's calls meet."""
        from distsim.check.layout import build_layout

        return build_layout(self.program)

    @cached_property
    def where(self) -> CallIndex:
        """The same, call by call."""
        from distsim.check.call_index import CallIndex

        return CallIndex(self.layout)


def made_all_calls(program: Program, left: Standstill) -> bool:
    """Every rank came to the end of its code."""
    return all(end.status == "ended" and end.position >= len(program.code(end.rank).calls) for end in left.ends)
