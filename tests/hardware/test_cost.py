"""The cost model: closed forms against schedules, bounds, sane bandwidths."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distsim.common.errors import UsageError
from distsim.hardware.cluster import PRESETS, cluster_from, preset
from distsim.hardware.cost import CostModel
from distsim.hardware.cost.max_min_fairness import LinkPorts
from distsim.operations.registry import OPERATIONS
from tests.support.harness import draws

COLLECTIVES = {name: row for name, row in OPERATIONS.items() if row.kind == "collective"}
MOVING = {name: row for name, row in COLLECTIVES.items() if row.busbw_factor(4) > 0}


class Slow(NamedTuple):
    link: str
    nodes: tuple[int, ...]
    factor: float


def model(name: str = "dgx-a100", nodes: int = 1, local_size: int = 8, **changes: Any) -> CostModel:
    return CostModel(cluster_from({"preset": name, **changes}), nodes * local_size, local_size)


def ranks(cost: CostModel) -> tuple[int, ...]:
    return tuple(range(cost.world_size))


placements = st.tuples(st.integers(1, 5), st.integers(1, 8)).flatmap(
    lambda shape: st.tuples(
        st.just(shape),
        st.lists(st.integers(0, shape[0] * shape[1] - 1), min_size=1, max_size=16, unique=True).map(
            tuple
        ),
    )
)
clusters = st.sampled_from(sorted(PRESETS))
sizes = st.integers(0, 2**32)


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("local_size", [1, 3, 4, 16])
def test_the_closed_form_equals_the_cost_of_the_schedule(name: str, local_size: int) -> None:
    """For n = 1..16, in several placements, with ranks in order and strided over the nodes."""
    row = COLLECTIVES[name]
    cost = CostModel(preset("cpu-10gbe"), 16, local_size)
    for n in range(1, 17):
        for group in (tuple(range(n)), tuple(sorted(range(n), key=lambda r: (r % 4, r)))):
            for nbytes in (0, 1, 1000, 1 << 22):
                for root in {0, n - 1}:
                    written = cost.schedule_ns(
                        row.schedule(n, root), row.chunk_nbytes(n, nbytes), group
                    )
                    assert cost.flat_ns(row, group, nbytes, root) == written


@given(placements, clusters, st.sampled_from(sorted(COLLECTIVES)), sizes, sizes)
@settings(max_examples=draws(150), deadline=None)
def test_more_bytes_never_cost_less(where: Any, name: str, op: str, a: int, b: int) -> None:
    (nodes, local_size), group = where
    cost, row = model(name, nodes, local_size), COLLECTIVES[op]

    less, more = (cost.collective_ns(row, group, nbytes, group[0]) for nbytes in sorted((a, b)))

    assert less <= more


@given(placements, clusters, st.sampled_from(sorted(MOVING)), sizes)
@settings(max_examples=draws(150), deadline=None)
def test_no_collective_is_faster_than_the_bandwidth_bound(
    where: Any, name: str, op: str, nbytes: int
) -> None:
    (nodes, local_size), group = where
    cost, row = model(name, nodes, local_size), MOVING[op]

    assert cost.collective_ns(row, group, nbytes, group[-1]) >= cost.link_bound_ns(
        row, group, nbytes
    )


@given(placements, clusters, sizes)
@settings(max_examples=draws(150), deadline=None)
def test_an_all_reduce_costs_at_least_as_much_as_an_all_gather(
    where: Any, name: str, nbytes: int
) -> None:
    """By latency and bandwidth alone; NCCL has trees for small all_reduce and none for all_gather,
    so there large buffers only.
    """
    (nodes, local_size), group = where
    cost = model(name, nodes, local_size)
    nbytes = max(nbytes, 1 << 29) if cost.nccl and len(group) > 1 else nbytes

    reduced, gathered = (
        cost.collective_ns(OPERATIONS[op], group, nbytes)
        for op in ("all_reduce", "all_gather_into_tensor")
    )

    assert reduced >= gathered


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_single_rank_pays_only_the_overhead(name: str) -> None:
    cost = model()

    assert cost.collective_ns(COLLECTIVES[name], (3,), 1 << 30, 3) == cost.call_overhead_ns


@pytest.mark.parametrize(
    "op", ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all_single"]
)
@pytest.mark.parametrize(
    ("name", "nodes"), [("dgx-a100", 1), ("dgx-h100", 1), ("dgx-a100", 2), ("dgx-h100", 10)]
)
def test_large_buffers_reach_the_ring_bandwidth(op: str, name: str, nodes: int) -> None:
    """busbw within 15 % of the narrower of link and cards as NCCL counts them, and no more than a
    data sheet's, but where a switch reduces; an all_to_all crosses nodes on one card per rank."""
    cost, row, nbytes = model(name, nodes), OPERATIONS[op], 1 << 36
    cluster = cost.cluster
    busbw = row.busbw_factor(nodes * 8) * nbytes / cost.collective_ns(row, ranks(cost), nbytes, 0)
    inter = cluster.rank_inter_bytes_per_ns * cluster.nics.count
    ring = (
        cluster.intra.attained_bytes_per_ns
        if nodes == 1
        else min(cluster.intra.attained_bytes_per_ns, inter)
    )
    if nodes > 1 and op == "all_to_all_single":
        ring = cluster.rank_inter_bytes_per_ns * (nodes * 8 - 1) / (nodes * 8 - 8)

    switched = op == "all_reduce" and name == "dgx-h100"
    assert 0.85 * ring <= busbw <= ring * (1.75 if switched else 1.05)


