"""A cluster's file from measurements: what was measured comes out again, what was not follows the
model, errors are told.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from distsim.common.errors import EnvironmentFault, UsageError
from distsim.hardware.cluster import Cluster, cluster_from, preset
from distsim.hardware.cost import CostModel
from distsim.operations.registry import OPERATIONS
from distsim.real.bench.measurement import (
    BenchResult,
    BenchRow,
    bench_from_json,
    bench_to_json,
    run_bench,
)
from distsim.real.calibrate import (
    MeasuredPoint,
    calibrate_cluster,
    points_from_bench,
    points_from_nccl_tests,
    points_from_trace,
)
from distsim.real.calibrate.fit_cluster import predicted_ns
from distsim.scenario import load, load_mapping, loads
from distsim.scenario.format.source.yaml_nodes import dump_yaml
from distsim.simulation.simulate_scenario import simulate
from tests.support.command_json import checked_json

SIZES = tuple(4096 * 4**k for k in range(7))
TRUTH = cluster_from(
    {
        "preset": "cpu-10gbe",
        "name": "truth",
        "call_overhead": "40 us",
        "intra": {"latency": "70 us", "bandwidth": "2 GB/s", "efficiency": 1.0},
        "reduce_bandwidth": "3 GB/s",
    }
)
LOG = """\
# nThread 1 nGpus 1 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20
#  Rank  0 Group  0 Pid    101 on    node-1 device  0 [0000:1b:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid    102 on    node-1 device  1 [0000:1c:00] NVIDIA H100 80GB HBM3
#  Rank  2 Group  0 Pid    103 on    node-2 device  0 [0000:1b:00] NVIDIA H100 80GB HBM3
#  Rank  3 Group  0 Pid    104 on    node-2 device  1 [0000:1c:00] NVIDIA H100 80GB HBM3
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
node-1:101:101 [0] NCCL INFO comm 0x55 rank 0 nranks 4
        1024           256     float     sum      -1    20.50    0.05    0.07       0    19.80    0.05    0.08       0
     1048576        262144     float     sum      -1    61.25   17.12   25.68       0    60.90   17.22   25.83     N/A
# Out of bounds values : 0 OK
"""


def points(
    cluster: Cluster, ranks: tuple[int, ...] = (2, 4), noise: Any = lambda k: 1.0
) -> list[MeasuredPoint]:
    """What a machine with this cluster's prices would measure."""
    wanted = [
        MeasuredPoint(op, 2 if OPERATIONS[op].kind == "p2p" else n, n, 1, nbytes, 1)
        for n in ranks
        for op in (
            "send",
            "all_reduce",
            "all_gather",
            "broadcast",
            "all_to_all_single",
            "reduce_scatter_tensor",
        )
        for nbytes in SIZES
    ]
    return [
        p._replace(ns=round(predicted_ns(CostModel(cluster, p.ranks, p.ranks), p) * noise(k)))
        for k, p in enumerate(wanted)
    ]


def test_parameters_of_a_cluster_are_recovered_from_its_own_costs() -> None:
    found = calibrate_cluster(points(TRUTH), preset("cpu-10gbe"), "here", "a test").cluster

    assert found.call_overhead_ns == pytest.approx(40_000, rel=0.1)
    assert found.intra.latency_ns == pytest.approx(70_000, rel=0.1)
    assert found.intra.attained_bytes_per_ns == pytest.approx(2.0, rel=0.05)
    assert found.reduce_bytes_per_ns == pytest.approx(3.0, rel=0.2)


def test_outliers_hardly_change_the_parameters() -> None:
    noisy = points(TRUTH, noise=lambda k: 8.0 if k % 11 == 0 else 1.0)

    found = calibrate_cluster(noisy, preset("cpu-10gbe"), "here", "a test").cluster

    assert found.intra.attained_bytes_per_ns == pytest.approx(2.0, rel=0.2)


