"""`distsim compare LOG --cluster C`: a hardware model compared with measured times."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from distsim.cli.application import application
from distsim.common.errors import UsageError
from distsim.hardware.cluster import cluster_from
from distsim.hardware.cost import CostModel
from distsim.operations.registry import OPERATIONS
from tests.support.command_json import checked_json

SIZES = (1 << 20, 1 << 24, 1 << 27)


def log(us: list[float]) -> str:
    """An nccl-tests log of all_reduce on four GPUs, as it is pasted."""
    ranks = "".join(
        f"#  Rank  {r} Group  0 Pid  1{r} on n0 device  {r} [0x1b] NVIDIA H100 80GB HBM3\n"
        for r in range(4)
    )
    side = "{us:10.2f} 1.00 1.00 0"
    rows = "".join(
        f"{size} {size // 4} float sum -1 {side.format(us=t)} {side.format(us=t)}\n"
        for size, t in zip(SIZES, us, strict=True)
    )
    return f"# nThread 1 nGpus 1\n{ranks}# size count type redop root time algbw busbw #wrong time algbw busbw #wrong\n{rows}"


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"}).invoke(
        application(), ["compare", *arguments]
    )
    return done.exit_code, " ".join(done.stdout.split())


def predicted_us() -> list[float]:
    cost = CostModel(cluster_from("dgx-h100"), 4, 4)
    return [
        cost.collective_ns(OPERATIONS["all_reduce"], (0, 1, 2, 3), size, 0) / 1000 for size in SIZES
    ]


def test_a_log_predicted_by_the_cluster_is_within_its_range(tmp_path: Path) -> None:
    (tmp_path / "all_reduce.log").write_text(log(predicted_us()))
    code, text = run(str(tmp_path / "all_reduce.log"), "--cluster", "dgx-h100")

    assert code == 0, text
    assert "3 measured times" in text
    assert "All measured times are within the predicted range." in text


def test_the_size_at_which_log_and_cluster_diverge_is_named(tmp_path: Path) -> None:
    """One time six times the price: it alone is outside the band, and the exit status says so."""
    us = predicted_us()
    (tmp_path / "all_reduce.log").write_text(log([us[0], 6 * us[1], us[2]]))
    code, text = run(str(tmp_path / "all_reduce.log"), "--cluster", "dgx-h100")
    assert code == 1
    assert "1 of 3 sizes are outside the range, from 16 MiB on" in text

    code, text = run(str(tmp_path / "all_reduce.log"), "--cluster", "dgx-h100", "--format", "json")
    assert code == 1
    assert [row["parts"] for row in checked_json("compare", text)["times"]] == [False, True, False]


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (("all_reduce.log",), "only one run was given"),
        (("a.yaml", "--cluster", "dgx-h100"), "has no measured times"),
    ],
)
def test_a_log_that_cannot_be_compared_with_a_cluster_is_refused(
    arguments: tuple[str, ...], cause: str
) -> None:
    with pytest.raises(UsageError, match=cause):
        CliRunner().invoke(application(), ["compare", *arguments], catch_exceptions=False)
