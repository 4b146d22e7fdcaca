"""The one simpy event of the fast engines: it lets a host that waits go on at a given time."""

from __future__ import annotations

import simpy


class Wake(simpy.Event):
    """An event that comes due at a time fixed by whoever brings it about."""

    def at(self, ns: int) -> None:
        self._ok, self._value = True, None
        self.env.schedule(self, delay=ns - self.env.now)
