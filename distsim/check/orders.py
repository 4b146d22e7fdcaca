"""The readings of a program with open receives: one search each, within one bound, and what they found as `Ending` records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from distsim.check.ending import MAX_STATES, Ending, Example, Kind, Orders, hows
from distsim.check.endings import standstill_at
from distsim.check.explore import Goal, Search
from distsim.check.layout import Layout
from distsim.check.schedule import schedule_of
from distsim.check.symmetry import images, orbit
from distsim.ops.table import OPS

#: How many sets of stuck ranks are listed at most.
MAX_SETS = 4096
_PORTION = 4096


def all_orders(layout: Layout, max_states: int = MAX_STATES) -> Orders:
    """Explore the three plain readings, then ``mixed`` as far as these leave it open.

    A mismatch or a broken reliance that ``mixed`` can reach, ``buffered`` can reach too (to buffer only ever adds what can meet),
    so ``mixed`` is looked at for deadlocks that need both kinds of send, or, where the three always end alike, for an execution
    that does not.
    """
    absent = frozenset(f.rank for f in layout.program.faults if f.kind == "absent")
    readings = ["rendezvous", *(["early"] if _rooted(layout) else []), "buffered"]
    searches = {reading: Search(layout, reading, absent=absent) for reading in readings}
    _share(list(searches.values()), max_states)
    for search in searches.values():
        search.drain()
    endings = {reading: ending_of(search) for reading, search in searches.items()}
    used = sum(search.stored for search in searches.values())
    complete = all(search.finished for search in searches.values())
    goal = _goal_of_mixed(endings)
    if goal is not None:
        mixed = Search(layout, "mixed", goal, absent)
        mixed.run(max(max_states - used, 1))
        mixed.drain()
        found = ending_of(mixed)
        endings["mixed"] = found if goal == "all" else _completed(found, goal)
        used, complete = used + mixed.stored, complete and mixed.finished
    return Orders(endings, min(used, max(max_states, 1)), complete)


def _share(searches: list[Search], most: int) -> None:
    """Run searches in turn, until all are finished or ``most`` states are stored."""
    while not all(search.finished for search in searches):
        for search in searches:
            left = most - sum(s.stored for s in searches)
            if left <= 0:
                return
            search.run(search.stored + min(left, _PORTION))


def _rooted(layout: Layout) -> bool:
    return any(OPS[call.op].root_field is not None for code in layout.program.codes for call in code.distinct_calls())


def _goal_of_mixed(endings: Mapping[str, Ending]) -> Goal | None:
    """What to look for under ``mixed``; None where the plain readings say it all."""
    goals: tuple[tuple[Kind, Goal], ...] = (("mismatch", "fits"), ("deadlock", "passes"))
    for kind, goal in goals:
        said = set(hows(endings, kind).values())
        if said != {"never"}:
            return goal if said == {"always"} else None
    return "all"


def _completed(found: Ending, goal: Goal) -> Ending:
    """A search for the opposite of what always happens stops early: what it did not look for is known to happen."""
    return replace(found, stuck=found.stuck or {(): ()}) if goal == "passes" else found


def ending_of(search: Search) -> Ending:
    """What a search has seen."""
    seen, machine = search.seen, search.machine
    stuck: dict[tuple[int, ...], tuple[int, ...]] = {}
    for ranks, core in seen.stuck.items():
        for image in images(ranks, search.classes, MAX_SETS):
            if image not in stuck and len(stuck) < MAX_SETS:
                place = dict(zip(_by_class(ranks, search), _by_class(image, search), strict=True))
                stuck[image] = tuple(sorted(place[rank] for rank in core))
    numbers = {"end": seen.first_end, "deadlock": seen.first_stuck, "mismatch": seen.first_unfit, "race": seen.first_broken}
    examples = {
        name: Example(standstill_at(machine, search.state(n)), schedule_of(machine, search.path(n)) if search.path(n) else None)
        for name, n in numbers.items()
        if n >= 0
    }
    if "end" not in examples:  # the bound came first
        examples["end"] = Example(standstill_at(machine, search.state(0)), ended=False)
    receives = search.receives().values()
    takers = {(box.receiver, r.position, r.part): frozenset(orbit(sorted(who), search.classes)) for r, box, who in receives}
    relying = tuple((box.receiver, r.position, r.part) for r, box, who in receives if r.assume >= 0 and who - {r.assume})
    unlikes = search.fits.unlikes()
    who = orbit(sorted({rank for u in unlikes for rank in u.ranks}), search.classes)
    return Ending(stuck, seen.passed, unlikes, seen.fit, examples, relying, seen.kept, tuple(sorted(who)), takers)


def _by_class(ranks: tuple[int, ...], search: Search) -> list[int]:
    """Ranks ordered so that equal places of two images of one set belong together."""
    moving = [rank for ranks_of in search.classes for rank in ranks_of]
    fixed = [rank for rank in ranks if rank not in moving]
    return fixed + [rank for ranks_of in search.classes for rank in ranks_of if rank in ranks]


__all__ = ["MAX_STATES", "Kind", "Orders", "all_orders", "ending_of"]
