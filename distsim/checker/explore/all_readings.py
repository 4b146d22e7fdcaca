"""The readings of a program with open receives: one search each, within one bound, and what they
found as `ReadingResult` records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from distsim.checker.explore.search import SearchGoal, StateSearch
from distsim.checker.explore.symmetry import orbit, symmetric_images
from distsim.checker.explore.terminal_states import standstill_at
from distsim.checker.matching.channel_layout import ChannelLayout
from distsim.checker.reading_result import (
    MAX_STATES,
    ContractResult,
    ExampleExecution,
    FailureKind,
    ReadingResult,
    frequency_by_reading,
)
from distsim.checker.replay_schedule import schedule_from_path
from distsim.operations.registry import OPERATIONS

#: How many sets of stuck ranks are listed at most.
MAX_BLOCKED_SETS = 4096
_STATES_PER_TURN = 4096


def explore_all_readings(layout: ChannelLayout, max_states: int = MAX_STATES) -> ContractResult:
    """Explore the three plain readings, then ``mixed`` as far as these leave it open.

    A mismatch or a broken reliance that ``mixed`` can reach, ``buffered`` can reach too (to buffer
    only ever adds what can meet), so ``mixed`` is looked at for deadlocks that need both kinds of
    send, or, where the three always end alike, for an execution that does not.
    """
    absent = frozenset(f.rank for f in layout.program.faults if f.kind == "absent")
    readings = ["rendezvous", *(["early"] if _has_rooted_collectives(layout) else []), "buffered"]
    searches = {reading: StateSearch(layout, reading, absent=absent) for reading in readings}
    _run_in_turn(list(searches.values()), max_states)
    for search in searches.values():
        search.drain()
    endings = {reading: reading_result_of(search) for reading, search in searches.items()}
    used = sum(search.stored for search in searches.values())
    complete = all(search.finished for search in searches.values())
    goal = _goal_of_mixed(endings)
    if goal is not None:
        mixed = StateSearch(layout, "mixed", goal, absent)
        mixed.run(max(max_states - used, 1))
        mixed.drain()
        found = reading_result_of(mixed)
        endings["mixed"] = found if goal == "all" else _with_assumed_deadlock(found, goal)
        used, complete = used + mixed.stored, complete and mixed.finished
    return ContractResult(endings, min(used, max(max_states, 1)), complete)


def _run_in_turn(searches: list[StateSearch], most: int) -> None:
    """Run searches in turn, until all are finished or ``most`` states are stored."""
    while not all(search.finished for search in searches):
        for search in searches:
            left = most - sum(s.stored for s in searches)
            if left <= 0:
                return
            search.run(search.stored + min(left, _STATES_PER_TURN))


def _has_rooted_collectives(layout: ChannelLayout) -> bool:
    return any(
        OPERATIONS[call.op].root_field is not None
        for code in layout.program.codes
        for call in code.distinct_calls()
    )


def _goal_of_mixed(endings: Mapping[str, ReadingResult]) -> SearchGoal | None:
    """What to look for under ``mixed``; None where the plain readings say it all."""
    goals: tuple[tuple[FailureKind, SearchGoal], ...] = (
        ("mismatch", "fits"),
        ("deadlock", "passes"),
    )
    for kind, goal in goals:
        said = set(frequency_by_reading(endings, kind).values())
        if said != {"never"}:
            return goal if said == {"always"} else None
    return "all"


def _with_assumed_deadlock(found: ReadingResult, goal: SearchGoal) -> ReadingResult:
    """A search for the opposite of what always happens stops early: what it did not look for is
    known to happen.
    """
    return replace(found, stuck=found.stuck or {(): ()}) if goal == "passes" else found


def reading_result_of(search: StateSearch) -> ReadingResult:
    """What a search has seen."""
    seen, machine = search.seen, search.machine
    stuck: dict[tuple[int, ...], tuple[int, ...]] = {}
    for ranks, core in seen.stuck.items():
        for image in symmetric_images(ranks, search.classes, MAX_BLOCKED_SETS):
            if image not in stuck and len(stuck) < MAX_BLOCKED_SETS:
                place = dict(
                    zip(
                        _ordered_by_class(ranks, search),
                        _ordered_by_class(image, search),
                        strict=True,
                    )
                )
                stuck[image] = tuple(sorted(place[rank] for rank in core))
    numbers = {
        "end": seen.first_end,
        "deadlock": seen.first_stuck,
        "mismatch": seen.first_unfit,
        "race": seen.first_broken,
    }
    examples = {
        name: ExampleExecution(
            standstill_at(machine, search.state(n)),
            schedule_from_path(machine, search.path(n)) if search.path(n) else None,
        )
        for name, n in numbers.items()
        if n >= 0
    }
    if "end" not in examples:  # the bound came first
        examples["end"] = ExampleExecution(standstill_at(machine, search.state(0)), ended=False)
    receives = search.receives().values()
    takers = {
        (box.receiver, r.position, r.part): frozenset(orbit(sorted(who), search.classes))
        for r, box, who in receives
    }
    broken_reliances = tuple(
        (box.receiver, r.position, r.part)
        for r, box, who in receives
        if r.assume >= 0 and who - {r.assume}
    )
    mismatches = search.fits.mismatches()
    who = orbit(sorted({rank for u in mismatches for rank in u.ranks}), search.classes)
    return ReadingResult(
        stuck,
        seen.passed,
        mismatches,
        seen.fit,
        examples,
        broken_reliances,
        seen.kept,
        tuple(sorted(who)),
        takers,
    )


def _ordered_by_class(ranks: tuple[int, ...], search: StateSearch) -> list[int]:
    """Ranks ordered so that equal places of two images of one set belong together."""
    moving = [rank for ranks_of in search.classes for rank in ranks_of]
    fixed = [rank for rank in ranks if rank not in moving]
    return fixed + [rank for ranks_of in search.classes for rank in ranks_of if rank in ranks]


__all__ = [
    "MAX_STATES",
    "FailureKind",
    "ContractResult",
    "explore_all_readings",
    "reading_result_of",
]
