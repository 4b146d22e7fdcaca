"""What is under way at once shares the links: n times as long, never more than a link carries, and
nothing where nothing meets.
"""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from distsim.backends import BACKEND_PROFILES
from distsim.engine import link_sharing, overlap
from distsim.engine import simulate as simulate_engine
from distsim.engine.local_run_columns import fill_columns
from distsim.engine.timeout_check import exceeds_timeout
from distsim.hardware.cluster import cluster_from, preset
from distsim.hardware.cost import CostModel
from distsim.hardware.cost.cut_traffic import traffic_across_cuts
from distsim.hardware.cost.max_min_fairness import LinkPorts, PortDemand, fair_rates
from distsim.operations.registry import OPERATIONS
from distsim.scenario import Scenario, loads
from distsim.semantics.form.completion import CompletionConditions
from distsim.semantics.form.linked_program import LinkedProgram
from distsim.semantics.form.mismatches import ProgramMismatches
from distsim.semantics.form.order_dependence import why_order_matters
from distsim.semantics.local.run import run_local_clocks
from distsim.simulation.simulate_scenario import Simulation, cost_model, simulate
from tests.support import generator
from tests.support.harness import draws

BIG = 1 << 28  # float32 elements: 1 GiB
LINE = {
    "name": "line",
    "collectives": "rails",
    "call_overhead": "1 us",
    "device": {
        "name": "d",
        "peak": {"float32": "1 TFLOP/s"},
        "memory_bandwidth": "1 TB/s",
        "memory_size": "80 GB",
    },
    "intra": {"kind": "nvlink", "latency": "2 us", "bandwidth": "200 GB/s"},
    "nics": {"count": 2, "bandwidth": "25 GB/s"},
    "network": {"latency": "3 us"},
}


def taken(
    nodes: int, per_node: int, cluster: Any, steps: str, backend: str = "nccl", numel: int = BIG
) -> Simulation:
    text = f"name: x\nworld: {{nodes: {nodes}, ranks_per_node: {per_node}}}\nbackend: {backend}\n{steps}"
    return simulate(
        loads(text.replace("NUMEL", str(numel))),
        cluster=cluster,
        with_verdict=False,
        with_values=False,
    )


def at_once(n: int, op: str = "all_reduce") -> str:
    """n collectives of all ranks at once, each on a group of its own."""
    groups = "".join(f"  g{i}: {list(range(8))}\n" for i in range(n))
    calls = "".join(
        f"  - {op}: {{tensor: x, group: g{i}, async: true, as: h{i}}}\n" for i in range(n)
    )
    return f"groups:\n{groups}tensors: {{x: {{shape: [NUMEL]}}}}\nprogram:\n{calls}  - wait: [{', '.join(f'h{i}' for i in range(n))}]\n"


def sends(n: int) -> str:
    """Rank 0 sends to n others at once."""
    posted = "".join(f"      - isend: {{tensor: x, dst: {i + 1}, as: h{i}}}\n" for i in range(n))
    return (
        f"tensors: {{x: {{shape: [NUMEL]}}}}\nprogram:\n  - ranks: 0\n    steps:\n{posted}"
        f"      - wait: [{', '.join(f'h{i}' for i in range(n))}]\n"
        f"  - ranks: 0 < rank and rank <= {n}\n    steps: [{{recv: {{tensor: x, src: 0}}}}]\n"
    )


@pytest.mark.parametrize(
    ("nodes", "per_node", "cluster"),
    [(1, 8, "dgx-h100"), (1, 8, "cpu-10gbe"), (8, 1, "dgx-a100"), (8, 1, LINE)],
)
def test_n_equal_transfers_over_one_link_take_n_times_as_long(
    nodes: int, per_node: int, cluster: Any
) -> None:
    backend = "gloo" if cluster == "cpu-10gbe" else "nccl"
    for steps in (at_once, sends):
        one, three = (
            taken(nodes, per_node, cluster, steps(n), backend).makespan_ns for n in (1, 3)
        )
        assert three == pytest.approx(3 * one, rel=0.02)


