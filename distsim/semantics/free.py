"""Is a linked program free of order: does no order of arrival decide what happens in it? Then local clocks are exact."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from distsim.ops.table import OPS
from distsim.semantics.form import ODD, Drop, Leave, Lock, Meet, PartKind, Post, Stuck, Unit, Wait
from distsim.semantics.link import IntArray, Linked


def why_ordered(linked: Linked, shared_links: bool = False) -> str | None:
    """The reason why the order of events must be followed, None where it does not matter. ``shared_links``: messages queue on cards."""
    if shared_links:
        return "links are shared"
    if linked.open_boxes.size:
        return "a receive is open to any source"
    if any(fault.kind not in ("slow", "late", "absent") for fault in linked.program.faults):
        return "a rank fails"
    if any(fault.kind == "absent" for fault in linked.program.faults) and linked.profile.peer_death == "raises":
        return "a rank is missing"
    return next((why for unit in linked.units if (why := _of_unit(linked, unit)) is not None), None) or misfit(linked)


def _of_unit(linked: Linked, unit: Unit) -> str | None:
    last = unit.instructions[-1]
    if isinstance(last, Leave) and last.gone:
        return "a rank leaves early"
    for instruction in unit.instructions:
        if isinstance(instruction, Drop):
            return "a request is dropped"
        if isinstance(instruction, Stuck):
            return "a call is invalid"
        if isinstance(instruction, Meet) and (instruction.uneven or instruction.lost):
            return "the ranks made different groups"
    return _queue_fills(unit) or (_lock_contended(unit) if linked.profile.lock else None)


def _queue_fills(unit: Unit) -> str | None:
    """Do more launches of a queue stand open at once than its workers run?"""
    opened: dict[Hashable, set[int]] = {}
    of: dict[int, Hashable] = {}
    for instruction in unit.instructions:
        if isinstance(instruction, Post) and instruction.launch.pooled:
            queue = instruction.launch.queue
            assert queue is not None
            there = opened.setdefault(queue.key, set())
            if len(there) >= queue.width:
                return "a queue of collectives fills up"
            there.add(instruction.launch.row)
            of[instruction.launch.row] = queue.key
        elif isinstance(instruction, Wait):
            for row in instruction.rows:
                if row in of:
                    opened[of[row]].discard(row)
    return None


def _lock_contended(unit: Unit) -> str | None:
    """Does an asynchronous collective run beside messages, or beside a wait for one?"""
    opened: set[int] = set()
    for instruction in unit.instructions:
        if isinstance(instruction, Post) and instruction.launch.pooled:
            opened.add(instruction.launch.row)
        elif isinstance(instruction, Wait):
            opened.difference_update(instruction.rows)
        elif opened and (isinstance(instruction, Lock) or _is_message(instruction)):
            return "the process's one lock decides who comes first"
    return None


def _is_message(instruction: object) -> bool:
    return isinstance(instruction, Post) and instruction.launch.parts[0].kind <= PartKind.RECEIVE


def leaves_open(linked: Linked) -> bool:
    """Does a rank leave before its end with requests that it never saw finished? Then it matters who came before."""
    for unit in linked.units:
        last = unit.instructions[-1]
        if isinstance(last, Leave) and last.gone:
            waited = {row for i in unit.instructions if isinstance(i, Wait) for row in i.rows}
            if any(part.row not in waited for launch in unit.launches for part in launch.parts if part.kind is not PartKind.WORK):
                return True
    return False


def misfit(linked: Linked) -> str | None:
    """Do calls that may meet differ?"""
    if bad_pairs(linked).size:
        return "messages do not fit"
    odd, uneven = bad_instances(linked)
    return "collectives do not fit" if odd.size or uneven.size else None


def bad_pairs(linked: Linked) -> IntArray:
    """The receives whose message, if both come, is not what they expect."""
    receives = np.flatnonzero((linked.kind == PartKind.RECEIVE) & (linked.mate >= 0))
    sends = linked.mate[receives]
    differ = (linked.signature[receives] != linked.signature[sends]) | (linked.tag[receives] != linked.tag[sends])
    found: IntArray = receives[differ]
    return found


def bad_instances(
    linked: Linked,
) -> tuple[IntArray, IntArray]:
    """(instances whose calls differ in what they say, instances of pairwise calls whose parts may not fit one another)."""
    rows = np.flatnonzero((linked.kind == PartKind.COLLECTIVE) & (linked.instance >= 0))
    count = len(linked.members)
    low, high = np.full(count, np.iinfo(np.int64).max), np.full(count, np.iinfo(np.int64).min)
    np.minimum.at(low, linked.instance[rows], linked.signature[rows])
    np.maximum.at(high, linked.instance[rows], linked.signature[rows])
    unlike = np.flatnonzero((low < high) | ((low == ODD) & (high == ODD)))
    return unlike, np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *_uneven(linked)]))


def _uneven(linked: Linked) -> list[IntArray]:
    """The instances of calls that agree pair by pair, and whose parts are not all of one size."""
    known: dict[int, bool] = {}
    found = []
    for unit, part, rows in linked.parts(PartKind.COLLECTIVE):
        if OPS[part.call.op].pairwise:
            if id(part.call) not in known:
                agreed = OPS[part.call.op].agreement(linked.program.resolve(unit.ranks[0], part.call))
                known[id(part.call)] = "numel" not in agreed or isinstance(part.call.signature, np.ndarray)
            if known[id(part.call)]:
                found.append(linked.instance[rows])
    return found
