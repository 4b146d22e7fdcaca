"""Prices worked out by hand: every algorithm's closed form, what combining takes, two levels,
chains, rails, links, measured times.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter
from math import ceil, log2, sqrt
from typing import Any, NamedTuple

import pytest

from distsim.hardware.cluster import MeasuredCurve, cluster_from, preset
from distsim.hardware.cost import CostModel
from distsim.hardware.cost.max_min_fairness import LinkPorts
from distsim.operations.core.algorithms import CollectiveAlgorithm, chain_reduce
from distsim.operations.core.operation_base import Operation
from distsim.operations.registry import OPERATIONS

MIB = 1 << 20
ALL = [
    (row, name)
    for row in OPERATIONS.values()
    if row.kind == "collective"
    for name in row.algorithms
]


class Slow(NamedTuple):
    link: str
    nodes: tuple[int, ...]
    factor: float


def model(
    name: str = "dgx-a100", nodes: int = 1, local_size: int = 8, faults: Any = (), **changes: Any
) -> CostModel:
    """A cluster priced by latency and bandwidth alone: on GPUs with ``collectives: rails``."""
    if name.startswith("dgx"):
        changes = {"collectives": "rails", **changes}
    return CostModel(
        cluster_from({"preset": name, **changes}), nodes * local_size, local_size, faults
    )


def alone(row: type[Operation], name: str) -> tuple[type[Operation], CollectiveAlgorithm]:
    """The row as if it knew this algorithm only."""
    return type(
        f"{row.__name__}Alone",
        (row,),
        {"algorithms": {name: row.algorithms[name]}, "__module__": __name__},
    ), row.algorithms[name]


# --- closed forms ---


@pytest.mark.parametrize(
    ("row", "name"), ALL, ids=lambda value: value if isinstance(value, str) else value.op
)
def test_every_algorithm_costs_the_sum_of_its_rounds(row: type[Operation], name: str) -> None:
    """Also those that no row puts first, on one node and on several."""
    only, algorithm = alone(row, name)
    for local_size in (3, 16):
        cost = CostModel(cluster_from("cpu-10gbe"), 16, local_size)
        for n in range(2, 17):
            group, chunk = tuple(range(n)), algorithm.chunk_nbytes(n, 1000 * n)
            assert cost.flat_ns(only, group, 1000 * n, n - 1) == cost.schedule_ns(
                algorithm.rounds(n, n - 1), chunk, group
            ), n


@pytest.mark.parametrize(
    ("row", "name"), ALL, ids=lambda value: value if isinstance(value, str) else value.op
)
def test_combining_costs_each_rank_the_chunks_that_it_adds(row: type[Operation], name: str) -> None:
    """As many as the busiest rank gets to combine, at the cluster's rate; in a chain, where rounds
    overlap, the whole buffer.
    """
    only, algorithm = alone(row, name)
    bare, combining = model("cpu-10gbe", 4, 4), model("cpu-10gbe", 4, 4, reduce_bandwidth="1 GB/s")
    for n in (1, 2, 5, 8, 13, 16):
        group, chunk = tuple(range(n)), algorithm.chunk_nbytes(n, 1040 * n)
        added = Counter(t.dst for round_ in algorithm.rounds(n, 0) for t in round_ if t.reduce)
        chunks = n if algorithm.rounds is chain_reduce and n > 1 else max(added.values(), default=0)

        found = combining.flat_ns(only, group, 1040 * n) - bare.flat_ns(only, group, 1040 * n)

        assert found == pytest.approx(chunks * chunk, abs=1), n


# --- the forms of large clusters ---


@pytest.mark.parametrize("nbytes", [8, 1 << 16, MIB, 64 * MIB, 1 << 33])
@pytest.mark.parametrize(("nodes", "g"), [(2, 2), (2, 8), (4, 8), (6, 4), (16, 8)])
@pytest.mark.parametrize(
    ("op", "passes"),
    [("all_reduce", 2), ("all_gather_into_tensor", 1), ("reduce_scatter_tensor", 1)],
)
def test_large_clusters_use_the_cheapest_of_two_levels_card_ring_and_flat_schedule(
    op: str, passes: int, nodes: int, g: int, nbytes: int
) -> None:
    """Two levels: a ring inside the node, then between nodes a ring or a tree (Bruck's, where each
    byte passes once), each rail by itself.

    A ring takes the cards of the group's own ranks."""
    cost = model("dgx-h100", nodes)
    a, x, n = cost.cluster.intra.latency_ns, cost.cluster.inter_latency_ns, nodes * g
    group = tuple(8 * node + k for node in range(nodes) for k in range(g))
    inner, rail = cost.cluster.intra.attained_bytes_per_ns, cost.cluster.rank_inter_bytes_per_ns
    inside, shard, steps = (
        (g - 1) * a + (g - 1) / g * nbytes / inner,
        nbytes / g / rail,
        ceil(log2(nodes)),
    )
    tree = steps * (x + shard) if passes == 2 else steps * x + (nodes - 1) / nodes * shard
    two_levels = passes * (inside + min((nodes - 1) * (x + shard / nodes), tree))
    around = (n - nodes) * a + nodes * x
    ring = passes * (n - 1) / n * (around + nbytes / min(inner, g * rail))
    flat = cost.flat_ns(OPERATIONS[op], group, nbytes) - cost.call_overhead_ns

    found = cost.collective_ns(OPERATIONS[op], group, nbytes)

    assert found - cost.call_overhead_ns == pytest.approx(
        min(two_levels, ring, flat), rel=1e-6, abs=1
    )


