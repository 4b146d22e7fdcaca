"""Links under prices: slow ones, those that ranks share, ways up from switches, and how many bytes
pass each of them.
"""

from __future__ import annotations

from math import ceil
from typing import Any, NamedTuple

import numpy as np
import pytest

from distsim.hardware.cluster import cluster_from, preset
from distsim.hardware.cost import CostModel
from distsim.hardware.cost.max_min_fairness import LinkPorts
from distsim.hardware.cost.nccl_context import NcclContext
from distsim.hardware.cost.nccl_placement import context_of_group
from distsim.operations.registry import OPERATIONS

MIB = 1 << 20


class Slow(NamedTuple):
    link: str
    nodes: tuple[int, ...]
    factor: float


# --- slow ones, and what a cluster says ---


def test_a_message_to_a_slow_node_is_slow_whichever_was_costed_first() -> None:
    """NCCL's messages of one class of links cost alike only where all of them are sound."""
    cost = CostModel(preset("dgx-h100"), 32, 8, [Slow("nic", (1,), 4.0)])
    sound = CostModel(preset("dgx-h100"), 32, 8).p2p_ns(0, 16, 64 * MIB)

    found = [cost.p2p_ns(*ends, 64 * MIB) for ends in ((0, 16), (0, 8), (16, 24), (8, 16))]

    assert found[0] == found[2] == sound
    assert found[1] == found[3] > 3 * sound


@pytest.mark.parametrize(
    ("link", "group", "least"), [("nvlink", range(8), 3.9), ("nic", range(16), 2.5)]
)
def test_a_slow_link_multiplies_the_time_of_bytes_and_their_bound(
    link: str, group: range, least: float
) -> None:
    """Between two machines the sound one is a tree that the links inside bound."""
    sound, slow = (
        CostModel(preset("dgx-a100"), 16, 8, faults) for faults in ((), [Slow(link, (), 4.0)])
    )
    (price, bound), (dear, far) = (
        (
            cost.collective_ns(OPERATIONS["all_reduce"], tuple(group), 1 << 33),
            cost.link_bound_ns(OPERATIONS["all_reduce"], tuple(group), 1 << 33),
        )
        for cost in (sound, slow)
    )

    assert far == pytest.approx(4 * bound, abs=4)
    assert least < dear / price < 4.1


def test_half_the_card_bandwidth_at_least_doubles_the_time_of_bytes_between_nodes() -> None:
    plain, narrow = (
        CostModel(
            cluster_from({"preset": "dgx-a100", "network": {"oversubscription": k}}), 16, 8
        ).link_bound_ns(OPERATIONS["all_reduce"], tuple(range(16)), 1 << 30)
        for k in (1, 2)
    )

    assert narrow == pytest.approx(2 * plain, abs=2)


def test_a_cost_on_one_node_ignores_its_cards_and_on_two_nodes_uses_them() -> None:
    plain, other = (
        CostModel(
            cluster_from({"preset": "dgx-a100", "nics": {"count": n, "bandwidth": "7 GB/s"}}), 16, 8
        )
        for n in (8, 3)
    )

    for size, alike in ((8, True), (16, False)):
        at = [
            context_of_group(cost.cluster, cost.placement(tuple(range(size))))
            for cost in (plain, other)
        ]
        assert (at[0] == at[1]) is alike


def test_only_pcie_without_peer_access_is_staged() -> None:
    """NVLink is peer access."""
    ways = [
        NcclContext("ampere", 8, 1, 8, 25.0, intra=intra, peer_access=access).link
        for intra in ("nvlink", "pcie")
        for access in (True, False)
    ]

    assert ways == ["nvlink", "nvlink", "pcie", "staged"]


def test_two_machines_joined_by_nvlink_are_one_node_with_the_cards_of_both() -> None:
    joined = CostModel(cluster_from({"preset": "dgx-h100", "intra": {"domain": 16}}), 32, 8)

    assert [joined.link_class(0, rank) for rank in (8, 15, 16)] == ["intra", "intra", "inter"]
    assert joined.cluster.nics.count == 16