def test_a_run_that_hangs_ends_with_its_last_transfer() -> None:
    """The message becomes faster when the all_reduce has ended. The end at its earlier speed, which
    is later, must not delay the exits of the ranks."""
    steps = (
        "tensors: {a: {shape: [1000]}, x: {shape: [NUMEL]}, y: {like: x}}\nprogram:\n"
        "  - isend: {tensor: x, dst: (rank + 1) % world_size, as: s}\n"
        "  - irecv: {tensor: y, src: (rank - 1) % world_size, as: r}\n"
        "  - all_reduce: {tensor: x}\n"
        "  - wait: [s, r]\n"
        "  - {ranks: 1, steps: [recv: {tensor: a, src: 0}]}\n"
    )
    found = taken(1, 4, "cpu-25gbe", steps, "gloo", 1_000_000)
    assert found.makespan_ns == found.run.trace["finished_ns"].max()


def test_eight_reductions_on_eight_four_and_two_cards_take_one_two_and_four_times_as_long() -> None:
    steps = "mesh: {m: 2, l: 8}\ntensors: {x: {shape: [NUMEL]}}\nprogram:\n  - all_reduce: {tensor: x, group: m}\n"
    times = {
        n: taken(2, 8, {"preset": "dgx-h100", "nics": {"count": n}}, steps).makespan_ns
        for n in (8, 4, 2)
    }
    assert [times[n] / times[8] for n in (4, 2)] == pytest.approx([2, 4], rel=0.02)


def test_a_send_and_a_reduction_through_one_card_slow_each_other() -> None:
    """Ranks 0 and 1 have one card; rank 0 sends to rank 2 on the next machine while rank 1 reduces
    with rank 3.
    """
    cluster = {**LINE, "nics": {"count": 1, "bandwidth": "25 GB/s"}}
    send = "  - ranks: 0\n    steps: [{send: {tensor: x, dst: 2}}]\n  - ranks: 2\n    steps: [{recv: {tensor: x, src: 0}}]\n"
    reduce = "  - ranks: rank % 2 == 1\n    steps: [{all_reduce: {tensor: x, group: odd}}]\n"
    head = "groups: {odd: [1, 3]}\ntensors: {x: {shape: [NUMEL]}}\nprogram:\n"
    alone = [taken(2, 2, cluster, head + steps).makespan_ns for steps in (send, reduce)]
    both = taken(2, 2, cluster, head + send + reduce)
    trace = both.run.trace
    ends = [int(trace["finished_ns"][trace["rank"] == rank].max()) for rank in (0, 1)]
    assert ends == pytest.approx([2 * alone[0], 2 * alone[1]], rel=0.02)


def test_compute_and_communication_of_a_rank_slow_each_other_by_the_factors_of_the_device() -> None:
    """A reduction of some 4 ms beside a kernel of 2 ms: the kernel takes 1.19 times as long, and so
    long the reduction 1.1 times.
    """
    steps = (
        "tensors: {x: {shape: [NUMEL]}}\nprogram:\n  - all_reduce: {tensor: x, async: true, as: h}\n"
        "  - compute: {time: 2 ms}\n  - wait: h\n"
    )
    alone = taken(
        1, 8, "dgx-h100", "tensors: {x: {shape: [NUMEL]}}\nprogram:\n  - all_reduce: {tensor: x}\n"
    ).makespan_ns
    found = taken(1, 8, "dgx-h100", steps)
    trace = found.run.trace
    work, device = (
        [trace.text("op", int(i)) == "compute" for i in trace["op"]],
        preset("dgx-h100").device,
    )
    long = int((trace["finished_ns"] - trace["started_ns"])[work][0])
    assert long == pytest.approx(2e6 * device.overlap_compute, abs=2)
    assert found.makespan_ns == pytest.approx(
        alone + long * (1 - 1 / device.overlap_transfers), rel=0.002
    )


def test_without_shared_links_the_fast_engine_gives_the_same_nanoseconds() -> None:
    ring = "tensors: {x: {shape: [NUMEL]}, y: {like: x}}\nprogram:\n  - isend: {tensor: x, dst: (rank + 1) % world_size, as: h}\n"
    ring += "  - recv: {tensor: y, src: (rank - 1) % world_size}\n  - wait: h\n  - compute: {time: 1 ms}\n  - all_reduce: {tensor: y}\n"
    for cluster, backend in (("cpu-10gbe", "gloo"), ("dgx-a100", "gloo"), (LINE, "mpi")):
        for numel in (4, BIG):
            fast = taken(
                2,
                2,
                {**cluster_of(cluster), "nics": {**cluster_of(cluster)["nics"], "count": 2}},
                ring,
                backend,
                numel,
            )
            ordered = simulate(
                fast.scenario,
                cluster=fast.cost.cluster,
                with_verdict=False,
                with_values=False,
                ordered=True,
            )
            assert (fast.run.driver, ordered.run.driver) == ("local clocks", "event-driven")
            for name in ("started_ns", "finished_ns", "returned_ns"):
                assert fast.run.trace[name].tolist() == ordered.run.trace[name].tolist()


