"""The edges of prices: which band a size has, and whom it is the band of."""

from __future__ import annotations

import pytest

from distsim.cluster import preset
from distsim.cost import CostModel
from distsim.cost.band import KNOWN, Band, band_of, several
from distsim.cost.setting import Setting

ONE = Setting("ampere", 8, 1, 8, 300.0)


def test_a_price_has_the_band_of_its_size_below_64_kib_to_16_mib_and_above() -> None:
    for at in (ONE, ONE._replace(architecture="hopper", n=16, nodes=2)):
        small, below, middle, upper, large = (band_of(at, n) for n in (1, (1 << 16) - 1, 1 << 16, 1 << 24, (1 << 24) + 1))

        assert small == below
        assert middle == upper
        assert len({small, middle, large}) == 3
        assert all(band.known and band.low < 1 < band.high <= 3.01 * band.low for band in (small, middle, large))


@pytest.mark.parametrize(("architecture", "nodes", "way", "known"), [
    ("ampere", 1, "nvlink", True), ("hopper", 1, "nvlink", True), ("volta", 1, "nvlink", True), ("hopper", 2, "ib", True),
    ("ampere", 2, "ib", False), ("hopper", 2, "socket", False), ("ampere", 1, "pcie", False), ("ada", 1, "nvlink", False),
])  # fmt: skip
def test_a_system_of_which_there_is_no_table_has_a_band_twice_as_wide(
    architecture: str, nodes: int, way: str, known: bool
) -> None:
    """In the logarithm. One that is said to be known is taken at that word."""
    at = Setting(architecture, 8 * nodes, nodes, 8, 300.0, intra="pcie" if way == "pcie" else "nvlink", transport=way)
    sure = band_of(at, 1, True)

    assert band_of(at, 1).known == known == ((architecture, nodes > 1, way) in KNOWN)
    assert band_of(at, 1) == (sure if known else Band(sure.low**2, sure.high**2, False))
    assert band_of(at, 1, False) == Band(sure.low**2, sure.high**2, False)


def test_ranks_that_may_be_anywhere_have_the_band_of_the_way_between_the_first_and_the_last() -> None:
    cost = CostModel(preset("dgx-h100"), 16, 8)
    near, far = (
        band_of(ONE._replace(architecture="hopper"), 1 << 20),
        band_of(ONE._replace(architecture="hopper", nodes=2), 1 << 20),
    )

    assert several(cost, 8) == (near.low, near.high)
    assert several(cost, 9) == (far.low, far.high)
    assert several(cost, 1) == (near.low, near.high)
