"""The clock of an event-driven run.

Key idea: simpy orders the instants, but gets only one event per instant at which anything happens.
What happens at an instant is kept here, in a list of entries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import simpy

#: What happens at an instant: a row finishes (its number), the host of a rank continues
#: (``~rank``), or a function is called.
ClockEntry = int | Callable[[], None]


class EventClock:
    """Runs entries in order of time; entries of one instant run in the order of `put`.

    This includes entries that are added to an instant while it runs: ``run`` must therefore iterate
    over the list that it gets, and not over a copy.
    """

    def __init__(self, run: Callable[[list[ClockEntry]], None]) -> None:
        self.env: Any = simpy.Environment()
        self.now = 0
        self._run_entries = run
        self._entries_at: dict[int, list[ClockEntry]] = {}

    def put(self, at_ns: int, entry: ClockEntry) -> None:
        """Add an entry at a time, which must not be in the past."""
        entries = self._entries_at.get(at_ns)
        if entries is None:
            self._entries_at[at_ns] = [entry]
            self.env.timeout(at_ns - self.now).callbacks.append(self._run_instant)
        else:
            entries.append(entry)

    def cancel(self, at_ns: int, entry: ClockEntry) -> None:
        """Remove an entry that `put` has added and that has not run yet."""
        entries = self._entries_at[at_ns]
        entries.remove(entry)
        if not entries:
            del self._entries_at[at_ns]

    def _run_instant(self, _: object) -> None:
        instant = int(self.env.now)
        entries = self._entries_at.get(instant)
        # simpy cannot remove an event, so it reports instants without entries too.
        if entries is not None:
            self.now = instant
            self._run_entries(entries)
            del self._entries_at[instant]

    def run(
        self,
        deadline: Callable[[], int | None] | None = None,
        expire: Callable[[], None] | None = None,
    ) -> None:
        """Run until there are no entries, and call ``expire`` at each deadline on the way.

        ``deadline`` returns the next deadline, or None. It is asked again before each instant,
        because deadlines depend on what has happened.
        """
        if deadline is None or expire is None:
            while self._entries_at:
                self.env.step()
            return
        while self._entries_at:
            limit = deadline()
            if limit is not None and limit < self.env.peek():
                delay = max(limit - self.env.now, 0)
                self.env.timeout(delay).callbacks.append(lambda _: self._expire(expire))
            self.env.step()

    def _expire(self, expire: Callable[[], None]) -> None:
        self.now = int(self.env.now)
        expire()