def test_groups_with_unequal_parts_of_nodes_have_no_two_level_algorithm() -> None:
    """Three ranks here and one there pay a ring or a schedule, which is more than two levels of two
    and two.
    """
    cost = model("dgx-h100", 2)

    even, uneven = (
        cost.collective_ns(OPERATIONS["all_reduce"], group, 64 * MIB)
        for group in ((0, 1, 8, 9), (0, 1, 2, 8))
    )

    assert uneven > even


def test_a_broadcast_is_a_chain_with_the_best_number_of_pieces() -> None:
    """a + (sqrt((n-2) a) + sqrt(S/B))^2 on one node; between nodes the last hop is the
    network's.
    """
    nbytes = 64 * MIB
    for nodes in (1, 2, 4):
        cost = model("dgx-a100", nodes)
        n, a, x = 8 * nodes, cost.cluster.intra.latency_ns, cost.cluster.inter_latency_ns
        last = x if nodes > 1 else a
        latency = (n - nodes) * a + (nodes - 1) * x - last
        inside, across = (
            cost.cluster.intra.attained_bytes_per_ns,
            cost.cluster.rank_inter_bytes_per_ns * cost.cluster.nics.count,
        )
        speed = inside if nodes == 1 else min(inside, across)
        chain = last + (sqrt(latency) + sqrt(nbytes / speed)) ** 2

        for op in ("broadcast", "reduce"):
            found = cost.collective_ns(OPERATIONS[op], tuple(range(n)), nbytes, 0)
            assert found == pytest.approx(cost.call_overhead_ns + chain, abs=2), (op, nodes)


def test_an_all_to_all_on_one_node_is_bound_by_the_bytes_each_rank_sends() -> None:
    """(n-1)/n of the buffer leaves each rank over its link."""
    cost, nbytes = model("dgx-a100"), 1 << 30

    found = cost.collective_ns(OPERATIONS["all_to_all_single"], tuple(range(8)), nbytes)

    assert found == pytest.approx(
        7 / 8 * nbytes / cost.cluster.intra.attained_bytes_per_ns, rel=0.01
    )


def test_a_small_all_to_all_takes_one_hop_for_all_pairs() -> None:
    cost = model("dgx-a100")

    found = cost.collective_ns(OPERATIONS["all_to_all_single"], tuple(range(8)), 8 * 1000)

    assert found == cost.call_overhead_ns + ceil(
        cost.cluster.intra.latency_ns + 7 * 1000 / cost.cluster.intra.attained_bytes_per_ns
    )


# --- links ---


def test_the_bound_of_a_link_is_busbw_over_the_fastest_link_and_zero_for_one_rank() -> None:
    cost = model("dgx-a100", 2)

    assert cost.link_bound_ns(OPERATIONS["all_reduce"], (3,), MIB) == 0
    assert cost.link_bound_ns(OPERATIONS["all_reduce"], (0, 1), MIB) == int(
        MIB / cost.cluster.intra.attained_bytes_per_ns
    )
    assert cost.link_bound_ns(OPERATIONS["all_reduce"], (0, 1, 2, 3), MIB) == int(
        1.5 * MIB / cost.cluster.intra.attained_bytes_per_ns
    )


def test_a_rank_reaches_itself_by_memory_its_node_by_the_link_and_others_by_the_card() -> None:
    cost = model("dgx-a100", 2)
    device = cost.cluster.device

    assert cost.bytes_per_ns(3, 3) == device.memory_bytes_per_ns * device.memory_efficiency / 2
    assert cost.bytes_per_ns(0, 7) == cost.cluster.intra.attained_bytes_per_ns
    assert cost.bytes_per_ns(0, 8) == cost.cluster.rank_inter_bytes_per_ns
    assert [cost.latency_ns(link) for link in ("self", "intra", "inter")] == [
        0,
        cost.cluster.intra.latency_ns,
        cost.cluster.inter_latency_ns,
    ]
    assert [cost.node(rank) for rank in (0, 7, 8, 15)] == [0, 0, 1, 1]
    assert cost.p2p_ns(3, 3, 0) == cost.call_overhead_ns


