"""A unit's instructions as tuples of numbers, for the driver with local clocks. One thread for the host, one for each stream."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from distsim.semantics.form import (
    KIND_COLLECTIVE,
    KIND_WORK,
    Instruction,
    Launch,
    Leave,
    Lock,
    Meet,
    Part,
    Post,
    Stuck,
    Sync,
    Unit,
    Wait,
)

#: Steps of a host: hand over and go on (POST, JOIN), or hand over and wait (the next ones), … and of a stream: BEGIN a launch once the
#: host has handed it over (ISSUE) and all before it have ended, and FINISH it. A host waits for the ends of its requests' launches one
#: after the other (WAIT_ENDS), for all that it has launched at once (AWAIT_ENDS). The driver asks for the first ones most often.
POST, MESSAGE, WAIT, FINISH, WORK, ISSUE, BEGIN, JOIN, COLLECTIVE, WAIT_EACH, MEET, WAIT_ENDS, AWAIT_ENDS, END, NEVER = range(15)

#: (step, row, rows): see `flatten`.
Step = tuple[int, int, tuple[int, ...]]


class Threads(NamedTuple):
    """A unit's threads: the host's steps, and those of each stream."""

    host: list[Step]
    streams: list[list[Step]]


def flatten(unit: Unit, offsets: list[int], one_by_one: bool) -> Threads:
    """The steps of a unit's threads. Rows count from the rank's first.

    The row of a wait is that of the call which waits (-1: the program's end), for its return is written down there; a meet has its numbers
    for rows. ``one_by_one``: waits come one for each request, and each notes when it was waited for (`WAIT_EACH`: the row, then these).
    """
    host: list[Step] = []
    streams: dict[Hashable, list[Step]] = {}
    own: set[int] = set()  # rows of launches that streams run
    found, i = [one for one in unit.instructions if type(one) is not Lock], 0
    while i < len(found):
        one = found[i]
        if type(one) is Post and (queue := one.launch.queue) is not None and queue.is_stream:
            own.add(one.launch.row)
            host.append((ISSUE, one.launch.row, ()))
            streams.setdefault(queue.key, []).extend(_stream_steps(one.launch))
            i += 1
        else:
            step, used = _host_step(found, i, offsets, own, one_by_one)
            host.append(step)
            i += used
    return Threads(host, list(streams.values()))


def _host_step(found: Sequence[Instruction], i: int, offsets: list[int], own: set[int], one_by_one: bool) -> tuple[Step, int]:
    """The step at an instruction that hands a stream nothing, and how many instructions it takes up."""
    here = found[i]
    if isinstance(here, Post):
        launch = here.launch
        whole = launch.row == offsets[here.position]  # not a part of a batch, whose return is written down in its own row
        waits = whole and i + 1 < len(found) and found[i + 1] == (here.position, (launch.row,), ())  # a Wait
        kind = launch.parts[0].kind
        if kind is KIND_WORK:
            return (WORK, launch.row, ()), 2 if waits else 1
        step = JOIN if kind is KIND_COLLECTIVE else POST
        return (step + waits, launch.row, ()), 1 + waits
    row = offsets[here.position] if here.position < len(offsets) - 1 else -1
    if isinstance(here, Wait):
        if own and not own.isdisjoint(here.rows):
            return (WAIT_ENDS, row, here.rows), 1
        return ((WAIT_EACH, row, (*here.rows[:1], *here.waited)) if one_by_one and here.waited else (WAIT, row, here.rows)), 1
    if isinstance(here, Sync):
        return (AWAIT_ENDS, row, here.rows), 1
    if isinstance(here, Meet):
        return (MEET, row, here.numbers), 1
    return ((NEVER if isinstance(here, Stuck) else END, row, ()) if isinstance(here, (Stuck, Leave)) else (WAIT, row, ())), 1


def _stream_steps(launch: Launch) -> list[Step]:
    parts: tuple[Part, ...] = launch.parts
    begin = (BEGIN, launch.row, launch.after)
    if parts[0].kind is KIND_WORK:
        return [begin, (WORK, launch.row, ())]
    come: list[Step] = [(JOIN if part.kind is KIND_COLLECTIVE else POST, part.row, ()) for part in parts]
    return [begin, *come, (FINISH, launch.row, tuple([part.row for part in parts]))]
