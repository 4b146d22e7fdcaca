"""The final state of a run: how each rank ended, and which ranks are blocked and why.

Every driver of a program produces this record when no rank can take a further step.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from distsim.common.records import dataclass

#: How a rank's program ended. ``raised``: a Python error; ``crashed``: the process died (signal);
#: ``silent`` (real runs only): the rank makes no progress and waits for no rank.
RankEndStatus = Literal["ended", "blocked", "raised", "crashed", "killed", "absent", "silent"]
#: How a rank ends that fails.
FAILURES: Final = ("raised", "crashed", "killed")


class WaitDependency(NamedTuple):
    """A rank waits for one request of its own.

    The request needs all of ``ranks`` or, if ``any``, one of them. ``position`` is the call whose
    request is open; ``part`` is the part of a batch, else -1.
    """

    position: int
    part: int
    ranks: tuple[int, ...]
    any: bool = False


class BlockedRank(NamedTuple):
    """A rank that cannot proceed until all its ``needs`` are met (an AND of ANDs and ORs).

    ``position`` is the call that the host is in. ``device``: the host ran ahead, and the device is
    blocked.
    """

    rank: int
    position: int
    needs: tuple[WaitDependency, ...]
    since_ns: int = 0
    device: bool = False


class RankEnd(NamedTuple):
    """How and when a rank ended.

    ``position`` is the call that it was in; the number of its calls if it made them all.
    """

    rank: int
    status: RankEndStatus
    position: int
    at_ns: int = 0
    message: str = ""


@dataclass(frozen=True, slots=True)
class FinalState:
    """The state in which no rank can take a further step.

    ``blocked`` is empty if every rank reached its end. ``unreceived``: (sender, position, part) of
    messages that were sent and never received. Which calls were matched is not recorded here.
    """

    ends: tuple[RankEnd, ...]
    blocked: tuple[BlockedRank, ...]
    unreceived: tuple[tuple[int, int, int], ...] = ()

    @property
    def stuck(self) -> tuple[int, ...]:
        """The blocked ranks."""
        return tuple(b.rank for b in self.blocked)
