"""The part of "which ranks are blocked, and on which ranks" that is the same for both drivers.

Key idea: a row that has started waits for its own partners. A row whose launch is still behind
others waits for whatever the started launches ahead of it wait for. The drivers differ only in how
they know whether a row has started and is open, which subclasses answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from distsim.findings.final_state import WaitDependency
from distsim.semantics.form.instructions import OperationLaunch
from distsim.semantics.form.linked_program import LinkedProgram


class BlockedStateBuilder(ABC):
    """Finds the `WaitDependency` records of open rows in a run that has stopped.

    Results are cached, so one builder serves one state, and the state must not change.
    """

    linked: LinkedProgram

    @abstractmethod
    def _launch_of(self, row: int) -> OperationLaunch:
        """The launch that a row, or a part's row, belongs to."""

    @abstractmethod
    def _is_open(self, row: int) -> bool:
        """Whether a launch or part has not ended yet."""

    @abstractmethod
    def _has_started(self, row: int) -> bool:
        """Whether a part has left its queue."""

    @abstractmethod
    def _own_dependencies(self, row: int) -> list[WaitDependency]:
        """What a part that has started waits for; empty if it is done."""

    def _distinct_dependencies(self, rows: Iterable[int]) -> tuple[WaitDependency, ...]:
        """The dependencies of several parts, each once, in order."""
        found: dict[WaitDependency, None] = {}
        for row in rows:
            found |= dict.fromkeys(self._dependencies(row))
        return tuple(found)

    def _dependencies(self, row: int) -> list[WaitDependency]:
        if self._has_started(row):
            return self._own_dependencies(row)
        return self._dependencies_ahead(row)

    def _dependencies_ahead(self, row: int) -> list[WaitDependency]:
        """What the launches ahead of a part that has not started wait for."""
        ahead = self._started_parts_ahead(row)
        return [dependency for other in ahead for dependency in self._dependencies(other)]

    def _started_parts_ahead(self, row: int) -> list[int]:
        """Open parts that have started and that hold up a row's launch.

        The walk passes through launches that wait themselves.
        """
        base = self.linked.base[int(self.linked.rank[row])]
        seen: set[int] = set()
        found: list[int] = []
        to_visit = list(self._launch_of(row).after)
        while to_visit:
            launch_row = base + to_visit.pop()
            if launch_row in seen or not self._is_open(launch_row):
                continue
            seen.add(launch_row)
            launch = self._launch_of(launch_row)
            parts = [base + part.row for part in launch.parts]
            if self._has_started(parts[0]):
                found += [part for part in parts if self._is_open(part)]
            else:
                to_visit += launch.after
        return sorted(found)