def test_measured_sizes_cost_the_measured_time_and_sizes_between_lie_between() -> None:
    """All_reduce here is far from any ring; the curve says so, for messages and for collectives."""
    curve = {4096: 300_000, 65536: 310_000, 1 << 20: 9_000_000, 16 << 20: 20_000_000}
    measured = [
        MeasuredPoint(op, 2, 2, 1, nbytes, ns)
        for op in ("all_reduce", "send")
        for nbytes, ns in curve.items()
    ]

    cost = CostModel(
        calibrate_cluster(measured, preset("cpu-10gbe"), "here", "a test").cluster, 2, 2
    )

    for nbytes, ns in curve.items():
        assert cost.collective_ns(OPERATIONS["all_reduce"], (0, 1), nbytes) == pytest.approx(
            ns, rel=1e-3
        )
        assert cost.p2p_ns(0, 1, nbytes) == pytest.approx(ns, rel=1e-3)
    assert 310_000 < cost.p2p_ns(0, 1, 1 << 18) < 9_000_000
    assert cost.p2p_ns(0, 1, 64 << 20) > 20_000_000


def test_unmeasured_calls_follow_the_nearest_curve_and_the_model() -> None:
    """Everything takes twice what the model says on 2 ranks; so it does on 3, and for a barrier's
    neighbour nothing changes.
    """
    doubled = [p._replace(ns=2 * p.ns) for p in points(TRUTH, ranks=(2,)) if p.op == "all_reduce"]
    base = TRUTH.model_copy(update={"measured": ()})
    curve = [
        {
            "op": "all_reduce",
            "group": 2,
            "ranks": 2,
            "times": {f"{p.nbytes} B": f"{p.ns} ns" for p in doubled},
        }
    ]
    cost = CostModel(cluster_from({**base.to_mapping(), "measured": curve}), 3, 3)
    bare = CostModel(base, 3, 3)

    assert cost.collective_ns(OPERATIONS["all_reduce"], (0, 1, 2), 1 << 20) == pytest.approx(
        2 * bare.collective_ns(OPERATIONS["all_reduce"], (0, 1, 2), 1 << 20), rel=1e-3
    )
    assert cost.collective_ns(OPERATIONS["broadcast"], (0, 1), 1 << 20) == bare.collective_ns(
        OPERATIONS["broadcast"], (0, 1), 1 << 20
    )


def test_at_a_measured_size_the_cost_is_the_measured_time_even_if_times_decrease() -> None:
    measured = [
        MeasuredPoint("send", 2, 2, 1, 4096, 400_000),
        MeasuredPoint("send", 2, 2, 1, 8192, 100_000),
        MeasuredPoint("send", 2, 2, 1, 16384, 500_000),
    ]

    cost = CostModel(
        calibrate_cluster(measured, preset("cpu-10gbe"), "here", "a test").cluster, 2, 2
    )

    assert [cost.p2p_ns(0, 1, nbytes) for nbytes in (4096, 8192, 16384)] == pytest.approx(
        [400_000, 100_000, 500_000], abs=1
    )


def test_a_first_size_slower_than_the_second_does_not_affect_sizes_between() -> None:
    """A sweep's first size is measured while the machine warms up: it has its own time, the next
    sizes that of the second.
    """
    measured = [
        MeasuredPoint("send", 2, 2, 1, nbytes, ns)
        for nbytes, ns in ((8, 400_000), (128, 100_000), (2048, 120_000))
    ]

    cost = CostModel(
        calibrate_cluster(measured, preset("cpu-10gbe"), "here", "a test").cluster, 2, 2
    )

    assert [cost.p2p_ns(0, 1, nbytes) for nbytes in (8, 128)] == pytest.approx(
        [400_000, 100_000], abs=1
    )
    assert [cost.p2p_ns(0, 1, nbytes) for nbytes in (16, 64)] == pytest.approx(
        [100_000, 100_000], rel=0.001
    )


def test_two_measured_rank_counts_predict_a_third_between_them() -> None:
    """Twice the model's time on two ranks, four times on eight: on four the mean of the two in
    logarithms.
    """
    base, row = preset("dgx-a100"), OPERATIONS["all_reduce"]
    bare = CostModel(base, 8, 8)

    def measured(n: int, times: int) -> MeasuredPoint:
        return MeasuredPoint(
            "all_reduce",
            n,
            n,
            1,
            1 << 20,
            times * CostModel(base, n, n).collective_ns(row, tuple(range(n)), 1 << 20),
        )

    found = calibrate_cluster([measured(2, 2), measured(8, 4)], base, "here", "a test").cluster
    price = CostModel(found, 4, 4).collective_ns(row, (0, 1, 2, 3), 1 << 20)

    assert price == pytest.approx(
        8**0.5 * bare.collective_ns(row, (0, 1, 2, 3), 1 << 20), rel=0.001
    )


