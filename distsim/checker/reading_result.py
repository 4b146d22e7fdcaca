"""Records of how a program's executions end under each reading of the contract.

A *reading* is one admissible answer to "which calls block?". The contract leaves that open, so a
program is correct only if it is correct under all readings:

* ``rendezvous``: a send waits for its receive, and a collective waits for all members;
* ``early``: a rank leaves a rooted collective as soon as its own data has moved;
* ``buffered``: a send never blocks, and ranks that only contribute to a rooted collective leave it
  at once;
* ``mixed``: each call may behave according to any of these.

The records are the same for a single run (`reading_run`) and for a search over all event orders
(`explore`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Literal

from distsim.checker.replay_schedule import READING_ORDER, ReplaySchedule
from distsim.common.records import dataclass
from distsim.findings.final_state import FinalState

if TYPE_CHECKING:
    from distsim.checker.matching.call_mismatch import CallMismatch

#: Default limit for the number of stored states, over all readings together.
MAX_STATES = 200_000
#: The readings under which a program runs by one fixed rule.
PLAIN_READINGS = READING_ORDER[:3]
Frequency = Literal["always", "sometimes", "never"]
FailureKind = Literal["mismatch", "deadlock", "race"]


@dataclass(frozen=True, slots=True)
class ExampleExecution:
    """One execution: its last state, and the choices that lead there (None if there are none).

    ``ended`` is False for an intermediate state, if a search saw no end within its bound.
    """

    final_state: FinalState
    schedule: ReplaySchedule | None = None
    ended: bool = True


@dataclass(frozen=True, slots=True)
class ReadingResult:
    """How the executions of one reading end.

    ``blocked_sets`` maps each set of blocked ranks to the core of an execution that ends with it.
    ``mismatches`` are calls that met and differ in some execution. ``broken_reliances`` are
    receives (rank, position, part) that took another sender than they rely on. For each of the
    three failures, a flag says whether some execution is free of it: ``has_completing_run`` (no
    rank is blocked), ``has_matching_run``, ``has_reliable_run``.

    ``examples`` has an execution for "end" (the first that ended) and for each failure found.
    ``takers`` maps any-source receives (rank, position, part) to the ranks whose message they take
    in some execution.
    """

    blocked_sets: Mapping[tuple[int, ...], tuple[int, ...]]
    has_completing_run: bool
    mismatches: tuple[CallMismatch, ...]
    has_matching_run: bool
    examples: Mapping[str, ExampleExecution]
    broken_reliances: tuple[tuple[int, int, int], ...] = ()
    has_reliable_run: bool = True
    mismatch_ranks: tuple[int, ...] = ()
    takers: Mapping[tuple[int, int, int], frozenset[int]] = field(default_factory=dict)

    def frequency(self, kind: FailureKind) -> Frequency:
        """Whether every execution has the failure, or some, or none."""
        occurs, has_run_without = {
            "mismatch": (bool(self.mismatches), self.has_matching_run),
            "deadlock": (bool(self.blocked_sets), self.has_completing_run),
            "race": (bool(self.broken_reliances), self.has_reliable_run),
        }[kind]
        if not occurs:
            return "never"
        return "sometimes" if has_run_without else "always"

    def example(self, kind: str) -> ExampleExecution:
        """An execution that shows the failure, or else the first execution."""
        return self.examples.get(kind, self.examples["end"])

    @property
    def core(self) -> tuple[int, ...]:
        """The union of the cores of all sets of blocked ranks."""
        return union_of_ranks(self.blocked_sets.values())


def union_of_ranks(sets: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """The ranks of all sets together, ascending."""
    return tuple(sorted({rank for ranks in sets for rank in ranks}))


def frequency_by_reading(
    results: Mapping[str, ReadingResult], kind: FailureKind
) -> dict[str, Frequency]:
    """How often each of the four readings has a failure.

    A plain reading without a result ends as ``rendezvous`` does. The executions of ``mixed``
    include those of the other three readings: if these differ, ``mixed`` is "sometimes"; if they
    agree and ``mixed`` was not explored, it agrees with them.
    """
    rendezvous = results["rendezvous"]
    frequencies = {
        reading: results.get(reading, rendezvous).frequency(kind) for reading in PLAIN_READINGS
    }
    mixed: Frequency
    if len(set(frequencies.values())) > 1:
        mixed = "sometimes"
    elif "mixed" in results:
        mixed = results["mixed"].frequency(kind)
    else:
        mixed = frequencies["rendezvous"]
    return {**frequencies, "mixed": mixed}


def verdict_dependence(
    frequencies: Mapping[str, Frequency],
) -> Literal["buffering", "schedule"] | None:
    """What a verdict depends on, in the terms of `cases/FORMAT.md`.

    A plain reading that is "sometimes" depends on the schedule; readings that differ depend on
    buffering.
    """
    if "sometimes" in [frequencies[reading] for reading in PLAIN_READINGS]:
        return "schedule"
    return "buffering" if len(set(frequencies.values())) > 1 else None


def first_reading_with(
    results: Mapping[str, ReadingResult], kind: FailureKind
) -> ReadingResult | None:
    """The first reading that has a failure, in the order of `READING_ORDER`."""
    for reading in READING_ORDER:
        if reading in results and results[reading].frequency(kind) != "never":
            return results[reading]
    return None


@dataclass(frozen=True, slots=True)
class ContractResult:
    """The results by reading, how many states were stored, and whether the bound sufficed."""

    results: Mapping[str, ReadingResult]
    explored: int
    complete: bool
