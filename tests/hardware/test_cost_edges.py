"""The edges of prices: which band a size has, whom it is the band of, and what NCCL counts for each
form.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from distsim.hardware.cluster import cluster_from, preset
from distsim.hardware.cost import CostModel, nccl_curves
from distsim.hardware.cost.explain import ExplainedForm, explain_cost
from distsim.hardware.cost.nccl_constants import CONSTANTS
from distsim.hardware.cost.nccl_context import NcclContext
from distsim.hardware.cost.nccl_placement import context_of_group
from distsim.hardware.cost.prediction_range import (
    FITTED_SYSTEMS,
    PredictionRange,
    communication_range,
    range_of_prediction,
)
from distsim.operations.registry import OPERATIONS

MIB = 1 << 20

ONE = NcclContext("ampere", 8, 1, 8, 300.0)


def test_the_prediction_range_depends_on_size_with_limits_at_64_kib_and_16_mib() -> None:
    for at in (ONE, ONE._replace(architecture="hopper", n=16, nodes=2)):
        small, below, middle, upper, large = (
            range_of_prediction(at, n) for n in (1, (1 << 16) - 1, 1 << 16, 1 << 24, (1 << 24) + 1)
        )

        assert small == below
        assert middle == upper
        assert len({small, middle, large}) == 3
        assert all(
            band.known and band.low < 1 < band.high <= 3.01 * band.low
            for band in (small, middle, large)
        )


@pytest.mark.parametrize(
    ("architecture", "nodes", "way", "known"),
    [
        ("ampere", 1, "nvlink", True),
        ("hopper", 1, "nvlink", True),
        ("volta", 1, "nvlink", True),
        ("hopper", 2, "ib", True),
        ("ampere", 2, "ib", False),
        ("hopper", 2, "socket", False),
        ("ampere", 1, "pcie", False),
        ("ada", 1, "nvlink", False),
    ],
)
def test_a_system_without_measurements_has_a_range_twice_as_wide(
    architecture: str, nodes: int, way: str, known: bool
) -> None:
    """In the logarithm. One that is said to be known is taken at that word."""
    at = NcclContext(
        architecture,
        8 * nodes,
        nodes,
        8,
        300.0,
        intra="pcie" if way == "pcie" else "nvlink",
        transport=way,
    )
    sure = range_of_prediction(at, 1, True)

    assert (
        range_of_prediction(at, 1).known
        == known
        == ((architecture, nodes > 1, way) in FITTED_SYSTEMS)
    )
    assert range_of_prediction(at, 1) == (
        sure if known else PredictionRange(sure.low**2, sure.high**2, False)
    )
    assert range_of_prediction(at, 1, False) == PredictionRange(sure.low**2, sure.high**2, False)


def test_ranks_at_unknown_places_have_the_range_of_the_path_from_first_to_last() -> None:
    cost = CostModel(preset("dgx-h100"), 16, 8)
    near, far = (
        range_of_prediction(ONE._replace(architecture="hopper"), 1 << 20),
        range_of_prediction(ONE._replace(architecture="hopper", nodes=2), 1 << 20),
    )

    assert communication_range(cost, 8) == (near.low, near.high)
    assert communication_range(cost, 9) == (far.low, far.high)
    assert communication_range(cost, 1) == (near.low, near.high)
    assert communication_range(CostModel(preset("dgx-h100"), 2, 1), 1) == (near.low, near.high)


def test_a_modified_preset_has_the_range_of_a_described_cluster() -> None:
    """No table is of such a system."""
    ours, theirs = (
        communication_range(CostModel(cluster_from(c), 8, 8), 8)
        for c in ("dgx-h100", {"preset": "dgx-h100", "nics": {"count": 4}})
    )

    assert theirs == pytest.approx((ours[0] ** 2, ours[1] ** 2))


def test_omitted_settings_default_to_those_of_a_dgx_h100() -> None:
    """And no data sheet is no bound."""
    cost = CostModel(preset("dgx-h100"), 8, 8)
    at = context_of_group(cost.cluster, cost.placement(tuple(range(8))))

    assert NcclContext("hopper", 8, 1, 8, at.intra_gbs, sheet_intra=at.sheet_intra) == at
    assert nccl_curves.lower_bound_us("all_reduce", ONE, 1e9) == 0


def test_between_two_measured_rank_counts_the_factor_is_interpolated_geometrically() -> None:
    """Measured 3 and 12 times what is modelled, at 2 and at 8 ranks: 6 times at 4. Beyond them a
    quarter of the trend is believed.
    """
    bare = CostModel(preset("dgx-h100"), 32, 32)

    def modelled(n: int) -> int:
        return bare.collective_ns(OPERATIONS["all_reduce"], tuple(range(n)), MIB)

    curves: list[dict[str, Any]] = [
        {
            "op": "all_reduce",
            "group": n,
            "nodes": 1,
            "ranks": n,
            "times": {"1 MiB": f"{k * modelled(n)} ns"},
        }
        for n, k in ((2, 3), (8, 12))
    ]
    for n, factor in ((2, 3.0), (4, 6.0), (8, 12.0), (16, 12 * 2**0.25)):
        cost = CostModel(cluster_from({"preset": "dgx-h100", "measured": curves}), n, n)
        assert cost.collective_ns(OPERATIONS["all_reduce"], tuple(range(n)), MIB) == pytest.approx(
            factor * modelled(n), abs=1
        )


# --- what NCCL counts ---


def candidates(
    name: str, op: str, n: int, nbytes: int, local_size: int = 8
) -> dict[tuple[str, str], ExplainedForm]:
    found = explain_cost(
        CostModel(preset(name), n, local_size), OPERATIONS[op], tuple(range(n)), nbytes
    )
    assert found is not None
    return {(candidate.algorithm, candidate.protocol): candidate for candidate in found.candidates}


@pytest.mark.parametrize("name", ["dgx1-v100", "dgx-a100", "dgx-h100"])
def test_tree_bandwidth_changes_by_at_most_a_third_when_the_size_doubles(
    name: str,
) -> None:
    """NCCL's correction of a tree by size (tuning.cc, treeCorrectionFactor) is never above 1,
    lowest in the middle, and has no jump.
    """
    found = [candidates(name, "all_reduce", 16, 64 << k) for k in range(24)]
    for protocol in ("LL", "LL128", "Simple"):
        gbs = [one["tree", protocol].counted_gbs for one in found]
        assert max(max(b / a, a / b) for a, b in pairwise(gbs)) < 1.34
        assert 10 <= gbs.index(min(gbs)) <= 13
        assert 0.4 <= min(gbs) / max(gbs) < 0.7


#: (algorithm, protocol) -> us of its start and of its hops, in NCCL's figures.
COUNTED = {
    # a ring of 32: 62 steps, 6 of them between 4 nodes; Simple's hops there by the plateau of 1.4
    ("ring", "LL"): (6.6, 56 * 0.6 + 6 * 2.7),
    ("ring", "LL128"): (14.0, 56 * 1.9 + 6 * 4.0),
    ("ring", "Simple"): (8.4, (56 * 3.4 + 6 * 14.0) * 1.4),
    # a tree: up and down 7 GPUs and log2(4) levels
    ("tree", "LL"): (6.8, 14 * 0.6 + 4 * 5.0),
    ("tree", "LL128"): (14.0, 14 * 1.25 + 4 * 8.5),
    ("tree", "Simple"): (8.4, 14 * 4.0 + 4 * 14.0),
    ("NVLS tree", "Simple"): (0.0, 25.0 + 4 * 20.9),
}


def test_steps_and_hops_of_an_all_reduce_on_four_nodes_are_those_of_nccl() -> None:
    """src/graph/tuning.cc, baseLat and hwLat, of 4 x 8 H100."""
    found = candidates("dgx-h100", "all_reduce", 32, MIB)

    assert set(found) == set(COUNTED)
    for form, (base, hops) in COUNTED.items():
        terms = found[form].terms
        assert sum(t.amount for t in terms if t.constant == "base") == base, form
        assert sum(t.amount for t in terms if t.constant.startswith("hop")) == pytest.approx(
            hops
        ), form


@pytest.mark.parametrize("op", ["all_reduce", "all_gather_into_tensor"])
def test_the_switch_reduces_for_three_or_more_gpus(op: str) -> None:
    """NVLS; two have nothing that their links would not do as fast."""
    assert [("NVLS", "Simple") in candidates("dgx-h100", op, n, MIB) for n in (2, 3, 4, 8)] == [
        False,
        True,
        True,
        True,
    ]


def test_one_gpu_per_node_gathers_by_parallel_trees_with_few_levels() -> None:
    """PAT: 3 levels between 8 machines instead of a ring's 7 hops, at three quarters of its
    bandwidth; none where machines have more.
    """
    found = candidates("gh200", "all_gather_into_tensor", 8, MIB, 1)
    levels, hops = (
        sum(t.amount for t in found[form].terms if t.constant == "hop between, Simple")
        for form in (("PAT", "Simple"), ("ring", "Simple"))
    )

    assert (levels, hops) == (3 * 4.0, 7 * 14.0)
    assert found["PAT", "Simple"].counted_gbs == pytest.approx(
        0.75 * found["ring", "Simple"].counted_gbs
    )
    assert ("PAT", "Simple") not in candidates("dgx-h100", "all_gather_into_tensor", 16, MIB)


def test_an_exchange_between_nodes_has_one_message_per_peer_and_a_card_for_outgoing_data() -> None:
    """2 x 8 A100: half of each buffer leaves, through a card of 24 GB/s attained; LL sends as many
    flags as bytes.
    """
    found = candidates("dgx-a100", "all_to_all_single", 16, MIB)
    one, other = found["pairs", "Simple"], found["pairs", "LL"]

    assert one.counted_gbs == pytest.approx(2 * 24) == 2 * other.counted_gbs
    assert {t.constant: t.amount for t in other.terms} == {
        "launch": 1,
        "message": 1,
        "message between": 1,
        "peer inside": 6,
        "peer between": 7,
        "hop between, LL": 2.7,
    }
    assert {t.constant for t in one.terms} - {t.constant for t in other.terms} == {
        "hop between, Simple",
        "start, Simple",
    }


def test_a_pair_is_explained_but_a_single_rank_or_a_cluster_without_nccl_is_not() -> None:
    pair, one = ((0, 1), (0,))
    found = explain_cost(CostModel(preset("dgx-h100"), 8, 8), OPERATIONS["all_reduce"], pair, MIB)

    assert found is not None
    assert found.busbw == MIB / found.ns  # 2 (n-1)/n is 1
    message = explain_cost(CostModel(preset("dgx-h100"), 8, 8), OPERATIONS["send"], pair, MIB)
    assert message is not None
    assert message.ns == CostModel(preset("dgx-h100"), 8, 8).p2p_ns(0, 1, MIB)
    assert (
        explain_cost(CostModel(preset("dgx-h100"), 8, 8), OPERATIONS["all_reduce"], one, MIB)
        is None
    )
    assert (
        explain_cost(CostModel(preset("cpu-10gbe"), 8, 8), OPERATIONS["all_reduce"], pair, MIB)
        is None
    )


def test_up_to_16_tib_a_cost_follows_its_formulas_and_beyond_it_grows_with_the_bytes() -> None:
    at, sizes = ONE._replace(architecture="hopper"), np.exp2([34.0, 40.25, 44.0])
    assert nccl_curves.cost_curve("all_gather", at).many(sizes) == pytest.approx(
        nccl_curves.unbounded_us("all_gather", at, sizes), rel=1e-9
    )
    cost = CostModel(preset("dgx-h100"), 8, 8)
    whole, double, more = (
        cost.collective_ns(OPERATIONS["all_gather_into_tensor"], tuple(range(8)), n << 43)
        for n in (2, 4, 6)
    )

    assert (double, more) == pytest.approx((2 * whole, 3 * whole), abs=3)


@pytest.mark.parametrize(
    ("op", "messages"), [("all_reduce", 0), ("all_to_all_single", 8 * 7), ("send", 8)]
)
def test_a_process_with_eight_gpus_launches_eight_times_and_queues_each_message(
    op: str, messages: int
) -> None:
    """A launch takes its thread 4.265 us on an A100, a message .814 (`CONSTANTS`); one of one GPU
    has no messages to put down in turn.
    """
    eight, one = (
        CostModel(cluster_from({"preset": "dgx-a100", "gpus_per_process": g}), 8, 8) for g in (8, 1)
    )
    found = [explain_cost(cost, OPERATIONS[op], tuple(range(8)), 8) for cost in (eight, one)]

    assert found[0] is not None
    assert found[1] is not None
    assert found[0].issue_us == pytest.approx(
        8 * CONSTANTS["issue"] + messages * CONSTANTS["issue, message"]
    )
    assert found[1].issue_us == CONSTANTS["issue"]