@pytest.mark.parametrize("link", ["nic", "network", "inter"])
def test_a_slow_network_slows_both_directions_of_its_node_only(link: str) -> None:
    """The slower end decides; two faults of one node multiply; no nodes named are all."""
    sound, slow = (
        model("dgx-a100", 3),
        model(
            "dgx-a100",
            3,
            faults=[Slow(link, (1,), 3.0), Slow(link, (1,), 2.0), Slow(link, (0,), 4.0)],
        ),
    )
    rate = sound.bytes_per_ns(0, 8)

    assert [slow.bytes_per_ns(*ends) for ends in ((8, 16), (16, 8), (0, 8), (0, 16))] == [
        rate / 6,
        rate / 6,
        rate / 6,
        rate / 4,
    ]
    assert slow.bytes_per_ns(8, 9) == sound.bytes_per_ns(8, 9)
    out, into = LinkPorts(slow).of_message(8, 16).ports
    assert LinkPorts(slow).capacity[[out, into]].tolist() == [rate / 6, rate]
    assert model("dgx-a100", 3, faults=[Slow(link, (), 2.0)]).bytes_per_ns(8, 16) == rate / 2


@pytest.mark.parametrize("link", ["nvlink", "intra"])
def test_a_slow_link_inside_one_node_affects_no_other_link_or_network(link: str) -> None:
    sound, slow = model("dgx-a100", 2), model("dgx-a100", 2, faults=[Slow(link, (1, 7), 2.5)])

    assert slow.bytes_per_ns(8, 9) == sound.bytes_per_ns(8, 9) / 2.5
    assert slow.bytes_per_ns(0, 1) == sound.bytes_per_ns(0, 1)
    assert slow.bytes_per_ns(0, 8) == sound.bytes_per_ns(0, 8)
    assert slow.collective_ns(OPERATIONS["all_reduce"], (8, 9), 1 << 34) > 2 * slow.collective_ns(
        OPERATIONS["all_reduce"], (0, 1), 1 << 34
    )


def test_gloo_moves_the_bytes_of_a_process_in_one_thread_where_measured_contention_demands() -> (
    None
):
    """At both ends of a message and of each member; NCCL's clusters have no such thread."""
    half = LinkPorts(model("cpu-10gbe", 2, 4, crossing=0.5))
    found = half.of_message(1, 2)

    assert [half.name(port) for port in found.ports[2:]] == ["rank 1 loop", "rank 2 loop"]
    assert found.weights == (1.0, 1.0, 0.0, 0.0)
    assert [
        half.name(port) for port in half.of_collective(OPERATIONS["all_reduce"], (0, 3)).ports[4:]
    ] == [
        "rank 0 loop",
        "rank 3 loop",
    ]
    for none in (model("cpu-10gbe", 2, 4), model("dgx-a100", 2, 4, crossing=0.5)):
        assert len(LinkPorts(none).of_message(1, 2).ports) == 2


def test_ranks_alone_on_their_nodes_communicate_over_the_network() -> None:
    """No ranks on a node is one, too."""
    for local_size in (1, 0):
        cost = CostModel(cluster_from("cpu-10gbe"), 3, local_size)
        assert [cost.node(rank) for rank in range(3)] == [0, 1, 2]
        assert cost.link_class(0, 1) == "inter"


def test_a_fault_at_a_missing_node_changes_nothing() -> None:
    sound, slow = model("dgx-a100", 2), model("dgx-a100", 2, faults=[Slow("nic", (2, -1, 9), 5.0)])

    assert [slow.bytes_per_ns(0, 8), slow.bytes_per_ns(0, 1)] == [
        sound.bytes_per_ns(0, 8),
        sound.bytes_per_ns(0, 1),
    ]


# --- compute ---


def test_work_costs_its_given_time_or_the_slower_of_arithmetic_and_memory() -> None:
    cost = model("dgx-a100")
    rate, memory = (
        cost.cluster.device.flop_per_ns("float32"),
        cost.cluster.device.memory_bytes_per_ns * cost.cluster.device.memory_efficiency,
    )

    assert cost.compute_ns(1, 1e12, 1e12) == 1
    assert cost.compute_ns(0, 0.0, 0.0) == 0
    assert cost.compute_ns(0, 1e9, 0.0) == cost.launch_ns + ceil(1e9 / rate)
    assert cost.compute_ns(0, 0.0, 1e9) == cost.launch_ns + ceil(1e9 / memory)
    assert cost.compute_ns(0, 1e9, 1e9) == cost.launch_ns + ceil(max(1e9 / rate, 1e9 / memory))


# --- measured times ---


def measured(
    op: str, group: int, nodes: int, times: dict[str, str], ranks: int | None = None
) -> dict[str, Any]:
    return {"op": op, "group": group, "nodes": nodes, "ranks": ranks or group, "times": times}


