"""A scenario lowered to calls: the `Program` that semantics, engine, checker and values read.

A `Program` holds *codes* (`distsim.program.code.SharedCode`), one for each class of ranks with the
same list of calls, and maps each rank to its code and row. Readers that want plain calls ask
`Program.call(rank, position)`.

A program contains no blocking rules (`distsim.semantics`) and no times (`distsim.engine`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from distsim.common.records import dataclass
from distsim.findings.finding_types import Finding, SourceLocation
from distsim.operations.core.resolved_call import RankGroup, ResolvedCall
from distsim.program.code import (
    CallSite,
    CodeCall,
    IntVector,
    SharedCode,
    Vec,
    at_row,
    resolve_call,
)
from distsim.program.features import Feature, features_of

if TYPE_CHECKING:
    from distsim.scenario.startup.records import StartupResult


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A declared tensor. ``value`` is None (unknown numbers) or the file's value, kept as parsed.

    Use `distsim.values` for its numbers.
    """

    name: str
    dtype: str
    copies: Vec
    shape: tuple[Vec, ...] | None  # over all ranks of the world; None: ``auto``
    value: Any = None


@dataclass(frozen=True, slots=True)
class RankFault:
    """A fault injected into the program, resolved for one rank (``kind`` as in the file)."""

    rank: int
    kind: str  # kill raise exit slow late absent
    position: int | None = None  # before this call of the rank
    at_ns: int | None = None
    factor: float = 1.0
    code: int = 1
    delay_ns: int = 0


@dataclass(frozen=True, slots=True)
class LinkFault:
    """A slower link: ``link`` is a link class of the cluster (``nic``, ``nvlink``, …)."""

    link: str
    nodes: tuple[int, ...]
    factor: float


