"""The edges of prices: which band a size has, whom it is the band of, and what NCCL counts for each form."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest

from distsim.cluster import cluster_from, preset
from distsim.cost import CostModel, nccl
from distsim.cost.band import KNOWN, Band, band_of, several
from distsim.cost.constants import CONSTANTS
from distsim.cost.on_gpus import setting
from distsim.cost.setting import Setting
from distsim.cost.sharing import Ports
from distsim.cost.told import Candidate, told
from distsim.ops.table import OPS

MIB = 1 << 20

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
    assert several(CostModel(preset("dgx-h100"), 2, 1), 1) == (near.low, near.high)


def test_ranks_of_a_preset_that_somebody_changed_have_the_band_of_what_is_described() -> None:
    """No table is of such a system."""
    ours, theirs = (
        several(CostModel(cluster_from(c), 8, 8), 8) for c in ("dgx-h100", {"preset": "dgx-h100", "nics": {"count": 4}})
    )

    assert theirs == pytest.approx((ours[0] ** 2, ours[1] ** 2))


# --- slow nodes and measured groups ---


class Slow(NamedTuple):
    link: str
    nodes: tuple[int, ...]
    factor: float


def test_a_message_to_a_slow_node_is_dear_whichever_was_asked_before() -> None:
    """NCCL's messages of one class of links cost alike only where all of them are sound."""
    cost = CostModel(preset("dgx-h100"), 32, 8, [Slow("nic", (1,), 4.0)])
    sound = CostModel(preset("dgx-h100"), 32, 8).p2p_ns(0, 16, 64 * MIB)

    found = [cost.p2p_ns(*ends, 64 * MIB) for ends in ((0, 16), (0, 8), (16, 24), (8, 16))]

    assert found[0] == found[2] == sound
    assert found[1] == found[3] > 3 * sound


@pytest.mark.parametrize(("link", "group"), [("nvlink", range(8)), ("nic", range(16))])
def test_a_slow_link_makes_bytes_and_their_bound_as_many_times_dearer(link: str, group: range) -> None:
    sound, slow = (CostModel(preset("dgx-a100"), 16, 8, faults) for faults in ((), [Slow(link, (), 4.0)]))
    (price, bound), (dear, far) = (
        (
            cost.collective_ns(OPS["all_reduce"], tuple(group), 1 << 33),
            cost.link_bound_ns(OPS["all_reduce"], tuple(group), 1 << 33),
        )
        for cost in (sound, slow)
    )

    assert far == pytest.approx(4 * bound, abs=4)
    assert 2.5 < dear / price < 4.1  # a tree of two nodes is bound by links and cards


def test_a_network_of_half_its_cards_bandwidth_doubles_what_bytes_between_machines_take_at_least() -> None:
    plain, narrow = (
        CostModel(cluster_from({"preset": "dgx-a100", "network": {"oversubscription": k}}), 16, 8).link_bound_ns(
            OPS["all_reduce"], tuple(range(16)), 1 << 30
        )
        for k in (1, 2)
    )

    assert narrow == pytest.approx(2 * plain, abs=2)


def test_a_price_on_one_machine_knows_nothing_of_its_cards_and_of_two_it_does() -> None:
    plain, other = (
        CostModel(cluster_from({"preset": "dgx-a100", "nics": {"count": n, "bandwidth": "7 GB/s"}}), 16, 8) for n in (8, 3)
    )

    for size, alike in ((8, True), (16, False)):
        at = [setting(cost.cluster, cost.placement(tuple(range(size)))) for cost in (plain, other)]
        assert (at[0] == at[1]) is alike


def test_only_pcie_without_peer_access_is_staged() -> None:
    """NVLink is peer access."""
    ways = [ONE._replace(intra=intra, peer_access=access).link for intra in ("nvlink", "pcie") for access in (True, False)]

    assert ways == ["nvlink", "nvlink", "pcie", "staged"]


def test_two_machines_that_nvlink_joins_are_one_node_with_the_cards_of_both() -> None:
    joined = CostModel(cluster_from({"preset": "dgx-h100", "intra": {"domain": 16}}), 32, 8)

    assert [joined.link_class(0, rank) for rank in (8, 15, 16)] == ["intra", "intra", "inter"]
    assert joined.cluster.nics.count == 16