def cluster_of(cluster: Any) -> dict[str, Any]:
    return cluster if isinstance(cluster, dict) else cluster_from(cluster).to_mapping()


def test_the_short_and_the_long_check_for_shared_links_agree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """24 random programs of messages on four ranks, one machine or two: the fast run is kept in the
    same ones, with the same times.
    """
    one = {**LINE, "collectives": "flat", "nics": {"count": 2, "bandwidth": "25 GB/s"}}
    paths: list[list[str]] = []
    for short in (True, False):
        if not short:
            monkeypatch.setattr(overlap, "_messages_are_sequential", lambda *_: False)
        found = []
        for seed in range(24):
            draw = random.Random(seed)
            pairs = [draw.sample(range(4), 2) for _ in range(draw.randint(1, 5))]
            steps = "".join(
                f"  - {{ranks: {a}, steps: [{{isend: {{tensor: x, dst: {b}, as: s{k}}}}}{draw.choice(['', f', {{wait: s{k}}}'])}]}}\n"
                f"  - {{ranks: {b}, steps: [{{irecv: {{tensor: x{k}, src: {a}, as: r{k}}}}}{draw.choice(['', f', {{wait: r{k}}}'])}]}}\n"
                for k, (a, b) in enumerate(pairs)
            )
            tensors = "".join(f", x{k}: {{like: x}}" for k in range(len(pairs)))
            text = f"tensors: {{x: {{shape: [NUMEL]}}{tensors}}}\nprogram:\n{steps}  - wait: all\n"
            run = taken(1 + seed % 2, 4 >> seed % 2, one, text, "gloo", draw.choice([4, BIG])).run
            found.append(f"{run.driver} {run.trace['finished_ns'].tolist()}")
        paths.append(found)

    assert paths[0] == paths[1]
    assert {path.split(" [")[0] for path in paths[0]} == {"local clocks", "event-driven"}


@given(
    generator.scenarios(
        generator.FEATURES
        - {"async_messages", "batches", "groups", "async_collectives", "links", "lost", "moved"}
    )
)
@settings(max_examples=draws(80))
def test_shortcuts_of_the_engine_agree_with_the_full_sharing_and_timeout_checks(
    mapping: generator.Mapping,
) -> None:
    """The engine skips the search for shared links and exceeded timeouts in programs that cannot
    have them. The full checks run here on every program."""
    program = generator.program_of(mapping)
    profile, cost = BACKEND_PROFILES[program.backend], cost_model(Scenario(**mapping), program)
    linked = LinkedProgram(program, profile)
    misfits = ProgramMismatches(linked)
    if why_order_matters(linked, misfits) is not None:
        return
    done = run_local_clocks(linked, CompletionConditions(linked, cost))
    columns = fill_columns(done)

    if simulate_engine._never_overlaps(program, misfits, done.conditions):
        assert not overlap.has_overlap(done.conditions, columns, cost)
    assert simulate_engine._exceeds_timeout(program, profile, columns) == exceeds_timeout(
        program, profile, columns
    )


def test_shared_links_can_be_switched_off() -> None:
    one, three = (
        taken(1, 8, {"preset": "dgx-h100", "shared_links": False}, at_once(n)) for n in (1, 3)
    )
    assert three.run.driver == "local clocks"
    assert three.makespan_ns == one.makespan_ns