def test_two_levels_are_faster_than_a_flat_ring_for_small_buffers_on_many_nodes() -> None:
    cost = model("dgx-h100", 16)

    assert (
        cost.collective_ns(OPERATIONS["all_reduce"], ranks(cost), 1024)
        < cost.flat_ns(OPERATIONS["all_reduce"], ranks(cost), 1024) / 4
    )


def test_a_flat_cluster_uses_the_default_schedule_of_the_operation() -> None:
    cost = model("cpu-10gbe", 4, 4)

    for row in COLLECTIVES.values():
        assert cost.collective_ns(row, ranks(cost), 1 << 20, 0) == cost.flat_ns(
            row, ranks(cost), 1 << 20, 0
        )


def test_a_ring_costs_what_the_textbook_states() -> None:
    """2(n - 1)(a + S/n b) beside the call's overhead, Thakur et al. (2005)."""
    cost = model("cpu-10gbe", 1, 4)
    hop = cost.cluster.intra.latency_ns + (1 << 20) / cost.cluster.intra.attained_bytes_per_ns

    assert cost.collective_ns(OPERATIONS["all_reduce"], ranks(cost), 1 << 22) == pytest.approx(
        cost.call_overhead_ns + 6 * hop, abs=1
    )


def test_links_are_classed_by_node() -> None:
    cost = model("dgx-a100", 2, 4)

    assert [cost.link_class(1, other) for other in (1, 3, 4)] == ["self", "intra", "inter"]
    assert cost.p2p_ns(0, 1, 1 << 20) < cost.p2p_ns(0, 4, 1 << 20)
    rails = model("dgx-a100", 2, 4, collectives="rails")
    assert rails.p2p_ns(0, 1, 0) == rails.call_overhead_ns + rails.cluster.intra.latency_ns


def test_messages_use_cards_between_nodes_and_the_links_of_both_ranks_inside() -> None:
    cost = CostModel(cluster_from({"preset": "dgx-a100", "nics": {"count": 2}}), 8, 4)
    ports = LinkPorts(cost)

    inside, across = ports.of_message(0, 1), ports.of_message(1, 6)
    assert [ports.name(port) for port in inside.ports] == ["rank 0 link out", "rank 1 link in"]
    assert [ports.name(port) for port in across.ports] == ["node 0 nic 1 out", "node 1 nic 0 in"]
    assert (inside.rate, across.rate) == (
        cost.cluster.intra.attained_bytes_per_ns,
        cost.cluster.rank_inter_bytes_per_ns,
    )
    assert ports.of_message(3, 3).ports == ()


def test_ranks_of_a_node_share_its_cards() -> None:
    """An all_to_all over two nodes with one card each takes eight times as long as with eight
    cards.
    """
    one, eight = (model("dgx-a100", 2, nics={"count": count}) for count in (1, 8))
    long, short = (
        cost.collective_ns(OPERATIONS["all_to_all"], ranks(cost), 1 << 36) for cost in (one, eight)
    )

    assert long == pytest.approx(8 * short, rel=0.01)