def test_two_levels_cross_a_slow_inner_link_proportionally_slower() -> None:
    """Priced by latency and bandwidth alone: of 4 x 8 ranks what a sum takes inside the machines,
    on links of a quarter of the speed.
    """
    cluster = cluster_from({"preset": "dgx-h100", "collectives": "rails", "call_overhead": "0 us"})
    sound, slow = (
        CostModel(cluster, 32, 8, faults).collective_ns(
            OPERATIONS["all_reduce"], tuple(range(32)), MIB
        )
        for faults in ((), [Slow("nvlink", (2,), 4.0)])
    )

    assert slow - sound == pytest.approx(
        3 * 2 * 7 / 8 * MIB / cluster.intra.attained_bytes_per_ns, abs=1
    )


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"network": {"leaf": 1, "oversubscription": 8}},
        {"call_overhead": "9 us"},
        {"algorithms": {"broadcast": "chain"}},
        {"collectives": "rails"},
        {
            "measured": [
                {"op": "broadcast", "group": 16, "nodes": 2, "ranks": 8, "times": {"1 MiB": "9 ms"}}
            ]
        },
    ],
)
def test_many_sizes_at_once_cost_the_same_as_one_by_one_on_any_cluster(
    changed: dict[str, Any],
) -> None:
    cost = CostModel(cluster_from({"preset": "dgx-h100", **changed}), 16, 8)
    for group in (tuple(range(16)), (3,)):
        for sizes in ([1, 1000, MIB, 1 << 30], [0, 8]):
            found = cost.collectives_ns(OPERATIONS["broadcast"], group, np.array(sizes)).tolist()
            assert found == [
                cost.collective_ns(OPERATIONS["broadcast"], group, size, group[0]) for size in sizes
            ]


def test_a_put_takes_the_latency_of_its_link_plus_its_bytes() -> None:
    cost = CostModel(preset("dgx-h100"), 16, 8)

    assert cost.one_sided_ns(0, 1, 64 * MIB) == cost.cluster.intra.latency_ns + ceil(
        64 * MIB / cost.cluster.intra.attained_bytes_per_ns
    )
    assert cost.one_sided_ns(0, 8, 64 * MIB) == cost.cluster.inter_latency_ns + ceil(
        64 * MIB / cost.cluster.rank_inter_bytes_per_ns
    )


