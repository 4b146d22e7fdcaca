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


#: By one node or several, and size: below 64 KiB, to 16 MiB, above.
_ONE_NODE_RANGES: Final = ((0.62, 1.42), (0.65, 1.40), (0.85, 1.26))
_MULTI_NODE_RANGES: Final = ((0.70, 2.10), (0.72, 1.50), (0.78, 1.60))
#: Systems of a class that one published system or none is of: the logarithms are so much wider.
_UNFITTED_EXPONENT: Final = 2.0
#: (architecture, several nodes, way) that two or more published systems are of.
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
        known = (
            at.architecture,
            at.nodes > 1,
            at.link if at.nodes == 1 else at.transport,
        ) in FITTED_SYSTEMS
    low, high = (_ONE_NODE_RANGES if at.nodes == 1 else _MULTI_NODE_RANGES)[
        (nbytes >= 1 << 16) + (nbytes > 1 << 24)
    ]
    return (
        PredictionRange(low, high, True)
        if known
        else PredictionRange(low**_UNFITTED_EXPONENT, high**_UNFITTED_EXPONENT, False)
    )


#: Of compute that is priced by FLOP and bytes: what lies between these quantiles, .065 and .935, of
#: published over simulated training steps, sources weighing alike, holds four of five of the times
#: of a source that was left out (`benchmarks/training_steps.py`).
COMPUTE_RANGE: Final = (0.87, 1.19)


def communication_range(cost: CostModel, ranks: int) -> tuple[float, float]:
    """(low, high) for a communication of 64 KiB to 16 MiB among ranks in any position.

    The range is wider for clusters other than unchanged presets.
    """
    at = context_of_group(cost.cluster, cost.placement((0, max(ranks - 1, 0))))
    band = range_of_prediction(at, 1 << 20, None if cost.name in PRESETS else False)
    return band.low, band.high