def test_the_error_is_reported_and_stored_in_the_file(tmp_path: Path) -> None:
    found = calibrate_cluster(
        points(TRUTH, noise=lambda k: 1.3 if k % 2 else 1.0), preset("cpu-10gbe"), "here", "a test"
    )
    file = tmp_path / "here.yaml"
    file.write_text(dump_yaml(found.cluster.to_mapping()), encoding="utf-8")

    again = cluster_from(load_mapping(file))

    assert again == found.cluster
    assert f"{found.median:.0%}".replace("%", " %") in again.error_band
    assert 0 < found.median < 0.5
    assert {m.op for m in found.errors} == {p.op for p in points(TRUTH)}
    assert all(m.median <= m.worst and m.model_median <= m.model_worst for m in found.errors)


def test_a_calibrated_cluster_can_be_used_by_its_file(tmp_path: Path) -> None:
    file = tmp_path / "here.yaml"
    file.write_text(
        dump_yaml(
            calibrate_cluster(
                points(TRUTH), preset("cpu-10gbe"), "here", "a test"
            ).cluster.to_mapping()
        ),
        encoding="utf-8",
    )

    done = simulate(load("scenarios/all_reduce.yaml"), cluster=str(file), with_verdict=False)

    assert done.cost.name == "here"
    assert done.run.trace.header["prices"]["measured"]


def test_measurements_without_anything_to_fit_are_reported() -> None:
    with pytest.raises(UsageError, match="nothing to calibrate from"):
        calibrate_cluster([], preset("cpu-10gbe"), "here", "a test")


# --- nccl-tests ---


def test_a_log_of_nccl_tests_gives_its_out_of_place_times_among_other_lines() -> None:
    found, device = points_from_nccl_tests(LOG, "all_reduce_perf.log")

    assert found == (
        MeasuredPoint("all_reduce", 4, 2, 2, 1024, 20_500),
        MeasuredPoint("all_reduce", 4, 2, 2, 1 << 20, 61_250),
    )
    assert "H100" in device


def test_old_logs_without_roots_or_reductions_are_read() -> None:
    old = LOG.replace("     sum      -1 ", "     sum ").replace("Group  0 ", "")
    gathered = LOG.replace("     sum      -1 ", " ")

    assert (
        points_from_nccl_tests(old, "x", "all_reduce")[0]
        == points_from_nccl_tests(LOG, "x", "all_reduce")[0]
    )
    assert [p.ns for p in points_from_nccl_tests(gathered, "nccl_allgather.log")[0]] == [
        20_500,
        61_250,
    ]


