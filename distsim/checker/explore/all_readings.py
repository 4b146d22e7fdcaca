"""Explore a program with any-source receives under all readings, within one bound.

The results are `ReadingResult` records, as for programs that need no search.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from distsim.checker.explore.potential_mismatches import NO_ASSUMED_SOURCE
from distsim.checker.explore.schedule_paths import schedule_from_path
from distsim.checker.explore.search import SearchGoal, StateSearch, TakingReceive
from distsim.checker.explore.symmetry import orbit, symmetric_images
from distsim.checker.explore.terminal_states import final_state_at
from distsim.checker.matching.channel_layout import ChannelLayout
from distsim.checker.reading_result import (
    MAX_STATES,
    ContractResult,
    ExampleExecution,
    FailureKind,
    ReadingResult,
    frequency_by_reading,
    union_of_ranks,
)
from distsim.operations.registry import OPERATIONS

#: Limit for the number of sets of blocked ranks that are listed.
MAX_BLOCKED_SETS = 4096
_STATES_PER_TURN = 4096


def explore_all_readings(layout: ChannelLayout, max_states: int = MAX_STATES) -> ContractResult:
    """Explore the three plain readings, then ``mixed`` as far as these leave its result open.

    A mismatch or a broken reliance that ``mixed`` can reach, ``buffered`` can reach too, because
    buffering only ever adds calls that can meet. So ``mixed`` is searched for deadlocks that need
    both kinds of send or, if the three readings always fail, for an execution that does not.
    """
    absent = frozenset(fault.rank for fault in layout.program.faults if fault.kind == "absent")
    readings = ["rendezvous", "buffered"]
    if _has_rooted_collectives(layout):
        readings = ["rendezvous", "early", "buffered"]
    searches = {reading: StateSearch(layout, reading, absent=absent) for reading in readings}
    _run_in_turn(list(searches.values()), max_states)
    for search in searches.values():
        search.record_pending_ends()

    results = {reading: reading_result_of(search) for reading, search in searches.items()}
    stored = sum(search.stored for search in searches.values())
    complete = all(search.finished for search in searches.values())
    goal = _goal_of_mixed(results)
    if goal is not None:
        mixed = StateSearch(layout, "mixed", goal, absent)
        mixed.run(max(max_states - stored, 1))
        mixed.record_pending_ends()
        results["mixed"] = _with_assumed_deadlock(reading_result_of(mixed), goal)
        stored += mixed.stored
        complete = complete and mixed.finished
    return ContractResult(results, min(stored, max(max_states, 1)), complete)


def _run_in_turn(searches: list[StateSearch], max_states: int) -> None:
    """Run searches in turn until all are finished or ``max_states`` states are stored.

    Turns share the bound, so that one large reading does not hide what the others would show.
    """
    while not all(search.finished for search in searches):
        for search in searches:
            available = max_states - sum(each.stored for each in searches)
            if available <= 0:
                return
            search.run(search.stored + min(available, _STATES_PER_TURN))


def _has_rooted_collectives(layout: ChannelLayout) -> bool:
    """Only rooted collectives make the reading ``early`` differ from ``rendezvous``."""
    for code in layout.program.codes:
        if any(OPERATIONS[call.op].root_field is not None for call in code.distinct_calls()):
            return True
    return False


def _goal_of_mixed(results: Mapping[str, ReadingResult]) -> SearchGoal | None:
    """What to search ``mixed`` for; None if the plain readings determine its result."""
    goals: tuple[tuple[FailureKind, SearchGoal], ...] = (
        ("mismatch", "no_mismatch"),
        ("deadlock", "completes"),
    )
    for kind, goal in goals:
        frequencies = set(frequency_by_reading(results, kind).values())
        if frequencies == {"always"}:
            return goal
        if frequencies != {"never"}:
            return None
    return "all"


def _with_assumed_deadlock(result: ReadingResult, goal: SearchGoal) -> ReadingResult:
    """Add the deadlock that a search for a completing execution may not have seen.

    Such a search stops early, but it only runs if the plain readings always deadlock, and their
    executions are among those of ``mixed``.
    """
    if goal != "completes" or result.blocked_sets:
        return result
    return replace(result, blocked_sets={(): ()})


def reading_result_of(search: StateSearch) -> ReadingResult:
    """The record of what a search has seen."""
    seen, classes = search.seen, search.classes
    receives = search.taking_receives()
    takers = {
        (taking.box.receiver, taking.receive.position, taking.receive.part): frozenset(
            orbit(sorted(taking.senders), classes)
        )
        for taking in receives
    }
    broken_reliances = tuple(
        (taking.box.receiver, taking.receive.position, taking.receive.part)
        for taking in receives
        if _breaks_reliance(taking)
    )
    mismatches = search.mismatch_collector.mismatches()
    mismatch_ranks = union_of_ranks(mismatch.ranks for mismatch in mismatches)
    return ReadingResult(
        _blocked_sets(search),
        seen.has_completing_run,
        mismatches,
        seen.has_matching_run,
        _examples(search),
        broken_reliances,
        seen.has_reliable_run,
        tuple(sorted(orbit(mismatch_ranks, classes))),
        takers,
    )


def _breaks_reliance(taking: TakingReceive) -> bool:
    """Whether the receive relies on a sender and took a message of another one."""
    assumed_source = taking.receive.assumed_source
    return assumed_source != NO_ASSUMED_SOURCE and bool(taking.senders - {assumed_source})


def _blocked_sets(search: StateSearch) -> dict[tuple[int, ...], tuple[int, ...]]:
    """The sets of blocked ranks with their cores, including all symmetric images."""
    blocked_sets: dict[tuple[int, ...], tuple[int, ...]] = {}
    for ranks, core in search.seen.blocked_sets.items():
        original = _ordered_by_class(ranks, search)
        for image in symmetric_images(ranks, search.classes, MAX_BLOCKED_SETS):
            if image in blocked_sets or len(blocked_sets) >= MAX_BLOCKED_SETS:
                continue
            image_of = dict(zip(original, _ordered_by_class(image, search), strict=True))
            blocked_sets[image] = tuple(sorted(image_of[rank] for rank in core))
    return blocked_sets


def _ordered_by_class(ranks: tuple[int, ...], search: StateSearch) -> list[int]:
    """Order ranks so that corresponding ranks of two symmetric images have the same place."""
    symmetric = [rank for cls in search.classes for rank in cls]
    fixed = [rank for rank in ranks if rank not in symmetric]
    return fixed + [rank for rank in symmetric if rank in ranks]


def _examples(search: StateSearch) -> dict[str, ExampleExecution]:
    seen = search.seen
    numbers = {
        "end": seen.first_end,
        "deadlock": seen.first_blocked,
        "mismatch": seen.first_mismatch,
        "race": seen.first_broken_reliance,
    }
    examples = {
        kind: _example(search, number) for kind, number in numbers.items() if number is not None
    }
    if "end" not in examples:  # the bound stopped the search before it saw an end
        initial = final_state_at(search.machine, search.state(0))
        examples["end"] = ExampleExecution(initial, ended=False)
    return examples


def _example(search: StateSearch, number: int) -> ExampleExecution:
    path = search.path(number)
    final_state = final_state_at(search.machine, search.state(number))
    schedule = schedule_from_path(search.machine, path) if path else None
    return ExampleExecution(final_state, schedule)


__all__ = [
    "MAX_STATES",
    "FailureKind",
    "ContractResult",
    "explore_all_readings",
    "reading_result_of",
]
