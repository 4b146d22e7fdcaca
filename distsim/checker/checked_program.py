"""A program together with the lookups that several detectors share.

Key idea: most detectors can find something only in programs with certain features, so
`CheckedProgram` says which detectors to import and run. Lookups are built on first use.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final

from distsim.findings.final_state import FinalState
from distsim.program.features import Feature
from distsim.program.model import Program

if TYPE_CHECKING:
    from distsim.checker.matching.call_index import CallIndex
    from distsim.checker.matching.channel_layout import ChannelLayout

#: Detector -> features. In a program that has none of them, the detector finds nothing. Each
#: detector is a module of `checker.detectors`.
DETECTOR_FEATURES: Final[dict[str, frozenset[Feature]]] = {
    "request_leaks": frozenset({"requests"}),
    "buffer_races": frozenset({"requests", "streams"}),
    "one_sided_races": frozenset({"remote"}),
    "signal_conflicts": frozenset({"signals"}),
    "swapped_collectives": frozenset({"branches"}),
    "swapped_messages": frozenset({"messages"}),
    "lint": frozenset({"requests", "branches", "timeouts"}),
}


class CheckedProgram:
    """A program, the detectors that may find something in it, and its lookups."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._detectors = frozenset(
            detector
            for detector, features in DETECTOR_FEATURES.items()
            if not features.isdisjoint(program.features)
        )

    def concerns(self, detector: str) -> bool:
        """Whether a detector may find something."""
        return detector in self._detectors

    @cached_property
    def layout(self) -> ChannelLayout:
        """Where the program's calls meet."""
        from distsim.checker.matching.channel_layout import build_channel_layout

        return build_channel_layout(self.program)

    @cached_property
    def call_index(self) -> CallIndex:
        """The program's calls by channel and sequence."""
        from distsim.checker.matching.call_index import CallIndex

        return CallIndex(self.layout)


def made_all_calls(program: Program, final_state: FinalState) -> bool:
    """Whether every rank reached the end of its program."""
    for end in final_state.ends:
        if end.status != "ended" or end.position < len(program.code(end.rank).calls):
            return False
    return True
