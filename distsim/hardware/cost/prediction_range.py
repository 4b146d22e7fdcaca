"""Prediction ranges on GPUs: quantiles of measured / predicted time for held-out systems.

The constants of the cost model were not fitted to these systems. The ranges are asymmetric, because
effects that a model lacks usually make the real time longer, not shorter.
`benchmarks/accuracy/run.py` prints the quantiles and the coverage of the ranges.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from distsim.hardware.cluster import PRESETS
from distsim.hardware.cost.nccl_context import NcclContext
from distsim.hardware.cost.nccl_placement import context_of_group

if TYPE_CHECKING:
    from distsim.hardware.cost.model import CostModel


class PredictionRange(NamedTuple):
    """Factors on a predicted cost that cover 90 % of measured times.

    ``known``: published tables of such systems exist.
    """

    low: float
    high: float
    known: bool


#: Ranges by number of nodes and by size: below 64 KiB, up to 16 MiB, above.
_ONE_NODE_RANGES: Final = ((0.62, 1.42), (0.65, 1.40), (0.85, 1.26))
_MULTI_NODE_RANGES: Final = ((0.70, 2.10), (0.72, 1.50), (0.78, 1.60))
#: For a class with at most one published system, the logarithm of the range is this much wider.
_UNFITTED_EXPONENT: Final = 2.0
#: Classes (architecture, several nodes, link) with at least two published systems.
FITTED_SYSTEMS: Final = (
    ("ampere", False, "nvlink"),
    ("hopper", False, "nvlink"),
    ("volta", False, "nvlink"),
    ("hopper", True, "ib"),
)


def range_of_prediction(at: NcclContext, nbytes: int, known: bool | None = None) -> PredictionRange:
    """The prediction range of a cost.

    ``known`` states whether published tables of such systems exist; the default is decided by
    `FITTED_SYSTEMS`.
    """
    if known is None:
        link = at.link if at.nodes == 1 else at.transport
        known = (at.architecture, at.nodes > 1, link) in FITTED_SYSTEMS
    size_class = (nbytes >= 1 << 16) + (nbytes > 1 << 24)
    low, high = (_ONE_NODE_RANGES if at.nodes == 1 else _MULTI_NODE_RANGES)[size_class]
    if known:
        return PredictionRange(low, high, True)
    return PredictionRange(low**_UNFITTED_EXPONENT, high**_UNFITTED_EXPONENT, False)


#: Range of compute whose cost follows from FLOP and bytes: the quantiles .065 and .935 of published
#: / simulated step times, with equal weight per source. It covers 80 % of the times of a held-out
#: source (`benchmarks/training_steps.py`).
COMPUTE_RANGE: Final = (0.87, 1.19)


def communication_range(cost: CostModel, ranks: int) -> tuple[float, float]:
    """(low, high) for a communication of 64 KiB to 16 MiB among ranks in any position.

    The range is wider for clusters other than unchanged presets.
    """
    at = context_of_group(cost.cluster, cost.placement((0, max(ranks - 1, 0))))
    band = range_of_prediction(at, 1 << 20, None if cost.name in PRESETS else False)
    return band.low, band.high