@pytest.mark.parametrize("seed", range(6))
def test_no_link_ever_moves_more_bytes_than_its_bandwidth_allows(seed: int) -> None:
    """Random messages and reductions at once, summed from the trace: what begins and ends within a
    window fits into it, at every port.
    """
    draw = random.Random(seed)
    nodes, per_node, cards = 2, draw.choice((2, 4)), draw.choice((1, 2))
    size, groups, steps, waits = nodes * per_node, list[str](), list[str](), list[str]()
    for i in range(4):
        members = sorted(draw.sample(range(size), draw.randint(2, size)))
        groups.append(f"  g{i}: {members}\n")
        steps.append(
            f"  - {{ranks: {members}, all_reduce: {{tensor: z{i}, group: g{i}, async: true, as: h{i}}}}}\n"
        )
        src, dst = draw.sample(range(size), 2)
        steps.append(
            f"  - {{ranks: {src}, isend: {{tensor: x{i}, dst: {dst}, tag: {i}, as: s{i}}}}}\n"
        )
        steps.append(
            f"  - {{ranks: {dst}, irecv: {{tensor: y{i}, src: {src}, tag: {i}, as: r{i}}}}}\n"
        )
        steps.append(f"  - {{ranks: {src}, compute: {{time: {draw.randint(0, 900)} us}}}}\n")
        waits += [
            f"  - {{ranks: {members}, wait: h{i}}}\n",
            f"  - {{ranks: {src}, wait: s{i}}}\n",
            f"  - {{ranks: {dst}, wait: r{i}}}\n",
        ]
    steps += waits
    shapes = [draw.randint(1, 1 << 22) for _ in range(4)]
    tensors = "".join(
        f"  x{i}: {{shape: [{n}]}}\n  y{i}: {{like: x{i}}}\n  z{i}: {{like: x{i}}}\n"
        for i, n in enumerate(shapes)
    )
    network = {
        "latency": "3 us",
        "oversubscription": draw.choice((1, 3)),
        "leaf": draw.choice((None, 1)),
    }
    cluster = {
        **LINE,
        "nics": {"count": cards, "bandwidth": f"{draw.choice((3, 25))} GB/s"},
        "network": network,
    }
    found = taken(
        nodes,
        per_node,
        cluster,
        f"groups:\n{''.join(groups)}tensors:\n{tensors}program:\n{''.join(steps)}",
        "mpi",
    )
    assert found.outcome == "completes"
    crossings = _crossings(found)
    capacity = LinkPorts(found.cost).capacity
    for port, spans in crossings.items():
        for first, *_ in spans:
            for _, last, _ in spans:
                moved = sum(
                    nbytes for begin, end, nbytes in spans if begin >= first and end <= last
                )
                assert moved <= capacity[port] * max(last - first, 0) * (1 + 1e-6) + 1


def _crossings(found: Simulation) -> dict[int, list[tuple[int, int, float]]]:
    """By port (begin, end, bytes) of what crossed it: of a message all, of a reduction what no
    schedule can spare.
    """
    cost, trace = found.cost, found.run.trace
    ports, spans = LinkPorts(cost), defaultdict[int, list[tuple[int, int, float]]](list)
    groups, seen = dict(trace.header["groups"]), set[int]()
    for row in trace.rows():
        if row.op == "isend":
            for port in ports.of_message(row.rank, row.peer or 0).ports:
                spans[port].append((row.started_ns, row.finished_ns, row.nbytes))
        elif row.op == "all_reduce" and row.match not in seen:
            seen.add(row.match)
            for port, share in ports.pools.of_collective(
                OPERATIONS["all_reduce"], groups[row.group]
            ).items():
                spans[ports.first_pool + port].append(
                    (row.started_ns, row.finished_ns, share * row.nbytes)
                )
            nodes: dict[int, list[int]] = defaultdict(list)
            for rank in groups[row.group]:
                nodes[cost.node(rank)].append(rank)
            for mates in nodes.values() if len(nodes) > 1 else ():
                cards = {ports.card(rank) for rank in mates}
                share = OPERATIONS["all_reduce"].busbw_factor(len(nodes)) * row.nbytes / len(cards)
                for card in cards:
                    spans[card].append((row.started_ns, row.finished_ns, share))
                    spans[card + 1].append((row.started_ns, row.finished_ns, share))
    return spans


