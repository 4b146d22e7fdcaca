"""How far a price may be off: quantiles of measured over priced, from systems that the constants were not fitted to."""

from __future__ import annotations

from typing import Final

from distsim.cost.setting import Setting

#: (5 %, 95 %) of measured / priced, by one node or several and size (below 64 KiB, to 16 MiB, above): `benchmarks/accuracy/run.py`.
_ONE: Final = ((0.6, 1.7), (0.6, 1.7), (0.8, 1.3))
_SEVERAL: Final = ((0.5, 2.5), (0.5, 2.5), (0.7, 1.9))
#: A class of systems that no table is of: the logarithms are as much wider.
_NEW: Final = 1.4


def band_of(at: Setting, nbytes: int, known: bool = True) -> tuple[float, float]:
    """(low, high) factors on a price between which nine of ten measured times are; ``known``: whether tables of this class exist."""
    low, high = (_ONE if at.nodes == 1 else _SEVERAL)[(nbytes >= 1 << 16) + (nbytes > 1 << 24)]
    return (low, high) if known else (low**_NEW, high**_NEW)