@dataclass(eq=False)
class Program:
    """A whole program.

    Invariants: ``codes[code_of[rank]].ranks[row_of[rank]] == rank`` for every rank whose calls are
    present; ``groups[i].id == i``. ``findings`` are those of lowering: invalid calls, selectors
    that select no rank.
    """

    name: str
    file: str
    world_size: int
    nodes: int
    local_size: int  # ranks per node
    backend: str
    options: Mapping[str, Any]
    sites: list[CallSite]
    groups: list[RankGroup]  # groups[i].id == i; groups[0] is the world
    tensors: Mapping[str, TensorSpec]
    codes: list[SharedCode]
    code_of: list[int]  # rank -> index into codes
    row_of: list[int]  # rank -> row of its code
    findings: tuple[Finding, ...] = ()
    faults: tuple[RankFault, ...] = ()
    link_faults: tuple[LinkFault, ...] = ()
    mesh: Mapping[str, int] = field(default_factory=dict)
    seed: int = 0
    jitter: float = 0.0
    #: Every name an expression may use, over all ranks of the world: rank, node, axes, vars, …
    names: Mapping[str, Any] = field(default_factory=dict)
    #: The simulated init_process_group, if the file contains anything that could make it fail or
    #: wait. None: all ranks join.
    startup: StartupResult | None = None
    #: For a program that is folded to some of its ranks: by rank, its representative rank. None:
    #: the calls of all ranks are present. A folded program's codes hold the representatives only,
    #: its groups all their members. See `distsim.semantics.classes.representatives`.
    representative_of: IntVector | None = None
    #: Lowered from a file: ranks know only the groups that the file names. A recorded program may
    #: have made groups in other ways, under names that are known.
    from_file: bool = False
    #: Recorded from a run that was stopped: ranks would have made more calls.
    is_partial: bool = False

    @cached_property
    def features(self) -> frozenset[Feature]:
        """The features that the program uses."""
        has_timeouts = self.options.get("timeout_ns") is not None or any(
            group.timeout_ns is not None for group in self.groups
        )
        has_numbers = any(spec.value is not None for spec in self.tensors.values())
        return features_of(self.codes, has_timeouts=has_timeouts, has_numbers=has_numbers)

    # --- ranks and groups ---
    @cached_property
    def present(self) -> Sequence[int]:
        """The ranks whose calls are present: in a folded program, the representatives."""
        if self.representative_of is None:
            return range(self.world_size)
        return sorted(set(self.representative_of.tolist()))

    def members(self, group: int) -> tuple[int, ...]:
        """The ranks of a group whose calls are present."""
        if self.representative_of is None:
            return self.groups[group].ranks
        members = self._present_members.get(group)
        if members is None:
            ranks = np.array(self.groups[group].ranks, dtype=np.int64)
            is_present = self.representative_of[ranks] == ranks
            members = self._present_members[group] = tuple(ranks[is_present].tolist())
        return members

    @cached_property
    def _present_members(self) -> dict[int, tuple[int, ...]]:
        return {}

    def alike(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """All ranks that these ranks represent, themselves included, ascending."""
        if self.representative_of is None:
            return tuple(sorted(ranks))
        return tuple(np.flatnonzero(np.isin(self.representative_of, list(ranks))).tolist())

    @cached_property
    def delays(self) -> dict[int, int]:
        """By rank, the ns by which faults delay its start; only ranks that start late."""
        delays: dict[int, int] = {}
        for fault in self.faults:
            if fault.kind == "late":
                delays[fault.rank] = delays.get(fault.rank, 0) + fault.delay_ns
        return delays

    def names_of(self, rank: int) -> dict[str, object]:
        """The names of expressions with their values on one rank."""
        return {name: at_row(value, rank) for name, value in self.names.items()}

    def node(self, rank: int) -> int:
        """The node of a rank."""
        return rank // self.local_size

    # --- calls ---
    def code(self, rank: int) -> SharedCode:
        """The code of a rank."""
        return self.codes[self.code_of[rank]]

    def code_call(self, rank: int, position: int) -> CodeCall:
        """The call of a rank at a position."""
        return self.codes[self.code_of[rank]].calls[position]

    def place(self, rank: int, position: int) -> SourceLocation:
        """The source location of a call."""
        return self.sites[self.code_call(rank, position).site].place(rank)

    def call(self, rank: int, position: int) -> ResolvedCall:
        """The plain resolved call of a rank at a position of its code."""
        return self.resolve(rank, self.code_call(rank, position))

    def resolve(self, rank: int, call: CodeCall) -> ResolvedCall:
        """The call with the values of one rank."""
        return resolve_call(self.code(rank), self.groups, self.row_of[rank], call)

    def calls_of(self, rank: int) -> Iterator[tuple[int, ResolvedCall]]:
        """(position, call) of every call that the rank makes, in order."""
        for position in self.code(rank).positions(self.row_of[rank]):
            yield position, self.call(rank, position)

    def group_timeouts_ns(self, default_ns: int) -> list[int]:
        """The timeout of each group, by id.

        New groups do not inherit the world's (G12): without one they have the backend's default.
        """
        world = self.options.get("timeout_ns") or self._timeout_of_init()
        own = [world if group.id == 0 else group.timeout_ns for group in self.groups]
        return [timeout or default_ns for timeout in own]

    def _timeout_of_init(self) -> int | None:
        """The timeout that the first init_process_group with one names."""
        calls = (call for code in self.codes for call in code.calls)
        timeouts = (
            call.fields.get("timeout_ns") for call in calls if call.op == "init_process_group"
        )
        return next((int(timeout) for timeout in timeouts if timeout), None)

    # --- size ---
    @cached_property
    def call_count(self) -> int:
        """Number of calls of all ranks, including the ranks that others represent."""
        times = None
        if self.representative_of is not None:
            times = np.bincount(self.representative_of, minlength=self.world_size)
        return sum(code.call_count(times) for code in self.codes)

    @cached_property
    def present_calls(self) -> int:
        """Number of calls of the ranks that are present."""
        return sum(code.call_count() for code in self.codes)

    def rows(self) -> list[int]:
        """Number of rows of each rank in a trace; 0 for a rank that another one represents."""
        representative_of = self.representative_of
        rows = []
        for rank in range(self.world_size):
            is_present = representative_of is None or representative_of[rank] == rank
            rows.append(self.code(rank).offsets[-1] if is_present else 0)
        return rows