def test_compute_cost_is_a_given_time_or_a_roofline() -> None:
    cost = model("dgx-a100")
    device = cost.cluster.device

    assert cost.compute_ns(5000, 1e15) == 5000
    assert cost.compute_ns(0) == 0
    by_flops = cost.compute_ns(0, 1e12, 1.0, "bfloat16")
    assert by_flops == pytest.approx(
        device.launch_ns + 1e12 / (312_000 * device.compute_efficiency), abs=1
    )
    by_bytes = cost.compute_ns(0, 1.0, 1e9, "bfloat16")
    assert by_bytes == pytest.approx(
        device.launch_ns + 1e9 / (2039 * device.memory_efficiency), abs=1
    )
    assert cost.compute_ns(0, 1e12, 0.0, "float32") > by_flops


def test_a_slow_link_slows_only_traffic_that_crosses_it() -> None:
    cluster = preset("dgx-a100")
    slow, sound = CostModel(cluster, 24, 8, [Slow("nic", (0,), 2.0)]), CostModel(cluster, 24, 8)
    nbytes = 1 << 34

    def ratio(*group: int) -> float:
        return slow.collective_ns(OPERATIONS["all_reduce"], group, nbytes) / sound.collective_ns(
            OPERATIONS["all_reduce"], group, nbytes
        )

    assert ratio(0, 8) == pytest.approx(2, rel=0.01)
    assert ratio(8, 16) == 1
    assert ratio(0, 1, 2) == 1
    assert slow.p2p_ns(8, 0, nbytes) == pytest.approx(2 * sound.p2p_ns(8, 0, nbytes), rel=0.01)


def test_a_fault_on_a_missing_link_is_refused() -> None:
    with pytest.raises(
        UsageError, match="cluster dgx-a100 has no link `nvlnk`; did you mean nvlink"
    ):
        CostModel(preset("dgx-a100"), 8, 8, [Slow("nvlnk", (), 2.0)])


