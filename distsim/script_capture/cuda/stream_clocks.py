"""Which work of an emulated GPU is ordered before which: a clock for each stream.

Every stream counts its work. It knows of each other stream up to which count that one's work is
over; events, waits and works carry this knowledge on. The host is an actor too: what it has waited
for is over for all work that it launches afterwards. The calls of a process group run on a stream
of their own, as in NCCL.

The idea is that of vector clocks (Mattern, 1989).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Final

from distsim.script_capture.cuda.stream_log import StreamStep

#: The actor that launches work, and computes on the CPU.
HOST: Final = "the host"

#: What begins the names of actors that are streams.
STREAM_PREFIX: Final = "stream "

#: By actor: how much of its work is over.
Clock = dict[str, int]


class StreamClocks:
    """The clocks of one process."""

    def __init__(self) -> None:
        self._work: Clock = defaultdict(int)
        self._known: dict[str, Clock] = defaultdict(dict)
        self._events: dict[int, Clock] = {}

    def launch(self, actor: str) -> int:
        """Add work of a stream. Returns its number."""
        if actor != HOST:
            self._learn(actor, self._known[HOST])
        self._work[actor] += 1
        return self._work[actor]

    def is_over(self, actor: str, number: int, other: str) -> bool:
        """Whether work ``number`` of ``actor`` is over before new work of ``other`` starts."""
        return actor in (other, HOST) or self._known[other].get(actor, 0) >= number

    def covered_by(self, actor: str) -> Clock:
        """What is over when all present work of an actor is over."""
        return {**self._known[actor], actor: self._work[actor]}

    def wait(self, actor: str, clock: Mapping[str, int]) -> None:
        """New work of an actor starts after what the clock covers."""
        self._learn(actor, clock)

    def observe(self, step: StreamStep) -> None:
        """Follow a step of the stream log."""
        stream = stream_actor(step.stream)
        if step.kind == "record":
            self._events[step.event] = self.covered_by(stream)
        elif step.kind == "block":
            self._learn(stream, self._events.get(step.event, {}))
        elif step.kind == "sync event":
            self._learn(HOST, self._events.get(step.event, {}))
        elif step.kind == "sync stream":
            self._learn(HOST, self.covered_by(stream))
        else:
            for actor in list(self._work):
                self._learn(HOST, self.covered_by(actor))

    def _learn(self, actor: str, clock: Mapping[str, int]) -> None:
        known = self._known[actor]
        for other, number in clock.items():
            if number > known.get(other, 0):
                known[other] = number


def stream_actor(name: str) -> str:
    """The actor of a stream."""
    return f"{STREAM_PREFIX}{name}"


__all__ = ["HOST", "STREAM_PREFIX", "Clock", "StreamClocks", "stream_actor"]
