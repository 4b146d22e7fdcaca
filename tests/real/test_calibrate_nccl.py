"""What nccl-tests writes, in the layouts of src/util.cu: text with more or fewer columns, and the
JSON of -J.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distsim.common.errors import UsageError
from distsim.real.calibrate import MeasuredPoint, points_from_nccl_tests

DEVICES = "".join(
    f"#  Rank {r:2} Group  0 Pid  {70 + r:5} on      node{r // 2} device {r % 2:2} [0000:1b:00] NVIDIA H100 80GB HBM3\n"
    for r in range(4)
)
HEAD = f"# Collective test starting: all_gather_perf\n# nThread 1 nGpus 1\n# Using devices\n{DEVICES}#\n"
_SIDE = "    time   algbw   busbw  #wrong"
_SINGLE = "   i_min   i_max   i_p99   i_cv%"
PLAIN = f"#       size         count      type   redop    root {_SIDE} {_SIDE}\n"
WIDE = f"#       size         count      type   redop    root {_SIDE}{_SINGLE} {_SIDE}{_SINGLE}\n"
#: Two of its ranks on each node, four in all.
EXPECTED = (
    MeasuredPoint("all_gather_into_tensor", 4, 2, 2, 1024, 20_500),
    MeasuredPoint("all_gather_into_tensor", 4, 2, 2, 1 << 20, 61_250),
)


def rows(between: str = "", after: str = "") -> str:
    sizes = ((1024, "20.50"), (1 << 20, "61.25"))
    return "".join(
        f"{size:12}{size // 4:14}     float    none      -1   {us}    0.05    0.04       0{between}"
        f"   9.00    9.05    9.04     N/A{between}{after}\n"
        for size, us in sizes
    )


def test_the_program_named_in_the_output_matters_and_the_file_name_does_not() -> None:
    assert points_from_nccl_tests(HEAD + PLAIN + rows(), "run7.txt")[0] == EXPECTED
    assert points_from_nccl_tests(HEAD + PLAIN + rows(), "run7.txt", "gather")[0][0].op == "gather"


def test_an_outlier_out_of_place_is_replaced_by_the_time_in_place() -> None:
    """Connections of a size are set up in its first call: where one row alone takes 1.5 times as
    long as in place, that is not its time.
    """
    line = "{:12}  1     float    none      -1   {}    0.05    0.04       0   {}    9.05    9.04     N/A\n"
    text = (
        HEAD
        + PLAIN
        + "".join(
            line.format(*row)
            for row in ((1024, 20.5, 20), (2048, 68, 25), (4096, 26, 25.5), (8192, 40, 30))
        )
    )

    assert [p.ns for p in points_from_nccl_tests(text, "x")[0]] == [20_500, 25_000, 26_000, 40_000]


def test_time_stamps_behind_the_rows_are_no_columns() -> None:
    stamped = PLAIN.rstrip() + "            timestamp\n"

    assert (
        points_from_nccl_tests(HEAD + stamped + rows(after="  2026-01-02 03:04:05"), "x")[0]
        == EXPECTED
    )


def test_columns_of_single_iterations_give_the_spread() -> None:
    found, _ = points_from_nccl_tests(
        HEAD
        + WIDE
        + rows(between="   18.00   25.00   24.00   10.00", after="  2026-01-02 03:04:05"),
        "x",
    )

    assert [p.ns for p in found] == [20_500, 61_250]
    assert [p.spread for p in found] == [pytest.approx(0.067, abs=0.001)] * 2


BEFORE = {
    "mpirun --tag-output": "[1,0]<stdout>:",
    "mpirun with a blank": "[1,0]<stdout> ",
    "srun --label": " 0: ",
    "time": "2026-01-02T03:04:05.678Z ",
    "time in brackets": "[2026-01-02 03:04:05] ",
    "pod": "worker-0 | ",
    "quoted": "> ",
    "colour": "\x1b[32m",
    "two of them": "[1,0]<stdout>: 0: ",
}


@pytest.mark.parametrize("what", BEFORE)
def test_launcher_prefixes_of_lines_are_skipped(what: str) -> None:
    """With warnings of other ranks in between."""
    noise = "[1,3]<stderr>:NCCL WARN something\nnode1:71:93 [1] NCCL INFO Channel 00/24\nWARNING: a deprecated option\n"
    text = "".join(BEFORE[what] + line + "\n" for line in (HEAD + PLAIN + rows()).splitlines())

    assert (
        points_from_nccl_tests(noise + text.replace(DEVICES, DEVICES + noise) + noise, "x")[0]
        == EXPECTED
    )


def test_several_runs_in_one_text_are_separated() -> None:
    """By what each says it measures, or by the line that was typed before it."""
    second = (
        "# Avg bus bandwidth    : 3\n$ ./build/all_reduce_perf -b 1K\n"
        + HEAD.partition("\n")[2]
        + PLAIN
        + rows()
    )

    found, _ = points_from_nccl_tests(HEAD + PLAIN + rows() + second, "x")

    assert found == (*EXPECTED, *(p._replace(op="all_reduce") for p in EXPECTED))


def test_a_run_that_stopped_before_its_first_row_does_not_affect_the_others() -> None:
    assert points_from_nccl_tests(HEAD + PLAIN + rows() + HEAD + PLAIN, "x")[0] == EXPECTED


def test_groups_that_ran_concurrently_count_by_their_own_ranks() -> None:
    split = HEAD.replace("Rank  2 Group  0", "Rank  2 Group  1").replace(
        "Rank  3 Group  0", "Rank  3 Group  1"
    )

    assert {p[:4] for p in points_from_nccl_tests(split + PLAIN + rows(), "x")[0]} == {
        ("all_gather_into_tensor", 2, 2, 1)
    }


# --- JSON ---


def report(**more: Any) -> dict[str, Any]:
    def device(rank: int) -> dict[str, Any]:
        return {
            "rank": rank,
            "group": 0,
            "pid": 70 + rank,
            "hostname": f"node{rank // 2}",
            "device": rank % 2,
            "device_hex": "0000:1b:00",
            "device_info": "NVIDIA H100 80GB HBM3",
        }

    config = {
        "nthreads": 1,
        "ngpus": 1,
        "blocking_collectives": "false",
        "devices": [device(r) for r in range(4)],
    }
    results = [
        {
            "size": size,
            "count": size // 4,
            "type": "float",
            "redop": "none",
            "root": "    -1",
            "out_of_place": {"time": us, "alg_bw": 1.0, "bus_bw": 1.0, "nwrong": None},
            "in_place": {"time": us - 1.0, "alg_bw": 1.0, "bus_bw": 1.0, "nwrong": 0.0},
            "actual_iterations": 20,
            "experiment_name": "",
        }
        for size, us in ((0, 18.0), (1024, 20.5), (1 << 20, 61.25))
    ]
    return {
        "version": 2,
        "start_time": "2026-01-02 03:04:05",
        "args": ["./build/all_gather_perf", "-J", "x"],
        "env": ["SECRET=1"],
        "nccl_version": 22803,
        "config": config,
        "results": results,
        **more,
    }


def test_json_and_text_logs_give_the_same_measurements() -> None:
    assert points_from_nccl_tests(json.dumps(report()), "run.json") == (
        EXPECTED,
        "NVIDIA H100 80GB HBM3",
    )


def test_all_gpus_of_a_process_count_even_if_only_the_first_is_named() -> None:
    data = report()
    data["config"] |= {"ngpus": 2, "devices": data["config"]["devices"][::2]}

    assert points_from_nccl_tests(json.dumps(data), "x")[0] == EXPECTED


def test_times_of_single_iterations_give_their_quartiles_as_spread() -> None:
    data = report()
    data["results"][1]["out_of_place_per_iter"] = {
        "min_us": 18.0,
        "times_us": [18.0, 19.0, 20.0, 22.0, 24.0],
    }

    found, _ = points_from_nccl_tests(json.dumps(data), "x")

    assert [p.spread for p in found] == [pytest.approx((22 - 19) / 2 / 20), 0.0]


def test_in_place_times_are_used_if_there_are_no_others() -> None:
    data = report()
    for row in data["results"]:
        row["out_of_place"] = None

    assert [p.ns for p in points_from_nccl_tests(json.dumps(data), "x")[0]] == [19_500, 60_250]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps(report())[:-40], "cut short or damaged"),
        (json.dumps(report(results=3)), "nor a JSON file of nccl-tests"),
        (json.dumps({"hello": 1}), "nor a JSON file of nccl-tests"),
        (
            json.dumps(report(config={**report()["config"], "devices": []})),
            "not an nccl-tests log with two or more ranks",
        ),
        (json.dumps(report()).replace('"time"', '"cpu_time"'), "times of the CPU"),
        (HEAD + PLAIN.replace("  time", "cputime") + rows(), "times of the CPU"),
    ],
)
def test_unusable_input_is_reported(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        points_from_nccl_tests(text, "x.json")


def test_the_command_reads_json_and_stores_nothing_of_the_environment(
    cli: Any, tmp_path: Path
) -> None:
    source, output = tmp_path / "gather.json", tmp_path / "pod.yaml"
    source.write_text(json.dumps(report()), encoding="utf-8")

    done = cli("calibrate", source, "-o", output)

    assert done.returncode == 0
    assert "SECRET" not in output.read_text(encoding="utf-8") + done.stdout
    source.write_text("{}", encoding="utf-8")
    assert cli("calibrate", source, "-o", output).returncode == 2
