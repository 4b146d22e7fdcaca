"""A lower bound for the time of a simulation: a bare simpy loop over the same calls.

It has a process per rank, a dict of deques, and one Timeout per message, but no checks and no
records. `python benchmarks/engine.py` compares the speed of distsim's engine with this loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from math import ceil
from typing import Any

import simpy

#: Per rank: ("isend" | "irecv", peer, nbytes), ("send" | "recv", peer, nbytes), ("wait", how many
#: of the open requests, oldest first), ("compute", ns), ("all_reduce", group, nbytes, members).
Calls = Sequence[tuple[Any, ...]]


def run(programs: Sequence[Calls], latency_ns: int, bytes_per_ns: float, reduce_ns: int) -> int:
    """The makespan in ns. Rendezvous messages: a transfer starts when both sides have come."""
    env = simpy.Environment()
    sends: dict[tuple[int, int], deque[simpy.Event]] = {}
    recvs: dict[tuple[int, int], deque[simpy.Event]] = {}
    meetings: dict[tuple[Any, int], list[simpy.Event]] = {}

    def meet(
        mine: dict[tuple[int, int], deque[simpy.Event]],
        theirs: dict[tuple[int, int], deque[simpy.Event]],
        key: tuple[int, int],
        nbytes: int,
    ) -> simpy.Event:
        waiting = theirs.get(key)
        if waiting:
            other = waiting.popleft()
            done: simpy.Event = env.timeout(latency_ns + ceil(nbytes / bytes_per_ns))
            assert done.callbacks is not None
            done.callbacks.append(lambda _: other.succeed())
            return done
        event = env.event()
        mine.setdefault(key, deque()).append(event)
        return event

    def rank(me: int, calls: Calls) -> Generator[simpy.Event, Any, None]:
        opened: deque[simpy.Event] = deque()
        counts: dict[Any, int] = {}
        for call in calls:
            kind = call[0]
            if kind in ("isend", "send"):
                event = meet(sends, recvs, (me, call[1]), call[2])
            elif kind in ("irecv", "recv"):
                event = meet(recvs, sends, (call[1], me), call[2])
            if kind in ("isend", "irecv"):
                opened.append(event)
            elif kind in ("send", "recv"):
                yield event
            elif kind == "wait":
                for _ in range(call[1]):
                    yield opened.popleft()
            elif kind == "compute":
                yield env.timeout(call[1])
            else:
                group = call[1]
                counts[group] = counts.get(group, 0) + 1
                come = meetings.setdefault((group, counts[group]), [])
                event = env.event()
                come.append(event)
                if len(come) == call[3]:
                    done = env.timeout(reduce_ns)
                    assert done.callbacks is not None
                    done.callbacks.append(lambda _, come=come: [e.succeed() for e in come])
                yield event

    for me, calls in enumerate(programs):
        env.process(rank(me, calls))
    env.run()
    return int(env.now)