def test_a_thousand_ranks_are_costed_without_enumerating_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By rotations, and all pairs by their number; none of these has a round less than a thousand
    transfers.
    """
    named = {"all_reduce": "ring", "all_gather": "ring", "all_to_all": "direct"}
    cost = model("dgx-h100", 128, collectives="rails", algorithms=named)

    def refuse(*_: object) -> None:
        raise AssertionError("the rounds were written down")

    monkeypatch.setattr("distsim.hardware.cost.link_loads.written_load", refuse)
    prices = [cost.collective_ns(OPERATIONS[op], ranks(cost), 1 << 20) for op in named]

    assert min(prices) > 0


#: What a textbook says of each algorithm on one node of eight: hops that cost their latency, and
#: buffers that cross a link.
TEXTBOOK = [
    ("all_reduce", "ring", 14, 14 / 8),
    ("all_reduce", "tree", 6, 6),
    ("all_reduce", "halving_doubling", 6, 14 / 8),
    ("all_gather", "ring", 7, 7 / 8),
    ("all_gather", "bruck", 3, 7 / 8),
    ("reduce_scatter", "ring", 7, 7 / 8),
    ("reduce_scatter", "bruck", 3, 7 / 8),
    ("broadcast", "binomial", 3, 3),
    ("broadcast", "chain", 14, 14 / 8),
    ("broadcast", "scatter_all_gather", 10, 14 / 8),
    ("reduce", "binomial", 3, 3),
    ("reduce", "chain", 14, 14 / 8),
    ("gather", "binomial", 3, 7 / 8),
    ("gather", "linear", 7, 7 / 8),
    ("scatter", "binomial", 3, 7 / 8),
    ("scatter", "linear", 7, 7 / 8),
    ("all_to_all", "pairwise", 7, 7 / 8),
    ("all_to_all", "direct", 1, 7 / 8),
    ("barrier", "dissemination", 3, 0),
    ("barrier", "central", 14, 0),
    ("monitored_barrier", "central", 14, 0),
]


@pytest.mark.parametrize(("op", "name", "hops", "buffers"), TEXTBOOK)
def test_an_algorithm_named_by_the_cluster_is_costed_by_its_own_schedule(
    op: str, name: str, hops: int, buffers: float
) -> None:
    """Thakur et al. (2005): the price is hops times latency plus buffers times the time of one."""
    cost, nbytes = model("cpu-10gbe", 1, 8, algorithms={op: name}), 1 << 23
    expected = (
        cost.call_overhead_ns
        + hops * cost.cluster.intra.latency_ns
        + buffers * nbytes / cost.cluster.intra.attained_bytes_per_ns
    )

    assert cost.collective_ns(OPERATIONS[op], ranks(cost), nbytes, 0) == pytest.approx(
        expected, abs=1
    )


@pytest.mark.parametrize("cluster", ["cpu-10gbe", "dgx-a100"])
@pytest.mark.parametrize("op", [*dict.fromkeys(op for op, *_ in TEXTBOOK)])
def test_the_cheapest_of_named_and_default_algorithms_is_used(cluster: str, op: str) -> None:
    def price(nbytes: int, **algorithms: str) -> int:
        form = "flat" if cluster.startswith("cpu") else "rails"
        cost = model(cluster, 2, 8, algorithms=algorithms, collectives=form)
        return cost.collective_ns(OPERATIONS[op], ranks(cost), nbytes, 0)

    for nbytes in (0, 1 << 10, 1 << 20, 1 << 28):
        named = [price(nbytes, **{op: name}) for name in OPERATIONS[op].algorithms]
        assert price(nbytes, **{op: "cheapest"}) == min(*named, price(nbytes))


def test_a_named_algorithm_applies_to_exactly_the_operations_it_implements() -> None:
    plain, bruck = model("cpu-10gbe"), model("cpu-10gbe", algorithms={"all_gather": "bruck"})
    for op in ("all_gather", "all_gather_into_tensor", "all_gather_into_tensor_coalesced"):
        assert bruck.collective_ns(OPERATIONS[op], ranks(bruck), 8) < plain.collective_ns(
            OPERATIONS[op], ranks(plain), 8
        )
    assert bruck.collective_ns(OPERATIONS["all_reduce"], ranks(bruck), 8) == plain.collective_ns(
        OPERATIONS["all_reduce"], ranks(plain), 8
    )


def test_a_named_algorithm_keeps_the_rails_of_another_one() -> None:
    rails, tree, ring = (
        model("dgx-a100", 2, algorithms=named)
        for named in ({}, {"all_reduce": "tree"}, {"all_reduce": "ring"})
    )
    by_rails, by_tree, by_ring = (
        cost.collective_ns(OPERATIONS["all_reduce"], ranks(cost), 1 << 36)
        for cost in (rails, tree, ring)
    )

    assert by_tree > 3 * by_rails
    assert by_rails <= by_ring < 1.05 * by_rails


@pytest.mark.parametrize(
    ("algorithms", "message"),
    [
        (
            {"all_gather": "bruk"},
            "cluster cpu-10gbe, changed: all_gather has no algorithm `bruk`; did you mean bruck?",
        ),
        (
            {"all_gater": "ring"},
            "`algorithms` for `all_gater`, which has none; did you mean all_gather?",
        ),
    ],
)
def test_an_unknown_algorithm_is_refused(algorithms: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as refusal:
        model("cpu-10gbe", algorithms=algorithms)

    assert message in str(refusal.value)


def test_a_reduction_tree_is_costed_where_combining_takes_time() -> None:
    """The root of a binomial tree over eight combines three buffers, one after the other; a chain
    combines its eight pieces.
    """
    for name, combined in (("binomial", 3.0), ("chain", 1.0)):
        free = model("cpu-10gbe", algorithms={"reduce": name})
        slow = model("cpu-10gbe", algorithms={"reduce": name}, reduce_bandwidth="1 GB/s")
        longer = slow.collective_ns(
            OPERATIONS["reduce"], ranks(slow), 1 << 20, 0
        ) - free.collective_ns(OPERATIONS["reduce"], ranks(free), 1 << 20, 0)
        assert longer == pytest.approx(combined * (1 << 20), abs=2)
