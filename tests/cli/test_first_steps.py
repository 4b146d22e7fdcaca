"""Mistakes of new users get a message that says what to do instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from distsim.hardware.cluster.presets import gpus_per_machine
from distsim.output.text.layout_plan import rejection_kind
from tests.support.harness import ROOT, Cli

SCRIPT = ROOT / "docs" / "examples" / "uneven.py"
HYBRID = ROOT / "scenarios" / "hybrid.yaml"
LLAMA = ROOT / "scenarios" / "strategies" / "llama3_8b.yaml"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("capture", "--nproc", "0", "--", "python", SCRIPT), "--nproc 0: expected at least"),
        (("simulate", ""), "'FILE': the value is empty; write a value"),
        (("clusters", "absent.yaml"), "`distsim clusters` lists the presets"),
        (("simulate", "scenarios/none/none.yaml"), "distsim learn -o scenarios"),
        (("simulate", LLAMA, "--set", "world.nodes=8"), "world={nodes: 2, ranks_per_node: 8}"),
        (("render", "--view", "operation"), "the view operation needs the name"),
        (("render", "--view", "algorithm"), "the view algorithm needs the name"),
        (("explain", "all_gather", "--bytes", "1KiB"), "need a cluster"),
        (("explain", "all_gather", "--ranks", "4"), "need a cluster"),
        (("learn", "all_gather"), "distsim explain NAME"),
        (("learn", "-o", HYBRID), "is not a folder"),
    ],
)
def test_a_mistake_is_reported_with_a_remedy(
    cli: Cli, words: tuple[object, ...], message: str
) -> None:
    done = cli(*words)

    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())


def test_ranks_that_never_communicate_are_an_error(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "empty.py"
    script.write_text("", encoding="utf-8")

    done = cli("capture", "--nproc", "2", "--", "python", script)

    assert done.stdout.startswith("empty.py: each rank ran alone\n")
    assert "no rank called init_process_group" in done.stdout
    assert "devices: no GPU, because neither empty.py nor its imports use CUDA" in done.stdout
    assert done.returncode == 1


def test_more_ranks_per_node_than_gpus_are_reported(cli: Cli) -> None:
    crowded = cli("simulate", LLAMA, "--set", "world=64", "--set", "mesh.dp=64", "--no-values")
    usual = cli("simulate", LLAMA, "--no-values")

    assert "8 GPUs, but the run places 64 ranks on one node" in " ".join(crowded.stdout.split())
    assert "places" not in usual.stdout


def test_a_changed_preset_keeps_its_gpus_per_node() -> None:
    assert gpus_per_machine("gb200-nvl72, changed") == gpus_per_machine("gb200-nvl72") == 4


def test_the_reason_for_a_rejected_layout_suggests_no_change_of_a_file() -> None:
    reason = (
        "with a pipeline, parameters stay gathered between micro-batches: set zero to 0, 1 or 2"
    )

    assert rejection_kind(reason).endswith("between micro-batches")


def test_one_difference_is_reported_in_the_singular(cli: Cli, tmp_path: Path) -> None:
    one, other = tmp_path / "one.yaml", tmp_path / "other.yaml"
    text = "world: 1\nprogram:\n  - compute: {{name: forward, time: {} ms}}\n"
    one.write_text(text.format(1), encoding="utf-8")
    other.write_text(text.format(2), encoding="utf-8")

    done = cli("compare", one, other)

    assert "(1 call that ends at different times)" in done.stdout


def test_the_ranks_of_a_comparison_fit_40_columns(
    cli: Cli,
) -> None:
    other = ROOT / "scenarios" / "ring_of_four.yaml"
    changed = cli("compare", HYBRID, other, env={"COLUMNS": "40"})

    section = changed.stdout.partition("Ranks, B - A")[2]
    assert section
    assert max(map(len, section.splitlines())) <= 40


def test_compare_with_an_output_file_draws_both_runs_into_it(cli: Cli, tmp_path: Path) -> None:
    file, picture = tmp_path / "one.yaml", tmp_path / "both.svg"
    file.write_text("world: 1\nprogram:\n  - compute: {time: 1 ms}\n", encoding="utf-8")

    done = cli("compare", file, file, "-o", picture)

    assert (done.returncode, f"wrote {picture}" in done.stderr) == (0, True)
    assert "<svg" in picture.read_text(encoding="utf-8")


def test_compare_with_one_run_needs_a_cluster_and_measured_times(cli: Cli) -> None:
    alone = cli("compare", HYBRID)
    scenario = cli("compare", HYBRID, "--cluster", "dgx-h100")

    assert (alone.returncode, scenario.returncode) == (2, 2)
    assert "only one run was given" in alone.stderr
    assert "has no measured times" in scenario.stderr


def test_doctor_exits_with_2_if_it_can_read_no_file(cli: Cli, tmp_path: Path) -> None:
    """Exit status 0 would say that no rank waits."""
    damaged = tmp_path / "fr_rank_0"
    damaged.write_bytes(b"\x80\x02}q\x00(X")

    assert cli("doctor", damaged).returncode == 2
