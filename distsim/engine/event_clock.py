"""What happens at which time: simpy's clock, with one of its events for each instant at which
anything does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import simpy

#: What happens at an instant: a row finishes (its number), a rank's host goes on (the number's
#: complement), or something else.
ClockEntry = int | Callable[[], None]


class EventClock:
    """Entries of one instant happen in the order in which they were put there, also those that
    others put there meanwhile.
    """

    def __init__(self, run: Callable[[list[ClockEntry]], None]) -> None:
        self.env: Any = simpy.Environment()
        self.now = 0
        self._run = run
        self._at: dict[int, list[ClockEntry]] = {}

    def put(self, at_ns: int, entry: ClockEntry) -> None:
        there = self._at.get(at_ns)
        if there is None:
            self._at[at_ns] = [entry]
            self.env.timeout(at_ns - self.now).callbacks.append(self._instant)
        else:
            there.append(entry)

    def _instant(self, _: object) -> None:
        self.now = int(self.env.now)
        self._run(self._at[self.now])
        del self._at[self.now]

    def run(
        self,
        deadline: Callable[[], int | None] | None = None,
        expire: Callable[[], None] | None = None,
    ) -> None:
        """Run to the end, with deadlines between its events where there are any."""
        if deadline is None or expire is None:
            self.env.run()
            return
        while self.env.peek() != float("inf"):
            limit = deadline()
            if limit is not None and limit < self.env.peek():
                self.env.timeout(max(limit - self.env.now, 0)).callbacks.append(
                    lambda _: self._expire(expire)
                )
            self.env.step()

    def _expire(self, expire: Callable[[], None]) -> None:
        self.now = int(self.env.now)
        expire()
