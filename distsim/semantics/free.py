"""Is a linked program free of order: does no order of arrival decide what happens in it? Then local clocks are exact."""

from __future__ import annotations

from collections.abc import Hashable

from distsim.semantics.form import (
    KIND_COLLECTIVE,
    KIND_RECEIVE,
    KIND_WORK,
    Drop,
    Leave,
    Lock,
    Meet,
    Post,
    Stuck,
    Unit,
    Wait,
)
from distsim.semantics.link import Linked
from distsim.semantics.misfits import Misfits


def why_ordered(linked: Linked, misfits: Misfits | None = None) -> str | None:
    """The reason why the order of events must be followed, None where it does not matter. ``misfits``: those of the program, if they are
    at hand."""
    if linked.open_boxes.size:
        return "a receive is open to any source"
    if any(fault.kind not in ("slow", "late", "absent") for fault in linked.program.faults):
        return "a rank fails"
    if any(fault.kind == "absent" for fault in linked.program.faults) and linked.profile.peer_death == "raises":
        return "a rank is missing"
    why = next((why for unit in linked.units if (why := _of_unit(linked, unit)) is not None), None)
    return why or (misfits or Misfits(linked)).why_ordered()


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
    """Does an asynchronous collective run beside what takes the lock as well: messages, a wait for one, a call of the host's own?"""
    opened: set[int] = set()
    for instruction in unit.instructions:
        if isinstance(instruction, Post) and instruction.launch.pooled:
            opened.add(instruction.launch.row)
        elif isinstance(instruction, Wait):
            opened.difference_update(instruction.rows)
        elif opened and (isinstance(instruction, Lock) or _is_message(instruction) or _is_host_s(instruction)):
            return "the process's one lock decides who comes first"
    return None


def _is_message(instruction: object) -> bool:
    return isinstance(instruction, Post) and instruction.launch.parts[0].kind <= KIND_RECEIVE


def _is_host_s(instruction: object) -> bool:
    """A collective that no worker runs, as a new_group."""
    return (
        isinstance(instruction, Post) and instruction.launch.queue is None and instruction.launch.parts[0].kind is KIND_COLLECTIVE
    )


def leaves_open(linked: Linked) -> bool:
    """Does a rank leave before its end with requests that it never saw finished? Then it matters who came before."""
    for unit in linked.units:
        last = unit.instructions[-1]
        if isinstance(last, Leave) and last.gone:
            waited = {row for i in unit.instructions if isinstance(i, Wait) for row in i.rows}
            if any(part.row not in waited for launch in unit.launches for part in launch.parts if part.kind is not KIND_WORK):
                return True
    return False
