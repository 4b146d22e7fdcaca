"""A unit's instructions as tuples of numbers, for the driver with local clocks. One thread for the host, one for each stream."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from distsim.semantics.form import Instruction, Launch, Leave, Lock, Meet, Part, PartKind, Post, Stuck, Sync, Unit, Wait

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

    The row of a wait is that of the call which waits (-1: the program's end), for its return is written down there; a meet has its number
    for rows. ``one_by_one``: waits come one for each request, and each notes when it was waited for (`WAIT_EACH`: the row, then these).
    """
    host: list[Step] = []
    streams: dict[Hashable, list[Step]] = {}
    own: set[int] = set()  # rows of launches that streams run
    found, i = [one for one in unit.instructions if not isinstance(one, Lock)], 0
    while i < len(found):
        step, used = _host_step(found, i, offsets, own, one_by_one)
        host.append(step)
        launch = getattr(found[i], "launch", None)
        if launch is not None and launch.on_stream:
            own.add(launch.row)
            streams.setdefault(launch.queue.key, []).extend(_stream_steps(launch))
        i += used
    return Threads(host, list(streams.values()))


def _host_step(found: Sequence[Instruction], i: int, offsets: list[int], own: set[int], one_by_one: bool) -> tuple[Step, int]:
    """The step at an instruction, and how many instructions it takes up."""
    here = found[i]
    if isinstance(here, Post):
        launch = here.launch
        if launch.on_stream:
            return (ISSUE, launch.row, ()), 1
        whole = launch.row == offsets[here.position]  # not a part of a batch, whose return is written down in its own row
        waits = whole and i + 1 < len(found) and found[i + 1] == Wait(here.position, (launch.row,))
        kind = launch.parts[0].kind
        if kind is PartKind.WORK:
            return (WORK, launch.row, ()), 2 if waits else 1
        step = JOIN if kind is PartKind.COLLECTIVE else POST
        return (step + waits, launch.row, ()), 1 + waits
    row = offsets[here.position] if here.position < len(offsets) - 1 else -1
    if isinstance(here, Wait):
        if any(r in own for r in here.rows):
            return (WAIT_ENDS, row, here.rows), 1
        return ((WAIT_EACH, row, (*here.rows[:1], *here.waited)) if one_by_one and here.waited else (WAIT, row, here.rows)), 1
    if isinstance(here, Sync):
        return (AWAIT_ENDS, row, here.rows), 1
    if isinstance(here, Meet):
        return (MEET, row, (here.number,)), 1
    return ((NEVER if isinstance(here, Stuck) else END, row, ()) if isinstance(here, (Stuck, Leave)) else (WAIT, row, ())), 1


def _stream_steps(launch: Launch) -> Iterator[Step]:
    parts: tuple[Part, ...] = launch.parts
    yield (BEGIN, launch.row, launch.after)
    if parts[0].kind is PartKind.WORK:
        yield (WORK, launch.row, ())
        return
    yield from ((JOIN if part.kind is PartKind.COLLECTIVE else POST, part.row, ()) for part in parts)
    yield (FINISH, launch.row, tuple(part.row for part in parts))