@pytest.mark.parametrize("n", [2, 16])
def test_many_sizes_at_once_are_not_costed_one_by_one(
    monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    """Where NCCL's forms alone decide, so that a million of them take a fraction of a second."""
    cost, sizes = CostModel(preset("dgx-h100"), 16, 8), np.arange(1, 5000)
    alone = cost.collective_ns(OPERATIONS["all_gather"], tuple(range(n)), 4999)
    monkeypatch.setattr(CostModel, "collective_ns", None)

    assert cost.collectives_ns(OPERATIONS["all_gather"], tuple(range(n)), sizes)[-1] == alone


def test_a_message_takes_its_latency_plus_its_bytes_over_the_narrowest_link() -> None:
    """A leaf's way up of a hundredth of a card: priced by latency and bandwidth alone."""
    network = {"leaf": 1, "oversubscription": 800, "latency": "3 us"}
    cost = CostModel(
        cluster_from({"preset": "dgx-h100", "collectives": "rails", "network": network}), 16, 8
    )
    up = cost.cluster.nics.attained_bytes_per_ns / 100

    assert cost.p2p_ns(0, 8, MIB) == cost.call_overhead_ns + cost.cluster.inter_latency_ns + ceil(
        MIB / up
    )


@pytest.mark.parametrize(
    ("cluster", "faults"),
    [
        ("dgx-h100", []),
        ("cpu-25gbe", [Slow("nic", (1,), 4.0), Slow("intra", (2,), 3.0)]),
        ({"preset": "l40s-pcie", "intra": {"per_switch": 3}}, []),
        ({"preset": "dgx-h100", "network": {"leaf": 1, "oversubscription": 80}}, []),
    ],
)
def test_messages_with_the_same_route_number_cost_the_same(
    cluster: object, faults: list[Slow]
) -> None:
    cost = CostModel(cluster_from(cluster), 12, 4, faults)
    src, dst = (ends.ravel() for ends in np.indices((12, 12)))
    costs: dict[int, set[int]] = {}
    for number, *ends in zip(cost.route_numbers(src, dst), src, dst, strict=True):
        costs.setdefault(int(number), set()).add(cost.p2p_ns(*map(int, ends), MIB))

    assert all(len(found) == 1 for found in costs.values())
    assert len(costs) >= len(set().union(*costs.values())) > 1


# --- switches ---


def test_ranks_behind_switches_are_counted_from_the_first_of_each_machine() -> None:
    """Three to a PCIe switch, four to a machine: the last is alone behind the second switch. Its
    way up has one slot's bandwidth.
    """
    slots = LinkPorts(
        CostModel(cluster_from({"preset": "l40s-pcie", "intra": {"per_switch": 3}}), 8, 4)
    )
    ways = [
        [slots.name(port) for port in slots.of_message(*ends).ports if port >= slots.first_pool]
        for ends in ((0, 2), (0, 3), (7, 4))
    ]

    assert ways == [
        [],
        ["pcie switch 0 out", "pcie switch 1 in"],
        ["pcie switch 3 out", "pcie switch 2 in"],
    ]
    assert len(slots.capacity) == slots.first_pool + 2 * 4
    assert set(slots.capacity[slots.first_pool :]) == {
        slots.cost.cluster.intra.attained_bytes_per_ns
    }


def test_a_leaf_switch_with_all_ranks_is_ignored() -> None:
    """Two machines of eight behind one leaf of two; behind leaves of one they meet at the ways up.
    So with PCIe switches.
    """
    levels = [
        CostModel(cluster_from({"preset": "dgx-h100", "network": {"leaf": n}}), 16, 8).pools.levels
        for n in (1, 2)
    ]

    assert [[level.word for level in found] for found in levels] == [["leaf"], []]
    slots = cluster_from({"preset": "l40s-pcie", "intra": {"per_switch": 4}})
    assert [
        len(CostModel(slots, world, local).pools.levels)
        for world, local in ((8, 8), (4, 8), (8, 4), (5, 8))
    ] == [1, 0, 0, 1]


def test_in_an_exchange_each_block_sends_the_data_of_its_ranks_for_the_others() -> None:
    """An eighth of a buffer for each of 8 ranks, two to a PCIe switch, four to a machine, a machine
    to a leaf: counted pair by pair.
    """
    cluster = {"preset": "l40s-pcie", "intra": {"per_switch": 2}, "network": {"leaf": 1}}
    pools = CostModel(cluster_from(cluster), 8, 4).pools
    counted = {
        f"{word} {block} out": sum(
            src // size == block != dst // size for src in range(8) for dst in range(8)
        )
        / 8
        for word, size in (("leaf", 4), ("pcie switch", 2))
        for block in range(8 // size)
    }

    for op in ("all_to_all_single", "all_to_all"):
        found = {
            pools.name(port): share
            for port, share in pools.of_collective(OPERATIONS[op], tuple(range(8))).items()
        }
        assert {name: share for name, share in found.items() if name.endswith("out")} == counted
        assert {
            name.replace("in", "out"): share for name, share in found.items() if name.endswith("in")
        } == counted


@pytest.mark.parametrize("name", ["dgx-a100", "l40s-pcie"])
def test_collective_bytes_of_ranks_and_cards_match_nccl_tests(name: str) -> None:
    """On 2 machines of 4 with 2 cards: of an exchange pair by pair, of a sum 2 (n-1)/n of each
    level. Over PCIe the bytes for the cards pass the slots as well, each rank's part of them."""
    ports = LinkPorts(CostModel(cluster_from({"preset": name, "nics": {"count": 2}}), 8, 4))
    slot = 1.0 if ports.through_intra else 0.0
    pairs = [sum(src // 4 == dst // 4 for dst in range(8) if dst != src) / 8 for src in range(8)]
    wanted = {
        "all_to_all_single": (pairs[0] + slot * 4 / 8, 4 * 4 / 8 / 2),
        "all_reduce": (2 * 3 / 4 + slot * 2 * 1 / 2 / 4, 2 * 1 / 2 / 2),
        "all_gather": (3 / 4 + slot * 1 / 2 / 4, 1 / 2 / 2),
    }

    for op, (link, card) in wanted.items():
        found = {
            ports.name(port): share
            for port, share in ports.asked(OPERATIONS[op], tuple(range(8))).items()
        }
        assert found == {
            **{f"rank {rank} link {way}": link for rank in range(8) for way in ("out", "in")},
            **{
                f"node {node} nic {k} {way}": card
                for node in range(2)
                for k in range(2)
                for way in ("out", "in")
            },
        }
        alone = ports.asked(OPERATIONS[op], (0, 4))
        assert {ports.name(port) for port in alone if port >= ports.first_card} == {
            f"node {node} nic 0 {way}" for node in range(2) for way in ("out", "in")
        }
        assert (0 in alone) == bool(slot)


def test_threads_are_numbered_between_links_and_cards_and_carry_no_bytes() -> None:
    ports = LinkPorts(CostModel(cluster_from({"preset": "cpu-10gbe", "crossing": 0.5}), 4, 2))
    demand = ports.of_collective(OPERATIONS["all_reduce"], (0, 1, 2, 3))
    threads = np.flatnonzero(ports.are_threads(np.arange(len(ports.capacity)))).tolist()

    assert [ports.name(port) for port in threads] == [f"rank {rank} loop" for rank in range(4)]
    assert {
        weight for port, weight in zip(demand.ports, demand.weights, strict=True) if port in threads
    } == {0.0}
    assert max(demand.weights) == 1.0
    assert demand.rate == min(
        ports.capacity[port]
        for port, weight in zip(demand.ports, demand.weights, strict=True)
        if weight == 1.0
    )


@pytest.mark.parametrize(
    ("op", "leaf", "switch"),
    [
        ("all_reduce", 1.0, 1.0 + 0.5),
        ("all_gather", 0.5, 0.5 + 0.25),
        ("broadcast", 1.0, 1.0 + 0.5),
    ],
)
def test_a_block_sends_its_share_to_other_blocks_and_its_part_of_outgoing_data(
    op: str, leaf: float, switch: float
) -> None:
    """As nccl-tests counts bytes, over 2 leaves of a machine, 2 switches in each; a group behind
    one switch passes none.
    """
    cluster = {
        "preset": "l40s-pcie",
        "intra": {"per_switch": 2},
        "network": {"leaf": 1, "oversubscription": 2},
    }
    cost = CostModel(cluster_from(cluster), 8, 4)
    found = cost.pools.of_collective(OPERATIONS[op], tuple(range(8)))

    assert {
        cost.pools.name(port).rpartition(" ")[0].rstrip(" 0123456789"): share
        for port, share in found.items()
    } == {"leaf": leaf, "pcie switch": switch}
    assert cost.pools.of_collective(OPERATIONS[op], (2, 3)) == {}
    plain = CostModel(cluster_from("l40s-pcie"), 8, 4)
    assert cost.collective_ns(OPERATIONS[op], (2, 3), 1 << 30, 2) == plain.collective_ns(
        OPERATIONS[op], (2, 3), 1 << 30, 2
    )
    assert cost.pools.ns_per_byte(OPERATIONS[op], tuple(range(8))) == leaf / (
        cost.cluster.nics.attained_bytes_per_ns / 2
    )