def test_a_measured_size_costs_the_measured_time() -> None:
    """Of a message and of a collective; other operations keep the model's price."""
    curves = [
        measured("all_reduce", 4, 1, {"1 MiB": "5 ms"}),
        measured("send", 2, 1, {"1 MiB": "3 ms"}),
    ]
    cost, bare = model("cpu-10gbe", 1, 4, measured=curves), model("cpu-10gbe", 1, 4)

    assert cost.collective_ns(OPERATIONS["all_reduce"], (0, 1, 2, 3), MIB) == pytest.approx(
        5_000_000, abs=1
    )
    assert cost.p2p_ns(2, 3, MIB) == pytest.approx(3_000_000, abs=1)
    assert cost.collective_ns(OPERATIONS["broadcast"], (0, 1, 2, 3), MIB, 0) == bare.collective_ns(
        OPERATIONS["broadcast"], (0, 1, 2, 3), MIB, 0
    )
    assert cost.collective_ns(OPERATIONS["all_reduce"], (2,), MIB) == bare.call_overhead_ns
    assert cost.collective_ns(
        OPERATIONS["all_reduce_coalesced"], (0, 1, 2, 3), MIB
    ) == pytest.approx(5_000_000, abs=1)


@pytest.mark.parametrize("seed", range(8))
def test_between_two_measured_sizes_a_cost_lies_between_their_times(seed: int) -> None:
    """Whatever was measured, rising or falling, and at the sizes themselves it is the measured
    one.
    """
    draw = random.Random(seed)
    sizes = sorted(draw.sample(range(1, 1 << 26), 5))
    times = {size: draw.randint(20_000, 900_000) for size in sizes}
    curve = MeasuredCurve.model_construct(op="all_reduce", group=8, ranks=8, nodes=1, times=times)
    cost = CostModel(preset("dgx-h100").model_copy(update={"measured": (curve,)}), 8, 8)
    prices = {
        size: cost.collective_ns(OPERATIONS["all_reduce"], tuple(range(8)), size)
        for size in range(sizes[0], sizes[-1], 1 << 18)
    }

    assert [
        cost.collective_ns(OPERATIONS["all_reduce"], tuple(range(8)), size) for size in sizes
    ] == list(times.values())
    for size, price in prices.items():
        i = bisect_right(sizes, size)
        low, high = sorted((times[sizes[i - 1]], times[sizes[min(i, 4)]]))
        assert low - 1 <= price <= high + 1


def test_messages_inside_a_node_and_between_nodes_have_separate_measurements() -> None:
    curves = [
        measured("send", 2, 1, {"1 MiB": "3 ms"}),
        measured("send", 2, 2, {"1 MiB": "9 ms"}, ranks=1),
    ]
    cost = model("cpu-10gbe", 2, 2, measured=curves)

    assert cost.p2p_ns(0, 1, MIB) == pytest.approx(3_000_000, abs=1)
    assert cost.p2p_ns(1, 2, MIB) == pytest.approx(9_000_000, abs=1)


def test_a_measurement_with_all_ranks_busy_applies_to_a_smaller_group() -> None:
    """A pair on two machines, one of eight at once; a message of sixteen ranks that all send to the
    next machine.
    """
    curves = [
        {"op": "all_reduce", "group": 2, "nodes": 2, "ranks": 8, "times": {"1 MiB": "5 ms"}},
        {"op": "send", "group": 16, "nodes": 2, "ranks": 8, "times": {"1 MiB": "3 ms"}},
    ]
    cost = CostModel(cluster_from({"preset": "dgx-h100", "measured": curves}), 16, 8)

    assert cost.collective_ns(OPERATIONS["all_reduce"], (0, 8), MIB) == pytest.approx(
        5_000_000, abs=1
    )
    assert cost.p2p_ns(0, 8, MIB) == pytest.approx(3_000_000, abs=1)


def test_a_collective_measured_across_nodes_is_compared_with_the_model_for_as_many_nodes() -> None:
    """At the measured size the measured time; the ratio goes on beyond it."""
    cost = model(
        "cpu-10gbe", 2, 2, measured=[measured("all_reduce", 4, 2, {"1 MiB": "7 ms"}, ranks=2)]
    )
    bare = model("cpu-10gbe", 2, 2)
    at, beyond = (
        bare.collective_ns(OPERATIONS["all_reduce"], (0, 1, 2, 3), size) for size in (MIB, 4 * MIB)
    )

    assert cost.collective_ns(OPERATIONS["all_reduce"], (0, 1, 2, 3), MIB) == pytest.approx(
        7_000_000, abs=1
    )
    assert cost.collective_ns(OPERATIONS["all_reduce"], (0, 1, 2, 3), 4 * MIB) == pytest.approx(
        beyond * 7_000_000 / at, rel=1e-6
    )
