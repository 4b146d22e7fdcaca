"""How far a price on GPUs may be off: quantiles of measured over priced times, of systems that the constants were not fitted to.

Lopsided: what is missing in a model makes the true time later more often than earlier. `benchmarks/accuracy/run.py` prints the
quantiles, and how many times the bands hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from distsim.cluster import PRESETS
from distsim.cost.on_gpus import setting
from distsim.cost.setting import Setting

if TYPE_CHECKING:
    from distsim.cost.model import CostModel


class Band(NamedTuple):
    """Factors on a price between which nine of ten measured times lie; ``known``: tables of such systems exist."""

    low: float
    high: float
    known: bool


#: By one node or several, and size: below 64 KiB, to 16 MiB, above.
_ONE: Final = ((0.62, 1.42), (0.65, 1.40), (0.85, 1.26))
_SEVERAL: Final = ((0.70, 2.10), (0.72, 1.50), (0.78, 1.60))
#: Systems of a class that one published system or none is of: the logarithms are so much wider.
_NEW: Final = 2.0
#: (architecture, several nodes, way) that two or more published systems are of.
KNOWN: Final = (
    ("ampere", False, "nvlink"), ("hopper", False, "nvlink"), ("volta", False, "nvlink"), ("hopper", True, "ib"),
)  # fmt: skip


def band_of(at: Setting, nbytes: int, known: bool | None = None) -> Band:
    """The band of a price; ``known`` says whether tables of such systems exist, left out: by `KNOWN`."""
    if known is None:
        known = (at.architecture, at.nodes > 1, at.link if at.nodes == 1 else at.transport) in KNOWN
    low, high = (_ONE if at.nodes == 1 else _SEVERAL)[(nbytes >= 1 << 16) + (nbytes > 1 << 24)]
    return Band(low, high, True) if known else Band(low**_NEW, high**_NEW, False)


#: Of compute that is priced by FLOP and bytes: what lies between these quantiles, .065 and .935, of published over simulated training
#: steps, sources weighing alike, holds four of five of the times of a source that was left out (`benchmarks/training_steps.py`).
COMPUTED: Final = (0.87, 1.19)


def several(cost: CostModel, ranks: int) -> tuple[float, float]:
    """(low, high) of a communication among ranks that may be anywhere, of 64 KiB to 16 MiB; wider where a preset is changed."""
    at = setting(cost.cluster, cost.placement((0, max(ranks - 1, 0))))
    band = band_of(at, 1 << 20, None if cost.name in PRESETS else False)
    return band.low, band.high