@pytest.mark.parametrize(
    ("text", "file", "message"),
    [
        (LOG, "run7.log", "name it with --op"),
        ("hello\n", "all_reduce.log", "not an nccl-tests log"),
    ],
)
def test_a_file_that_is_no_log_or_names_no_operation_is_reported(
    text: str, file: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        points_from_nccl_tests(text, file)


def test_a_cluster_of_several_nodes_costs_what_the_log_shows() -> None:
    found = calibrate_cluster(
        points_from_nccl_tests(LOG, "all_reduce_perf.log")[0], preset("dgx-h100"), "pod", "a log"
    )

    cost = CostModel(found.cluster, 4, 2)

    assert cost.collective_ns(OPERATIONS["all_reduce"], (0, 1, 2, 3), 1 << 20) == pytest.approx(
        61_250, rel=1e-3
    )


# --- traces ---


def test_costs_are_recovered_from_a_trace() -> None:
    alone = load("scenarios/hybrid.yaml", sets=["cluster.shared_links=false"])
    done = simulate(alone, with_verdict=False, with_values=False)

    found = {(p.op, p.group, p.nbytes): p for p in points_from_trace(done.run.trace)}

    assert set(found) == {("send", 2, 16384), ("all_reduce", 2, 4 << 20)}
    assert found["all_reduce", 2, 4 << 20].ns == done.cost.collective_ns(
        OPERATIONS["all_reduce"], (0, 2), 4 << 20
    )
    assert found["send", 2, 16384].ns == done.cost.p2p_ns(0, 1, 16384)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_contention_between_crossing_messages_is_measured_and_simulated(share: float) -> None:
    """Two messages that cross, measured to take one message and a share of its moving time, take as
    long in a simulation.
    """
    cost = CostModel(TRUTH, 2, 2)
    crossed = [
        MeasuredPoint(
            "batch_isend_irecv",
            2,
            2,
            1,
            nbytes,
            cost.p2p_ns(0, 1, nbytes) + round(share * nbytes / cost.bytes_per_ns(0, 1)),
        )
        for nbytes in SIZES
    ]
    cluster = calibrate_cluster(
        [*points(TRUTH), *crossed], preset("cpu-10gbe"), "here", "a test"
    ).cluster
    assert cluster.crossing == pytest.approx(share, abs=0.05)

    nbytes = SIZES[-1]
    swap = f"""
name: swap
world: 2
backend: gloo
tensors: {{mine: {{shape: [{nbytes // 4}]}}, theirs: {{like: mine}}}}
program:
  - isend: {{tensor: mine, dst: 1 - rank, as: sent}}
  - recv: {{tensor: theirs, src: 1 - rank}}
  - wait: sent
"""
    taken = simulate(loads(swap), cluster=cluster, with_verdict=False).makespan_ns
    assert taken == pytest.approx(crossed[-1].ns, rel=0.05)


# --- bench ---


def test_a_bench_file_survives_writing_and_reading() -> None:
    made = BenchResult((BenchRow("all_reduce", 2, 4, 4096, 300, 250, 400, 9),), {"cores": 2}, 1.5)

    assert bench_from_json(bench_to_json(made)) == made
    assert points_from_bench(made) == (MeasuredPoint("all_reduce", 2, 4, 1, 4096, 300, 0.25, 9),)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": "distsim-bench"}',
        '{"format": "distsim-bench", "schema_version": 1, "rows": [{"op": "send"}]}',
    ],
)
def test_a_file_that_is_no_bench_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        bench_from_json(text)


@pytest.mark.slow
def test_the_commands_measure_and_fit_this_machine(cli: Any, tmp_path: Path) -> None:
    """Two processes over loopback; every operation moves what it is asked to."""
    pytest.importorskip("torch")
    measured, cluster = tmp_path / "here.json", tmp_path / "here.yaml"

    made = cli("bench", "--ranks", "2", "--sizes", "4KiB,1MiB", "--samples", "3", "-o", measured)
    fitted = cli("calibrate", measured, "-o", cluster, "--format", "json")
    assert (made.returncode, fitted.returncode) == (0, 0), made.stderr + fitted.stderr
    rows = checked_json("bench", measured.read_text(encoding="utf-8"))["rows"]
    alone = {
        op for op, row in OPERATIONS.items() if row.kind == "collective" and row.coalesces is None
    }
    assert {row["op"] for row in rows} == {"send", "batch_isend_irecv", *alone}
    assert all(row["median_ns"] > 1000 for row in rows)
    assert max(map(len, made.stdout.splitlines())) <= 80
    assert checked_json("calibrate", fitted.stdout)["cluster"]["measured"]
    assert cli("simulate", "scenarios/all_reduce.yaml", "--cluster", cluster).returncode == 0


@pytest.mark.slow
def test_a_measurement_that_takes_too_long_is_stopped_and_leaves_no_process() -> None:
    pytest.importorskip("torch")

    with pytest.raises(EnvironmentFault, match="was stopped"):
        run_bench((2,), (1 << 20,), ("all_reduce",), rounds=100_000, timeout_s=3.0)

    assert multiprocessing.active_children() == []


def test_an_operation_without_a_measurement_is_named() -> None:
    with pytest.raises(UsageError, match="all_reduce"):
        run_bench((2,), SIZES, ("all_reduc",))
    with pytest.raises(UsageError, match="two ranks"):
        run_bench((1,), SIZES, ("all_reduce",))