@pytest.mark.parametrize("seed", range(4))
def test_link_shares_are_max_min_fair(seed: int) -> None:
    """No port is overfull, and who gets less than it can use stands at a full port at which nobody
    gets more.
    """
    draw = random.Random(seed)
    capacity = np.array([draw.choice((25.0, 50.0, 400.0)) for _ in range(20)])
    demands = [
        PortDemand(
            tuple(draw.sample(range(20), 3)),
            tuple(draw.choice((0.5, 1.0)) for _ in range(3)),
            draw.uniform(1, 60),
        )
        for _ in range(24)
    ]
    rates = fair_rates(demands, capacity)
    used = np.zeros(20)
    for demand, rate in zip(demands, rates, strict=True):
        used[list(demand.ports)] += np.array(demand.weights) * rate
    assert (used <= capacity * (1 + 1e-9)).all()
    most = [
        max((r for d, r in zip(demands, rates, strict=True) if port in d.ports), default=0.0)
        for port in range(20)
    ]
    for demand, rate in zip(demands, rates, strict=True):
        full = [port for port in demand.ports if used[port] >= capacity[port] * (1 - 1e-9)]
        assert rate == pytest.approx(demand.rate) or any(
            rate >= most[port] * (1 - 1e-9) for port in full
        )


def test_n_flows_at_one_port_share_it_equally_and_smaller_flows_leave_the_rest() -> None:
    capacity = np.array([12.0])
    assert fair_rates([PortDemand((0,), (1.0,), 12.0)] * 4, capacity).tolist() == [3.0] * 4
    assert fair_rates(
        [PortDemand((0,), (1.0,), 12.0)] * 2 + [PortDemand((0,), (1.0,), 2.0)], capacity
    ).tolist() == [
        5.0,
        5.0,
        2.0,
    ]
    slow = [PortDemand((0,), (1.0,), 1.0)] * 2 + [
        PortDemand((0,), (1.0,), 0.25)
    ]  # less than a byte each ns
    assert fair_rates(slow, np.array([1.0])).tolist() == [0.375, 0.375, 0.25]


def _random_messages(draw: random.Random) -> str:
    """Messages and kernels of 12 ranks; some connect many ranks, some only two."""
    tensors, steps = "", ""
    for i in range(10):
        tensors += (
            f"  x{i}: {{shape: [{draw.choice((10**3, 10**5, 10**7))}]}}\n  y{i}: {{like: x{i}}}\n"
        )
        width = draw.choice((2, 4, 12))
        shift = draw.randrange(1, width)
        block = f"rank // {width} * {width}"
        steps += f"  - compute: {{time: (rank * {draw.randrange(1, 99)}) % 7 * 20 us}}\n"
        steps += (
            f"  - isend: {{tensor: x{i}, dst: {block} + (rank + {shift}) % {width}, as: s{i}}}\n"
        )
        steps += (
            f"  - irecv: {{tensor: y{i}, src: {block} + (rank - {shift}) % {width}, as: r{i}}}\n"
        )
    return f"tensors:\n{tensors}program:\n{steps}  - wait: all\n"


