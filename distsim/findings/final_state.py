"""Who is blocked, on whom: the record that rules, one-pass driver and engine leave behind at a
standstill.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from distsim.common.records import dataclass

#: How a rank's program ended. ``raised``: a Python error; ``crashed``: the process died (signal);
#: ``silent``: of a real run, does not move and waits for nobody.
RankEndStatus = Literal["ended", "blocked", "raised", "crashed", "killed", "absent", "silent"]


class WaitDependency(NamedTuple):
    """A rank waits for one request of its own: all of ``ranks`` must come, or any one of them.

    ``position``/``part``: the call (and the batch's part, else -1) whose request is open.
    """

    position: int
    part: int
    ranks: tuple[int, ...]
    any: bool = False


class BlockedRank(NamedTuple):
    """A rank that cannot go on. All its ``needs`` must be met (an AND of ANDs and ORs).

    ``position`` is the call the host is in. ``device`` tells that the host ran ahead and the device
    stands still.
    """

    rank: int
    position: int
    needs: tuple[WaitDependency, ...]
    since_ns: int = 0
    device: bool = False


class RankEnd(NamedTuple):
    """How and when a rank came to its end. ``position`` is the call it was in (the number of calls
    when it ended).
    """

    rank: int
    status: RankEndStatus
    position: int
    at_ns: int = 0
    message: str = ""


@dataclass(frozen=True, slots=True)
class FinalState:
    """No step is left to take. ``blocked`` is empty when every rank reached its end.

    ``unreceived``: (sender, position, part) of messages sent and never received;
    ``pairs``: what met, as the one-pass driver saw it, is not kept here.
    """

    ends: tuple[RankEnd, ...]
    blocked: tuple[BlockedRank, ...]
    unreceived: tuple[tuple[int, int, int], ...] = ()

    @property
    def stuck(self) -> tuple[int, ...]:
        return tuple(b.rank for b in self.blocked)