def test_two_levels_cross_a_slow_link_inside_as_many_times_slower() -> None:
    """Priced by latency and bandwidth alone: of 4 x 8 ranks what a sum takes inside the machines, on links of a quarter of the speed."""
    cluster = cluster_from({"preset": "dgx-h100", "collectives": "rails", "call_overhead": "0 us"})
    sound, slow = (
        CostModel(cluster, 32, 8, faults).collective_ns(OPS["all_reduce"], tuple(range(32)), MIB)
        for faults in ((), [Slow("nvlink", (2,), 4.0)])
    )

    assert slow - sound == pytest.approx(3 * 2 * 7 / 8 * MIB / cluster.intra.attained, abs=1)


@pytest.mark.parametrize("changed", [
    {}, {"network": {"leaf": 1, "oversubscription": 8}}, {"call_overhead": "9 us"}, {"algorithms": {"broadcast": "chain"}},
    {"collectives": "rails"},
    {"measured": [{"op": "broadcast", "group": 16, "nodes": 2, "ranks": 8, "times": {"1 MiB": "9 ms"}}]},
])  # fmt: skip
def test_many_sizes_at_once_cost_what_each_costs_alone_whatever_a_cluster_says(changed: dict[str, Any]) -> None:
    cost = CostModel(cluster_from({"preset": "dgx-h100", **changed}), 16, 8)
    for group in (tuple(range(16)), (3,)):
        for sizes in ([1, 1000, MIB, 1 << 30], [0, 8]):
            found = cost.collectives_ns(OPS["broadcast"], group, np.array(sizes)).tolist()
            assert found == [cost.collective_ns(OPS["broadcast"], group, size, group[0]) for size in sizes]


# --- switches ---


def test_ranks_behind_switches_are_counted_from_the_first_of_each_machine() -> None:
    """Three to a PCIe switch, four to a machine: the last is alone behind the second switch. Its way up has one slot's bandwidth."""
    slots = Ports(CostModel(cluster_from({"preset": "l40s-pcie", "intra": {"per_switch": 3}}), 8, 4))
    ways = [
        [slots.name(port) for port in slots.of_message(*ends).ports if port >= slots.first_pool]
        for ends in ((0, 2), (0, 3), (7, 4))
    ]

    assert ways == [[], ["pcie switch 0 out", "pcie switch 1 in"], ["pcie switch 3 out", "pcie switch 2 in"]]
    assert len(slots.capacity) == slots.first_pool + 2 * 4
    assert set(slots.capacity[slots.first_pool :]) == {slots.cost.cluster.intra.attained}


def test_a_leaf_that_holds_all_ranks_is_none() -> None:
    """Two machines of eight behind one leaf of two; behind leaves of one they meet at the ways up. So with PCIe switches."""
    levels = [CostModel(cluster_from({"preset": "dgx-h100", "network": {"leaf": n}}), 16, 8).pools.levels for n in (1, 2)]

    assert [[level.word for level in found] for found in levels] == [["leaf"], []]
    slots = cluster_from({"preset": "l40s-pcie", "intra": {"per_switch": 4}})
    assert [len(CostModel(slots, world, local).pools.levels) for world, local in ((8, 8), (4, 8), (8, 4), (5, 8))] == [1, 0, 0, 1]