@pytest.mark.parametrize("seed", range(4))
def test_shares_are_the_same_whether_or_not_the_search_for_connected_transfers_is_complete(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    cluster = draw.choice(
        (LINE, {"preset": "cpu-25gbe", "crossing": 0.3}, {**LINE, "collectives": "flat"})
    )
    program = _random_messages(draw)
    traces = []
    # Every search is complete; as it is; none is complete.
    for enough in (0, link_sharing._ENOUGH_CONNECTED, 10**9):
        monkeypatch.setattr(link_sharing, "_ENOUGH_CONNECTED", enough)
        found = taken(3, 4, cluster, program, "mpi", numel=1)
        assert found.run.driver == "event-driven"
        traces.append(found.run.trace)
    for column in ("started_ns", "finished_ns", "match"):
        first, *others = (trace[column].tolist() for trace in traces)
        assert others == [first, first]


@pytest.mark.parametrize("crossing", [0, 0.3, 1])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_thread_that_sends_and_receives_at_once_slows_both_down_by_its_share(
    ranks: int, crossing: float
) -> None:
    """In a chain of messages, the ranks between its ends send and receive at once."""
    cluster = {"preset": "cpu-25gbe", "crossing": crossing, "collectives": "flat"}
    steps = (
        "tensors: {x: {shape: [NUMEL]}, y: {like: x}}\nprogram:\n"
        "  - {irecv: {tensor: y, src: rank - 1, as: r}, ranks: rank > 0}\n"
        "  - {isend: {tensor: x, dst: rank + 1, as: s}, ranks: rank < world_size - 1}\n"
        "  - wait: all\n"
    )
    alone = taken(2, 1, {**cluster, "crossing": 0}, steps, "gloo").run.makespan_ns
    chain = taken(ranks, 1, cluster, steps, "gloo").run.makespan_ns

    assert chain / alone == pytest.approx(1 + crossing * (ranks > 2), rel=0.01)


def test_ranks_share_cards_if_a_node_has_fewer_cards_than_ranks() -> None:
    """Without any, what one rank does never slows another's network down but through groups."""
    assert not LinkPorts(CostModel(preset("dgx-h100"), 16, 8)).shared_cards
    assert LinkPorts(CostModel(preset("aws-p4d"), 16, 8)).shared_cards
    assert not LinkPorts(CostModel(preset("aws-p4d"), 8, 8)).shared_cards


#: Two machines on a leaf switch, whose way up has half of their cards' bandwidth; no other latency
#: than the call's.
LEAVES = {
    **LINE,
    "nics": {"count": 2, "bandwidth": "25 GB/s"},
    "network": {"latency": "0 us", "leaf": 2, "oversubscription": 2},
}


def messages(pairs: list[tuple[int, int]]) -> str:
    """These messages at once."""
    tensors = "tensors: {x: {shape: [NUMEL]}, y: {like: x}}\nprogram:\n"
    return tensors + "".join(
        f"  - {{ranks: {src}, send: {{tensor: x, dst: {dst}}}}}\n  - {{ranks: {dst}, recv: {{tensor: y, src: {src}}}}}\n"
        for src, dst in pairs
    )


def test_the_uplink_of_a_leaf_switch_is_shared_by_exactly_the_traffic_that_leaves_it() -> None:
    """Four machines of two: 0 to 3 are on one leaf. Its way up has two cards' bandwidth: two
    messages fit, four take twice as long.
    """
    one, two, four = (
        taken(4, 2, LEAVES, messages([(rank, rank + 4) for rank in range(n)]), "mpi").makespan_ns
        for n in (1, 2, 4)
    )
    inside = taken(
        4,
        2,
        LEAVES,
        messages([(rank, (rank + 2) % 4) for rank in range(2)] + [(4, 6), (5, 7)]),
        "mpi",
    ).makespan_ns
    always = {**LEAVES, "network": {"latency": "0 us", "oversubscription": 2}}

    assert [two, inside] == pytest.approx([one, one], rel=0.001)
    assert four == pytest.approx(2 * one, rel=0.001)
    assert taken(4, 2, always, messages([(0, 4)]), "mpi").makespan_ns == pytest.approx(
        2 * one, rel=0.001
    )


def test_rail_reductions_and_a_global_exchange_share_the_leaf_switch() -> None:
    """A reduction for each of two cards: beside each other where the way up has room, twice as long
    where it has not; what every rank sends to all is bound by it alone."""
    leaves = {
        k: {**LEAVES, "network": {"latency": "0 us", "leaf": 2, "oversubscription": k}}
        for k in (1, 8)
    }
    steps = "mesh: {m: 4, l: 2}\ntensors: {x: {shape: [NUMEL]}}\nprogram:\n  - {ranks: l <= LAST, all_reduce: {tensor: x, group: m}}\n"
    wide, narrow = (
        [taken(4, 2, leaves[k], steps.replace("LAST", last)).makespan_ns for last in ("0", "1")]
        for k in (1, 8)
    )
    exchange = [
        CostModel(cluster_from(leaves[k]), 8, 2).collective_ns(
            OPERATIONS["all_to_all_single"], tuple(range(8)), 1 << 30, 0
        )
        for k in (1, 8)
    ]

    assert wide[0] == wide[1]
    assert narrow[1] == pytest.approx(2 * narrow[0], rel=0.001)
    assert exchange[1] == pytest.approx(4 * (1 << 30) / 2 / (2 * 2 * 25 / 8), rel=0.001)
    assert exchange[1] > 2 * exchange[0]


def test_slots_behind_one_pcie_switch_share_its_uplink() -> None:
    """Ranks 0 and 1 send to 2 and 3, behind the other switch: half as fast each; within a switch
    both are alone.
    """
    intra: dict[str, Any] = {
        "kind": "pcie",
        "latency": "2 us",
        "bandwidth": "24 GB/s",
        "per_switch": 2,
    }
    pcie = {**LINE, "intra": intra}
    apart, within = (
        taken(1, 4, pcie, messages(pairs), "mpi").makespan_ns
        for pairs in ([(0, 2), (1, 3)], [(0, 1), (2, 3)])
    )
    ports = LinkPorts(CostModel(cluster_from(pcie), 4, 4))

    assert apart == pytest.approx(2 * within, rel=0.001)
    assert {ports.name(port) for port in ports.of_message(0, 3).ports} >= {
        "pcie switch 0 out",
        "pcie switch 1 in",
    }
    assert not LinkPorts(
        CostModel(cluster_from({**pcie, "intra": {**intra, "per_switch": 4}}), 4, 4)
    ).pools.levels


#: An operation of each kind, and bytes out of and into the cards of a node with 3 of 4 ranks and of
#: one with the last, which is the root.
UNEVEN = {
    "all_reduce": ((1, 1), (1, 1)),
    "all_gather_into_tensor": ((0.75, 0.25), (0.25, 0.75)),
    "reduce_scatter_tensor": ((0.25, 0.75), (0.75, 0.25)),
    "all_to_all_single": ((0.75, 0.75), (0.75, 0.75)),
    "gather": ((0.75, 0), (0, 0.75)),
    "scatter": ((0, 0.75), (0.75, 0)),
    "broadcast": ((1, 1), (1, 1)),
}


@pytest.mark.parametrize("op", UNEVEN)
def test_unequal_nodes_each_send_what_they_have_and_receive_what_they_lack(
    op: str,
) -> None:
    cost = CostModel(cluster_from({**LINE, "nics": {"count": 1, "bandwidth": "25 GB/s"}}), 6, 3)
    ports = LinkPorts(cost)
    asked = ports.asked(OPERATIONS[op], (0, 1, 2, 5), 5)
    cards = [tuple(asked.get(ports.card(rank) + way, 0.0) for way in (0, 1)) for rank in (0, 5)]

    assert cards == [pytest.approx(UNEVEN[op][0]), pytest.approx(UNEVEN[op][1])]


@pytest.mark.parametrize("op", UNEVEN)
@pytest.mark.parametrize("counts", [(1, 3, 2), (5, 1), (2, 2, 2), (4, 1, 1, 4)])
def test_bytes_that_leave_some_parts_of_a_group_enter_others_and_equal_parts_move_equal_bytes(
    op: str, counts: tuple[int, ...]
) -> None:
    found, n = traffic_across_cuts(OPERATIONS[op], counts, 1), sum(counts)

    assert sum(part.out for part in found) == pytest.approx(sum(part.into for part in found))
    if len(set(counts)) == 1 and op not in ("gather", "scatter"):
        share = OPERATIONS[op].busbw_factor(len(counts)) * (
            counts[0] if op == "all_to_all_single" else 1
        )
        assert found == [pytest.approx((share, share))] * len(counts)
    assert max(max(part) for part in found) <= n


def test_a_gather_is_bound_only_by_the_link_into_the_leaf_of_its_root() -> None:
    """Eight machines of two, two on a leaf whose way up has 0.25 GB/s: 12 of 16 parts of a GiB pass
    the root's.
    """
    narrow = {
        **LINE,
        "nics": {"count": 2, "bandwidth": "25 GB/s"},
        "network": {"latency": "0 us", "leaf": 2, "oversubscription": 400},
    }
    cost = CostModel(cluster_from(narrow), 16, 2)
    ports = cost.pools.of_collective(OPERATIONS["gather"], tuple(range(16)), 5)

    assert {cost.pools.name(port): share for port, share in ports.items()} == pytest.approx(
        {"leaf 1 in": 0.75, "leaf 0 out": 0.25, "leaf 2 out": 0.25, "leaf 3 out": 0.25}
    )
    ns = [
        cost.collective_ns(OPERATIONS["gather"], tuple(range(16)), nbytes, 5)
        for nbytes in (0, 1 << 30)
    ]
    assert ns[1] - ns[0] == pytest.approx(0.75 * (1 << 30) / (2 * 2 * 25 / 400), rel=1e-6)
