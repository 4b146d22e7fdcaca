"""Operations as rows, and what their schedules ask of the links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, NamedTuple, Protocol

from distsim.cluster.model import Cluster
from distsim.cluster.placement import Placement, RoundLoad
from distsim.errors import UsageError
from distsim.names import listing, near
from distsim.schedules import ALGORITHMS, Algorithm, Round

#: The word for "whichever is cheapest" in place of an algorithm's name.
CHEAPEST = "cheapest"


class Row(Protocol):
    """The columns of an operation's row that a price needs; see `distsim.ops.base.Op`."""

    op: ClassVar[str]
    algorithms: ClassVar[Mapping[str, Algorithm]]

    @classmethod
    def single(cls) -> str: ...

    @classmethod
    def busbw_factor(cls, n: int) -> float: ...


class Load(NamedTuple):
    """A whole schedule: its rounds by what they ask of the links, and how many chunks a rank combines, one after the other."""

    rounds: tuple[tuple[RoundLoad, int], ...]
    combined: int


def load_of(place: Placement, algorithm: Algorithm, root: int) -> Load:
    if algorithm.shape == "all pairs":
        return Load(((place.all_pairs_load(), 1),), 0)
    if algorithm.rotations is None:
        return written_load(place, algorithm.rounds(place.n, root))
    rotations = algorithm.rotations(place.n)
    rounds = _together((place.rotation_load(r.distance, r.chunks), r.rounds) for r in rotations)
    return Load(rounds, sum(r.rounds * r.chunks for r in rotations if r.reduce))


def written_load(place: Placement, rounds: Sequence[Round]) -> Load:
    """Of rounds as they are written."""
    combined = Counter(t.dst for round_ in rounds for t in round_ if t.reduce)
    loads = ((place.round_load([t.src for t in round_], [t.dst for t in round_]), 1) for round_ in rounds)
    return Load(_together(loads), max(combined.values(), default=0))


def _together(loads: Iterable[tuple[RoundLoad, int]]) -> tuple[tuple[RoundLoad, int], ...]:
    """Equal rounds counted together, in order of first use."""
    counts: Counter[RoundLoad] = Counter()
    for load, times in loads:
        counts[load] += times
    return tuple(counts.items())


def brings_about(row: type[Row]) -> str:
    """What the row's algorithms are algorithms of."""
    return next((algorithm.of for algorithm in row.algorithms.values()), "")


def check_names(cluster: Cluster) -> None:
    """Raises UsageError where ``algorithms`` names what there is not."""
    for of, name in cluster.algorithms.items():
        known = ALGORITHMS.get(of)
        if known is None:
            message = f"cluster {cluster.name} has `algorithms` for `{of}`, which has none{near(of, ALGORITHMS)}"
            raise UsageError(message, f"those that have are {listing(ALGORITHMS)}")
        if name != CHEAPEST and name not in known:
            message = f"cluster {cluster.name}: {of} has no algorithm `{name}`{near(name, (*known, CHEAPEST))}"
            raise UsageError(message, f"it has {listing(known)}, or `{CHEAPEST}` for the least of their prices")
