"""The tables of measured times, of a calibration and of clusters."""

from __future__ import annotations

import yaml

from distsim.hardware.cluster import cluster_from, preset
from distsim.output.text.calibration_tables import (
    bench_text,
    cluster_table,
    cluster_yaml,
    residuals_json,
    residuals_text,
)
from distsim.real.bench.measurement import BenchResult, BenchRow
from distsim.real.calibrate import MeasuredPoint
from distsim.real.calibrate.fit_cluster import CostResidual, cost_residuals

MIB = 1 << 20


def test_a_bench_table_has_quartiles_and_the_bus_bandwidth_of_nccl_tests() -> None:
    """An all_reduce of n ranks moves 2 (n - 1) / n times its bytes over each link."""
    rows = (
        BenchRow("all_reduce", 2, 4, MIB, 1_000_000, 900_000, 1_200_000, 9),
        BenchRow("all_reduce", 4, 4, 4096, 1_000_000, 900_000, 1_200_000, 9),
        BenchRow("barrier", 4, 4, 0, 70_000, 60_000, 80_000, 9),
    )
    text = bench_text(BenchResult(rows, {"cores": 2, "torch": "2.9"}, 12.4))

    assert [" ".join(line.split()) for line in text.splitlines()] == [
        "Measured on this machine in 12 s (2 cores, torch 2.9); 9 samples per row",
        "",
        "operation ranks bytes median 25 % 75 % busbw",
        "all_reduce 2 of 4 1 MiB 1 ms 900 us 1.2 ms 1.05 GB/s",
        "all_reduce 4 4 KiB 1 ms 900 us 1.2 ms 6.14 MB/s",
        "barrier 4 - 70 us 60 us 80 us -",
    ]


def residual(ratio: float, nbytes: int, band: tuple[float, float] | None) -> CostResidual:
    point = MeasuredPoint("all_reduce", 4, 4, 1, nbytes, round(1_000_000 * ratio))
    return CostResidual(point, 1_000_000, band)


def test_measured_times_outside_the_range_are_marked_and_summed_up() -> None:
    found = [residual(ratio, n * MIB, (0.5, 2.0)) for n, ratio in ((1, 1.0), (2, 3.0), (4, 0.2))]
    text = " ".join(residuals_text(found, "dgx-a100", "log.txt").split())

    assert text.startswith(
        "dgx-a100 compared with log.txt: 3 measured times, median prediction error 67 %"
    )
    assert (
        "all_reduce of 4 ranks on 1 node: 2 of 3 sizes are outside the range, from 2 MiB on; "
        "largest error at 4 MiB: 0.20 times the predicted time"
    ) in text
    assert "all_reduce 4 1 1 MiB 1 ms 1 ms 1.00 0.50–2.00 all_reduce" in text
    assert "3.00 0.50–2.00 *" in text
    assert "*: outside the range" in text


def test_measured_times_may_all_be_within_the_range_or_have_none() -> None:
    within = residuals_text([residual(1.5, MIB, (0.5, 2.0))], "c", "l")
    edges = residuals_text(
        [residual(0.5, MIB, (0.5, 2.0)), residual(2.0, MIB, (0.5, 2.0))], "c", "l"
    )
    without = residuals_text([residual(1.5, MIB, None)], "c", "l")

    for text in (within, edges):
        assert "All measured times are within the predicted range." in text
        assert "*" not in text
    assert "The costs of this cluster have no range." in without
    assert without.splitlines()[-1].endswith("1.50  -")


def test_residuals_compare_each_size_with_the_median_of_its_measurements() -> None:
    cluster = preset("dgx-a100")
    times = [MeasuredPoint("all_reduce", 4, 4, 1, MIB, ns) for ns in (90_000, 100_000, 900_000)]

    (found,) = cost_residuals(times, cluster)
    (as_data,) = residuals_json([found])["times"]  # type: ignore[misc]

    assert found.point.ns == 100_000
    assert found.ratio == 100_000 / found.predicted_ns
    assert found.band is not None
    assert found.is_outside_range == (not found.band[0] <= found.ratio <= found.band[1])
    assert (as_data["op"], as_data["bytes"], as_data["measured_ns"]) == ("all_reduce", MIB, 100_000)
    assert as_data["parts"] == found.is_outside_range


def test_a_cluster_as_yaml_is_read_back_as_the_same_cluster() -> None:
    for name in ("dgx-a100", "cpu-10gbe"):
        text = cluster_yaml(preset(name))
        assert cluster_from(yaml.safe_load(text)) == preset(name)


def test_a_line_of_the_cluster_table_has_the_device_and_all_links() -> None:
    head, line = cluster_table([preset("dgx-h100")]).splitlines()

    assert head.split() == ["cluster", "device", "inside", "a", "node", "between", "nodes", "net"]
    assert line.startswith("dgx-h100  ")
    assert "GB/s" in line
    assert "8 x " in line
