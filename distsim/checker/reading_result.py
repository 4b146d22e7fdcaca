"""What the executions of one reading end in: of the single pass, or of all that the explorer
followed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Literal

from distsim.checker.replay_schedule import ReplaySchedule
from distsim.common.records import dataclass
from distsim.findings.final_state import FinalState

if TYPE_CHECKING:
    from distsim.checker.matching.call_mismatch import CallMismatch

#: States that are stored at most, over all readings, unless the caller says otherwise.
MAX_STATES = 200_000
Frequency = Literal["always", "sometimes", "never"]
FailureKind = Literal["mismatch", "deadlock", "race"]


@dataclass(frozen=True, slots=True)
class ExampleExecution:
    """One execution: where it ends, and the choices that lead there (None where there are none to
    make).

    ``ended`` is False for a state on the way, where a search saw no end within its bound.
    """

    final_state: FinalState
    schedule: ReplaySchedule | None = None
    ended: bool = True


@dataclass(frozen=True, slots=True)
class ReadingResult:
    """One reading. ``stuck`` maps sets of blocked ranks to the core of an execution that ends so;
    ``passed``: some execution ends with nobody blocked. ``unlikes``: calls that met and differ in
    some execution, ``fit``: some execution has none. ``relying``: receives (rank, position, part)
    that took another sender than they rely on, ``kept``: some execution has none. ``examples`` has
    an execution for "end" (the first that ended) and for each kind that was found.
    """

    stuck: Mapping[tuple[int, ...], tuple[int, ...]]
    passed: bool
    mismatches: tuple[CallMismatch, ...]
    fit: bool
    examples: Mapping[str, ExampleExecution]
    broken_reliances: tuple[tuple[int, int, int], ...] = ()
    kept: bool = True
    mismatch_ranks: tuple[int, ...] = ()
    #: (rank, position, part) of open receives -> ranks whose message they take in some execution.
    takers: Mapping[tuple[int, int, int], frozenset[int]] = field(default_factory=dict)

    def how(self, kind: FailureKind) -> Frequency:
        """Is it so in every execution, in some, in none?"""
        some, none = {
            "mismatch": (bool(self.mismatches), self.fit),
            "deadlock": (bool(self.stuck), self.passed),
            "race": (bool(self.broken_reliances), self.kept),
        }[kind]
        return "never" if not some else "sometimes" if none else "always"

    def example(self, kind: str) -> ExampleExecution:
        """An execution that shows a kind, else the first one."""
        return self.examples.get(kind, self.examples["end"])

    @property
    def core(self) -> tuple[int, ...]:
        """The cores of all sets of blocked ranks together."""
        return tuple(sorted({rank for core in self.stuck.values() for rank in core}))


READING_ORDER = ("rendezvous", "early", "buffered", "mixed")


def frequency_by_reading(
    endings: Mapping[str, ReadingResult], kind: FailureKind
) -> dict[str, Frequency]:
    """How each of the four readings stands to a kind.

    A plain reading that is not there ends as rendezvous does. ``mixed`` has every execution of the
    other three among its own, so where they differ it is "sometimes"; where it was not explored
    they agree, and it does too.
    """
    said = {
        reading: endings.get(reading, endings["rendezvous"]).how(kind)
        for reading in READING_ORDER[:3]
    }
    same = len(set(said.values())) == 1
    mixed: Frequency = "sometimes"
    if same:
        mixed = endings["mixed"].how(kind) if "mixed" in endings else said["rendezvous"]
    return {**said, "mixed": mixed}


def verdict_dependence(said: Mapping[str, Frequency]) -> Literal["buffering", "schedule"] | None:
    """What a verdict depends on (`cases/FORMAT.md`): a plain reading that is "sometimes" depends on
    the schedule, readings that differ on buffering."""
    if "sometimes" in [said[reading] for reading in READING_ORDER[:3]]:
        return "schedule"
    return "buffering" if len(set(said.values())) > 1 else None


def first_reading_with(
    endings: Mapping[str, ReadingResult], kind: FailureKind
) -> ReadingResult | None:
    """The first reading that has a kind, in the order rendezvous, early, buffered, mixed."""
    found: Sequence[ReadingResult] = [endings[r] for r in READING_ORDER if r in endings]
    return next((ending for ending in found if ending.how(kind) != "never"), None)


@dataclass(frozen=True, slots=True)
class ContractResult:
    """Endings by reading, how many states were stored, and whether the searches came to their end
    within the bound.
    """

    endings: Mapping[str, ReadingResult]
    explored: int
    complete: bool