def test_of_an_exchange_each_block_sends_what_its_ranks_have_for_the_others() -> None:
    """An eighth of a buffer for each of 8 ranks, two to a PCIe switch, four to a machine, a machine to a leaf: counted pair by pair."""
    cluster = {"preset": "l40s-pcie", "intra": {"per_switch": 2}, "network": {"leaf": 1}}
    pools = CostModel(cluster_from(cluster), 8, 4).pools
    counted = {
        f"{word} {block} out": sum(src // size == block != dst // size for src in range(8) for dst in range(8)) / 8
        for word, size in (("leaf", 4), ("pcie switch", 2))
        for block in range(8 // size)
    }

    for op in ("all_to_all_single", "all_to_all"):
        found = {pools.name(port): share for port, share in pools.of_collective(OPS[op], tuple(range(8))).items()}
        assert {name: share for name, share in found.items() if name.endswith("out")} == counted
        assert {name.replace("in", "out"): share for name, share in found.items() if name.endswith("in")} == counted


@pytest.mark.parametrize("name", ["dgx-a100", "l40s-pcie"])
def test_what_ranks_and_cards_send_of_a_collective_is_what_nccl_tests_counts(name: str) -> None:
    """On 2 machines of 4 with 2 cards: of an exchange pair by pair, of a sum 2 (n-1)/n of each level. Over PCIe the bytes for the cards
    pass the slots as well, each rank's part of them."""
    ports = Ports(CostModel(cluster_from({"preset": name, "nics": {"count": 2}}), 8, 4))
    slot = 1.0 if ports.through_intra else 0.0
    pairs = [sum(src // 4 == dst // 4 for dst in range(8) if dst != src) / 8 for src in range(8)]
    wanted = {
        "all_to_all_single": (pairs[0] + slot * 4 / 8, 4 * 4 / 8 / 2), "all_reduce": (2 * 3 / 4 + slot * 2 * 1 / 2 / 4, 2 * 1 / 2 / 2),
        "all_gather": (3 / 4 + slot * 1 / 2 / 4, 1 / 2 / 2),
    }  # fmt: skip

    for op, (link, card) in wanted.items():
        found = {ports.name(port): share for port, share in ports.asked(OPS[op], tuple(range(8))).items()}
        assert found == {
            **{f"rank {rank} link {way}": link for rank in range(8) for way in ("out", "in")},
            **{f"node {node} nic {k} {way}": card for node in range(2) for k in range(2) for way in ("out", "in")},
        }
        alone = ports.asked(OPS[op], (0, 4))
        assert {ports.name(port) for port in alone if port >= ports.first_card} == {
            f"node {node} nic 0 {way}" for node in range(2) for way in ("out", "in")}  # fmt: skip
        assert (0 in alone) == bool(slot)


def test_threads_are_numbered_between_links_and_cards_and_take_up_no_bytes_of_a_collective() -> None:
    ports = Ports(CostModel(cluster_from({"preset": "cpu-10gbe", "crossing": 0.5}), 4, 2))
    demand = ports.of_collective(OPS["all_reduce"], (0, 1, 2, 3))
    threads = [port for port in range(len(ports.capacity)) if ports.is_thread(port)]

    assert [ports.name(port) for port in threads] == [f"rank {rank} loop" for rank in range(4)]
    assert {weight for port, weight in zip(demand.ports, demand.weights, strict=True) if port in threads} == {0.0}
    assert max(demand.weights) == 1.0
    assert demand.rate == min(
        ports.capacity[port] for port, weight in zip(demand.ports, demand.weights, strict=True) if weight == 1.0
    )


@pytest.mark.parametrize(("op", "leaf", "switch"), [
    ("all_reduce", 1.0, 1.0 + 0.5), ("all_gather", 0.5, 0.5 + 0.25), ("broadcast", 1.0, 1.0 + 0.5)])  # fmt: skip
def test_a_block_sends_its_buffers_share_to_the_other_blocks_and_its_part_of_what_leaves_the_machine(
    op: str, leaf: float, switch: float
) -> None:
    """As nccl-tests counts bytes, over 2 leaves of a machine, 2 switches in each; a group behind one switch passes none."""
    cluster = {"preset": "l40s-pcie", "intra": {"per_switch": 2}, "network": {"leaf": 1, "oversubscription": 2}}
    cost = CostModel(cluster_from(cluster), 8, 4)
    found = cost.pools.of_collective(OPS[op], tuple(range(8)))

    assert {cost.pools.name(port).rpartition(" ")[0].rstrip(" 0123456789"): share for port, share in found.items()} == {
        "leaf": leaf, "pcie switch": switch}  # fmt: skip
    assert cost.pools.of_collective(OPS[op], (2, 3)) == {}
    plain = CostModel(cluster_from("l40s-pcie"), 8, 4)
    assert cost.collective_ns(OPS[op], (2, 3), 1 << 30, 2) == plain.collective_ns(OPS[op], (2, 3), 1 << 30, 2)
    assert cost.pools.ns_per_byte(OPS[op], tuple(range(8))) == leaf / (cost.cluster.nics.attained / 2)


def test_what_is_left_out_of_a_setting_is_what_a_dgx_h100_has() -> None:
    """And no data sheet is no bound."""
    cost = CostModel(preset("dgx-h100"), 8, 8)
    at = setting(cost.cluster, cost.placement(tuple(range(8))))

    assert Setting("hopper", 8, 1, 8, at.intra_gbs, sheet_intra=at.sheet_intra) == at
    assert nccl.bound_us("all_reduce", ONE, 1e9) == 0


def test_between_two_measured_rank_counts_the_factor_is_their_geometric_mean_by_the_logarithm() -> None:
    """Measured 3 and 12 times what is modelled, at 2 and at 8 ranks: 6 times at 4. Beyond them a quarter of the trend is believed."""
    bare = CostModel(preset("dgx-h100"), 32, 32)

    def modelled(n: int) -> int:
        return bare.collective_ns(OPS["all_reduce"], tuple(range(n)), MIB)

    curves: list[dict[str, Any]] = [
        {"op": "all_reduce", "group": n, "nodes": 1, "ranks": n, "times": {"1 MiB": f"{k * modelled(n)} ns"}}
        for n, k in ((2, 3), (8, 12))
    ]
    for n, factor in ((2, 3.0), (4, 6.0), (8, 12.0), (16, 12 * 2**0.25)):
        cost = CostModel(cluster_from({"preset": "dgx-h100", "measured": curves}), n, n)
        assert cost.collective_ns(OPS["all_reduce"], tuple(range(n)), MIB) == pytest.approx(factor * modelled(n), abs=1)


# --- what NCCL counts ---


def candidates(name: str, op: str, n: int, nbytes: int, local_size: int = 8) -> dict[tuple[str, str], Candidate]:
    found = told(CostModel(preset(name), n, local_size), OPS[op], tuple(range(n)), nbytes)
    assert found is not None
    return {(candidate.algorithm, candidate.protocol): candidate for candidate in found.candidates}


@pytest.mark.parametrize("name", ["dgx1-v100", "dgx-a100", "dgx-h100"])
def test_the_bandwidth_of_a_tree_changes_by_a_third_at_most_from_a_size_to_its_double(name: str) -> None:
    """NCCL's correction of a tree by size (tuning.cc, treeCorrectionFactor) is never above 1, lowest in the middle, and has no jump."""
    found = [candidates(name, "all_reduce", 16, 64 << k) for k in range(24)]
    for protocol in ("LL", "LL128", "Simple"):
        gbs = [one["tree", protocol].counted_gbs for one in found]
        assert max(max(b / a, a / b) for a, b in pairwise(gbs)) < 1.34
        assert 10 <= gbs.index(min(gbs)) <= 13
        assert 0.4 <= min(gbs) / max(gbs) < 0.7


#: (algorithm, protocol) -> us of its start and of its hops, in NCCL's figures.
COUNTED = {
    # a ring of 32: 62 steps, 6 of them between 4 nodes; Simple's hops there by the plateau of 1.4
    ("ring", "LL"): (6.6, 56 * 0.6 + 6 * 2.7), ("ring", "LL128"): (14.0, 56 * 1.9 + 6 * 4.0),
    ("ring", "Simple"): (8.4, (56 * 3.4 + 6 * 14.0) * 1.4),
    # a tree: up and down 7 GPUs and log2(4) levels
    ("tree", "LL"): (6.8, 14 * 0.6 + 4 * 5.0), ("tree", "LL128"): (14.0, 14 * 1.25 + 4 * 8.5),
    ("tree", "Simple"): (8.4, 14 * 4.0 + 4 * 14.0), ("NVLS tree", "Simple"): (0.0, 25.0 + 4 * 20.9),
}  # fmt: skip


def test_starts_and_hops_of_an_all_reduce_on_four_machines_are_nccls() -> None:
    """src/graph/tuning.cc, baseLat and hwLat, of 4 x 8 H100."""
    found = candidates("dgx-h100", "all_reduce", 32, MIB)

    assert set(found) == set(COUNTED)
    for form, (base, hops) in COUNTED.items():
        terms = found[form].terms
        assert sum(t.amount for t in terms if t.constant == "base") == base, form
        assert sum(t.amount for t in terms if t.constant.startswith("hop")) == pytest.approx(hops), form


@pytest.mark.parametrize("op", ["all_reduce", "all_gather_into_tensor"])
def test_the_switch_reduces_for_three_gpus_and_more(op: str) -> None:
    """NVLS; two have nothing that their links would not do as fast."""
    assert [("NVLS", "Simple") in candidates("dgx-h100", op, n, MIB) for n in (2, 3, 4, 8)] == [False, True, True, True]


def test_one_gpu_a_machine_gathers_by_parallel_trees_whose_levels_are_few() -> None:
    """PAT: 3 levels between 8 machines instead of a ring's 7 hops, at three quarters of its bandwidth; none where machines have more."""
    found = candidates("gh200", "all_gather_into_tensor", 8, MIB, 1)
    levels, hops = (
        sum(t.amount for t in found[form].terms if t.constant == "hop between, Simple")
        for form in (("PAT", "Simple"), ("ring", "Simple"))
    )

    assert (levels, hops) == (3 * 4.0, 7 * 14.0)
    assert found["PAT", "Simple"].counted_gbs == pytest.approx(0.75 * found["ring", "Simple"].counted_gbs)
    assert ("PAT", "Simple") not in candidates("dgx-h100", "all_gather_into_tensor", 16, MIB)


def test_an_exchange_among_machines_has_a_message_for_each_peer_and_a_card_for_what_leaves() -> None:
    """2 x 8 A100: half of each buffer leaves, through a card of 24 GB/s attained; LL sends as many flags as bytes."""
    found = candidates("dgx-a100", "all_to_all_single", 16, MIB)
    one, other = found["pairs", "Simple"], found["pairs", "LL"]

    assert one.counted_gbs == pytest.approx(2 * 24) == 2 * other.counted_gbs
    assert {t.constant: t.amount for t in other.terms} == {
        "launch": 1, "message": 1, "message between": 1, "peer inside": 6, "peer between": 7, "hop between, LL": 2.7}  # fmt: skip
    assert {t.constant for t in one.terms} - {t.constant for t in other.terms} == {"hop between, Simple", "start, Simple"}


def test_a_pair_is_told_and_one_rank_alone_or_a_cluster_without_nccl_is_not() -> None:
    pair, one = ((0, 1), (0,))
    found = told(CostModel(preset("dgx-h100"), 8, 8), OPS["all_reduce"], pair, MIB)

    assert found is not None
    assert found.busbw == MIB / found.ns  # 2 (n-1)/n is 1
    assert told(CostModel(preset("dgx-h100"), 8, 8), OPS["all_reduce"], one, MIB) is None
    assert told(CostModel(preset("cpu-10gbe"), 8, 8), OPS["all_reduce"], pair, MIB) is None


def test_beyond_16_tib_a_price_grows_with_the_bytes() -> None:
    cost = CostModel(preset("dgx-h100"), 8, 8)
    whole, double, more = (cost.collective_ns(OPS["all_gather_into_tensor"], tuple(range(8)), n << 43) for n in (2, 4, 6))

    assert (double, more) == pytest.approx((2 * whole, 3 * whole), abs=3)


@pytest.mark.parametrize(("op", "messages"), [("all_reduce", 0), ("all_to_all_single", 8 * 7), ("send", 8)])
def test_a_process_of_eight_gpus_launches_eight_times_and_puts_down_each_message(op: str, messages: int) -> None:
    """A launch takes its thread 4.265 us on an A100, a message .814 (`CONSTANTS`); one of one GPU has no messages to put down in turn."""
    eight, one = (CostModel(cluster_from({"preset": "dgx-a100", "gpus_per_process": g}), 8, 8) for g in (8, 1))
    found = [told(cost, OPS[op], tuple(range(8)), 8) for cost in (eight, one)]

    assert found[0] is not None
    assert found[1] is not None
    assert found[0].issue_us == pytest.approx(8 * CONSTANTS["issue"] + messages * CONSTANTS["issue, message"])
    assert found[1].issue_us == CONSTANTS["issue"]
