"""Measured times beside what a cluster says of them: where the two part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from distsim.calibrate.fit import price, world_of
from distsim.calibrate.points import Point, pooled
from distsim.cluster import Cluster
from distsim.cost import CostModel
from distsim.cost.told import told
from distsim.ops.table import OPS


class Beside(NamedTuple):
    """A measured time and its price in ns. ``band``: factors on the price between which nine of ten measured times lie; None where the
    cluster's prices have none."""

    point: Point
    priced_ns: int
    band: tuple[float, float] | None

    @property
    def ratio(self) -> float:
        """Measured over priced."""
        return self.point.ns / self.priced_ns

    @property
    def parts(self) -> bool:
        """Whether the measured time is outside the band."""
        return self.band is not None and not self.band[0] <= self.ratio <= self.band[1]


def beside(points: Iterable[Point], cluster: Cluster) -> tuple[Beside, ...]:
    """Every measured size with its price, by operation, ranks, nodes and size; the median where a size was measured more than once."""
    models: dict[tuple[int, int], CostModel] = {}
    found = []
    for point in sorted(pooled(points)):
        at = world_of(point)
        cost = models.setdefault(at, CostModel(cluster, *at))
        found.append(Beside(point, max(price(cost, point), 1), _band(cost, point)))
    return tuple(found)


def _band(cost: CostModel, point: Point) -> tuple[float, float] | None:
    row = OPS[point.op]
    ranks = (0, 1 if point.nodes == 1 else cost.local_size) if row.kind == "p2p" else tuple(range(point.group))
    known = told(cost, row, ranks, point.nbytes)
    return None if known is None else (known.band.low, known.band.high)
